"""The terminal's drawings say what the frames say, and fit eighty columns."""

from io import StringIO

from lab_simulator import record
from rich.console import Console

from tinymoe.lab.frames import load, pages
from tinymoe.lab.terminal import expert_load, page_table


def drawn(renderable, width=80):
    console = Console(width=width, color_system=None, force_terminal=False, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text()


def test_expert_load_per_group():
    events, _ = record(seed=8, num_blocks=40, requests=8, seats=5, experts=16)
    frame = load.by_group(events, {0: "english", 1: "german", 2: "python"}, layer=1, experts=16)
    text = drawn(expert_load(frame))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[3:6]] == ["english", "german", "python"]
    for line, percents in zip(lines[3:6], load.percent_of_mean(frame)):
        shown = [int("".join(c for c in cell if c.isdigit())) for cell in _cells(line)]
        assert shown == percents
    assert " ".join(text.split()).endswith(load.caption(frame))


def test_expert_load_fits_eighty_columns_however_uneven_it_is():
    counts = [[0] * 15 + [9], [1] * 16, [30, *[0] * 14, 2]]
    frame = {"event": 0, "step": 0, "per": "run", "experts": 16, "rows": ["english", "german", "layer 10"]}
    frame |= {"counts": counts}
    lines = drawn(expert_load(frame), width=120).splitlines()
    rows = lines[lines.index(next(line for line in lines if line.startswith("english"))) :][:3]
    assert max(map(len, lines[: 2 + len(rows)])) <= 80
    assert [line.split()[-1] for line in rows] == ["16.0", "1.0", "15.0"]
    assert rows[0].split()[-2].endswith("1600")
    assert rows[2].endswith("100 15.0")


def _cells(line):
    """The sixteen numbers of a row, each behind its bar."""
    body = line[line.index(" ") : line.rindex(" ")]
    for bar in "▁▂▃▄▅▆▇█":
        body = body.replace(bar, " ")
    return body.split()


def test_page_table_shows_owners_sharing_and_free_blocks():
    events, _ = record(seed=8, num_blocks=40, requests=8, seats=5)
    i = next(
        i
        for i in pages.moments(events)
        if (f := pages.frame(events, i, num_blocks=40))["cached"] and any(len(o) > 1 for o in f["owners"])
    )
    frame = pages.frame(events, i, num_blocks=40)
    text = drawn(page_table(frame, pages.caption(frame)))
    grid = " ".join(line[4:] for line in text.splitlines()[1:4]).split()
    assert len(grid) == 40
    assert grid.count(".") == len(frame["free"])
    assert grid.count("~") == len(frame["cached"])
    assert sum("+" in g for g in grid) == sum(len(o) > 1 for o in frame["owners"])
    assert "*" in text
    assert " ".join(text.split()).endswith(pages.caption(frame))
