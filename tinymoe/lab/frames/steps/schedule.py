"""W6, schedule chart: which sequence ran how many tokens in which step, and how much of the budget was used."""

from tinymoe.core.trace import FINISH_REASONS, WAIT_REASONS
from tinymoe.lab.frames.view import Events, Frame, count, letters, listed

KINDS = frozenset({"arrive", "admit", "chunk", "wait", "preempt", "fork", "finish", "step", "sample"})
CHANGES = frozenset({"chunk", "step"})
DECISIONS = frozenset({"preempt", "wait", "admit", "finish", "fork"})
PREFILL, DECODE, WAITING, PREEMPTED = "P", "D", "W", "X"


def moments(events: Events, **_) -> list[int]:
    """The end of each step: its `step` event, or what the step's outcome (sample, finish) added after it."""
    found: list[int] = []
    for i, event in enumerate(events):
        if event.kind == "step":
            found.append(i)
        elif found and event.kind in ("sample", "finish") and event.step == events[found[-1]].step:
            found[-1] = i
    return found


class _Chart:
    """Folds events into columns; a column closes with its `step` event."""

    def __init__(self):
        self.prompt: dict[int, int] = {}  # seq -> prompt tokens, in order of arrival
        self.request: dict[int, int] = {}
        self.waiting: dict[int, None] = {}
        self.columns: list[list] = []
        self.waits: list[list[int]] = []
        self.ended: list[list[int]] = []
        self._cells: dict[int, list] = {}
        self._held_up: dict[int, int] = {}  # seq -> the last reason noted in this step
        self._cached: dict[int, int] = {}

    def apply(self, event) -> None:
        match event.kind:
            case "arrive":
                self._meet(event.seq, event.request, event.prompt_tokens)
                self.waiting[event.seq] = None
            case "fork":
                self._meet(event.child, event.request, self.prompt.get(event.parent, 0))
            case "admit":
                self._meet(event.seq, event.request, 0)
                self.waiting.pop(event.seq, None)
                self._cached[event.seq] = event.cached
            case "chunk":
                self._run(event)
            case "wait":
                self._held_up[event.seq] = event.why
            case "preempt":
                self.waiting[event.seq] = None
                self._cells[event.seq] = [event.seq, PREEMPTED, event.lost, 0]
            case "finish":
                self.waiting.pop(event.seq, None)
                self.ended.append([event.seq, event.step, event.reason, event.tokens])
            case "step":
                self._close(event)

    def _meet(self, seq: int, request: int, prompt: int) -> None:
        self.prompt.setdefault(seq, prompt)
        self.request.setdefault(seq, request)

    def _run(self, event) -> None:
        self._meet(event.seq, -1, 0)
        tokens = event.stop - event.start
        decode = event.samples and tokens == 1 and event.start >= self.prompt[event.seq]
        cached = self._cached.pop(event.seq, 0)
        self._cells[event.seq] = [event.seq, DECODE if decode else PREFILL, tokens, cached]

    def _close(self, event) -> None:
        for seq in self.waiting:
            self._cells.setdefault(seq, [seq, WAITING, 0, 0])
        order = {seq: row for row, seq in enumerate(self.prompt)}
        cells = sorted(self._cells.values(), key=lambda c: order.get(c[0], -1))
        self.columns.append([event.step, event.budget, event.used, cells])
        # The engine notes who is held up while it plans; whoever ran after all did not wait.
        ran = {c[0] for c in cells if c[1] in (PREFILL, DECODE)}
        self.waits = [[seq, why] for seq, why in self._held_up.items() if seq not in ran]
        self._held_up, self._cells = {}, {}


def frame(events: Events, i: int, *, window: int = 32) -> Frame:
    """The steps closed up to event i, the last `window` of them.

    rows: [seq, request, prompt tokens] in order of arrival; columns: [step, budget, used, cells] with cells
    [seq, code, tokens, cached tokens found at admission]; code is P, D, W or X (its tokens are those lost); ended: [seq,
    step, index into FINISH_REASONS, generated tokens]; waits: [seq, index into WAIT_REASONS] of the last step.
    """
    chart = _Chart()
    for event in events[: i + 1]:
        chart.apply(event)
    columns = chart.columns[-window:]
    last = chart.columns[-1] if chart.columns else [0, 0, 0, []]
    first = columns[0][0] if columns else 0
    gone = {seq for seq, step, *_ in chart.ended if step < first}
    return {
        "event": events[min(i, len(events) - 1)].index if len(events) else -1,
        "step": last[0],
        "rows": [[s, chart.request[s], n] for s, n in chart.prompt.items() if s not in gone],
        "columns": columns,
        "ended": [e for e in chart.ended if e[1] >= first],
        "waits": chart.waits,
        "dropped": len(chart.columns) - len(columns),
    }


def caption(frame: Frame) -> str:
    if not frame["columns"]:
        return "No step has run yet."
    step, budget, used, cells = frame["columns"][-1]
    parts = [f"Step {step}: {used} of {count(budget, 'token')}"]
    prefill = [f"{letters(c[0])} {c[2]}" for c in cells if c[1] == PREFILL]
    decode = [letters(c[0]) for c in cells if c[1] == DECODE]
    if prefill:
        parts.append("prefill " + listed(prefill))
    if decode:
        parts.append("decode " + listed(decode))
    for cell in cells:
        if cell[1] == PREEMPTED:
            parts.append(f"{letters(cell[0])} is preempted and loses {count(cell[2], 'token')}")
        if cell[3]:
            parts.append(f"{letters(cell[0])} skips {count(cell[3], 'cached token')}")
    for seq, why in frame["waits"]:
        parts.append(f"{letters(seq)} waits: {WAIT_REASONS[why]}")
    for seq, end, reason, tokens in frame["ended"]:
        if end == step:
            parts.append(f"{letters(seq)} finishes ({FINISH_REASONS[reason]}) with {count(tokens, 'token')}")
    return "; ".join(parts) + "."


def table(frame: Frame) -> list[list]:
    rows: list[list] = [["step", "tokens", *(letters(s) for s, _, _ in frame["rows"])]]
    for step, budget, used, cells in frame["columns"]:
        run = {c[0]: f"{c[1]}{c[2] or ''}" for c in cells}
        rows.append([step, f"{used}/{budget}", *(run.get(s, "") for s, _, _ in frame["rows"])])
    return rows
