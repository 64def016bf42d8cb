"""Hooks on parameters: kept out of the check of the loss, and watched for bending gradients.

A hook sees the gradient of a micro-batch, not of the batch. One that scales it, or masks it, does to the sum what it
does to each part; one that clamps it, or adds to it, does not.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from wholebatch.errors import UnsupportedModelError

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SMALL = 1e-3
"""Elements below this share of a gradient's largest are not looked at: their ratio is rounding."""


@contextmanager
def without_hooks(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, no hook on a parameter is called."""
    every = [hooks for p in parameters for kind in _KINDS if (hooks := getattr(p, kind, None))]
    kept = [dict(hooks) for hooks in every]
    try:
        for hooks in every:
            hooks.clear()
        yield
    finally:
        for hooks, before in zip(every, kept, strict=True):
            hooks.update(before)


def hooks_on(parameters: Iterable[torch.nn.Parameter]) -> frozenset[int]:
    """What tells the hooks on the gradients of parameters from others."""
    return frozenset(id(hook) for p in parameters for hook in (getattr(p, "_backward_hooks", None) or {}).values())


class BendingHooks:
    """Refuses hooks whose effect on a parameter's gradient differs from one micro-batch to the next.

    A context manager round the micro-batches of a batch. Costs two tensors the size of each parameter that has a
    hook, so it is for batches with hooks not seen before.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if getattr(p, "_backward_hooks", None)]
        self._handles: list[Any] = []
        self._came: dict[int, torch.Tensor] = {}
        self._ratios: dict[int, torch.Tensor] = {}
        self._bent = 0

    def __enter__(self) -> None:
        for place, parameter in enumerate(self._parameters):
            hooks: dict[int, Any] = parameter._backward_hooks  # type: ignore[assignment]
            others = dict(hooks)
            hooks.clear()  # autograd calls them in the order in which they were put in
            first = parameter.register_hook(partial(self._comes, place))  # type: ignore[no-untyped-call]
            hooks.update(others)
            last = parameter.register_hook(partial(self._goes, place))  # type: ignore[no-untyped-call]
            self._handles += [first, last]

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._came.clear()
        self._ratios.clear()
        if failed is None and self._bent:
            raise UnsupportedModelError(
                f"hooks on {self._bent} parameters change the gradient differently from one micro-batch to the next: "
                "they clamp it, or add to it. They see each micro-batch's gradient, not the batch's, so the result "
                "would not be the batch's. Remove them, and do it to .grad after backward has returned. .grad is as it "
                "was."
            )

    def _comes(self, place: int, gradient: torch.Tensor) -> None:
        if gradient.layout == torch.strided:
            self._came[place] = gradient.detach().clone()

    def _goes(self, place: int, gradient: torch.Tensor) -> None:
        came = self._came.pop(place, None)
        if came is None or came.shape != gradient.shape or torch.equal(came, gradient):
            return
        told = came.abs() > _SMALL * came.abs().max()
        ratio = torch.where(told, gradient.detach() / came, torch.nan)
        before = self._ratios.setdefault(place, ratio)
        both = told & before.isfinite()
        tolerance = 1e-2 if ratio.dtype in (torch.float16, torch.bfloat16) else 1e-4
        if not torch.allclose(ratio[both], before[both], rtol=tolerance, atol=tolerance):
            self._bent += 1
            self._ratios[place] = torch.full_like(ratio, torch.nan)  # counted once
