"""The denominator in the graph of a cross-entropy is compared with the count in every batch, not only the first."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from wholebatch.errors import LossNotAdditiveError
from wholebatch.loss.shown import shown_denominator

Batch = dict[str, torch.Tensor]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


def logits() -> torch.Tensor:
    """Of six rows and four classes."""
    return torch.randn(6, 4, dtype=torch.float64, requires_grad=True)


CLASSES = torch.tensor([0, 1, -1, 3, 2, -1])


def test_labels_that_are_not_ignored_are_shown() -> None:
    shown = shown_denominator(F.cross_entropy(logits(), CLASSES, ignore_index=-1))
    assert shown is not None
    assert shown.item() == 4


def test_class_weights_are_shown_also_through_casts_and_views() -> None:
    weight = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    loss = F.cross_entropy(logits(), CLASSES, weight=weight, ignore_index=-1)
    shown = shown_denominator(loss.float().view(1).squeeze())
    assert shown is not None
    assert shown.item() == 1 + 2 + 8 + 4


MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (lambda: (logits()[:, 0] * MASK).sum() / MASK.sum(), 4),
        (lambda: (logits()[:, 0] * MASK).sum() / (MASK > 0).sum(), 4),
        (lambda: (logits()[:, 0] * MASK).sum() / MASK.sum().clamp(min=5), 5),
        (lambda: logits().mean(dim=1).sum() / 6, 6),
    ],
    ids=["float mask", "integer count", "clamped", "number"],
)
def test_the_divisor_of_a_sum_is_shown(loss: Any, shown: float) -> None:
    found = shown_denominator(loss())
    assert found is not None
    assert found.item() == shown


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.cross_entropy(logits(), CLASSES, ignore_index=-1, reduction="sum"),
        lambda: 0.5 * F.cross_entropy(logits(), CLASSES, ignore_index=-1),
        lambda: F.cross_entropy(logits().bfloat16(), CLASSES, ignore_index=-1),
        lambda: F.cross_entropy(logits(), CLASSES, ignore_index=-1) / 8,
        lambda: (logits()[:, 0] * MASK).mean() / MASK.mean(),
        lambda: (logits().sum() + 1) / 6,
        lambda: F.mse_loss(logits(), torch.zeros(6, 4, dtype=torch.float64)),
        lambda: logits().detach().sum(),
    ],
    ids=["sum", "scaled", "rounded", "divided again", "means", "added", "mse", "no graph"],
)
def test_other_losses_show_nothing(loss: Any) -> None:
    assert shown_denominator(loss()) is None


def test_saved_tensor_hooks_are_not_run() -> None:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        loss = F.cross_entropy(logits(), CLASSES, ignore_index=-1)
    assert shown_denominator(loss) is None


def batch(unlabelled: tuple[int, ...] = ()) -> Batch:
    """Eight rows; those named have the class -1."""
    y = torch.arange(8) % 4
    y[list(unlabelled)] = -1
    return {"x": torch.arange(24, dtype=torch.float64).reshape(8, 3) / 24, "y": y}


def ignoring(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Ignores a label that nobody told of; a mean over examples as long as there is none."""
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-1)


@pytest.mark.parametrize("count", ["examples", lambda b: len(b["x"])], ids=["named", "function"])
def test_an_unlabelled_example_in_a_later_batch_is_refused(model: nn.Module, count: Any) -> None:
    """The first batch has none, so nothing could be told then. `.grad` is as before, and a balanced batch is right."""
    accumulator = wb.GradientAccumulator(model, ignoring, count=count, micro_batch_size=2)
    accumulator.backward(batch())
    before = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    values = [gradient.clone() for gradient in before]
    with pytest.raises(LossNotAdditiveError, match=r"divided by 2, 1, 2, 2, but by count= they weigh 2, 2, 2, 2"):
        accumulator.backward(batch(unlabelled=(3,)))
    for parameter, gradient, value in zip(model.parameters(), before, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)
    model.zero_grad()
    accumulator.backward(batch(unlabelled=(1, 3, 5, 7)))  # one in each micro-batch: in proportion, and right
    gradient = model.weight.grad
    whole = torch.autograd.grad(ignoring(model, batch(unlabelled=(1, 3, 5, 7))), model.weight)[0]
    torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-12)


def masked(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The same by hand; one where nothing is labelled."""
    kept = (batch["y"] >= 0).double()
    losses = F.cross_entropy(model(batch["x"]), batch["y"].clamp(min=0), reduction="none")
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def test_masks_in_loss_fn_are_seen_too(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, masked, count="examples", micro_batch_size=2)
    accumulator.backward(batch())
    with pytest.raises(LossNotAdditiveError, match=r"divided by 2, 1, 2, 2"):
        accumulator.backward(batch(unlabelled=(3,)))


def test_the_right_count_is_never_refused(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, ignoring, count=lambda b: (b["y"] != -1).sum(), micro_batch_size=2)
    for unlabelled in ((), (3,), (0, 1), (0, 1, 2), (7,)):
        model.zero_grad()
        accumulator.backward(batch(unlabelled))
        whole = torch.autograd.grad(ignoring(model, batch(unlabelled)), model.weight)[0]
        torch.testing.assert_close(model.weight.grad, whole, rtol=0, atol=1e-12)
