"""For all tests: one torch thread a process, no model hub, and marked tests skip where they cannot run, saying why."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # tests run side by side; more threads than cores make all of them slower

# A slow machine is no failure, hence no deadline. In CI the examples are the same in every run.
settings.register_profile("tinymoe", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tinymoe")

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_CHROME = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


@cache
def chromium() -> str | None:
    """A Chromium that answers (on some systems the command is a stub that only offers to install one), or None."""
    for path in (*map(shutil.which, CHROMIUMS), str(MAC_CHROME) if MAC_CHROME.exists() else None):
        try:
            if path and subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0:
                return path
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))
        if item.get_closest_marker("browser") and not chromium():
            item.add_marker(
                pytest.mark.skip(reason=f"needs a browser; none of {', '.join(CHROMIUMS)} runs here")
            )


@pytest.fixture(scope="session")
def chromium_path() -> str | None:
    return chromium()
