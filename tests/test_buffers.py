"""Buffers that forward passes move are put back if the batch comes to nothing."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from wholebatch.errors import BatchStatisticsWarning

Batch = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings(
    f"ignore::{BatchStatisticsWarning.__module__}.{BatchStatisticsWarning.__name__}"
)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mean over examples; fails where it is told to."""
    if batch["fail"].any():
        raise ValueError("as told")
    return F.mse_loss(model(batch["x"]), batch["y"])


def made(value: float = 1.0, fail: int | None = None) -> Batch:
    """Eight rows; the last one holds `value`."""
    x = torch.arange(24.0).reshape(8, 3)
    x[-1] = value
    told = torch.zeros(8, dtype=torch.bool)
    if fail is not None:
        told[fail] = True
    return {"x": x, "y": torch.zeros(8, 2), "fail": told}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


def state(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the buffers."""
    return [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later batch"])
def test_a_skipped_batch_does_not_move_running_statistics(model: nn.Module, first: bool) -> None:
    """A batch with nan in its inputs would make them nan for good."""
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    if not first:
        accumulator.backward(made())
        assert not torch.equal(model[0].running_mean, torch.zeros(3))
    before = state(model)
    assert not accumulator.backward(made(float("nan"))).should_step
    assert all(map(torch.equal, before, state(model)))
    assert accumulator.backward(made()).should_step


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later batch"])
def test_nor_does_a_batch_that_failed(model: nn.Module, first: bool) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    if not first:
        accumulator.backward(made())
    before = state(model)
    with pytest.raises(ValueError, match="as told"):
        accumulator.backward(made(fail=7))
    assert all(map(torch.equal, before, state(model)))


def test_a_good_batch_moves_them_once_per_micro_batch(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    accumulator.backward(made())
    accumulator.backward(made())
    assert model[0].num_batches_tracked.item() == 8


def test_buffers_that_stay_are_not_copied_again() -> None:
    """After the first batch only those are copied that moved in it."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("table", torch.zeros(1000))
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    accumulator.backward(made())
    moving = accumulator._buffers._moving
    assert moving is not None
    assert {id(slot.buffer) for slot in moving} == {id(buffer) for buffer in model[0].buffers()}


class Averaging(nn.Module):
    """Keeps a moving average of its inputs, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(x.mean(dim=0), 0.1)
            self.calls += 1
        return self.linear(x)


def test_other_buffers_that_move_are_named_once() -> None:
    """A moving average moves once per micro-batch; a counter adds up, and is not named."""
    accumulator = wb.GradientAccumulator(Averaging(), loss_fn, count="examples", micro_batch_size=2)
    with pytest.warns(BatchStatisticsWarning, match=r"the forward moves the buffers average, and"):
        accumulator.backward(made())
    accumulator.backward(made())


def test_where_warnings_are_errors_that_one_leaves_all_as_it_was() -> None:
    """Gradients, which were complete by then, and buffers."""
    model = Averaging()
    before = state(model)
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    with warnings.catch_warnings(action="error"), pytest.raises(BatchStatisticsWarning):
        accumulator.backward(made())
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    assert all(map(torch.equal, before, state(model)))


def test_in_a_single_micro_batch_they_move_as_in_one_pass() -> None:
    accumulator = wb.GradientAccumulator(Averaging(), loss_fn, count="examples", micro_batch_size=8)
    accumulator.backward(made())


class Rebinding(nn.Module):
    """Puts a new tensor in place of its buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(dim=0).detach()
        return self.linear(x)


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later batch"])
def test_a_buffer_that_was_replaced_is_put_back(first: bool) -> None:
    model = Rebinding()
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    if not first:
        with pytest.warns(BatchStatisticsWarning, match=r"the forward moves the buffers average, and"):
            accumulator.backward(made())
    before, values = model.average, model.average.clone()
    assert not accumulator.backward(made(float("nan"))).should_step
    assert model.average is before
    assert torch.equal(model.average, values)
    with warnings.catch_warnings(action="ignore"):
        accumulator.backward(made())
    assert model.average is not before
