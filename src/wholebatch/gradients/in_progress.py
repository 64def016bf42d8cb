"""Sees to it that what the micro-batches of a batch add to `.grad` stays there until the batch is complete."""

from collections.abc import Iterable, Sequence
from operator import is_not

import torch

from wholebatch.errors import UnsupportedModelError


class InProgress:
    """The gradients of a batch while it is being accumulated.

    Each backward pass runs inside it, as a context manager. `zero_grad()` in `loss_fn` or in a hook, or a backward
    pass of their own, would silently lose or add a part of the batch; it is refused.

    Between two passes any change is seen. Within one, by a hook, what is seen is a gradient that was taken off; its
    values may well change there, since that is what a backward pass does.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._gradients = self._now()
        self._versions = _versions(self._gradients)

    def _now(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def __enter__(self) -> None:
        if any(map(is_not, self._now(), self._gradients)) or _versions(self._gradients) != self._versions:
            raise UnsupportedModelError(_lost("between two backward passes", "loss_fn, or a hook of the forward"))

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            return
        now = self._now()
        if any(map(is_not, now, self._gradients)) and any(map(_taken_off, self._gradients, now)):
            raise UnsupportedModelError(_lost("during a backward pass", "a hook"))
        self._gradients, self._versions = now, _versions(now)


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int | None]:
    """How often each has been changed in place; by `zero_grad(set_to_none=False)`, for one."""
    return [None if gradient is None else gradient._version for gradient in gradients]


def _taken_off(before: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    if before is None or now is before:
        return False
    # Where a dense gradient is added to a sparse one, autograd itself makes a new tensor.
    return now is None or not before.is_sparse


def _lost(when: str, who: str) -> str:
    return (
        f".grad was cleared or changed in the middle of the batch, {when}: {who} calls zero_grad() or backward(). What "
        "the micro-batches before had added would be lost, or something be added that is not theirs. Call zero_grad() "
        "in the training loop, after optimizer.step(). .grad is as it was before the call."
    )
