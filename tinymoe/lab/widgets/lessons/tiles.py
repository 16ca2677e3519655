"""Tile map: the sorted rows of a Mixture-of-Experts layer in their tiles, and which weights each program of `up` read.

Nothing is worked out here: the tiles are those that sort_tokens returned, and what a program read are the loads that were
seen while Triton's interpreter ran it. A program's tile is the entry of tile_expert that it loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Events, Frame, count, last_by
from tinymoe.lab.frames.why import Reason
from tinymoe.lab.widgets.esm import EsmPicture, source
from tinymoe.lab.widgets.scrubber import Picture, Scrubber

KINDS = frozenset({"program", "expert"})
SRC = "tinymoe.lab.widgets.lessons.tiles:recorded#tile"


class Load(NamedTuple):
    """One load of one program: which elements of the tensor called `name` it read."""

    program: int
    name: str
    elements: Sequence[int]


class TilePicture(EsmPicture):
    _esm = source("tile_map")


def recorded(loads: Iterable[Load], shape: tuple[int, int, int]) -> Recording:
    """One "program" event a program, by number, and an "expert" event before the first that reads an expert's weights.

    loads: of "tile_expert", of "weights" with shape [E, 2I, H] (gate rows first), and of anything that every program loads.
    tile is -1 for a program that found none left; features low..high-1; read: how many weights it loaded.
    """
    _, two_I, H = shape
    of: dict[int, dict[str, list[Sequence[int]]]] = {}
    for load in loads:
        of.setdefault(load.program, {}).setdefault(load.name, []).append(load.elements)
    found, known = Recording(), set()
    for program in sorted(of):
        data = {"tile": -1, "expert": -1, "low": 0, "high": 0, "read": 0}
        if "tile_expert" in of[program]:
            [tile] = np.unique(np.concatenate(of[program]["tile_expert"]))  # shown by "why?": #tile
            weights = np.unique(np.concatenate(of[program]["weights"]))
            [expert] = np.unique(weights // (two_I * H)).tolist()
            features = np.unique(weights // H % two_I % (two_I // 2))
            low, high = int(features[0]), int(features[-1]) + 1
            data = {"tile": int(tile), "expert": expert, "low": low, "high": high, "read": len(weights)}
            if expert not in known:
                known.add(expert)
                found.append(Event(len(found), program, "expert", SRC, {"expert": expert}))
        found.append(Event(len(found), program, "program", SRC, data))
    return found


class TileView:
    """The view of `recorded` loads. A frame: tiles [[expert, first row, rows], ...]; words, one a sorted row; block_m; now
    [tile, block of features] or [-1, -1]; done: numbers of the finished blocks of each tile; blocks: how many there are;
    experts [[expert, percent of its weights fetched so far], ...]; last: the highest program number."""

    KINDS = KINDS
    CHANGES = frozenset({"program"})
    DECISIONS = frozenset({"expert"})

    def __init__(self, tiles: Sequence[Sequence[int]], block_m: int, words: Sequence[str], size: int):
        self.size = size  # weights of an expert
        self.tiles, self.block_m, self.words = [list(t) for t in tiles], block_m, list(words)

    def moments(self, events: Events, **_) -> list[int]:
        """One for each program with a tile; those without one are one moment together."""
        key = lambda e: e.step if e.tile >= 0 else -1  # noqa: E731
        return last_by(events, self.CHANGES, key)

    def frame(self, events: Events, i: int, **_) -> Frame:
        programs = [e for e in events if e.kind == "program"]
        lows = sorted({e.low for e in programs if e.tile >= 0})
        shown = [e for e in events[: i + 1] if e.kind == "program"]
        fetched: dict[int, int] = {tile[0]: 0 for tile in self.tiles}
        done: list[list[int]] = [[] for _ in self.tiles]
        for event in shown:
            if event.tile >= 0:
                fetched[event.expert] += event.read
                done[event.tile].append(lows.index(event.low))
        last = shown[-1]
        return {
            "event": last.index,
            "step": last.step,
            "last": programs[-1].step,
            "now": [last.tile, lows.index(last.low)] if last.tile >= 0 else [-1, -1],
            "features": [last.low, last.high],
            "read": self._percent(last.read),
            "idle": sum(e.tile < 0 for e in shown),
            "tiles": self.tiles,
            "block_m": self.block_m,
            "words": self.words,
            "blocks": len(lows),
            "done": done,
            "experts": [[expert, self._percent(n)] for expert, n in fetched.items()],
        }

    def _percent(self, weights: int) -> int:
        return round(100 * weights / self.size)

    def caption(self, frame: Frame) -> str:
        tile, _ = frame["now"]
        if tile < 0:
            first = frame["step"] - frame["idle"] + 1
            return f"Programs {first} to {frame['step']} find no tile left: they read no weights and leave at once."
        expert, row, rows = frame["tiles"][tile]
        low, high = frame["features"]
        place = f"row {row}" if rows == 1 else f"rows {row} to {row + rows - 1}"
        return (
            f"Program {frame['step']}: tile {tile}, expert {expert}, {place} ({rows} of {frame['block_m']} in use), features "
            f"{low} to {high - 1}. It reads {frame['read']} % of the expert's weights; so far {dict(frame['experts'])[expert]} % "
            f"of them have been read, and {count(sum(p > 0 for _, p in frame['experts']), 'expert')} of {len(frame['experts'])}."
        )

    def table(self, frame: Frame) -> list[list]:
        fetched: Mapping[int, int] = dict(frame["experts"])
        rows: list[list] = [["tile", "expert", "first row", "rows in use", "blocks done", "expert read, %"]]
        for n, (expert, row, size) in enumerate(frame["tiles"]):
            rows.append(
                [n, expert, row, size, f"{len(frame['done'][n])} of {frame['blocks']}", fetched[expert]]
            )
        return rows


class TileMap(Scrubber):
    """loads: what the programs of up_kernel read (see `recorded`). shape: [E, 2I, H] of the weights.

    tiles: (expert, first row, rows in use) of each; block_m: rows a tile has room for; words: what to write on each sorted
    row. Raises ValueError if a program read the weights of another expert than its tile's.
    """

    def __init__(
        self,
        loads: Iterable[Load],
        shape: tuple[int, int, int],
        *,
        tiles: Sequence[Sequence[int]],
        block_m: int,
        words: Sequence[str],
    ):
        events = recorded(loads, shape)
        for event in events:
            if event.kind == "program" and event.tile >= 0 and tiles[event.tile][0] != event.expert:
                raise ValueError(
                    f"program {event.step} took tile {event.tile} of expert {tiles[event.tile][0]}, but read expert "
                    f"{event.expert}: loads and tiles must come from one launch"
                )
        if not events:
            raise ValueError("no load was seen: run the kernel while loads are being watched")
        view = TileView(tiles, block_m, words, shape[1] * shape[2])
        picture = Picture(view, "tile map", make=lambda f: TilePicture(frame=f), esm="tile_map")
        super().__init__([picture], events)

    def _reasons(self, seq: int | None = None, block: int | None = None) -> list[Reason]:
        tile, _ = self.frame["now"]
        if tile < 0:
            return [
                Reason(
                    "num_tiles is not above this program's tile, so it returns before any other load.", SRC
                )
            ]
        return [
            Reason(
                f"The program loads entry {tile} of tile_expert, which names the expert it must read.", SRC
            )
        ]
