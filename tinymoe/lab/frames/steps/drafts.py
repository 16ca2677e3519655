"""W8, draft ribbon: what was guessed ahead in each step, which guesses stayed, and what came in the place of the others."""

from collections.abc import Callable, Iterable

from tinymoe.core.trace import FINISH_REASONS, Event
from tinymoe.lab.frames.view import Events, Frame, count, last_by, letters, listed, tenths

KINDS = frozenset({"draft", "verify", "sample", "finish", "step"})
CHANGES = frozenset({"draft", "verify", "sample"})
DECISIONS = frozenset({"verify"})
# Codes of a draft: it stays; it goes; nobody looked at it, since one before it went; it is not judged yet; the sequence
# ended before it.
ACCEPTED, REJECTED, UNSEEN, PENDING, CUT = "A", "R", "U", "P", "C"
# Codes of the token behind the drafts: drawn in the place of the rejected one; behind drafts that all stayed; without drafts.
REDRAWN, BONUS, PLAIN = "N", "B", "S"
WORDS = {
    ACCEPTED: "accepted", REJECTED: "rejected", UNSEEN: "not looked at", PENDING: "not judged yet",
    CUT: "accepted, but behind the end", REDRAWN: "redrawn", BONUS: "bonus", PLAIN: "without drafts",
}  # fmt: skip
WINDOW = 16
NO_CHANCE = -1


def moments(events: Events, **_) -> list[int]:
    """The end of each step."""
    return last_by(events, KINDS, lambda e: e.step)


class _Ribbon:
    """Folds events into rows [step, seq, position, cells, tail, end]; see `frame`."""

    def __init__(self):
        self.rows: list[list] = []
        self._now: dict[int, list] = {}  # the rows of the step that runs, by sequence
        self._step = -1

    def apply(self, event: Event) -> None:
        if event.step != self._step:
            self._step, self._now = event.step, {}
        match event.kind:
            case "step":  # before its drafts; a second one of the same number retries a step that failed
                self.rows = [row for row in self.rows if row[1] not in self._now or row[0] != event.step]
                self._now = {}
            case "draft":
                self._row(event)[3].append([PENDING, event.token, event.q, NO_CHANCE])
            case "verify":
                self._judge(event)
            case "sample":
                self._grow(event)
            case "finish" if event.seq in self._now:
                self._now[event.seq][5] = event.reason

    def _row(self, event: Event) -> list:
        if event.seq not in self._now:
            self._now[event.seq] = [event.step, event.seq, event.position, [], [], -1]
            self.rows.append(self._now[event.seq])
        return self._now[event.seq]

    def _judge(self, event: Event) -> None:
        cells = self._row(event)[3]
        at = event.position - self._row(event)[2]
        cells[at][0], cells[at][3] = (ACCEPTED if event.accepted else REJECTED), event.p
        if not event.accepted:
            for cell in cells[at + 1 :]:
                cell[0] = UNSEEN

    def _grow(self, event: Event) -> None:
        row = self._row(event)
        at, cells = event.position - row[2], row[3]
        if at < len(cells) and cells[at][0] == ACCEPTED:
            return
        row[4] = [REDRAWN if at < len(cells) else BONUS if cells else PLAIN, event.token, at]

    def cut(self, sampled: Iterable[tuple[int, int, int]]) -> None:
        """Mark the accepted drafts that never became tokens; sampled: (step, seq, position) of those that did."""
        kept = set(sampled)
        for step, seq, position, cells, _, end in self.rows:
            for i, cell in enumerate(cells if end >= 0 else ()):
                if cell[0] == ACCEPTED and (step, seq, position + i) not in kept:
                    cell[0] = CUT


def frame(
    events: Events, i: int, *, window: int = WINDOW, words: Callable[[int], str] | None = None
) -> Frame:
    """The verifications up to event i, and the tokens that came without drafts; the last `window` of both.

    rows: [step, seq, position, cells, tail, end], position: that of the first cell; cells: [code, token, q, p], one a
    draft, chances in millionths, -1 where nobody looked; tail: [code, token, place behind the first cell] or [];
    end: index into FINISH_REASONS if the sequence ended here, else -1. total: [verifications, drafted, accepted, redrawn,
    bonus, tokens] of the whole run, tokens counted where there were drafts. Of the last step, now: the same; seqs: who got
    tokens; tokens: how many, those without drafts too; pending: drafts not judged yet; ended: [seq, reason].
    words: text of a token; names: those shown.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 row, got {window}")
    ribbon, shown, sampled = _Ribbon(), [e for e in events[: i + 1] if e.kind in KINDS], []
    for event in shown:
        ribbon.apply(event)
        if event.kind == "sample":
            sampled.append((event.step, event.seq, event.position))
    ribbon.cut(sampled)
    rows = ribbon.rows[-window:]
    tokens = dict.fromkeys(t for r in rows for t in [*(c[1] for c in r[3]), *r[4][1:2]])
    return {
        "event": shown[-1].index if shown else -1,
        "step": shown[-1].step if shown else 0,
        "rows": rows,
        "total": totals(ribbon.rows),
        **_now([r for r in ribbon.rows if r[0] == shown[-1].step] if shown else []),
        "names": {str(t): words(t) for t in tokens} if words else {},
        "dropped": len(ribbon.rows) - len(rows),
    }


def _now(rows: list[list]) -> Frame:
    cells = [c[0] for r in rows for c in r[3]]
    return {
        "now": totals(rows),
        "seqs": [r[1] for r in rows],
        "tokens": cells.count(ACCEPTED) + sum(len(r[4]) > 0 for r in rows),
        "pending": cells.count(PENDING),
        "ended": [[r[1], r[5]] for r in rows if r[5] >= 0],
    }


def totals(rows: list[list]) -> list[int]:
    """[verifications, drafted, accepted, redrawn, bonus, tokens] of rows; those without drafts do not count."""
    rows = [r for r in rows if r[3]]
    codes = [c[0] for r in rows for c in r[3]]
    tails = [r[4][0] for r in rows if r[4]]
    kept = codes.count(ACCEPTED)
    return [
        len(rows), len(codes), kept + codes.count(CUT), tails.count(REDRAWN), tails.count(BONUS), kept + len(tails)
    ]  # fmt: skip


def caption(frame: Frame) -> str:
    if frame["event"] < 0:
        return "No step has run yet."
    step, (runs, drafted, accepted, redrawn, bonus, _) = f"Step {frame['step']}", frame["now"]
    if not frame["seqs"]:
        return f"{step}: no token is chosen."
    if frame["pending"]:
        return f"{step}: {drafted} drafted, not judged yet."
    said = f"{drafted} drafted, {accepted} accepted" if runs else "nothing drafted"
    said += f", {redrawn} redrawn" if redrawn or (runs and not bonus) else ""
    said += f", {bonus} bonus" if bonus else ""
    said = (
        f"{step}: {said}; {count(frame['tokens'], 'token')} for {listed(list(map(letters, frame['seqs'])))}."
    )
    said += "".join(f" {letters(seq)} ends ({FINISH_REASONS[why]})." for seq, why in frame["ended"])
    runs, *_, tokens = frame["total"]
    if runs:
        said += (
            f" So far {count(tokens, 'token')} in {count(runs, 'verification')}, {tenths(tokens, runs)} each."
        )
    return said


def table(frame: Frame) -> list[list]:
    rows: list[list] = [["step", "sequence", "position", "token", "outcome", "draft %", "model %"]]
    for step, seq, position, cells, tail, _ in frame["rows"]:
        lines = [(i, *cell) for i, cell in enumerate(cells)]
        lines += [(tail[2], tail[0], tail[1], NO_CHANCE, NO_CHANCE)] if tail else []
        for i, code, token, *chances in sorted(lines, key=lambda x: x[0]):  # stable: the rejected one first
            name = frame["names"].get(str(token), str(token))
            percent = ["" if c == NO_CHANCE else tenths(c, 10**4) for c in chances]
            rows.append([step, letters(seq), position + i, name, WORDS[code], *percent])
    return rows
