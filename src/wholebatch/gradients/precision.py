"""Autocast round a batch, the scale of a GradScaler, and sums in fp32 for low-precision parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from wholebatch.errors import ConfigurationError
from wholebatch.facts import Number

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Scaler(Protocol):
    """What wholebatch needs of a `torch.amp.GradScaler`: to scale a tensor."""

    def scale(self, outputs: Any) -> Any:
        """Multiply by the current scale."""


@contextmanager
def one_autocast(device: torch.device) -> Iterator[None]:
    """The caller's autocast state, held open for a whole batch.

    Autocast keeps its low-precision copies of the weights until the outermost context is left, so with one context
    round the batch each weight is cast once instead of once per micro-batch, with bitwise the same result. The same
    holds for an autocast entered inside `loss_fn`. The copies are dropped before and after, since the optimizer changes
    the weights in between.
    """
    if not torch.amp.is_autocast_available(device.type):
        yield
        return
    torch.clear_autocast_cache()
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    try:
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            yield
    finally:
        torch.clear_autocast_cache()


class NoAutocast:
    """The context for the backward passes of a batch: torch's documentation has them run outside autocast.

    Made once for a batch, since whether autocast is on does not change within it, and entered for each micro-batch.
    """

    def __init__(self, device: torch.device) -> None:
        available = torch.amp.is_autocast_available(device.type)
        on = available and torch.is_autocast_enabled(device.type)
        self._off = torch.autocast(device.type, enabled=False) if on else None
        self._forget = _casts_lose_gradients()

    def __enter__(self) -> None:
        if self._forget:
            torch.clear_autocast_cache()
        if self._off is not None:
            self._off.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._off is not None:
            self._off.__exit__(*error)


@cache
def _casts_lose_gradients() -> bool:
    """Whether this torch keeps a copy that was cast under `no_grad` for code that needs its gradient, as 2.6 does.

    A reentrant checkpoint runs its forward under `no_grad` and recomputes it in backward, where such copies must not
    be found.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            weight @ weight
        return not (weight @ weight).requires_grad


def scale_of(grad_scaler: Scaler | None, device: torch.device) -> torch.Tensor | None:
    """The scale of this batch, read once so that all its micro-batches have the same; None without a scaler."""
    if grad_scaler is None:
        return None
    if not callable(getattr(grad_scaler, "scale", None)):
        raise ConfigurationError(f"grad_scaler={grad_scaler!r:.80}: it must be a torch.amp.GradScaler")
    scale: torch.Tensor = grad_scaler.scale(torch.ones((), device=device))
    return scale


def share(loss: torch.Tensor, weight: float, scale: torch.Tensor | None) -> torch.Tensor:
    """A micro-batch's share of the batch's loss: what is differentiated, times the scale of this batch.

    A product, because `backward(gradient=...)` loads torch's symbolic shapes, which takes a second, to check it.
    """
    share = loss if weight == 1.0 else loss * weight
    return share if scale is None else share * scale.to(share.device, share.dtype)


class Fp32Sums:
    """Sums the gradients of low-precision parameters in fp32, micro-batch by micro-batch.

    In bf16, 256 + 1 is 256: over many micro-batches small addends are lost. Costs 4 bytes for each element of such a
    parameter during the batch. `finish` leaves gradients of the parameter's own dtype, as torch's optimizers expect.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.dtype in _LOW_PRECISION]
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def add(self) -> None:
        """Move the gradients that a micro-batch has left in `.grad` into the sums."""
        if self._parameters:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        for parameter in self._parameters:
            if (gradient := parameter.grad) is None:
                continue
            if (total := self._sums.get(parameter)) is None:
                self._sums[parameter] = gradient.float()
            else:
                total.add_(gradient)
            parameter.grad = None

    def multiply(self, factor: Number) -> None:
        """Multiply all sums by `factor`."""
        for total in self._sums.values():
            total.mul_(factor)

    def finish(self) -> None:
        """Put the sums into `.grad`, rounded once."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()
