"""The figures of a run."""

import pytest
import torch

from wholebatch.facts import StepReport
from wholebatch.training.run_report import (
    UpdateTotals,
    arithmetic,
    counted,
    duration,
    listed,
    measured,
    mebibytes,
    number,
)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((4,) * 16, "64 examples = 16 micro-batches × 4"),
        ((64,), "64 examples = 1 micro-batch × 64"),
        ((4, 3, 3), "10 examples = 1 micro-batch × 4 + 2 micro-batches × 3"),
        ((1,), "1 example = 1 micro-batch × 1"),
        ((512,) * 8, "4,096 examples = 8 micro-batches × 512"),
        ((9, 1, 4, 4, 2), "20 examples = 5 micro-batches of 1 to 9"),
    ],
)
def test_batch_arithmetic(sizes: tuple[int, ...], text: str) -> None:
    assert arithmetic(sizes) == text


def test_figures_carry_their_unit() -> None:
    assert [mebibytes(300 * 2**20), mebibytes(5 * 2**30), mebibytes(None)] == ["300 MiB", "5,120 MiB", "unknown"]
    assert [duration(0.4), duration(59.6), duration(125), duration(10925)] == ["0:00", "1:00", "2:05", "3:02:05"]
    assert listed({"empty": 1, "not UTF-8": 1_000}) == "empty, not UTF-8: 1,000 times"
    assert [counted(number, "update") for number in (0, 1, 1_000)] == ["0 updates", "1 update", "1,000 updates"]
    assert [number(1234), number(None)] == ["1,234", "an unknown number"]
    assert measured({"loss": 4.1731, "accuracy": 0.5}, "tokens") == "loss 4.173 nats per token, accuracy 0.500"


def step_report(count: float, peak: int | None, should_step: bool) -> StepReport:
    loss = torch.tensor(2.0 if should_step else float("nan"))
    return StepReport(loss, {}, count, 4, (2, 2), should_step, None, (), peak, 0.1, 0)


def test_totals_add_up() -> None:
    totals = UpdateTotals()
    for count, peak, should_step in [(30, None, True), (10, 700, False), (20, 500, True)]:
        totals.add(step_report(count, peak, should_step), seconds=2.0, num_tokens=24, applied=should_step)
    assert (totals.batches, totals.skipped_batches, totals.num_units, totals.seconds) == (3, 1, 60, 6.0)
    assert (totals.num_tokens, totals.count) == (72, 20.0)
    assert (totals.loss, totals.peak_memory_bytes, totals.micro_batch_sizes) == (2.0, 700, (2, 2))
    assert totals.tokens_per_second == 12.0


def test_an_unknown_peak_stays_unknown() -> None:
    totals = UpdateTotals()
    totals.add(step_report(1, None, True), seconds=1.0, num_tokens=1, applied=True)
    assert totals.peak_memory_bytes is None
