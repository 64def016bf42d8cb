"""What a training run shows while it runs."""

import io
import re

import pytest
import torch
from rich.console import Console

from wholebatch.facts import StepReport
from wholebatch.training.progress import LINES_ELSEWHERE, TrainingProgress
from wholebatch.training.run_report import UpdateTotals


def step_report(sizes: tuple[int, ...]) -> StepReport:
    return StepReport(
        loss=torch.tensor(3.25),
        metrics={},
        count=500.0,
        num_examples=sum(sizes),
        micro_batch_sizes=sizes,
        should_step=True,
        reason=None,
        bad_examples=(),
        peak_memory_bytes=300 * 2**20,
        seconds=0.5,
        restarts=0,
    )


def shown(num_batches: int, terminal: bool, cuts: list[tuple[int, ...]], width: int = 120) -> str:
    """What is printed by `num_batches` updates of half a second each; the last of `cuts` is used from then on."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width)
    totals = UpdateTotals()
    with TrainingProgress(console, num_batches, budget_bytes=2**30) as progress:
        for batch in range(num_batches):
            report = step_report(cuts[min(batch, len(cuts) - 1)])
            totals.add(report, seconds=0.5, num_tokens=520, applied=True)
            progress.show(totals)
    return out.getvalue()


def test_a_pipe_gets_plain_lines_and_not_too_many() -> None:
    lines = shown(200, terminal=False, cuts=[(4,) * 16]).splitlines()
    assert lines[0] == "64 examples = 16 micro-batches × 4"
    assert lines[1] == "update 1/200  loss 3.250 (500 tokens)  1,040 tokens/s  peak 300 MiB of 1,024 MiB  1:40 left"
    assert lines[-1] == "update 200/200  loss 3.250 (500 tokens)  1,040 tokens/s  peak 300 MiB of 1,024 MiB  0:00 left"
    assert len(lines) == LINES_ELSEWHERE + 2  # every tenth, the first, and the arithmetic
    assert "\x1b" not in "".join(lines)


def test_a_few_updates_get_a_line_each() -> None:
    assert len(shown(3, terminal=False, cuts=[(4,) * 16]).splitlines()) == 4


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_one_live_line(width: int) -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(5, terminal=True, cuts=[(4,) * 16], width=width))
    assert "64 examples = 16 micro-batches × 4" in text
    last = text.rstrip().splitlines()[-1]
    assert re.fullmatch(r"5/5 ━+ loss 3\.250 \(500 tokens\) 1,040 tokens/s 300/1,024 MiB [\d:-]+ left", last)
    assert len(last) == width


def test_the_arithmetic_is_shown_when_it_has_changed() -> None:
    """While sizes are being measured, the parts of a batch are unequal; the last batch of an epoch is smaller."""
    cuts = [(1, 1, 2, 2, 4, 4), (5, 5, 4), (5, 5, 4), (4,), (7, 7), (7, 7)]
    text = shown(8, terminal=False, cuts=cuts)
    assert [line for line in text.splitlines() if "example" in line] == [
        "14 examples = 2 micro-batches × 5 + 1 micro-batch × 4",
        "14 examples = 2 micro-batches × 7",
    ]


def test_an_unequal_cut_is_shown_once() -> None:
    """Of examples of unequal lengths each batch has another."""
    cuts = [(1, 2, 2, 2, 7), (2, 4, 8), (4, 4, 6), (3, 4, 7), (3, 4, 7), (1, 2, 4, 7), (2, 5, 7), (1, 6, 7)]
    lines = [line for line in shown(9, terminal=False, cuts=cuts).splitlines() if "example" in line]
    assert lines == ["14 examples = 4 micro-batches of 1 to 7"]


def test_skipped_batches_are_shown() -> None:
    out, totals = io.StringIO(), UpdateTotals()
    with TrainingProgress(Console(file=out, width=120), 2) as progress:
        for applied in (True, False):
            totals.add(step_report((4,) * 16), seconds=0.5, num_tokens=520, applied=applied)
            progress.show(totals)
    first, second = (line for line in out.getvalue().splitlines() if line.startswith("update"))
    assert "skipped" not in first
    assert "1 skipped" in second


def test_a_slow_run_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at least every minute, whatever the number of updates."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out, totals = io.StringIO(), UpdateTotals()
    with TrainingProgress(Console(file=out, width=120), 10_000) as progress:
        for _ in range(100):
            now[0] += 7.0
            totals.add(step_report((4,) * 16), seconds=7.0, num_tokens=520, applied=True)
            progress.show(totals)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("update")]
    assert [line.split()[1] for line in lines[:3]] == ["1/10000", "10/10000", "19/10000"]


def test_a_run_that_goes_on_begins_where_it_stood() -> None:
    out, totals = io.StringIO(), UpdateTotals(batches=40, num_tokens=40 * 520, seconds=20.0)
    with TrainingProgress(Console(file=out, width=120), 100, done=40) as progress:
        totals.add(step_report((4,) * 16), seconds=0.5, num_tokens=520, applied=True)
        progress.show(totals)
    assert out.getvalue().splitlines()[-1].startswith("update 41/100 ")
