"""A loss and its gradient in a few parameters, measured on a few examples without touching any `.grad`."""

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wholebatch.errors import UnsupportedModelError
from wholebatch.loss.counting import as_numbers
from wholebatch.loss.stated import MicroBatchLoss
from wholebatch.loss.suggested import LossHead, read_head

FRACTION_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Bits that a floating-point type keeps after the leading one."""

_TF32_BITS = 10
_TOLERANCES = ((52, 1e-11), (23, 6e-5), (10, 4e-3), (7, 3e-2))
"""The relative difference that other shapes make in a deep model, by the bits of the least precise type involved."""

_SMALL_ELEMENTS, _LARGE_PARAMETERS, _ALL_UP_TO_ELEMENTS = 2**16, 16, 2**22


@dataclass(frozen=True)
class Measured:
    """A loss and its gradient in a few parameters, for one set of examples."""

    form: str
    losses: Mapping[str, float]
    """By term: `value * weight / divisor`."""

    factors: Mapping[str, float]
    """By term: `weight / divisor`."""

    counts: Mapping[str, float]
    gradient: torch.Tensor
    """Linear sketches of the gradient of the sum of `losses` in a few parameters, one after another; on the host, in
    double precision. Zero where the loss does not reach a parameter."""

    places: torch.Tensor
    """For each element of `gradient`, which parameter it belongs to."""

    seed: float
    """What the backward started from, and `gradient` was divided by again."""

    head: LossHead
    bits: int
    """Fraction bits of the least precise floating-point type involved."""

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding explains at first sight."""
        return next((tolerance for bits, tolerance in _TOLERANCES if self.bits >= bits), _TOLERANCES[-1][1])

    @property
    def finite(self) -> bool:
        """Whether the losses are finite."""
        return all(map(math.isfinite, self.losses.values()))


class Measurer:
    """Evaluates a loss on a few examples and differentiates it.

    Every `.grad` of `parameters` must be None.

    Args:
        evaluate: The loss of `(micro_batch, counts, num_examples)`, forward only.
        differentiate: The gradient of a 0-d tensor in some of the parameters; None for those without one.
        parameters: The trainable parameters; a few of them are looked at.
    """

    def __init__(
        self,
        evaluate: Callable[[Any, Mapping[str, float], int], MicroBatchLoss],
        differentiate: Callable[[torch.Tensor, Sequence[nn.Parameter]], Sequence[torch.Tensor | None]],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._evaluate, self._differentiate = evaluate, differentiate
        self._all, self._few = parameters, looked_at(parameters)
        sizes = torch.tensor([sketch_size(parameter) for parameter in self._few], dtype=torch.long)
        self._places = torch.arange(len(sizes)).repeat_interleave(sizes)

    def __call__(
        self, data: Any, counts: Mapping[str, float], size: int, divisors: Mapping[str, float] | None, seed: float
    ) -> Measured:
        """Measure `data`, of `size` examples; each term is divided by its `divisors`, or by its own count.

        Raises:
            UnsupportedModelError: `loss_fn` runs a backward of its own.
        """
        with _TypesWatched() as watched:
            loss = self._evaluate(data, counts, size)
        self._refuse_own_backward()
        terms = loss.terms
        own = as_numbers([{name: term.count for name, term in terms.items()}])[0]
        over = own if divisors is None else divisors
        factors = {name: float(term.weight) / (over[name] or 1.0) for name, term in terms.items()}
        total = torch.stack([term.value * (factors[name] * seed) for name, term in terms.items()]).sum()
        head = read_head(next(iter(terms.values())).value)  # before the backward, which frees what it reads
        bits = _bits({total.dtype, *watched.seen}, total)
        return Measured(
            form=loss.form,
            losses={name: term.value.item() * factors[name] for name, term in terms.items()},
            factors=factors,
            counts=own,
            gradient=self._sketches(total) / seed,
            places=self._places,
            seed=seed,
            head=head,
            bits=bits,
        )

    def _sketches(self, total: torch.Tensor) -> torch.Tensor:
        if not total.requires_grad:
            return torch.zeros(len(self._places), dtype=torch.float64)
        pairs = zip(self._differentiate(total, self._few), self._few, strict=True)
        return torch.cat([sketch(parameter if g is None else g, zero=g is None) for g, parameter in pairs])

    def _refuse_own_backward(self) -> None:
        if any(parameter.grad is not None for parameter in self._all):
            raise UnsupportedModelError(
                "loss_fn calls backward() itself: gradients were there before it had returned, and would count twice. "
                "Return the micro-batch's loss with its graph; backward is run here."
            )


def graph_nodes(loss: torch.Tensor) -> Iterator[str]:
    """The name of every node in the graph of a loss."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node.name()
        pending += [function for function, _ in node.next_functions]


def looked_at(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """All parameters of a small model; a few of a larger one.

    The small ones (norms, biases, routers), the first and last two (the gradient of the head is hardly ever zero
    everywhere), and others drawn with a fixed seed, so that no regular pattern (A and B of every adapter) is missed.
    """
    if sum(parameter.numel() for parameter in parameters) <= _ALL_UP_TO_ELEMENTS:
        return list(parameters)
    last, draw = len(parameters) - 1, random.Random(0)
    small = [place for place, parameter in enumerate(parameters) if parameter.numel() <= _SMALL_ELEMENTS]
    chosen = {0, min(1, last), max(0, last - 1), last}
    chosen.update(draw.sample(small, min(len(small), _ALL_UP_TO_ELEMENTS // _SMALL_ELEMENTS)))
    large = [place for place in range(len(parameters)) if place not in chosen]
    chosen.update(draw.sample(large, min(len(large), _LARGE_PARAMETERS)))
    return [parameters[place] for place in sorted(chosen)]


def sketch(gradient: torch.Tensor, zero: bool = False) -> torch.Tensor:
    """A linear sketch: one random projection of each row, so that a large matrix is kept as a vector.

    Args:
        gradient: Dense or sparse, of any floating-point type.
        zero: Whether it is zero everywhere, whatever it holds.
    """
    if zero or not gradient.numel():
        return torch.zeros(sketch_size(gradient), dtype=torch.float64)
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    dense = torch.view_as_real(dense).sum(dim=-1) if dense.is_complex() else dense
    if dense.ndim < 2:
        return dense.reshape(-1).to("cpu", torch.float64, copy=True)
    rows = dense.reshape(dense.shape[0], -1)
    rows = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    projection = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=rows.dtype)
    return (rows @ projection.to(rows.device)).to("cpu", torch.float64)


def sketch_size(parameter: torch.Tensor) -> int:
    """Elements of the sketch of a tensor of this shape."""
    return parameter.shape[0] if parameter.ndim > 1 else parameter.numel()


def _bits(dtypes: Collection[torch.dtype], loss: torch.Tensor) -> int:
    """Fraction bits of the least precise type; products of float32 numbers may be rounded to fewer on a GPU."""
    bits = [FRACTION_BITS.get(dtype, FRACTION_BITS[torch.bfloat16]) for dtype in dtypes]
    if loss.device.type == "cuda" and torch.float32 in dtypes:
        convolves = torch.backends.cudnn.allow_tf32 and any("Convolution" in name for name in graph_nodes(loss))
        if convolves or torch.get_float32_matmul_precision() != "highest":
            bits.append(_TF32_BITS)
    return min(bits)


class _TypesWatched(TorchFunctionMode):
    """Sees the floating-point types that a loss is computed in: autocast's, and the casts that a model makes itself.

    A model in float64 whose normalisation works in float32, as Llama's and T5's does, is as precise as float32. What
    has no gradient counts too: a teacher in bfloat16 rounds what its student learns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                self.seen.add(one.dtype)
        return result
