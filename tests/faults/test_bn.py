"""Known faults of batch statistics: those of a micro-batch are not those of the batch."""

import pytest
import torch
from torch import nn

import wholebatch as wb
from wholebatch.errors import BatchStatisticsWarning, LossNotAdditiveError

pytestmark = pytest.mark.smoke

BATCH = {"x": torch.tensor([8.0, 12.0, 18.0, 22.0], dtype=torch.float64).reshape(4, 1)}
"""Rows 8, 12 | 18, 22."""

SEQUENCES = {"x": torch.arange(24.0, dtype=torch.float64).reshape(4, 1, 6)}


class Net(nn.Module):
    """A normalising module in a place of its own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"norm": norm})
        self.out = nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body["norm"](x) * self.out


def squares(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).sub(1.0).square().mean()


def accumulator(model: nn.Module, size: int) -> wb.GradientAccumulator:
    return wb.GradientAccumulator(model, squares, count="examples", micro_batch_size=size)


TRACKING = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(1), BATCH),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(1), {"x": SEQUENCES["x"].unsqueeze(-1)}),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(1), BATCH),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(1, track_running_stats=True), SEQUENCES),
}


@pytest.mark.parametrize("kind", TRACKING)
def test_bn2_statistics_of_micro_batches(kind: str) -> None:
    """Found by type, named once in a warning that says what is not exact and what to do, on the first batch cut."""
    norm, batch = TRACKING[kind]
    whole = accumulator(Net(norm()), 2)
    with pytest.warns(BatchStatisticsWarning, match=rf"body\.norm \({kind}\).*Not exact.*Way out") as caught:
        whole.backward(batch)
    assert len(caught) == 1
    whole.backward(batch)  # a second warning would be an error


@pytest.mark.parametrize("size", [4, 5])
def test_bn2_exact_where_the_batch_is_not_cut(size: int) -> None:
    """In one micro-batch nothing is wrong and nothing is said: mean 1.5 and variance 4.767, updated once."""
    norm = nn.BatchNorm1d(1, momentum=0.1)
    accumulator(Net(norm), size).backward(BATCH)
    assert norm.running_mean.item() == pytest.approx(1.5, rel=1e-12)
    assert norm.running_var.item() == pytest.approx(0.9 + 0.1 * 116 / 3, rel=1e-12)
    assert norm.num_batches_tracked.item() == 1


def test_bn2_the_check_leaves_no_trace_in_the_statistics() -> None:
    """Two micro-batches are two updates of the running statistics, and looking at the loss beforehand is none."""
    norm = nn.BatchNorm1d(1, momentum=0.1)
    with pytest.warns(BatchStatisticsWarning):
        accumulator(Net(norm), 2).backward(BATCH)
    assert norm.running_mean.item() == pytest.approx(0.9 * 1.0 + 0.1 * 20, rel=1e-12)
    assert norm.num_batches_tracked.item() == 2


SILENT = {
    "frozen": (lambda: nn.BatchNorm1d(1).eval(), BATCH),
    "of an instance": (lambda: nn.InstanceNorm1d(1, affine=True), SEQUENCES),
    "of a layer": (lambda: nn.LayerNorm(6), SEQUENCES),
    "of groups": (lambda: nn.GroupNorm(1, 1), SEQUENCES),
}


@pytest.mark.parametrize("kind", SILENT)
def test_bn2_no_warning_where_all_is_exact(kind: str) -> None:
    """Modules that look at one example at a time, and frozen ones, give the gradient of one pass without a word."""
    norm, batch = SILENT[kind]
    model = Net(norm())
    right = torch.autograd.grad(squares(model, batch), list(model.parameters()))
    accumulator(model, 2).backward(batch)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::wholebatch.errors.BatchStatisticsWarning")
def test_bn2_without_running_statistics_it_is_refused() -> None:
    """A BatchNorm that keeps none normalises with the batch even in evaluation: the loss does not add up."""
    model = Net(nn.BatchNorm1d(1, track_running_stats=False))
    with pytest.raises(LossNotAdditiveError):
        accumulator(model, 2).backward({"x": SEQUENCES["x"].square()})
    assert model.out.grad is None
