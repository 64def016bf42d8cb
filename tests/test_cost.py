"""What the library adds to a hand-written loop, in figures that do not depend on the machine.

Timings are shown in `benchmarks/overhead.py`; here are the proxies that a timing must follow: operators, reads of
tensors by the host, and allocations as large as a parameter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb

WIDTH = 96
EXTRA_OPERATORS_PER_MICRO_BATCH = 4
"""A view of each of the two fields to count in, a cast of the count, and the look at the loss's denominator."""

EXTRA_OPERATORS_PER_BATCH = 30
"""Sums of the losses and counts on the device, for the report."""

READS_PER_BATCH = 2
"""One of the counts, which are on the host, before the first micro-batch; one of the losses after the last."""

Batch = dict[str, torch.Tensor]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))


def made(examples: int) -> Batch:
    """Rows with a class each; every third has none."""
    labels = torch.arange(examples) % 5
    labels[::3] = -100
    return {"x": torch.randn(examples, 8), "labels": labels}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mean over labelled examples."""
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def by_hand(model: nn.Module, batch: Batch, size: int) -> None:
    """The best hand-written loop: counts known beforehand, each share differentiated, one sum for the log."""
    parts = [
        {name: field[start : start + size] for name, field in batch.items()}
        for start in range(0, len(batch["x"]), size)
    ]
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    logged = []
    for part, count in zip(parts, counts, strict=True):
        share = loss_fn(model, part) * (count / sum(counts))
        share.backward()
        logged.append(share.detach())
    torch.stack(logged).sum()


class Operators(TorchDispatchMode):
    """Counts operators, and new storages as large as the largest parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.large = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += 1
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        for one in result if isinstance(result, (tuple, list)) else (result,):
            new = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known
            self.large += new and one.numel() >= WIDTH * WIDTH
        return result


def spent(model: nn.Module, call: Callable[[], Any]) -> Operators:
    """What `call` spends, with `.grad` empty before it."""
    model.zero_grad()
    with Operators() as operators:
        call()
    return operators


@pytest.mark.parametrize("options", [{}, {"on_bad_batch": "ignore"}], ids=["skip", "ignore"])
def test_few_operators_are_added(model: nn.Module, options: dict[str, Any]) -> None:
    """So many per batch, and so many per micro-batch: 8 against 24 micro-batches of 3."""
    accumulator = wb.GradientAccumulator(model, loss_fn, count="tokens", micro_batch_size=3, **options)
    accumulator.backward(made(12))  # checks the first batch
    extra = {}
    for steps in (8, 24):
        batch = made(3 * steps)
        library = spent(model, lambda batch=batch: accumulator.backward(batch))
        extra[steps] = library.count - spent(model, lambda batch=batch: by_hand(model, batch, 3)).count
    assert (extra[24] - extra[8]) / 16 <= EXTRA_OPERATORS_PER_MICRO_BATCH
    assert extra[8] <= EXTRA_OPERATORS_PER_BATCH + 8 * EXTRA_OPERATORS_PER_MICRO_BATCH


def test_nothing_as_large_as_a_parameter_is_allocated_beyond_the_gradients(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="tokens", micro_batch_size=3)
    accumulator.backward(made(12))
    batch = made(24)
    library = spent(model, lambda: accumulator.backward(batch))
    assert library.large == spent(model, lambda: by_hand(model, batch, 3)).large > 0


class Reads(TorchFunctionMode):
    """Notes when the host reads a tensor, and when a forward runs."""

    READING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "equal", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self.READING:
            self.events.append("read")
        if name == "cross_entropy":
            self.events.append("forward")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [2, 8, 32])
@pytest.mark.parametrize(("on_bad_batch", "after"), [("skip", 1), ("raise", 1), ("ignore", 0)])
def test_the_host_reads_once_after_the_last_micro_batch(
    model: nn.Module, steps: int, on_bad_batch: Any, after: int
) -> None:
    """However many micro-batches there are. The counts are read before the first; they are on the host."""
    accumulator = wb.GradientAccumulator(model, loss_fn, count="tokens", micro_batch_size=3, on_bad_batch=on_bad_batch)
    accumulator.backward(made(12))
    accumulator.backward(made(12))  # reads the flags of the one before
    if on_bad_batch == "ignore":
        accumulator._judge.read_now()
    with Reads() as reads:
        accumulator.backward(made(3 * steps))
    first = reads.events.index("forward")
    last = len(reads.events) - 1 - reads.events[::-1].index("forward")
    assert reads.events[first:last].count("read") == 0
    assert reads.events[last:].count("read") == after
    assert reads.events[:first].count("read") + after <= READS_PER_BATCH
