"""Hooks on parameters: kept out of the check of the loss, and watched for bending gradients.

A hook sees the gradient of a micro-batch, not of the batch. One that scales it, or masks it, does to the sum what it
does to each part; one that clamps it, or adds to it, does not. A post-accumulate-grad hook sees `.grad`, the sum so
far: whatever it does to that, it does again with each micro-batch.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


def _round(
    hooks: dict[int, Any], register: Callable[..., Any], first: Callable[..., None], last: Callable[..., None]
) -> list[Any]:
    """Register one hook before and one after those that are there; autograd calls them in the order of the dict."""
    others = dict(hooks)
    hooks.clear()
    before = register(first)
    hooks.update(others)
    return [before, register(last)]


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
            self._handles += _round(
                hooks, parameter.register_hook, partial(self._comes, place), partial(self._goes, place)
            )

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


class ChangingHooks:
    """Refuses post-accumulate-grad hooks that change `.grad`, which holds the sum over the micro-batches so far.

    A context manager round the micro-batches of a batch, for hooks not seen before. Costs nothing to speak of.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if getattr(p, "_post_accumulate_grad_hooks", None)]
        self._handles: list[Any] = []
        self._came: dict[int, tuple[torch.Tensor | None, int]] = {}  # by parameter: devices have threads of their own
        self._calls: Counter[int] = Counter()
        self._changed: set[int] = set()

    def __enter__(self) -> None:
        for parameter in self._parameters:
            hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
            self._handles += _round(hooks, parameter.register_post_accumulate_grad_hook, self._comes, self._goes)

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        changed = [parameter for parameter in self._changed if self._calls[parameter] > 1]
        if failed is None and changed:
            raise UnsupportedModelError(
                f"post-accumulate-grad hooks on {len(changed)} parameters change .grad in place: it holds the sum over "
                "the micro-batches so far, so they change the first micro-batch's share once more with each of the "
                "others. Remove them, and do it to .grad after backward has returned. .grad is as it was."
            )

    def _comes(self, parameter: torch.Tensor) -> None:
        self._came[id(parameter)] = _gradient_and_version(parameter)

    def _goes(self, parameter: torch.Tensor) -> None:
        self._calls[id(parameter)] += 1
        (before, version), (now, version_now) = self._came.pop(id(parameter)), _gradient_and_version(parameter)
        if now is not before or version_now != version:
            self._changed.add(id(parameter))


def _gradient_and_version(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version
