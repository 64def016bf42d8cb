"""Known faults about what is reported: the loss, in training and evaluation, and what reports keep alive."""

import contextlib
import gc
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb
from lin import AB, EXACT, FORMS, Batch, Lin, accumulator, collated, examples, mask_of, num_tokens, rows
from wholebatch.errors import BadBatchWarning

pytestmark = pytest.mark.smoke

EIGHT = rows([1, 2, 3], [10], [4, 4], [0.5] * 5, [7], [6, 2], [3, 3, 3, 3], [9])
MEAN_OF_EIGHT = (6 + 10 + 8 + 2.5 + 7 + 8 + 12 + 9) / 19


# ---- LG1, LG2 ----


@pytest.mark.parametrize(
    ("batch", "sizes", "right"), [(AB, (2, 1), 4.0), (EIGHT, (8, 4, 2, 1), MEAN_OF_EIGHT)], ids=["AB", "eight rows"]
)
@pytest.mark.parametrize("form", FORMS)
def test_lg1_loss_grows_with_the_number_of_micro_batches(
    form: str, batch: Batch, sizes: tuple[int, ...], right: float
) -> None:
    """The reported loss and the gradient's norm are the batch's own at K = 1, 2, 4, 8."""
    for size in sizes:
        model = Lin()
        report = accumulator(model, form, size).backward(batch)
        assert report.gradient_accumulation_steps == len(batch["x"]) // size
        assert report.loss.item() == pytest.approx(right, rel=EXACT)
        assert torch.nn.utils.get_total_norm([model.w.grad]).item() == pytest.approx(right, rel=EXACT)


def test_lg1_metrics() -> None:
    """Metrics are means over the batch too, each over its own count."""

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        losses, mask = model(batch["x"]), mask_of(batch)
        large = ((losses > 2.5) & mask).sum()
        metrics = {"large": (large, mask.sum()), "rows": (float(mask.any(dim=1).sum()), 1)}
        return wb.LossSum((losses * mask).sum(), mask.sum(), metrics)

    for size in (8, 4, 2, 1):
        metrics = accumulator(Lin(), (loss_fn, None), size).backward(EIGHT).metrics
        assert metrics["large"].item() == pytest.approx((1 + 1 + 2 + 0 + 1 + 1 + 4 + 1) / 19, rel=EXACT)
        assert metrics["rows"].item() == pytest.approx(size, rel=EXACT)


class ZeroScores(nn.Module):
    """The same score for each of 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(*labels.shape, 4)


def mean_cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["labels"]).flatten(0, 1), batch["labels"].flatten())


def summed_cross_entropy(model: nn.Module, batch: Batch) -> wb.LossSum:
    scores = model(batch["labels"]).flatten(0, 1)
    return wb.LossSum(cross_entropy(scores, batch["labels"].flatten(), reduction="sum"), num_tokens(batch))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("form", [(mean_cross_entropy, "tokens"), (summed_cross_entropy, None)], ids=["mean", "sum"])
def test_lg2_loss_divided_twice(form: Any, size: int) -> None:
    """Scores of zero over 4 classes: ln 4 at every K, in training and in evaluation."""
    labels = torch.arange(8 * 3).reshape(8, 3) % 4
    labels[0, 1:] = labels[5] = -100
    whole = accumulator(ZeroScores(), form, size)
    assert whole.backward({"labels": labels}).loss.item() == pytest.approx(1.386294, abs=1e-6)
    assert whole.evaluate({"labels": labels}).loss == pytest.approx(math.log(4), rel=EXACT)


# ---- LG4 ----

THREE_AND_FORTY = (rows([1, 1, 1]), rows([10, 30]))
"""Sums and counts (3, 3) and (40, 2)."""


def ways_to_evaluate() -> dict[str, Any]:
    both = rows([1, 1, 1], [10, 30])
    return {
        "batches": list(THREE_AND_FORTY),
        "generator": iter(THREE_AND_FORTY),
        "DataLoader": torch.utils.data.DataLoader(list(THREE_AND_FORTY), batch_size=None),  # type: ignore[arg-type]
        "one batch": both,
        "whole batches": wb.whole_batches(list(THREE_AND_FORTY), 2),
        "whole batches of one": wb.whole_batches([both], 1),
        "with empty rows": [rows([1, 1, 1], [], []), rows([], [10, 30])],
    }


@pytest.mark.parametrize("size", [1, 2, "auto"])
@pytest.mark.parametrize("way", list(ways_to_evaluate()))
@pytest.mark.parametrize("form", FORMS)
def test_lg4_evaluation_depends_on_the_batch_size(form: str, way: str, size: Any) -> None:
    """43 / 5 = 8.6 however the five tokens are batched, not 10.5; the perplexity is its exponential."""
    report = accumulator(Lin(), form, size).evaluate(ways_to_evaluate()[way])
    assert report.loss == pytest.approx(8.6, rel=EXACT)
    assert report.count == 5
    assert math.exp(report.loss) == pytest.approx(math.exp(43 / 5), rel=1e-10)


def test_lg4_examples_and_metrics() -> None:
    """The same of examples that are collated, and of metrics."""

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        losses, mask = model(batch["x"]), mask_of(batch)
        return wb.LossSum((losses * mask).sum(), mask.sum(), {"square": ((losses**2 * mask).sum(), mask.sum())})

    dataset = [example for batch in THREE_AND_FORTY for example in examples(batch)]
    for batch_size in (1, 2):
        whole = accumulator(Lin(), (loss_fn, None), collate_fn=collated)
        report = whole.evaluate(wb.whole_batches(dataset, batch_size, loader_yields="examples"))
        assert report.loss == pytest.approx(8.6, rel=EXACT)
        assert report.metrics["square"] == pytest.approx((3 + 100 + 900) / 5, rel=EXACT)


# ---- LG5 ----

NUM_BATCHES, LEVEL_FROM = 50, 3


class Watched(nn.Module):
    """LIN, with a weak reference to every activation."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = Lin()
        self.activations: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lin(x).tanh()
        self.activations.append(weakref.ref(hidden))
        return hidden + 1.0


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """What is dead inside died by itself: nothing waits in a cycle for the collector."""
    gc.collect()
    gc.freeze()  # what is there already is not counted
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def num_live_tensors() -> int:
    """That were made since then."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def tensors_of(report: wb.StepReport) -> list[torch.Tensor]:
    counts = report.count.values() if isinstance(report.count, dict) else [report.count]
    values = [report.loss, *report.metrics.values(), *counts]
    return [value for value in values if isinstance(value, torch.Tensor)]


def with_metrics(model: nn.Module, batch: Batch) -> wb.LossSum:
    """A metric that was not detached."""
    losses, mask = model(batch["x"]), mask_of(batch)
    return wb.LossSum((losses * mask).sum(), mask.sum(), {"square": ((losses**2 * mask).sum(), mask.sum())})


KEPT_FORMS = {
    **{name: FORMS[name] for name in ("masked mean", "sum and count", "term")},
    "metrics": (with_metrics, None),
}


@pytest.mark.parametrize("on_bad_batch", ["skip", "ignore"])
@pytest.mark.parametrize("form", KEPT_FORMS)
def test_lg5_graphs_kept_alive(form: str, on_bad_batch: Any) -> None:
    """50 batches, some of them bad, every report kept: no activation outlives its batch, and memory is level."""
    model = Watched()
    optimizer = torch.optim.AdamW(model.parameters())
    whole = accumulator(model, KEPT_FORMS[form], on_bad_batch=on_bad_batch, max_skipped_batches=NUM_BATCHES)
    reports, live = [], []
    with without_garbage_collection(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BadBatchWarning)
        for number in range(NUM_BATCHES):
            last = float("nan") if number % 10 == 9 else float(number)
            report = whole.backward(rows([1, 2, 3], [], [last]))
            reports.append(report)
            if report.should_step:
                optimizer.step()
            optimizer.zero_grad()
            assert not any(activation() is not None for activation in model.activations)
            model.activations.clear()
            live.append(num_live_tensors() - sum(len(tensors_of(one)) for one in reports))
    assert all(tensor.grad_fn is None and not tensor.requires_grad for one in reports for tensor in tensors_of(one))
    assert [report.should_step for report in reports].count(False) == (5 if on_bad_batch == "skip" else 0)
    assert len(set(live[LEVEL_FROM:])) == 1


@pytest.mark.parametrize("form", KEPT_FORMS)
def test_lg5_evaluation_keeps_nothing(form: str) -> None:
    """Nor does evaluation, whose report is plain numbers."""
    model = Watched()
    whole, live, reports = accumulator(model, KEPT_FORMS[form]), [], []
    with without_garbage_collection():
        for _ in range(10):
            reports.append(whole.evaluate([AB, EIGHT]))
            assert not any(activation() is not None for activation in model.activations)
            live.append(num_live_tensors())
    assert all(isinstance(number, float) for one in reports for number in (one.loss, *one.metrics.values()))
    assert len(set(live[LEVEL_FROM:])) == 1


def test_lg5_a_failed_batch_keeps_nothing() -> None:
    """An error in the last micro-batch leaves nothing of the ones before, once it has been handled."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        if (batch["x"] == 99).any():
            raise ArithmeticError("99")
        return (model(batch["x"]) * mask_of(batch)).sum() / num_tokens(batch)

    model, live = Watched(), []
    whole = accumulator(model, (loss_fn, "tokens"))
    whole.backward(AB)
    with without_garbage_collection():
        for _ in range(10):
            model.zero_grad()
            with contextlib.suppress(ArithmeticError):
                whole.backward(rows([1, 2], [3], [99]))
            assert not any(activation() is not None for activation in model.activations)
            live.append(num_live_tensors())
    assert len(set(live[LEVEL_FROM:])) == 1
