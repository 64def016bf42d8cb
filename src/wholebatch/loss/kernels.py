"""Fused kernels for linear and cross-entropy in one that other libraries bring, for a GPU.

Used where they are installed and support the very form that is asked for; never one that leaves out small gradients.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = list[Tensor | None]
"""In hidden, weight and bias."""


@dataclass(frozen=True, eq=False)
class Form:
    """What is asked of a linear layer with cross-entropy; see `chunked.linear_cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    class_weights: Tensor | None
    soft_cap: float | None
    chunk_rows: int
    dtype: torch.dtype
    """Of the products."""


Pass: TypeAlias = Callable[
    [Tensor, Tensor, Tensor | None, Tensor, Form, Sequence[bool], Tensor | None], tuple[Tensor, Gradients]
]
"""From hidden, weight, bias, labels, form, which gradients are wanted, and a seed: the loss's sum, and these."""

_HALF = (torch.bfloat16, torch.float16)


def fused_pass(kind: str, weight: Tensor, form: Form) -> Pass | None:
    """A fused kernel for this form on a device of this kind; None if there is none."""
    if kind != "cuda":
        return None
    if form.dtype in _HALF and not form.label_smoothing and form.class_weights is None and _cut() is not None:
        return _by_cut_cross_entropy
    if form.dtype not in (torch.float32, torch.bfloat16) or (liger := _liger()) is None:
        return None
    # Without this option it rounds the weight's gradient to the type of the products after each of its chunks.
    sums_in_full = weight.dtype == form.dtype or "accum_dtype" in inspect.signature(liger).parameters
    return _by_liger if sums_in_full else None


def _by_cut_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    form: Form,
    wanted: Sequence[bool],
    seed: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The default leaves out gradients below an epsilon; "cce_exact" does not."""
        kernel: Any = _cut()
        return kernel(  # type: ignore[no-any-return]
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=form.ignore_index,
            softcap=form.soft_cap,
            reduction="sum",
            impl="cce_exact",
        )

    return _differentiated(loss, (hidden, weight, bias), form, wanted, seed)


def _by_liger(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    form: Form,
    wanted: Sequence[bool],
    seed: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    kernel: Any = _liger()
    in_full = {} if weight.dtype == form.dtype else {"accum_dtype": weight.dtype}

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return kernel(  # type: ignore[no-any-return]
            hidden,
            weight,
            labels,
            bias=bias,
            ce_weight=form.class_weights,
            ignore_index=form.ignore_index,
            label_smoothing=form.label_smoothing,
            reduction="sum",
            softcap=form.soft_cap,
            **in_full,
        )

    return _differentiated(loss, (hidden, weight, bias), form, wanted, seed)


def _differentiated(
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor | None],
    form: Form,
    wanted: Sequence[bool],
    seed: Tensor | None,
) -> tuple[Tensor, Gradients]:
    """The loss and its gradients at once, each in the type of its input: some kernels change what they have saved."""
    leaves = [
        None if one is None else one.detach().to(form.dtype).requires_grad_(want)
        for one, want in zip(inputs, wanted, strict=True)
    ]
    with torch.set_grad_enabled(any(wanted)), torch.autocast(inputs[0].device.type, enabled=False):
        total = loss(*leaves)  # type: ignore[arg-type]
    found: Gradients = [None, None, None]
    if places := [place for place, want in enumerate(wanted) if want and leaves[place] is not None]:
        sources = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want and leaf is not None]
        start = None if seed is None else seed.to(total.dtype)
        for place, gradient in zip(places, torch.autograd.grad(total, sources, start), strict=True):
            found[place] = gradient.to(inputs[place].dtype)  # type: ignore[union-attr]
    return total.detach().to(torch.float32), found


@cache
def _cut() -> Callable[..., Any] | None:
    return getattr(_module("cut_cross_entropy"), "linear_cross_entropy", None)


@cache
def _liger() -> Callable[..., Any] | None:
    return getattr(_module("liger_kernel.transformers.functional"), "liger_fused_linear_cross_entropy", None)


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001  installed for another torch, or without a compiler: as if it were not
        return None
