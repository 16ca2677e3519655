"""A headless Chromium, and pages that note every request which leaves their own server."""

from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Page, sync_playwright

# As root there is no sandbox; the rest keeps Chromium from calling home, which would look like the page's own request.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Visit:
    """A page, and what went wrong on it so far."""

    page: Page
    base: str  # the page's own server, "http://127.0.0.1:port"
    external: list[str] = field(default_factory=list)  # requests to anywhere else
    failed: list[str] = field(default_factory=list)  # answers from 400 on, requests without an answer
    errors: list[str] = field(default_factory=list)  # exceptions in the page's scripts

    def __post_init__(self):
        own = (self.base, self.base.replace("http", "ws", 1), "data:", "blob:", "about:")
        self.page.on("request", lambda r: None if r.url.startswith(own) else self.external.append(r.url))
        self.page.on("websocket", lambda w: None if w.url.startswith(own) else self.external.append(w.url))
        self.page.on(
            "response", lambda r: self.failed.append(f"{r.status} {r.url}") if r.status >= 400 else None
        )
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))


@pytest.fixture(scope="session")
def browser(chromium_path):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """visit(base) -> a Visit with a fresh, empty browser context."""
    contexts = []

    def open_page(base: str, **options) -> Visit:
        contexts.append(browser.new_context(viewport={"width": 1300, "height": 1500}, **options))
        return Visit(contexts[-1].new_page(), base)

    yield open_page
    for context in contexts:
        context.close()
