"""Keeps the gradients that were there before a batch, so that a batch is either added whole or not at all."""

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from wholebatch.facts import Number
from wholebatch.gradients.hooks import without_hooks

_MOMENT_SECONDS = 0.05


class SetAside:
    """Takes `.grad` off the parameters (`discard`); gives it back untouched, or with the new gradient added (`keep`).

    As a context manager it gives back whatever was there unless `keep` was called. Where every `.grad` was None
    (what `zero_grad()` leaves) all of this is free. The tensors that were there stay the same objects.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._previous: list[torch.Tensor | None] = []
        self.is_open = False
        """Whether a batch is under way, neither kept nor given up."""

    def __enter__(self) -> "SetAside":
        self._previous = [parameter.grad for parameter in self._parameters]
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.is_open:
                with interrupt_held():
                    self.restore()
        finally:
            if self.is_open:  # Ctrl-C came just before it was held back
                self.restore()

    def discard(self) -> None:
        """Take every gradient off; what was there before the context stays aside."""
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        """`.grad` as it was before the batch."""
        for parameter, previous in zip(self._parameters, self._previous, strict=True):
            parameter.grad = previous
        self.is_open = False

    def multiply(self, factor: Number) -> None:
        """Multiply the gradients of this batch, in place."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def keep(self) -> None:
        """Add the new gradients to what was there before. Not interrupted half-way by Ctrl-C."""
        if any(previous is not None for previous in self._previous):
            with interrupt_held():
                self._add()
                self.is_open = False
        self.is_open = False

    def _add(self) -> None:
        for parameter, previous in zip(self._parameters, self._previous, strict=True):
            if previous is None:
                continue
            if (new := parameter.grad) is not None:
                previous = _sum(previous, new)
            parameter.grad = previous


@torch.no_grad()
def _sum(previous: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """As autograd accumulates: in place, except where a sparse gradient meets a dense one."""
    if previous.is_sparse and not new.is_sparse:
        return new.add_(previous)
    return previous.add_(new)


def gradients_aside(
    total: torch.Tensor, wanted: Sequence[torch.nn.Parameter], parameters: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    """The gradient of `total` in `wanted`, with every `.grad` as it was and no hook of an optimizer called.

    For graphs that `torch.autograd.grad` refuses: a reentrant checkpoint recomputes in a backward of its own, which
    reaches all parameters.
    """
    with SetAside(parameters) as aside, without_hooks(parameters):
        aside.discard()
        torch.autograd.backward(total)
        return [parameter.grad for parameter in wanted]


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Hold Ctrl-C back for a few lines that must not be left half-way; it is delivered a moment after.

    Signals reach Python code in the main thread only, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, the default action, or set outside Python
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            # From a timer, so that it arrives after backward has returned its report, not in the middle of it.
            threading.Timer(_MOMENT_SECONDS, _interrupt, (threading.get_ident(),)).start()


def _interrupt(thread: int) -> None:
    if hasattr(signal, "pthread_kill"):  # also ends a call that the thread is blocked in
        signal.pthread_kill(thread, signal.SIGINT)
    else:  # Windows
        signal.raise_signal(signal.SIGINT)
