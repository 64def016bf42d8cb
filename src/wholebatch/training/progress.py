"""What a training run shows while it runs: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from wholebatch.training.run_report import UpdateTotals, arithmetic, duration, mebibytes

LINES_ELSEWHERE = 20
"""Lines of progress where there is no terminal: enough to see a trend, few enough to read."""

FIRST_UNEQUAL = 6
"""The update from which on an unequal cut is told: measuring is over by then, as a rule."""

LONGEST_SILENCE = 60.0
"""Seconds after which such a line comes all the same."""


class TrainingProgress:
    """Shows the updates of one run; use it as a context manager.

    On a terminal one line is drawn anew with each update: bar, loss, tokens per second, peak memory, time left.
    Elsewhere (a pipe, a log file) every so many updates get a line of their own, without control characters.
    """

    def __init__(
        self, console: Console, num_batches: int, done: int = 0, unit: str = "tokens", budget_bytes: int | None = None
    ) -> None:
        """Show `num_batches` updates on `console`, so many of them `done` before; losses are means over `unit`."""
        self._console = console
        self._num_batches, self._done = num_batches, done
        self._unit, self._budget_bytes = unit, budget_bytes
        self._every = max(1, num_batches // LINES_ELSEWHERE)
        self._arithmetic, self._full, self._last_line = "", 0, time.monotonic()
        self._live = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None),  # what the rest leaves
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("", total=num_batches, completed=done)

    def __enter__(self) -> Self:
        """Start the live line, where there is one."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the line as it is and give the cursor back, also after an error."""
        self._live.stop()

    def show(self, totals: UpdateTotals) -> None:
        """Show where the run stands."""
        self._show_arithmetic(totals.micro_batch_sizes, totals.batches)
        budget = "" if self._budget_bytes is None else f" of {mebibytes(self._budget_bytes)}"
        skipped = f"  {totals.skipped_batches:,} skipped" if totals.skipped_batches else ""
        facts = (
            f"loss {totals.loss:.3f} ({totals.count:,.0f} {self._unit})  {totals.tokens_per_second:,.0f} tokens/s  "
            f"peak {mebibytes(totals.peak_memory_bytes)}{budget}{skipped}"
        )
        short = f"loss {totals.loss:.3f} ({totals.count:,.0f} {self._unit}) {totals.tokens_per_second:,.0f} tokens/s"
        memory = f"{mebibytes(totals.peak_memory_bytes).removesuffix(' MiB')}/{mebibytes(self._budget_bytes)}"
        self._live.update(self._task, completed=totals.batches, description=f"{short} {memory}{skipped}")
        if not self._console.is_terminal and self._is_due(totals.batches):
            left = totals.seconds / totals.batches * (self._num_batches - totals.batches)
            line = f"update {totals.batches}/{self._num_batches}  {facts}  {duration(left)} left"
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line of its own."""
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        self._last_line = time.monotonic()

    def _show_arithmetic(self, sizes: tuple[int, ...], batches: int) -> None:
        """Whenever the cut of a full batch has changed; once where examples of unequal lengths are cut unequally.

        While sizes are being measured, the parts are unequal as well.
        """
        self._full = max(self._full, sum(sizes))
        shown = arithmetic(sizes)
        even = max(sizes) - min(sizes) <= 1
        first = min(self._done + FIRST_UNEQUAL, self._num_batches)
        told = even or (not self._arithmetic and batches >= first)
        if sum(sizes) == self._full and told and shown != self._arithmetic:
            self.say(shown)
            self._arithmetic = shown

    def _is_due(self, batch: int) -> bool:
        if batch in (self._done + 1, self._num_batches) or batch % self._every == 0:
            return True
        return time.monotonic() - self._last_line >= LONGEST_SILENCE
