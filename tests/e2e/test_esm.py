"""The ES modules in a static page with a stand-in for the model: what they draw, say, and do with keys, by day and night."""

import json

import pytest
from lab_simulator import record

from tinymoe.lab.frames import pages, prefix
from tinymoe.lab.frames.steps import schedule
from tinymoe.lab.widgets.esm import source
from tinymoe.lab.widgets.lessons.dial import RouterDial
from tinymoe.lab.widgets.predict import quiz

pytestmark = pytest.mark.browser

PAGE = """<!doctype html><meta charset="utf-8"><style>:root { color-scheme: SCHEME } body { background: Canvas; margin: 20px }</style>
<body><div id="here"></div><script type="module">
class Model {
  constructor(traits) { this.traits = traits; this.heard = []; this.sent = []; }
  get(name) { return this.traits[name]; }
  set(name, value) { this.traits[name] = value; for (const [n, f] of this.heard) if (n === "change" || n === `change:${name}`) f(); }
  on(name, f) { this.heard.push([name, f]); }
  off() {}
  save_changes() { if (this.traits.at !== undefined) this.traits.drawn = this.traits.at; }
  send(message) { this.sent.push(message); }
}
const url = URL.createObjectURL(new Blob([SOURCE], { type: "text/javascript" }));
window.model = new Model(TRAITS);
(await import(url)).default.render({ model: window.model, el: document.querySelector("#here") });
document.title = "drawn";
</script></body>"""

# Contrast of every visible text with what is behind it (WCAG 2.2, 1.4.3), colours resolved by the browser.
CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => { context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].map((v) => v / 255); };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (node) => { const chain = []; for (let n = node; n; n = n.parentElement) chain.push(rgba(getComputedStyle(n).backgroundColor));
    return chain.reverse().reduce((below, top) => over(top, below), rgba(getComputedStyle(document.body).backgroundColor)); };
  const light = (c) => [0, 1, 2].map((i) => (c[i] <= 0.04045 ? c[i] / 12.92 : ((c[i] + 0.055) / 1.055) ** 2.4)).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const worst = [];
  for (const node of document.querySelectorAll("#here *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || node.tagName === "STYLE" || node.tagName === "title" || node.disabled || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), box = node.closest("g")?.querySelector("rect");
    const back = box && getComputedStyle(box).fill.startsWith("color") ? over(rgba(getComputedStyle(box).fill), behind(document.querySelector("#here"))) : behind(node);
    const ink = over(rgba(node instanceof SVGElement ? style.fill : style.color), back);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    worst.push([(a + 0.05) / (b + 0.05), node.textContent.trim().slice(0, 30)]);
  }
  return worst.sort((x, y) => x[0] - y[0]);
}"""


CELLS = {
    "label": "3 pairs, stage 4 of 5",
    "size": [38, 30],
    "follow": "1",
    "things": ["pair", 3],
    "panels": [
        {"title": "by token", "label": 70, "rows": [["a", ["e"]], ["b", ["e", ["n2\ne1"]]]]},
        {"title": "by expert", "label": 0, "rows": [["", [["d0\na"], ["s1\nb"], "!7", "r", ".x"]]]},
    ],
    "key": [["n", "now"], ["r", "room"]],
}
LOGITS = [0.5, -1.25, 2.0, 0.25, -3.0, 1.5]
TILES = {
    "event": 5,
    "step": 4,
    "last": 8,
    "now": [2, 1],
    "tiles": [[1, 0, 4], [1, 4, 1], [3, 5, 2]],
    "block_m": 4,
    "words": ["def", " read", "(", "path", "\n", " with", " open"],
    "blocks": 2,
    "done": [[0, 1], [0], [0, 1]],
    "experts": [[1, 150], [3, 100]],
}
DRAFTS = {
    "event": 40,
    "step": 5,
    "rows": [
        [3, 0, 8, [], ["S", 50, 0], -1],
        [4, 0, 9, [["A", 60, 250000, 500000], ["R", 61, 250000, 1500], ["U", 62, 90, -1]], ["N", 70, 1], -1],
        [5, 0, 11, [["A", 63, 1000000, 900000]], ["B", 71, 1], 1],
    ],
    "total": [2, 4, 2, 1, 1, 4],
    "names": {
        "50": " It",
        "60": " was",
        "61": " the",
        "62": " best",
        "70": " a\n",
        "63": " <b>",
        "71": " time",
    },
    "dropped": 2,
}


@pytest.fixture(scope="module")
def events():
    return record(seed=8, num_blocks=24, requests=7, seats=5, budget=14)[0]


@pytest.fixture
def draw(visit):
    """draw(module, traits) -> the Visit of a page that shows it."""
    seen = []

    def show(name, traits, scheme="light", **options):
        here = visit("about:blank", **options)
        html = (
            PAGE.replace("SCHEME", scheme)
            .replace("TRAITS", _script(traits))
            .replace("SOURCE", _script(source(name)))
        )
        here.page.set_content(html)
        here.page.wait_for_function("document.title === 'drawn'")
        seen.append(here)
        return here

    yield show
    for here in seen:
        assert (here.errors, here.external, here.failed) == ([], [], [])


def _script(value):
    return json.dumps(value).replace("<", "\\u003c")


def traits_of(name, events):
    if name == "scrubber":
        return {
            "label": "page table",
            "at": 2,
            "drawn": 2,
            "count": 6,
            "decisions": [0, 4],
            "caption": "Step 1: something.",
            "live": True,
            "running": False,
            "show_why": True,
            "show_table": True,
            "why": [["Because of this.", "tinymoe/engine/scheduler.py:88  the line"]],
            "table": [["a", "b"], [1, "two"]],
        }
    if name == "predict":
        return {"frame": quiz(events, pages.moments(events)[20], "free"), "choice": -1}
    if name == "token_matrix":
        words = ["It", " was", " a", ' "cold"', " day"]
        return {
            "frame": {
                "event": 3,
                "step": 1,
                "size": 5,
                "words": words,
                "panels": [["Without", 0, 4], ["With", 3, 4]],
            },
            "selection": "",
        }
    if name == "router_dial":
        return {"frame": RouterDial(LOGITS, expert=3).frame, "selection": "", "turnable": True}
    if name == "tile_map":
        return {"frame": TILES, "selection": ""}
    if name == "cell_map":
        return {"frame": CELLS, "selection": ""}
    if name == "draft_ribbon":
        return {"frame": DRAFTS, "selection": ""}
    view = {"page_table": pages, "prefix_tree": prefix, "schedule_chart": schedule}[name]
    chosen = view.moments(events)
    options = {"block_size": 4} if view is pages else {}
    return {"frame": view.frame(events, chosen[len(chosen) * 2 // 3], **options), "selection": ""}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name",
    [
        "page_table",
        "prefix_tree",
        "schedule_chart",
        "draft_ribbon",
        "scrubber",
        "predict",
        "token_matrix",
        "router_dial",
        "tile_map",
        "cell_map",
    ],
)
def test_text_can_be_read_by_day_and_night(draw, events, name, scheme):
    here = draw(name, traits_of(name, events), scheme, color_scheme=scheme)
    contrasts = here.page.evaluate(CONTRAST)
    assert len(contrasts) > 5
    assert contrasts[0][0] >= 4.5, contrasts[:5]


def test_page_table_names_every_block(draw, events):
    traits = traits_of("page_table", events)
    here = draw("page_table", traits)
    frame = traits["frame"]
    labels = [c.get_attribute("aria-label") for c in here.page.get_by_role("gridcell").all()]
    assert len(labels) == len(frame["owners"])
    for block, (label, owners) in enumerate(zip(labels, frame["owners"])):
        assert label.startswith(f"block {block}, ")
        assert ("owned by" in label) == bool(owners)
        assert ("cached" in label) == (block in frame["cached"])
        assert ("changed now" in label) == (block in frame["touched"])
    assert here.page.get_by_role("grid").get_attribute("aria-label") == f"page table, step {frame['step']}"


def test_a_new_frame_is_drawn_and_the_focus_stays(draw, events):
    here = draw("page_table", traits_of("page_table", events))
    here.page.get_by_role("gridcell").first.focus()
    here.page.keyboard.press("ArrowRight")
    here.page.keyboard.press("ArrowDown")
    assert here.page.evaluate("document.activeElement.dataset.block") == "9"
    here.page.keyboard.press("Enter")
    assert here.page.evaluate("model.get('selection')") == "block 9"
    first = pages.frame(events, pages.moments(events)[0], num_blocks=24)
    here.page.evaluate("(frame) => model.set('frame', frame)", first)
    assert here.page.get_by_role("grid").get_attribute("aria-label") == f"page table, step {first['step']}"
    assert here.page.evaluate("document.activeElement.dataset.block") == "9"


def test_schedule_is_a_table_that_says_what_ran(draw, events):
    traits = traits_of("schedule_chart", events)
    here = draw("schedule_chart", traits)
    frame = traits["frame"]
    said = {c.get_attribute("aria-label") for c in here.page.locator("tbody td[data-seq]").all()}
    cells = [(c[0], cell) for c in frame["columns"] for cell in c[3]]
    assert len(said) == len(cells)
    words = {"P": "prefill", "D": "decode", "W": "waits", "X": "preempted"}
    for step, (_, code, _, _) in cells:
        assert any(s.startswith(f"step {step}, ") and words[code] in s for s in said)
    budgets = here.page.locator("tfoot td").all_inner_texts()
    assert [b.strip() for b in budgets] == [f"{used}/{budget}" for _, budget, used, _ in frame["columns"]]
    here.page.locator("tbody td[data-seq]").first.click()
    assert here.page.evaluate("model.get('selection')").startswith("seq ")


def test_tree_has_one_item_for_each_block(draw, events):
    traits = traits_of("prefix_tree", events)
    here = draw("prefix_tree", traits)
    nodes = traits["frame"]["nodes"]
    items = here.page.get_by_role("treeitem")
    assert [i.get_attribute("data-block") for i in items.all()] == [str(n[0]) for n in nodes]
    assert [i.get_attribute("aria-level") for i in items.all()] == [str(n[3] + 1) for n in nodes]
    boxes = [i.locator("rect").bounding_box() for i in items.all()]
    for a in range(len(boxes)):
        for b in range(a):
            p, q = boxes[a], boxes[b]
            apart_x = p["x"] >= q["x"] + q["width"] or q["x"] >= p["x"] + p["width"]
            assert apart_x or p["y"] >= q["y"] + q["height"] or q["y"] >= p["y"] + p["height"]
    items.first.focus()
    here.page.keyboard.press("ArrowDown")
    here.page.keyboard.press(" ")
    assert here.page.evaluate("model.get('selection')") == f"block {nodes[1][0]}"


def test_matrix_draws_what_ran_and_what_was_read(draw, events):
    here = draw("token_matrix", traits_of("token_matrix", events))
    without, cached = here.page.locator("figure").all()
    kinds = [{k: p.locator(f"rect.{k}").count() for k in ("new", "read", "old")} for p in (without, cached)]
    assert kinds == [{"new": 10, "read": 0, "old": 0}, {"new": 1, "read": 3, "old": 6}]
    assert cached.get_by_role("img").get_attribute("aria-label") == (
        "With: rows 3 to 3 are computed, keys 0 to 2 come from the cache"
    )
    assert here.page.locator("figcaption").all_inner_texts() == ["Without 4 of 4 rows", "With 1 of 4 rows"]


def test_dial_chooses_k_without_a_kernel_and_asks_for_another_expert(draw, events):
    here = draw("router_dial", traits_of("router_dial", events))
    page = here.page

    def chosen():
        rows = page.locator("tr.in").all()
        return [(r.get_attribute("data-expert"), r.locator("td").last.inner_text()) for r in rows]

    assert chosen() == [("2", "no. 1"), ("5", "no. 2")]
    assert page.get_by_role("status").inner_text() == ""
    page.get_by_role("radio", name="3").check()
    assert chosen() == [("0", "no. 3"), ("2", "no. 1"), ("5", "no. 2")]
    said = page.get_by_role("status").inner_text()
    assert said.startswith("With k = 3 instead: expert 2 with 5")
    frame = page.evaluate("model.get('frame')")
    assert [f"expert {x} with {w} %" in said for x, w in zip(*frame["best"][2])] == [True] * 3
    assert page.evaluate("document.activeElement.value") == "3"
    page.get_by_role("button", name="expert 4").click()
    assert page.evaluate("model.get('selection')") == "expert 4"
    frame["logits"][4] = 900
    frame["best"][2] = [[4, 2, 5], [99, 1, 0]]
    page.evaluate("(frame) => model.set('frame', frame)", frame)
    assert [x for x, _ in chosen()] == ["2", "4", "5"]  # k stays what the reader asked for


def test_dial_without_a_kernel_offers_no_dead_buttons(draw, events):
    here = draw("router_dial", {**traits_of("router_dial", events), "turnable": False})
    assert here.page.get_by_role("button").count() == 0
    assert here.page.get_by_role("row").count() == 1 + len(LOGITS)


def test_tile_map_draws_rows_room_and_blocks(draw, events):
    here = draw("tile_map", traits_of("tile_map", events))
    lines = here.page.locator("g[data-tile]").all()
    kinds = ["row", "room", "block.done", "block.at", "block:not(.done):not(.at)"]
    assert [[t.locator(f"rect.{k}").count() for k in kinds] for t in lines] == [
        [4, 0, 2, 0, 0],
        [1, 3, 1, 0, 1],
        [2, 2, 1, 1, 0],
    ]
    texts = [[x.strip() for x in t.locator("text").all_text_contents()] for t in lines]
    assert texts[0] == ["expert 1", "def", "read", "(", "path", "150 %"]
    assert texts[1] == ["expert 1", "\\n"]  # the expert's share stands at its first tile
    assert texts[2] == ["▸ expert 3", "with", "open", "100 %"]
    image = here.page.get_by_role("img")
    assert image.get_attribute("aria-label") == "tile map: program 4 works on tile 2, expert 3"
    here.page.evaluate("(frame) => model.set('frame', frame)", {**TILES, "now": [-1, -1]})
    assert here.page.locator("g.now").count() == 0
    assert image.get_attribute("aria-label") == "tile map: no tile is left for this program"


def test_cell_map_draws_boxes_and_follows_one(draw, events):
    here = draw("cell_map", traits_of("cell_map", events))
    page, boxes = here.page, here.page.locator(".panels .box")
    kinds = [b.get_attribute("class") for b in boxes.all()]
    assert kinds == [
        *("box gap", "box gap", "box now"),
        *("box done", "box put mine", "box clash", "box room", "box plain"),
    ]
    assert page.get_by_role("img").get_attribute("aria-label") == "3 pairs, stage 4 of 5"
    menu = page.get_by_role("combobox", name="follow")
    assert menu.locator("option").all_inner_texts() == ["pair 0", "pair 1", "pair 2"]
    assert menu.input_value() == "1"
    menu.select_option("2")
    assert page.locator(".mine").all_inner_texts() == ["2\ne1"]
    page.locator("[data-id='0']").click()
    assert menu.input_value() == "0"
    moved = {**CELLS, "panels": [{"title": "all", "label": 0, "rows": [["", [["n2\nb"], [".0\na"]]]]}]}
    page.evaluate("(frame) => model.set('frame', frame)", moved)
    assert page.locator(".mine").get_attribute("data-id") == "0"  # the reader's choice stays
    assert page.evaluate("document.getAnimations().length") == 2  # both things glide from where they were
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(
        "(frame) => { for (const a of document.getAnimations()) a.finish(); model.set('frame', frame); }",
        CELLS,
    )
    assert page.evaluate("document.getAnimations().length") == 0
    page.evaluate("(frame) => model.set('frame', frame)", {**CELLS, "things": None, "follow": None})
    assert not menu.is_visible()


def test_controls_by_keyboard(draw, events):
    here = draw("scrubber", traits_of("scrubber", events))
    page = here.page

    def at():
        return page.evaluate("model.get('at')")

    slider = page.get_by_role("slider")
    assert slider.get_attribute("aria-label") == "page table: moment"
    slider.focus()
    for key, expected in (
        ("ArrowRight", 3),
        ("ArrowLeft", 2),
        ("End", 5),
        ("ArrowRight", 5),
        ("Home", 0),
        ("ArrowLeft", 0),
    ):
        page.keyboard.press(key)
        assert at() == expected
    assert slider.get_attribute("aria-valuetext") == "1 of 6"
    page.keyboard.press(" ")
    page.wait_for_function("model.get('at') === 5", timeout=10_000)
    assert page.get_by_role("button", name="pause", exact=True).count() <= 1
    page.get_by_role("button", name="step back").click()
    assert at() == 4
    page.keyboard.press("Home")
    page.get_by_role("button", name="next decision").click()
    assert at() == 4
    page.get_by_role("button", name="let the engine run one step").click()
    assert page.evaluate("model.sent") == [{"do": "step"}]
    page.get_by_role("button", name="run the engine").click()
    assert page.evaluate("model.get('running')") is True
    assert page.get_by_role("button", name="let the engine run one step").is_disabled()


def test_controls_speak_and_do_not_move_by_themselves(draw, events):
    here = draw("scrubber", traits_of("scrubber", events))
    page = here.page
    status = page.get_by_role("status")
    assert status.get_attribute("aria-live") == "polite"
    page.evaluate("model.set('caption', 'Step 2: something else.')")
    assert status.inner_text() == "Step 2: something else."
    assert "Because of this." in page.locator("li").inner_text()
    assert page.locator("table").inner_text().split() == ["a", "b", "1", "two"]
    page.get_by_role("button", name="why did this happen?").click()
    assert page.locator("li").count() == 0
    unnamed = [b for b in page.get_by_role("button").all() if not b.get_attribute("aria-label")]
    assert unnamed == []
    page.wait_for_timeout(700)
    assert page.evaluate("model.get('at')") == 2


def test_ribbon_marks_each_token_and_looks_at_one(draw, events):
    here = draw("draft_ribbon", traits_of("draft_ribbon", events))
    page = here.page
    cells = page.get_by_role("gridcell")
    marks = [c.inner_text()[0] for c in cells.all()]
    assert marks == ["•", "✓", "✗", "↻", "–", "✓", "+"]  # without any colour, and in the order of the text
    labels = [c.get_attribute("aria-label") for c in cells.all()]
    assert labels[2] == 'step 4, A, position 10, " the": rejected; draft 25.0 %, model 0.15 %'
    assert labels[3] == 'step 4, A, position 10, " a\\n": redrawn'
    look = page.locator(".look")
    assert look.inner_text().startswith('A, position 11, " <b>": accepted')  # of the last step, unasked
    cells.nth(2).hover()
    assert [x.strip() for x in look.inner_text().splitlines() if x.strip()] == [
        'A, position 10, " the": rejected (bars: 0 to 100 %)', "draft: q", "25.0 %", "model: p", "0.15 %",
        "under rejection sampling it stays with chance min(1, p/q) = 0.60 %",
    ]  # fmt: skip
    widths = [
        b.evaluate("(e) => getComputedStyle(e).getPropertyValue('--full')") for b in look.locator("i").all()
    ]
    assert widths == ["25%", "0.15%"]
    cells.nth(5).focus()
    for key, at in (
        ("ArrowUp", 1),
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("End", 4),
        ("ArrowUp", 0),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.ariaLabel") == labels[at], key
    cells.nth(4).focus()
    assert "(bars: 0 to 0.01 %)" in look.inner_text()
    assert "not asked" in look.inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("model.get('selection')") == "token 4 0 11"
    less = {**DRAFTS, "rows": DRAFTS["rows"][:2], "step": 4}
    page.evaluate("(frame) => model.set('frame', frame)", less)
    assert page.evaluate("document.activeElement.ariaLabel") == labels[4]
    assert "2 earlier rows" in page.locator(".key").inner_text()


@pytest.mark.parametrize("right", [True, False])
def test_the_first_prediction_counts(draw, events, right):
    traits = traits_of("predict", events)
    here = draw("predict", traits)
    answer, choices = traits["frame"]["answer"], traits["frame"]["choices"]
    choice = answer if right else (answer + 1) % len(choices)
    here.page.get_by_role("radio").nth(choice).check()
    assert here.page.evaluate("model.get('choice')") == choice
    said = here.page.get_by_role("status").inner_text()
    assert said.startswith("Right: " if right else f"No, it was {choices[answer]}: ")
    assert all(r.is_disabled() for r in here.page.get_by_role("radio").all())


@pytest.mark.parametrize("name", ["page_table", "prefix_tree", "schedule_chart", "draft_ribbon"])
def test_reduced_motion_is_respected(draw, events, name):
    moving = "() => [...document.querySelectorAll('#here *')].filter((n) => getComputedStyle(n).transitionDuration !== '0s').length"
    assert draw(name, traits_of(name, events)).page.evaluate(moving) > 0
    assert draw(name, traits_of(name, events), reduced_motion="reduce").page.evaluate(moving) == 0
