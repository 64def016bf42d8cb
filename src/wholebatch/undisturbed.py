"""Run a model and leave no trace: random state, buffers, attributes and train/eval flags end as they were."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from wholebatch.gradients.set_aside import interrupt_held
from wholebatch.loss.measured import FRACTION_BITS

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def undisturbed(model: nn.Module, device: torch.device, evaluation: bool = True) -> Iterator[None]:
    """Afterwards the model's state and the random state of Python, NumPy and torch are what they were.

    Code compiled by torch.compile runs uncompiled inside, so that nothing is compiled for these few calls.

    Args:
        model: Its buffers, attributes and train/eval flags are kept; its parameters are expected not to change.
        device: Whose random state is kept, beside the CPU's.
        evaluation: Whether the model is in evaluation mode inside.
    """
    mode = evaluation_mode(model) if evaluation else nullcontext()
    with modules_kept(model), mode, same_random_state(device), _uncompiled():
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own flag afterwards.

    Flags only: `eval()` may be overridden, and then does more than can be taken back (adapters merged into weights).
    """
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        with interrupt_held():
            for module in modules:
                module.training = True


@contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards each module has the attributes and buffers that it had, and these the values that they had.

    Attributes too, because models keep figures that belong to a buffer (the longest sequence that its table covers)
    beside it. What an attribute holds is not looked into: a list that grew stays longer.
    """
    before = [
        (module, dict(vars(module)), dict(module._buffers), _copies(module._buffers.values()))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        with interrupt_held():
            for module, attributes, buffers, copies in before:
                _replace(vars(module), attributes)
                _replace(module._buffers, buffers)
                _put_back(buffers.values(), copies)


def _copies(buffers: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if buffer is None else buffer.detach().clone() for buffer in buffers]


def _replace(there: dict[str, Any], before: dict[str, Any]) -> None:
    there.clear()
    there.update(before)


@torch.no_grad()
def _put_back(buffers: Iterable[torch.Tensor | None], copies: Iterable[torch.Tensor | None]) -> None:
    for buffer, values in zip(buffers, copies, strict=True):
        if buffer is not None and values is not None and not torch.equal(buffer, values):
            buffer.copy_(values)


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Afterwards the random state of Python, NumPy (where it is loaded) and torch, on `device` too, is what it was."""
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


def drawn_so_far() -> tuple[object, ...]:
    """The random state of Python, NumPy (where it is loaded) and torch on the CPU: code that draws moves it."""
    states: list[object] = [random.getstate(), torch.get_rng_state().tolist()]
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states.append((name, keys.tobytes(), *rest))
    return tuple(states)


def draw_once(device: torch.device) -> None:
    """Move the random state of Python, NumPy and torch on, so that other numbers follow."""
    random.random()
    torch.rand(())
    torch.rand((), device=device)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.random()


@contextmanager
def last_bits_flipped(parameters: Iterable[nn.Parameter], bits: int) -> Iterator[None]:
    """Change each parameter by one unit in the last of `bits` fraction bits, and back: this is what rounding does.

    A bit flipped twice is what it was, so that nothing has to be copied.
    """
    words = list(_words(parameters, bits))
    with interrupt_held():
        _flip(words)
    try:
        yield
    finally:
        with interrupt_held():
            _flip(words)


def _words(parameters: Iterable[nn.Parameter], bits: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Each parameter as whole numbers, with the bit to flip."""
    for parameter in parameters:
        data = parameter.data  # not detach(), which would count as a change for autograd
        if data.dtype in FRACTION_BITS and data.layout == torch.strided and type(data) is torch.Tensor:
            yield data.view(_INTEGERS[data.element_size()]), 1 << max(0, FRACTION_BITS[data.dtype] - bits)


def _flip(words: Iterable[tuple[torch.Tensor, int]]) -> None:
    for word, mask in words:
        word.bitwise_xor_(mask)


def _uncompiled() -> AbstractContextManager[Any]:
    # torch._dynamo is loaded if and only if something may have been compiled; loading it takes seconds.
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
