"""The frames of W1 and W3 for a terminal: pure functions from a frame to a rich renderable, without widgets."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinymoe.lab.frames import load
from tinymoe.lab.frames.view import Frame, count, letters, tenths

HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")  # Okabe-Ito
BARS = " ▁▂▃▄▅▆▇█"
FULL = 300  # percent of the mean at which a bar is full


def expert_load(frame: Frame, title: str = "Tokens per expert, in percent of the mean") -> RenderableType:
    """One row per layer or group, one bar and number per expert; above the mean the number is bold. 16 experts and names
    of ten letters fit 80 columns."""
    grid = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 0), header_style="dim"
    )
    grid.add_column("")
    for expert in range(frame["experts"]):
        grid.add_column(f"{expert}", justify="right", min_width=4)
    grid.add_column("max/\nmean", justify="right", min_width=5)
    for name, counts, percents in zip(frame["rows"], frame["counts"], load.percent_of_mean(frame)):
        cells = [
            Text(f"{_bar(p)}{p}"[-4:], style="bold #d55e00" if p > 150 else "bold" if p > 100 else "")
            for p in percents
        ]
        top = tenths(max(counts, default=0) * frame["experts"], sum(counts))
        grid.add_row(Text(f"{name} "), *cells, Text(top))
    return Group(grid, Text(load.caption(frame), style="italic"))


def _bar(percent: int) -> str:
    return BARS[min(8, (8 * percent + FULL - 1) // FULL)]


def page_table(frame: Frame, caption: str = "", width: int = 16) -> RenderableType:
    """The blocks, `width` in a row (A: owned by A, A+2: and two more, ~: cached, .: free), and each sequence's table."""
    cached = set(frame["cached"])
    blocks = Table(
        title="Page table",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        padding=(0, 1, 0, 0),
    )
    total = len(frame["owners"])
    for first in range(0, total, width):
        row = [_block(frame["owners"][b], b in cached) for b in range(first, min(first + width, total))]
        blocks.add_row(Text(f"{first:>4}", style="dim"), *row)
    tables = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for seq, computed, table in frame["tables"]:
        chain = " ".join("?" if b < 0 else f"{b}*" if len(frame["owners"][b]) > 1 else str(b) for b in table)
        tables.add_row(_owner(seq), Text(count(computed, "token"), style="dim"), Text(chain))
    legend = Text("A owned  A+1 shared (* in a table)  ~ cached  . free", style="dim")
    parts: list[RenderableType] = [blocks, legend, tables]
    return Group(*parts, Text(caption, style="italic")) if caption else Group(*parts)


def _owner(seq: int) -> Text:
    return Text(letters(seq), style=f"bold {HUES[seq % len(HUES)]}")


def _block(owners: list[int], cached: bool) -> Text:
    if not owners:
        return Text("~" if cached else ".", style="dim")
    more = f"+{len(owners) - 1}" if len(owners) > 1 else ""
    return _owner(owners[0]).append(more)
