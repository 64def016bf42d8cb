"""Run a model and leave no trace: random state, buffers and train/eval flags end as they were."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from wholebatch.gradients.set_aside import interrupt_held


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode inside; afterwards buffers, flags and the random state of Python, NumPy and torch are restored.

    Code compiled by torch.compile runs uncompiled inside, so that nothing is compiled for these few calls.
    """
    with _same_buffers(model), evaluation_mode(model), same_random_state(device), _uncompiled():
        yield


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Put buffers back afterwards, whether they were changed in place, replaced, or made in the first place."""
    owned = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    copies = [(buffer, buffer.detach().clone()) for *_, buffer in owned if buffer is not None]
    try:
        yield
    finally:
        with interrupt_held(), torch.no_grad():
            for module, name, buffer in owned:
                if module._buffers.get(name) is not buffer:
                    setattr(module, name, buffer)
            for buffer, before in copies:
                if buffer.shape == before.shape and not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside, each module's own flag afterwards."""
    modules = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        with interrupt_held():
            for module in modules:
                module.training = True


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """The random state of Python, NumPy (where loaded) and torch, on the CPU and on `device`, is put back afterwards."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    accelerated = device.type not in ("cpu", "meta")
    devices = [device.index if device.index is not None else 0] if accelerated else []
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type if accelerated else "cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def random_states(device: torch.device) -> tuple[object, ...]:
    """The present random state, comparable with `==`: whether code drew random numbers shows in a change."""
    states: list[object] = [random.getstate(), torch.get_rng_state().tolist()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states.append((name, keys.tobytes(), *rest))
    return tuple(states)


def _uncompiled():  # type: ignore[no-untyped-def]
    # torch._dynamo is loaded if and only if something may have been compiled; loading it takes seconds.
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
