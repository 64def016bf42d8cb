"""Candidates side by side, as a table on a terminal of 100 columns; its cells are also those of the page."""

from rich import box
from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from wholebatch.bench import Comparison, Figures, Result
from wholebatch.memory.device import MIB

HEADINGS = (
    "candidate",
    "micro-\nbatches",
    "largest:\nex. / tokens",
    "padded\n/ real",
    "seconds\nper batch",
    "peak\nMiB",
)
"""Of the columns that `cells` fills; the speed follows."""

UNMEASURED = "–"

WIDTH = 100
"""Columns of the table."""


def table(comparison: Comparison) -> Table:
    """One row for each candidate, with a bar for its speed; the recommended one is marked."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), width=WIDTH)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading == "candidate" else "right", no_wrap=True)
    shown.add_column(f"{unit(comparison)}\nper second", ratio=1)
    fastest = max((one.figures.speed for one in comparison.results if one.figures is not None), default=1.0)
    for result in comparison.results:
        best = result is comparison.recommended
        shown.add_row(*cells(result, best), _speed(result, fastest), style="bold green" if best else "")
    return shown


def _speed(result: Result, fastest: float) -> Table | Text:
    if result.figures is None:
        return Text(result.problem or "")
    line = Table.grid(expand=True, padding=(0, 1, 0, 0))
    line.add_column(width=len(f"{fastest:,.0f}"), justify="right")
    line.add_column(ratio=1)
    line.add_row(f"{result.figures.speed:,.0f}", Bar(fastest, 0, result.figures.speed))
    return line


def cells(result: Result, best: bool) -> list[str]:
    """The text under each of `HEADINGS`."""
    name, figures = ("→ " if best else "  ") + result.candidate.name, result.figures
    if figures is None:
        return [name, *[UNMEASURED] * (len(HEADINGS) - 1)]
    seconds = figures.seconds
    return [
        name,
        f"{figures.num_micro_batches:.3g}",
        largest(figures),
        UNMEASURED if figures.padding is None else f"{figures.padding:.2f}",
        f"{seconds.median:.3g} ({seconds.low:.2g}–{seconds.high:.2g})",
        mebibytes(figures.peak_bytes),
    ]


def largest(figures: Figures) -> str:
    """`8 / 1,016`: examples and padded tokens of the largest micro-batch."""
    tokens = "" if figures.largest_tokens is None else f" / {figures.largest_tokens:,}"
    return f"{figures.largest_examples:,}{tokens}"


def mebibytes(size: int | None) -> str:
    """Without the unit, which the heading names."""
    return UNMEASURED if size is None else f"{size / MIB:,.{0 if size >= 10 * MIB else 1}f}"


def unit(comparison: Comparison) -> str:
    """What a speed counts."""
    measured = [one.figures for one in comparison.results if one.figures is not None]
    known = all(figures.tokens_per_second is not None for figures in measured)
    return "real tokens" if known else "examples"
