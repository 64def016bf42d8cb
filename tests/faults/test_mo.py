"""Known faults of mixtures of experts: a balance term is no sum over the batch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import wholebatch as wb
from wholebatch.errors import LossNotAdditiveError

pytestmark = pytest.mark.smoke

Batch = dict[str, torch.Tensor]
BATCH = {"x": torch.eye(2, dtype=torch.float64).repeat_interleave(2, dim=0)}
"""Two examples for expert 0, then two for expert 1."""


class Experts(nn.Module):
    """A router that sends each example to its expert with probability 0.9, and something to train behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2, bias=False)
        self.out = nn.Parameter(torch.ones(()))
        self.double()
        with torch.no_grad():
            self.router.weight.copy_(torch.eye(2, dtype=torch.float64) * math.log(9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances = self.router(x).softmax(dim=-1)
        return self.out * chances.amax(dim=-1), chances


def balance(chances: torch.Tensor) -> torch.Tensor:
    """Twice the sum over experts of the share of examples times the mean chance."""
    shares = one_hot(chances.argmax(dim=-1), 2).to(chances.dtype).mean(dim=0)
    return 2 * (shares * chances.mean(dim=0)).sum()


def in_one_scalar(model: nn.Module, batch: Batch) -> torch.Tensor:
    output, chances = model(batch["x"])
    return output.mean() + 0.5 * balance(chances)


def alone(model: nn.Module, batch: Batch) -> torch.Tensor:
    return balance(model(batch["x"])[1])


def sum_and_count(model: nn.Module, batch: Batch) -> wb.LossSum:
    output, chances = model(batch["x"])
    return wb.LossSum(output.sum() + 0.5 * balance(chances) * len(output), len(output))


def terms(model: nn.Module, batch: Batch) -> dict[str, wb.LossSum]:
    output, chances = model(batch["x"])
    size = len(output)
    return {"output": wb.LossSum(output.sum(), size), "balance": wb.LossSum(balance(chances) * size, size)}


LOSSES: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any]] = {
    "one scalar": (in_one_scalar, "examples"),
    "alone": (alone, "examples"),
    "sum and count": (sum_and_count, None),
    "terms": (terms, {"output": "examples", "balance": "examples"}),
}


def accumulator(model: nn.Module, loss: str, size: int) -> wb.GradientAccumulator:
    loss_fn, count = LOSSES[loss]
    return wb.GradientAccumulator(model, loss_fn, count=count, micro_batch_size=size)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_mo3_balance_of_micro_batches(loss: str, size: int) -> None:
    """The batch's balance is 1.0, the mean of its halves' 1.8: refused before anything is changed, in every form."""
    model = Experts()
    assert balance(model(BATCH["x"])[1]).item() == pytest.approx(1.0)
    assert balance(model(BATCH["x"][:2])[1]).item() == pytest.approx(1.8)
    with pytest.raises(LossNotAdditiveError):
        accumulator(model, loss, size).backward(BATCH)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


def test_mo3_the_term_is_pointed_out() -> None:
    """Where the loss's graph shows a second term, the message says so and names the router's as the likely one."""
    with pytest.raises(LossNotAdditiveError, match=r"2 terms.*router"):
        accumulator(Experts(), "one scalar", 2).backward(BATCH)


@pytest.mark.parametrize(
    ("loss", "right"), [("alone", 1.0), ("one scalar", 1.4), ("terms", 1.9), ("sum and count", 1.4)]
)
def test_mo3_exact_where_the_batch_is_not_cut(loss: str, right: float) -> None:
    """In one micro-batch the balance is the batch's own: 1.0, and the gradient is that of one pass."""
    model = Experts()
    report = accumulator(model, loss, 4).backward(BATCH)
    assert report.loss.item() == pytest.approx(right, rel=1e-12)
    output, chances = model(BATCH["x"])
    weights = {"alone": (0.0, 1.0), "terms": (1.0, 1.0)}.get(loss, (1.0, 0.5))
    whole = weights[0] * output.mean() + weights[1] * balance(chances)
    [gradient] = torch.autograd.grad(whole, [model.router.weight])
    torch.testing.assert_close(model.router.weight.grad, gradient, rtol=1e-12, atol=1e-14)
