"""Ctrl-C at any line of the library: `.grad` is as before or complete, never part of a batch, and training can go on.

A real SIGINT is raised at one line after another, each with its own run of a batch.
"""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb

SOURCE = str(Path(wb.__file__).parent)
LONG_ENOUGH_SECONDS = 5.0
LAST_LINES = 10
"""Between the moment when the gradient is complete and the return of `backward`."""

Place = tuple[str, int]
Batch = dict[str, torch.Tensor]


class Lines:
    """Traces the lines of the library that a call runs, and interrupts the call at one of them.

    Args:
        at: The line to interrupt at, counted from 1; None to run through.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.places = at, list[Place]()

    def __call__(self, call: Callable[[], Any]) -> None:
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            self.places.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.places) == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


class Training:
    """A model with a batch, in the middle of training or at its start."""

    def __init__(self, first: bool, gradients_before: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.batch: Batch = {"x": torch.randn(5, 3).double(), "labels": torch.randint(4, (5,))}
        self.accumulator = wb.GradientAccumulator(
            self.model, loss_fn, count="examples", optimizer=self.optimizer, micro_batch_size=2
        )
        if not first:
            self.backward()
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter) if gradients_before else None
        self.before = self.gradients
        self.values_before = [None if g is None else g.clone() for g in self.before]

    def backward(self) -> None:
        self.accumulator.backward(self.batch)

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    @property
    def grad_is_as_before(self) -> bool:
        found = zip(self.gradients, self.before, self.values_before, strict=True)
        return all(now is old and (old is None or torch.equal(old, value)) for now, old, value in found)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["labels"])


def complete(first: bool, gradients_before: bool) -> tuple[list[torch.Tensor], list[Place]]:
    """The gradients that the uninterrupted call leaves, and the lines that it runs."""
    training, lines = Training(first, gradients_before), Lines()
    lines(training.backward)
    return [gradient for gradient in training.gradients if gradient is not None], lines.places


def to_interrupt_at(places: list[Place], every: int) -> list[int]:
    """The first and the last time that each line is run, or every so many of them; counted from 1."""
    first = {place: number for number, place in reversed(list(enumerate(places, start=1)))}
    last = {place: number for number, place in enumerate(places, start=1)}
    return sorted({*first.values(), *last.values()})[::every]


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)
@pytest.mark.parametrize(
    ("first", "gradients_before", "every"),
    [(False, False, 4), (False, True, 3), (True, False, 31), (True, True, 31)],
    ids=["later batch", "later batch, with gradients from before", "first batch", "first batch, with gradients"],
)
def test_ctrl_c_at_any_line_never_leaves_part_of_a_batch(first: bool, gradients_before: bool, every: int) -> None:
    """Wherever it comes: `.grad` is as before, or complete if all was done; and optimizers can step again."""
    right, places = complete(first, gradients_before)
    complete_at = []
    for at in to_interrupt_at(places, every):
        training = Training(first, gradients_before)
        returned = False
        with contextlib.suppress(KeyboardInterrupt):
            Lines(at)(training.backward)
            returned = True
            time.sleep(LONG_ENOUGH_SECONDS)  # ended by an interrupt that was held back
            pytest.fail(f"the interrupt at {places[at - 1]} was lost")
        if returned or not training.grad_is_as_before:
            assert all(map(torch.equal, training.gradients, right)), f"part of a batch, at {places[at - 1]}"
        if not returned and not training.grad_is_as_before:
            complete_at.append(at)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        training.optimizer.step()
    assert all(at > len(places) - LAST_LINES for at in complete_at), [places[at - 1] for at in complete_at]
