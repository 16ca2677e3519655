"""Grouping: how the pairs of a Mixture-of-Experts layer are counted, placed and cut into tiles; each can be followed.

Where a pair ends and which tiles there are is what kernels/sort_tokens.py returned; the picture only takes the steps of a
counting sort one after the other. Cells are drawn by cell_map.js.
"""

from collections.abc import Sequence
from typing import Any

from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Events, Frame, count, last_by, listed
from tinymoe.lab.frames.why import Reason
from tinymoe.lab.widgets.esm import EsmPicture, source
from tinymoe.lab.widgets.scrubber import Picture, Scrubber

STAGES = ("lie", "count", "begin", "place", "tile")
SRC = "tinymoe.lab.widgets.lessons.grouping:Grouping.__init__#sorted"
SIZE, LABEL = [38, 30], 150  # of a box, and beside a row, in pixels
WORD = 5  # characters of a token in a box


class CellPicture(EsmPicture):
    _esm = source("cell_map")


def shown_word(word: str, most: int = 99) -> str:
    """A token's text on one line."""
    return repr(word)[1:-1][:most]


class GroupingView:
    """The view of `events()`. ids: the expert of each pair; words: of each token; K pairs a token. rows[p]: where pair p is
    placed, -1 for a pair of nobody. tiles: (expert, first row, rows). A frame is what cell_map.js draws."""

    KINDS = frozenset({*STAGES, "stage"})
    CHANGES = frozenset(STAGES)
    DECISIONS = frozenset({"stage"})

    def __init__(
        self, ids: Sequence[int], words: Sequence[str], rows: Sequence[int], tiles: Sequence[Sequence[int]],
        block_m: int, follow: int,
    ):  # fmt: skip
        self.ids, self.words, self.rows, self.tiles = list(ids), list(words), list(rows), list(tiles)
        self.block_m, self.follow, self.K = block_m, follow, len(ids) // len(words)
        self.pair_at = {row: pair for pair, row in enumerate(rows) if row >= 0}
        self.experts = sorted({self.ids[pair] for pair in self.pair_at.values()})
        self.begin = {e: min(r for r, p in self.pair_at.items() if ids[p] == e) for e in self.experts}

    def events(self) -> Recording:
        """ "stage" before the first event of each: "lie", "count" a token, "begin", "place" a pair, "tile"."""
        found = Recording()
        for step, (kind, times) in enumerate(
            zip(STAGES, (1, len(self.words), 1, len(self.ids), len(self.tiles)))
        ):
            for n in range(times):
                if kind == "place" and self.rows[n] < 0:
                    continue
                if n == 0 and step:
                    found.append(Event(len(found), step, "stage", SRC, {}))
                found.append(Event(len(found), step, kind, SRC, {"n": n}))
        return found

    def moments(self, events: Events, **_) -> list[int]:
        return last_by(events, self.CHANGES, lambda e: e.index)

    def frame(self, events: Events, i: int, **_) -> Frame:
        last = [e for e in events[: i + 1] if e.kind in STAGES][-1]
        stage, n = STAGES.index(last.kind), last.n
        tokens = {"lie": 0, "count": n + 1}.get(last.kind, len(self.words))
        placed = {"place": n + 1, "tile": len(self.ids)}.get(last.kind, 0)
        return {
            "event": last.index,
            "step": last.step,
            "stage": stage,
            "n": n,
            "label": f"{count(len(self.ids), 'pair')}, stage {stage + 1} of {len(STAGES)}",
            "size": SIZE,
            "follow": str(self.follow),
            "things": ["pair", len(self.ids)],
            "panels": [
                {"title": "by token", "label": 70, "rows": self._by_token(last, placed)},
                {"title": "by expert", "label": LABEL, "rows": self._by_expert(last, tokens, placed)},
            ],
            "key": [["n", "now"], ["e", "a place kept free, or left"], ["r", "room left in a tile"]],
        }

    def _by_token(self, last: Event, placed: int) -> list[list]:
        rows = []
        for token, word in enumerate(self.words):
            cells: list[Any] = []
            for pair in range(token * self.K, (token + 1) * self.K):
                if pair < placed and self.rows[pair] >= 0:
                    cells.append("e")
                    continue
                kind = "n" if last.kind == "count" and last.n == token else "."
                cells.append([f"{kind}{pair}\ne{self.ids[pair]}"])
            rows.append([shown_word(word), cells])
        return rows

    def _by_expert(self, last: Event, tokens: int, placed: int) -> list[list]:
        rows, cut = [], last.n + 1 if last.kind == "tile" else 0
        for expert in self.experts:
            mine = [n for n, tile in enumerate(self.tiles) if tile[0] == expert]
            size = sum(e == expert for e in self.ids[: tokens * self.K])
            if last.kind in ("lie", "count"):
                now = self.ids[last.n * self.K : tokens * self.K].count(expert) if last.kind == "count" else 0
                cells: list[Any] = ["e"] * (size - now) + ["n"] * now
                rows.append([f"expert {expert:2}: {size}", cells])
                continue
            whole = range(self.begin[expert], self.begin[expert] + size)
            if not mine or mine[0] >= cut:
                rows.append(
                    [f"expert {expert:2} from {whole[0]:2}", [self._cell(r, last, placed) for r in whole]]
                )
                continue
            for n in mine:
                _, first, used = self.tiles[n]
                cells = [self._cell(r, last, placed) for r in range(first, first + used)]
                if n >= cut:  # the rest of this expert is not cut yet
                    rows.append([f"expert {expert:2} from {first:2}", cells])
                    continue
                mark = "▸" if n == cut - 1 else " "
                rows.append([f"{mark}tile {n}, expert {expert}", cells + ["r"] * (self.block_m - used)])
        return rows

    def _cell(self, row: int, last: Event, placed: int) -> Any:
        pair = self.pair_at[row]
        if pair >= placed:
            return f"e{row}"
        now = (last.kind == "place" and pair == last.n) or (
            last.kind == "tile" and row in self._rows_of(last.n)
        )
        word = shown_word(self.words[pair // self.K].strip(" ") or " ", WORD)
        return [f"{'n' if now else '.'}{pair}\n{word}"]

    def _rows_of(self, tile: int) -> range:
        _, first, used = self.tiles[tile]
        return range(first, first + used)

    def caption(self, frame: Frame) -> str:
        n, K = frame["n"], self.K
        if frame["stage"] == 0:
            return f"As they lie: {count(len(self.words), 'token')} with {K} pairs each; pair p belongs to token p // {K}."
        if frame["stage"] == 1:
            mine = self.ids[n * K : (n + 1) * K]
            sums = [f"expert {e} has {self.ids[: (n + 1) * K].count(e)}" for e in dict.fromkeys(mine)]
            return f"Count: token {n}, {self.words[n]!r}; now {listed(sums)}."
        if frame["stage"] == 2:
            return f"Prefix sum: {listed([f'expert {e} begins at row {r}' for e, r in self.begin.items()])}."
        if frame["stage"] == 3:
            row, expert = self.rows[n], self.ids[n]
            before = row - self.begin[expert]
            return (
                f"Place: pair {n}, {self.words[n // K]!r}, goes to row {row}: expert {expert} begins at row {self.begin[expert]}, "
                f"and {count(before, 'earlier pair')} chose it."
            )
        expert, first, used = self.tiles[n]
        place = f"row {first}" if used == 1 else f"rows {first} to {first + used - 1}"
        said = f"Cut: tile {n} is expert {expert}, {place}, {used} of {self.block_m} in use."
        if n == len(self.tiles) - 1:
            room = len(self.tiles) * self.block_m
            said += f" In all {count(len(self.tiles), 'tile')} with room for {room} rows, {len(self.pair_at)} of them in use."
        return said

    def table(self, frame: Frame) -> list[list]:
        """What is known of each pair at this moment."""
        stage, n = frame["stage"], frame["n"]
        out: list[list] = [["pair", "token", "expert", "row", "tile"]]
        for pair, (expert, row) in enumerate(zip(self.ids, self.rows)):
            placed = row >= 0 and (stage > 3 or (stage == 3 and pair <= n))
            tiles = [t for t in range(n + 1) if stage == 4 and row in self._rows_of(t)]
            out.append([pair, self.words[pair // self.K], expert, row if placed else "", *(tiles or [""])])
        return out


class Grouping(Scrubber):
    """ids: the expert of each pair, token by token; words: text of each token. made: what sort_tokens made of them, with
    order, offsets, tile_expert, tile_row, num_tiles and block_m. follow: the pair marked at first.

    Raises ValueError if `made` is not a sort of these ids.
    """

    def __init__(self, ids: Sequence[int], made: Any, *, words: Sequence[str], follow: int = 0):
        ids, offsets = [int(e) for e in ids], [int(r) for r in made.offsets]
        if not words or len(ids) % len(words):
            raise ValueError(
                f"every token needs equally many pairs: got {len(ids)} pairs, {count(len(words), 'token')}"
            )
        rows = [-1] * len(ids)
        for row, pair in enumerate(int(p) for p in made.order[: offsets[-1]]):
            if not (
                0 <= pair < len(ids) and rows[pair] < 0 and offsets[ids[pair]] <= row < offsets[ids[pair] + 1]
            ):
                raise ValueError(
                    f"row {row} holds pair {pair}, which does not belong there: sort these ids, and no others"
                )
            rows[pair] = row  # as the kernel placed it: #sorted
        number = int(made.num_tiles[0])
        starts = list(zip(map(int, made.tile_expert[:number]), map(int, made.tile_row[:number])))
        tiles = [(e, row, min(made.block_m, offsets[e + 1] - row)) for e, row in starts]
        view = GroupingView(ids, words, rows, tiles, made.block_m, follow)
        picture = Picture(view, "grouping", make=lambda f: CellPicture(frame=f), esm="cell_map")
        super().__init__([picture], view.events())

    def _reasons(self, seq: int | None = None, block: int | None = None) -> list[Reason]:
        said = (
            "The pairs lie as the router wrote them, K for each token.",
            "The size of each group must be known before any pair can be placed.",
            "A group begins where the groups before it end: the running sum of the counts.",
            "A pair comes after the earlier pairs of its expert, so pairs of one expert keep their order.",
            "A tile is multiplied with one expert's weights, so it may not hold rows of two.",
        )
        return [Reason(said[self.frame["stage"]], SRC)]
