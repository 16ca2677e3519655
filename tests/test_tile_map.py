"""The tile map: what its frames say of made-up loads, counted by hand, and that strange loads are refused."""

import json
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tinymoe.core.trace import resolve
from tinymoe.lab import lesson as lessons
from tinymoe.lab.lesson import Lesson
from tinymoe.lab.widgets.lessons.tiles import SRC, Load, TileMap, recorded
from tinymoe.lab.widgets.replay import REPLAY

# Experts 1 and 3 of four; weights [4, 2 * 2, 3]: an expert has 12, its gate row n begins at 3 n, its up row at 6 + 3 n.
SHAPE = (4, 4, 3)
TILES = [(1, 0, 2), (1, 2, 1), (3, 3, 2)]
WORDS = ["a", "b", "c", "d", "e"]


def loads_of(program, tile, feature):
    """Of a program that makes one feature: it reads a gate row and an up row of its tile's expert."""
    first = 12 * TILES[tile][0]
    rows = [
        Load(program, "weights", range(first + start, first + start + 3))
        for start in (3 * feature, 6 + 3 * feature)
    ]
    return [Load(program, "num_tiles", [0]), Load(program, "tile_expert", [tile]), *rows]


LOADS = [load for p in range(6) for load in loads_of(p, p // 2, p % 2)]
IDLE = [Load(p, "num_tiles", [0]) for p in (6, 7, 8)]


@pytest.fixture
def tile_map():
    return TileMap(LOADS + IDLE, SHAPE, tiles=TILES, block_m=2, words=WORDS)


def test_events_are_the_loads():
    events = recorded(LOADS + IDLE, SHAPE)
    programs = [e for e in events if e.kind == "program"]
    assert [(e.step, e.tile, e.expert, e.low, e.high, e.read) for e in programs[:3]] == [
        (0, 0, 1, 0, 1, 6),
        (1, 0, 1, 1, 2, 6),
        (2, 1, 1, 0, 1, 6),
    ]
    assert [e.tile for e in programs[6:]] == [-1, -1, -1]
    assert [(e.step, e.expert) for e in events if e.kind == "expert"] == [(0, 1), (4, 3)]
    assert [e.index for e in events] == list(range(len(events)))
    assert recorded([*LOADS[::-1], *LOADS], SHAPE)[: len(events) - 3] == events[:-3]  # twice, any order: once


def test_every_program_is_a_moment_and_every_expert_a_decision(tile_map):
    assert tile_map.controls.count == 7  # programs without a tile are one moment
    assert tile_map.controls.decisions == [0, 4]
    shares = []
    for n in range(7):
        tile_map.seek(n)
        frame = tile_map.frame
        shares.append(dict(frame["experts"]))
        assert frame["now"] == ([n // 2, n % 2] if n < 6 else [-1, -1])
        assert sum(map(len, frame["done"])) == min(n + 1, 6)
    assert shares[0] == {1: 50, 3: 0}
    assert shares[3] == {1: 200, 3: 0}  # two tiles read all of it, each
    assert shares[6] == {1: 200, 3: 100}


def test_captions_tables_and_reasons(tile_map):
    tile_map.seek(2)
    assert tile_map.text == (
        "Program 2: tile 1, expert 1, row 2 (1 of 2 in use), features 0 to 0. It reads 50 % of the expert's weights; "
        "so far 150 % of them have been read, and 1 expert of 2."
    )
    assert tile_map.table[1:] == [
        [0, 1, 0, 2, "2 of 2", 150],
        [1, 1, 2, 1, "1 of 2", 150],
        [2, 3, 3, 2, "0 of 2", 0],
    ]
    [reason] = tile_map.why()
    assert reason.words == "The program loads entry 1 of tile_expert, which names the expert it must read."
    assert "tile_expert" in resolve(SRC).text
    tile_map.seek(-1)
    assert tile_map.text == "Programs 6 to 8 find no tile left: they read no weights and leave at once."
    assert "num_tiles" in tile_map.why()[0].words


def test_replay_holds_every_moment(tile_map):
    bundle = json.loads(tile_map._repr_mimebundle_()[REPLAY])
    assert bundle["esm"] == "tile_map"
    assert [f["now"] for f in bundle["frames"]] == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1], [-1, -1]]
    assert len(bundle["captions"]) == len(bundle["tables"]) == 7


def test_loads_of_another_launch_are_refused():
    with pytest.raises(ValueError, match="program 0 took tile 0 of expert 2, but read expert 1"):
        TileMap(LOADS, SHAPE, tiles=[(2, 0, 2), *TILES[1:]], block_m=2, words=WORDS)
    with pytest.raises(ValueError, match="no load was seen"):
        TileMap([], SHAPE, tiles=TILES, block_m=2, words=WORDS)


@pytest.mark.parametrize("missing", [True, False])
def test_cells_that_need_what_is_missing_are_skipped(missing, monkeypatch, capsys):
    shell = InteractiveShell()
    monkeypatch.setattr(lessons, "get_ipython", lambda: shell)
    Lesson("07", judges={}).needs("no_such_package" if missing else "torch", "nobody wrote it")
    said = capsys.readouterr().out
    name = "no_such_package" if missing else "torch"
    assert shell.run_cell(f"# needs {name}\nx = 1\n").success
    assert shell.run_cell("y = 2\n").success
    assert ("x" in shell.user_ns, shell.user_ns["y"]) == (not missing, 2)
    skipped = "skipped: no_such_package is not installed here (nobody wrote it)\n"
    assert capsys.readouterr().out == (skipped if missing else "")
    assert ("no_such_package is not installed here (nobody wrote it)" in said) == missing
    assert sys.displayhook  # the shell leaves ours alone
