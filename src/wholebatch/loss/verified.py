"""Whether the stated count holds: pieces of a batch against their union, values and gradients.

If a loss is a mean over the stated units, the union's loss is the pieces' losses weighted by their counts, and so is
its gradient. Both are measured on a few examples, with dropout off and with seeds other than 1, and judged against
the rounding noise of the same evaluation in another order.

Equal values alone prove nothing: at its start DPO, or any model with a zero-initialised head, has the same loss
whatever the rule. Gradients tell every rule apart that weighs these pieces differently; where low precision hides the
difference, the denominator in the loss's own graph decides (`suggested`).
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from wholebatch.errors import CountError, LossNotAdditiveError
from wholebatch.loss.counting import ONLY, as_numbers, find_labels, tokens, tokens_after_the_shift
from wholebatch.loss.stated import MicroBatchLoss
from wholebatch.loss.suggested import LossHead, read_head, suggest_count

UNION_SEED, PIECE_SEEDS = 0.75, (1.25, 1.5)
"""Backward starts from these, and they are divided out again: a custom Function that ignores its seed shows."""

_RELATIVE = {torch.float64: 1e-11, torch.float32: 6e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The rounding that different shapes cause in a deep model, by the least precise type involved."""

_TF32 = 3e-3
_NOISE = 16.0
"""How often the measured noise of another order is allowed."""

_ABSOLUTE = 0.05
"""Gradients below this share of the model's largest (root mean square) are rounding noise to that share."""

_ALL_UP_TO_ELEMENTS, _FEW_PARAMETERS = 2**22, 16


@dataclass(frozen=True)
class Measured:
    """A loss and its gradient in a few parameters, for one set of examples."""

    form: str
    losses: Mapping[str, float]
    """By term: `value * weight / divisor`."""

    factors: Mapping[str, float]
    """By term: `weight / divisor`."""

    counts: Mapping[str, float]
    gradients: Mapping[int, torch.Tensor]
    """Linear sketches of the gradient of the sum of `losses`, by the parameter's place; those without one left out."""

    head: LossHead
    tolerance: float
    """Relative, from the least precise floating-point type involved."""


@dataclass(frozen=True)
class Evidence:
    """Measurements of the same examples together, in another order, and in pieces."""

    union: Measured
    permuted: Measured
    pieces: Sequence[Measured]
    alternatives: Sequence[Mapping[str, float]]
    """For each piece, what else could have been counted."""

    @property
    def conclusive(self) -> bool:
        """Whether the union has a unit and is finite, gradients too; if not, nothing can be said about the count."""
        finite = all(map(math.isfinite, self.union.losses.values()))
        gradients = all(bool(gradient.isfinite().all()) for gradient in self.union.gradients.values())
        return finite and gradients and any(self.union.counts.values())


@dataclass(frozen=True)
class Gap:
    """How far pieces are from their union."""

    loss: float
    gradient: float
    """The largest relative difference."""

    holds: bool
    """Whether all of it is within the tolerance."""


class Measurer:
    """Evaluates a loss on a few examples and differentiates it without touching any `.grad`.

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
        self._evaluate, self._differentiate, self._parameters = evaluate, differentiate, _few(parameters)
        self._dtypes = {parameter.dtype for parameter in parameters}

    def __call__(
        self, data: Any, counts: Mapping[str, float], num_examples: int, divisors: Mapping[str, float] | None, seed: float
    ) -> Measured:
        """Measure `data`; each term is divided by its `divisors`, by its own count where these are None."""
        with _TypesWatched() as watched:
            loss = self._evaluate(data, counts, num_examples)
        terms = loss.terms
        own = as_numbers([{name: term.count for name, term in terms.items()}])[0]
        over = own if divisors is None else divisors
        factors = {name: float(term.weight) / (over[name] or 1.0) for name, term in terms.items()}
        total = torch.stack([term.value * (factors[name] * seed) for name, term in terms.items()]).sum()
        dtypes = {*self._dtypes, *watched.seen, *(term.value.dtype for term in terms.values())}
        return Measured(
            form=loss.form,
            losses={name: term.value.item() * factors[name] for name, term in terms.items()},
            factors=factors,
            counts=own,
            head=read_head(next(iter(terms.values())).value),
            gradients=self._sketches(total, seed),
            tolerance=max(_tolerance(dtype, total.device) for dtype in dtypes),
        )

    def _sketches(self, total: torch.Tensor, seed: float) -> dict[int, torch.Tensor]:
        if not total.requires_grad:
            return {}
        gradients = self._differentiate(total, self._parameters)
        return {place: _sketch(g) / seed for place, g in enumerate(gradients) if g is not None}


def gap(evidence: Evidence, weights: Sequence[float] | None = None) -> Gap:
    """How far the pieces are from the union under the stated count, or under other `weights` of the pieces' own losses.

    Args:
        evidence: What was measured.
        weights: What each piece's own loss is multiplied by instead, for a loss of one term.
    """
    union, pieces, scale, scales = evidence.union, evidence.pieces, 1.0, [1.0] * len(evidence.pieces)
    if weights is not None:
        scale = 1.0 / union.factors[ONLY]
        scales = [weight / piece.factors[ONLY] for weight, piece in zip(weights, pieces, strict=True)]
    tolerance = max(measured.tolerance for measured in (union, evidence.permuted, *pieces))
    losses = [_loss_gap(name, evidence, scale, scales) for name in union.losses]
    gradients = _gradient_gaps(evidence, scale, scales, tolerance)
    return Gap(
        loss=max(difference for difference, _ in losses),
        gradient=max((difference for difference, _ in gradients), default=0.0),
        holds=all(difference <= tolerance + noise for difference, noise in losses)
        and all(difference <= allowed for difference, allowed in gradients),
    )


def each_sees_all(evidence: Evidence) -> bool:
    """Whether every piece has the loss of the union itself: whatever the loss, such pieces add up."""
    union, tolerance = _values(evidence.union), evidence.union.tolerance
    return all(
        math.isclose(value, union[term], rel_tol=tolerance)
        for piece in evidence.pieces
        for term, value in _values(piece).items()
    )


def _values(measured: Measured) -> dict[str, float]:
    """What `loss_fn` returned, by term."""
    return {term: loss / (measured.factors[term] or 1.0) for term, loss in measured.losses.items()}


def _loss_gap(name: str, evidence: Evidence, scale: float, scales: Sequence[float]) -> tuple[float, float]:
    """The relative difference of a term between the pieces and the union, and the noise that another order makes."""
    whole, permuted = scale * evidence.union.losses[name], scale * evidence.permuted.losses[name]
    parts = [piece.losses[name] * factor for piece, factor in zip(evidence.pieces, scales, strict=True)]
    size = max(abs(whole), *map(abs, parts)) or 1.0
    return _finite(abs(sum(parts) - whole) / size), _finite(_NOISE * abs(permuted - whole) / size)


def _gradient_gaps(
    evidence: Evidence, scale: float, scales: Sequence[float], tolerance: float
) -> list[tuple[float, float]]:
    """For each parameter, the relative difference of its gradient, and how much of that rounding explains."""
    whole, permuted = evidence.union.gradients, evidence.permuted.gradients
    places = sorted({place for measured in (evidence.union, *evidence.pieces) for place in measured.gradients})
    sums = {place: _sum_at(place, evidence, scales) for place in places}
    zeros = {place: torch.zeros_like(total) for place, total in sums.items()}
    sizes = {place: _size_at(place, evidence, scale, scales) for place in places}
    largest = max(sizes.values(), default=0.0)
    gaps = []
    for place in places:
        union = whole.get(place, zeros[place]) * scale
        noise = _rms(permuted.get(place, zeros[place]) * scale - union)
        size = max(sizes[place], _ABSOLUTE * largest) or 1.0
        gaps.append((_finite(_rms(sums[place] - union) / size), tolerance + _NOISE * _finite(noise) / size))
    return gaps


def _sum_at(place: int, evidence: Evidence, scales: Sequence[float]) -> torch.Tensor:
    """The pieces' gradient of one parameter, summed; zeros where no piece reaches it."""
    parts = [(piece.gradients.get(place), factor) for piece, factor in zip(evidence.pieces, scales, strict=True)]
    found = [gradient * factor for gradient, factor in parts if gradient is not None]
    return torch.stack(found).sum(dim=0) if found else torch.zeros_like(evidence.union.gradients[place])


def _size_at(place: int, evidence: Evidence, scale: float, scales: Sequence[float]) -> float:
    """What rounding is relative to: the largest of a parameter's gradients, as the pieces' may cancel in the union."""
    measured = zip((evidence.union, *evidence.pieces), (scale, *scales), strict=True)
    return max(_rms(one.gradients[place]) * abs(factor) for one, factor in measured if place in one.gradients)


def verify(evidence: Evidence, stated: str | None) -> bool:
    """Check the stated count.

    Args:
        evidence: What was measured.
        stated: The count's name among `evidence.alternatives`; None where it is a function or comes with the loss.

    Returns:
        Whether the pieces tell the stated count from each alternative. If they do not (all examples of the same
        length), the check has to be repeated on a batch whose examples differ.

    Raises:
        CountError: The count is not additive.
        LossNotAdditiveError: The pieces do not add up to their union, or the loss's graph shows another count.
    """
    _check_additive_count(evidence)
    if len(evidence.union.losses) > 1 or evidence.union.form != "scalar":
        if not (found := gap(evidence)).holds:
            raise LossNotAdditiveError(_message(evidence, found, stated, []))
        return True
    others = {name: w for name, w in _weights(evidence).items() if not _same(w, _stated_weights(evidence))}
    fitting = [name for name, weights in others.items() if gap(evidence, weights).holds]
    if not (found := gap(evidence)).holds:
        raise LossNotAdditiveError(_message(evidence, found, stated, fitting))
    shown = _shown_by_graph(evidence)
    if fitting and shown is not None and not _same(shown, _stated_weights(evidence)):
        named = [name for name in fitting if _same(shown, others[name])]
        if named:
            raise LossNotAdditiveError(_message(evidence, found, stated, named))
    return _distinct(evidence, stated)


def suggest(evidence: Evidence) -> str | None:
    """The name of the count that fits a scalar loss whose count was not stated; None if none fits, or several do."""
    fitting = [name for name, weights in _weights(evidence).items() if gap(evidence, weights).holds]
    union = {name: sum(counts[name] for counts in evidence.alternatives) for name in fitting}
    named = suggest_count(evidence.union.head, {**union, **({"sum": 1.0} if "sum" in union else {})})
    return named or (fitting[0] if len(fitting) == 1 else None)


def alternatives(data: Any, num_examples: int) -> dict[str, float]:
    """What a micro-batch's loss could be a mean over, counted by name."""
    counts: dict[str, Any] = {"examples": num_examples}
    try:
        labels = find_labels(data)
    except CountError:
        return as_numbers([counts])[0]
    if labels.ndim > 1 and not labels.is_floating_point():
        counts |= {"tokens": tokens(data), "tokens after the shift": tokens_after_the_shift(data)}
    return as_numbers([counts])[0]


def _weights(evidence: Evidence) -> dict[str, list[float]]:
    """By the name of a count, the share of each piece under it; for "sum", 1."""
    names = evidence.alternatives[0] if evidence.alternatives else {}
    weights = {"sum": [1.0] * len(evidence.pieces)}
    for name in names:
        counts = [piece[name] for piece in evidence.alternatives]
        if total := sum(counts):
            weights[name] = [count / total for count in counts]
    return weights


def _stated_weights(evidence: Evidence) -> list[float]:
    scale = evidence.union.factors[ONLY]
    return [piece.factors[ONLY] / scale for piece in evidence.pieces]


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))


def _shown_by_graph(evidence: Evidence) -> list[float] | None:
    """The pieces' shares by the denominators in their losses' graphs; None where these say nothing."""
    heads = [evidence.union.head, *(piece.head for piece in evidence.pieces)]
    denominators = [head.denominator for head in heads if head.terms == 1 and head.denominator]
    if len(denominators) < len(heads) or len(set(denominators)) == 1:
        return None
    whole, *parts = denominators
    return [part / whole for part in parts] if abs(sum(parts) - whole) <= 1e-6 * whole else None


def _distinct(evidence: Evidence, stated: str | None) -> bool:
    """Whether the pieces weigh differently under each alternative that another batch would tell from the stated one."""
    weights = _weights(evidence)
    rivals = [name for name in ("examples", "tokens") if name in weights and name != stated]
    if stated == "tokens after the shift":
        rivals.remove("tokens")  # one label less per example: as good as the same where they cannot be told apart
    return not any(_same(weights[name], _stated_weights(evidence)) for name in rivals)


def _check_additive_count(evidence: Evidence) -> None:
    for term, whole in evidence.union.counts.items():
        parts = [piece.counts[term] for piece in evidence.pieces]
        if abs(sum(parts) - whole) > 1e-6 * max(abs(whole), 1e-30):
            raise CountError(
                f"the count of {term!r} is not additive: {' + '.join(f'{part:g}' for part in parts)} in two parts of a "
                f"batch, but {whole:g} in both together. It must count units (or sum weights), not average them."
            )


def _message(evidence: Evidence, found: Gap, stated: str | None, fitting: Sequence[str]) -> str:
    said = "what loss_fn returned" if stated is None and evidence.union.form != "scalar" else f"count={stated or 'your function'}"
    text = (
        f"under {said} the parts of a batch do not add up to the batch: the loss is off by {found.loss:.2g} and the "
        f"gradient by {found.gradient:.2g} (relative). Nothing was changed."
    )
    head = evidence.union.head
    if fitting:
        return f"{text} It fits a mean over {fitting[0]}: {way_out(fitting[0])}." if fitting[0] != "sum" else f'{text} It fits a plain sum: pass count="sum".'
    if head.terms > 1:
        return (
            f"{text} The loss has {head.terms} terms ({head.form}): one of them, a router's or a penalty, needs its own "
            "count, or is no sum over examples. Return a mapping of wb.LossSum with count={term: ...}, or leave it out."
        )
    return (
        f"{text} The loss's graph shows: {head.form}. If its denominator contains the padded length, is a sum of "
        "weights, or was normalised beforehand, return wb.LossSum(sum, count) or count it with a function. If examples "
        "are compared with each other (contrastive, in-batch negatives, statistics of the batch), no cut gives the "
        "batch's gradient: use a micro_batch_size of at least the batch."
    )


def way_out(name: str) -> str:
    """The argument that states the count called `name`."""
    if name == "tokens after the shift":
        return 'pass count=lambda micro_batch: (micro_batch["labels"][..., 1:] != -100).sum()'
    return f'pass count="{name}"'


def _few(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """All parameters of a small model; of a larger one the first and last two (the head's gradient is never all zero)
    and others drawn with a fixed seed, so that no regular pattern (A and B of every adapter) is missed.
    """
    if sum(parameter.numel() for parameter in parameters) <= _ALL_UP_TO_ELEMENTS or len(parameters) <= _FEW_PARAMETERS:
        return list(parameters)
    inner = random.Random(0).sample(range(2, len(parameters) - 2), _FEW_PARAMETERS - 4)
    return [parameters[place] for place in (0, 1, *sorted(inner), len(parameters) - 2, len(parameters) - 1)]


def _sketch(gradient: torch.Tensor) -> torch.Tensor:
    """A linear sketch: one random projection of each row, so that a large matrix is kept as a vector."""
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    dense = dense if dense.dtype in (torch.float32, torch.float64) else dense.float()
    if dense.ndim < 2 or not dense.numel():
        return dense.reshape(-1).clone()
    rows = dense.reshape(dense.shape[0], -1)
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(rows.shape[1], generator=generator, dtype=rows.dtype)
    return rows @ projection.to(rows.device)


def _rms(vector: torch.Tensor) -> float:
    return float(vector.double().square().mean().sqrt()) if vector.numel() else 0.0


def _finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype == torch.float32 and device.type == "cuda":
        return _TF32  # matrix products may round to TF32
    return _RELATIVE.get(dtype, _RELATIVE[torch.bfloat16])


class _TypesWatched(TorchFunctionMode):
    """Sees the floating-point types that a loss is computed in: autocast's, and the casts that a model makes itself.

    A model in float64 whose normalisation works in float32, as Llama's and T5's does, is as precise as float32.
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
