"""Says of a loss which counts are right, and what an accumulator must do with each: accept, refuse, or suggest it."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import wholebatch as wb
from wholebatch.errors import CountError, CountRequiredError, LossNotAdditiveError

Loss = Callable[[Any, Any], Any]

PRECISIONS = ("float64", "float32", "bf16 autocast", "bf16 autocast in loss_fn", "bf16")
TOLERANCES = {"float64": 1e-9, "float32": 2e-5, "bf16": 0.1}


def accumulator(model: nn.Module, loss_fn: Loss | None, count: Any, **options: Any) -> wb.GradientAccumulator:
    return wb.GradientAccumulator(model, loss_fn, count=count, **({"micro_batch_size": 2} | options))


def in_precision(precision: str, model: nn.Module, loss_fn: Loss, batch: Any) -> tuple[nn.Module, Loss, Any]:
    """The same in another precision; autocast round the call is `around`."""
    kinds = {"float64": torch.float64, "bf16": torch.bfloat16}
    kind = kinds.get(precision, torch.float32)
    model = model.to(kind)
    batch = {name: value.to(kind) if value.is_floating_point() else value for name, value in batch.items()}
    if precision != "bf16 autocast in loss_fn":
        return model, loss_fn, batch

    def loss_in_autocast(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_fn(model, batch)

    return model, loss_in_autocast, batch


def around(precision: str) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16 autocast" else nullcontext()


# ---- Nothing is changed ----


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a refused call must leave as it is, copied."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "objects": {name: (id(p), id(p.grad)) for name, p in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tobytes(),
    }


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_state(one[key], other[key]) for key in one)
    return bool(one == other)


@contextmanager
def nothing_changed(model: nn.Module, *, collated: bool = False) -> Iterator[None]:
    """Assert it; a batch that is collated, which may draw random numbers, is so before anything else."""
    before = state_of(model)
    yield
    after = state_of(model)
    if collated:
        after |= {name: before[name] for name in ("torch", "python", "numpy")}
    assert same_state(before, after)


# ---- Verdicts ----


def refusal(
    model: nn.Module, loss_fn: Loss | None, batch: Any, count: Any, *, precision: str = "", **options: Any
) -> str:
    """Assert that a count is refused and that nothing was changed; the message."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    engine = accumulator(model, loss_fn, count, **options)
    quiet = nothing_changed(model, collated="collate_fn" in options)
    with quiet, around(precision), pytest.raises((LossNotAdditiveError, CountError)) as caught:
        engine.backward(batch)
    for parameter in model.parameters():
        parameter.grad = None
    return str(caught.value)


def suggestion(model: nn.Module, loss_fn: Loss | None, batch: Any, *, precision: str = "", **options: Any) -> str:
    """Assert that a scalar without a count is refused and that nothing was changed; the message."""
    engine = accumulator(model, loss_fn, None, **options)
    quiet = nothing_changed(model, collated="collate_fn" in options)
    with quiet, around(precision), pytest.raises(CountRequiredError) as caught:
        engine.backward(batch)
    return str(caught.value)


def gradient(model: nn.Module) -> torch.Tensor:
    """Every trainable parameter's gradient in one vector; taken off the model."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    for parameter in trainable:
        parameter.grad = None
    return torch.cat([part.detach().to_dense().flatten().double() for part in parts])


def accepted(
    model: nn.Module,
    loss_fn: Loss | None,
    batch: Any,
    count: Any,
    *,
    precision: str = "",
    one_pass: bool = True,
    **options: Any,
) -> wb.StepReport:
    """Assert that a count is accepted without a warning, and the gradient that of one pass where that is wanted."""
    engine = accumulator(model, loss_fn, count, **options)
    with around(precision):
        report = engine.backward(batch)  # warnings are errors
    assert report.should_step
    found = gradient(model)
    if one_pass and precision in TOLERANCES:
        loss_fn(model, batch).backward()
        right = gradient(model)
        assert (found - right).norm() <= TOLERANCES[precision] * right.norm()
    return report


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
