"""Whether the stated count holds: pieces of a batch against their union, values and gradients.

If a loss is a mean over the stated units, the union's loss is the pieces' losses weighted by their counts, and so is
its gradient. Both are measured on a few examples (`measured`), with dropout off and with seeds other than 1.

Equal values alone prove nothing: at its start DPO, or any model with a zero-initialised head, has the same loss
whatever the rule. Gradients tell every rule apart that weighs these pieces differently; where low precision hides the
difference, or everything is zero, the denominator in the loss's own graph decides (`suggested`).

A difference that is more than rounding at first sight is judged again against measured noise (`Evidence.noisy`): the
union with the last bit of each parameter flipped, and differentiated from another seed. The union in another order
would not do, since a loss that depends on the order, and so adds up over no pieces, would excuse itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from wholebatch.errors import CountError
from wholebatch.loss.counting import ONLY
from wholebatch.loss.measured import FRACTION_BITS, Measured
from wholebatch.loss.suggested import suggest_count

UNION_SEED, PIECE_SEEDS, OTHER_SEED = 0.75, (1.25, 1.5), 1.75
"""Backward starts from these, and they are divided out again: a custom Function that ignores its seed shows."""

NAMED = ("examples", "tokens", "tokens after the shift", "sum")
"""The counts that are most often taken for each other."""

_ADDITIVE = 1e-5
"""How well counts add up that are sums of float32 weights."""

_EXACT = 1e-6
"""How well shares agree that were read from a graph in float32."""

_NOISE = 16.0
"""How often the measured noise is allowed."""

_ABSOLUTE = 0.05
"""Gradients below this share of the model's largest (root mean square) are rounding noise to that share."""


@dataclass(frozen=True)
class Rival:
    """What else could have been counted."""

    counts: Sequence[float]
    """In each piece."""

    varies: bool
    """Whether the examples differ in it; if they do not, another batch may tell it from what is stated."""

    words: str
    code: str | None
    """As of `candidates.Candidate`."""


@dataclass(frozen=True)
class Evidence:
    """Measurements of the same examples together and in pieces."""

    union: Measured
    pieces: Sequence[Measured]
    rivals: Mapping[str, Rival]
    noisy: Sequence[Measured] = ()
    """The union again, different by no more than rounding: how far it moves is noise."""

    @property
    def tolerance(self) -> float:
        """Relative; from the least precise floating-point type involved."""
        return max(measured.tolerance for measured in (self.union, *self.pieces))

    @property
    def bits(self) -> int:
        """Fraction bits of the least precise type involved."""
        return min(measured.bits for measured in (self.union, *self.pieces))

    @property
    def conclusive(self) -> bool:
        """Whether the union has a unit, a finite loss and a gradient that is finite somewhere.

        If not, nothing can be said about the count. The batch will be skipped, for one; the next is looked at.
        """
        gradient = self.union.gradient
        told = bool(gradient.isfinite().any()) or not len(gradient)
        return self.union.finite and told and any(self.union.counts.values())

    @property
    def blank(self) -> bool:
        """Whether all losses and gradients are zero, so that they fit any rule."""
        every = (self.union, *self.pieces)
        return not any(loss for measured in every for loss in measured.losses.values()) and not any(
            bool(measured.gradient.any()) for measured in every
        )

    @property
    def void(self) -> bool:
        """Whether one of the pieces has neither loss nor gradient: nothing was selected in it, or masked out of all.

        A plain sum then fits whatever the rule is, and so may others.
        """
        return any(not any(piece.losses.values()) and not bool(piece.gradient.any()) for piece in self.pieces)

    @property
    def uncut(self) -> bool:
        """Whether each piece has the very loss of the union, as where nothing that matters is cut."""
        own = [[m.losses[name] / (m.factors[name] or 1.0) for name in m.losses] for m in (self.union, *self.pieces)]
        return all(same(one, own[0], self.tolerance) for one in own[1:])

    @property
    def stated_shares(self) -> list[float]:
        """The pieces' shares of the union under the stated count; of the first term where there are several."""
        term = next(iter(self.union.counts))
        if self.union.form == "scalar":
            return [piece.factors[term] / self.union.factors[term] for piece in self.pieces]
        whole = self.union.counts[term]
        return [piece.counts[term] / whole if whole else 0.0 for piece in self.pieces]

    @property
    def rival_shares(self) -> dict[str, list[float]]:
        """By name, the pieces' shares under each rival; for "sum", 1."""
        shares = {"sum": [1.0] * len(self.pieces)}
        for name, rival in self.rivals.items():
            if total := sum(rival.counts):
                shares[name] = [count / total for count in rival.counts]
        return shares


@dataclass(frozen=True)
class Gap:
    """How far pieces are from their union."""

    loss: float
    gradient: float
    """The largest relative difference; inf where a piece is not finite."""

    holds: bool
    """Whether all of it is within the tolerance and the noise."""


@dataclass(frozen=True)
class Judgement:
    """What evidence says about the stated count."""

    holds: bool
    gap: Gap
    fitting: Sequence[str] = ()
    """Where it does not hold: the names of rivals that fit, and that the graph shows if it shows one."""

    shown: bool = False
    """Where it does not hold: whether the denominator in the loss's graph does."""

    untold: frozenset[str] = frozenset()
    """Rivals that weigh these pieces as the stated count does, but need not do so in other batches."""

    undecided: bool = False
    """Whether the figures fit other counts as well, and the graph does not decide."""

    @property
    def explained(self) -> bool:
        """Whether another count was found to hold."""
        return bool(self.fitting) or self.shown


def gap(evidence: Evidence, shares: Sequence[float] | None = None) -> Gap:
    """How far the pieces are from the union under the stated count, or under other `shares` of a loss of one term."""
    union, scale, scales = evidence.union, 1.0, [1.0] * len(evidence.pieces)
    if shares is not None:
        scale = 1.0 / union.factors[ONLY]
        scales = [share / piece.factors[ONLY] for share, piece in zip(shares, evidence.pieces, strict=True)]
    losses = [_loss_gap(name, evidence, scale, scales) for name in union.losses]
    differences, allowed = _gradient_gaps(evidence, scale, scales)
    return Gap(
        loss=max(difference for difference, _ in losses),
        gradient=float(differences.max()) if len(differences) else 0.0,
        holds=all(difference <= most for difference, most in losses) and bool((differences <= allowed).all()),
    )


def _loss_gap(name: str, evidence: Evidence, scale: float, scales: Sequence[float]) -> tuple[float, float]:
    """The relative difference of a term between the pieces and the union, and how much of it rounding explains."""
    whole = evidence.union.losses[name]
    noise = max((abs(other.losses[name] - whole) for other in evidence.noisy), default=0.0) * scale
    parts = [piece.losses[name] * factor for piece, factor in zip(evidence.pieces, scales, strict=True)]
    size = max(abs(whole * scale), *map(abs, parts)) or 1.0
    return _finite(abs(sum(parts) - whole * scale) / size), evidence.tolerance + _NOISE * noise / size


def _gradient_gaps(evidence: Evidence, scale: float, scales: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each parameter, the relative difference of its gradient, and how much of it rounding explains."""
    places, union = evidence.union.places, evidence.union.gradient
    parts = [piece.gradient * factor for piece, factor in zip(evidence.pieces, scales, strict=True)]
    sizes = _sizes(evidence, scale, scales)
    differences = _rms(torch.stack(parts).sum(dim=0) - union * scale, places) / sizes
    told = _rms(union, places).isfinite()  # overflow of all together says nothing about the count
    allowed = evidence.tolerance + _gradient_noise(evidence, scale, scales)
    return differences.nan_to_num(math.inf)[told], allowed[told]


def _gradient_noise(evidence: Evidence, scale: float, scales: Sequence[float]) -> torch.Tensor:
    """For each parameter, the relative difference that the measured noise explains."""
    union, places = evidence.union.gradient, evidence.union.places
    disturbed = [(other.gradient - union) * scale for other in evidence.noisy] or [torch.zeros_like(union)]
    noise = torch.stack([_rms(one, places) for one in disturbed]).amax(dim=0)
    return _NOISE * noise.nan_to_num(math.inf) / _sizes(evidence, scale, scales)


def _sizes(evidence: Evidence, scale: float, scales: Sequence[float]) -> torch.Tensor:
    """For each parameter, what rounding is relative to: the largest gradient, as the parts' may cancel in the union."""
    measured = zip((evidence.union, *evidence.pieces), (scale, *scales), strict=True)
    own = torch.stack([_rms(one.gradient * factor, evidence.union.places) for one, factor in measured]).amax(dim=0)
    sizes = torch.maximum(own, _ABSOLUTE * own.nan_to_num(0.0, 0.0).max())
    return torch.where(sizes > 0, sizes, 1.0)


def judge(evidence: Evidence) -> Judgement:
    """Whether the stated count holds.

    Raises:
        CountError: It is not additive.
    """
    _check_additive_count(evidence)
    found, stated = gap(evidence), evidence.stated_shares
    if evidence.union.form != "scalar":
        untold = _untold(evidence, stated) if found.holds else frozenset()
        return Judgement(found.holds, found, untold=untold, undecided=evidence.blank)
    others = {name: shares for name, shares in evidence.rival_shares.items() if not same(shares, stated)}
    fitting = [name for name, shares in others.items() if _statable(name, evidence) and gap(evidence, shares).holds]
    if evidence.void:
        fitting = []
    shown = shares_shown(evidence)
    if shown is not None and gap(evidence, shown).holds:
        by_graph = [name for name in others if _statable(name, evidence) and same(shown, others[name], _EXACT)]
        unlike_stated = not same(shown, stated, max(_EXACT, 4 * 2.0**-evidence.bits))
        if not found.holds or unlike_stated or (by_graph and not same(shown, stated, _EXACT)):
            return Judgement(False, found, by_graph, shown=True)
        fitting = []
    if not found.holds:
        return Judgement(False, found, fitting)
    undecided = evidence.void or bool(set(fitting) & set(NAMED))
    return Judgement(True, found, untold=_untold(evidence, stated), undecided=undecided)


def fitting_counts(evidence: Evidence) -> list[str]:
    """The names of the counts that fit a scalar loss of which none is stated.

    Those that its graph shows, if what it shows fits; else all that the figures allow. If one of them is the very
    denominator in the graph, that alone; else the common ones alone where there are such.
    """
    every = {} if evidence.void else evidence.rival_shares
    shown = shares_shown(evidence)
    if shown is not None and gap(evidence, shown).holds:
        exact = {name: shares for name, shares in every.items() if same(shown, shares, _EXACT)}
        rounded = max(_EXACT, 4 * 2.0**-evidence.bits)
        every = exact or {name: shares for name, shares in every.items() if same(shown, shares, rounded)}
    fitting = [name for name in every if _statable(name, evidence) and gap(evidence, every[name]).holds]
    totals = {name: sum(evidence.rivals[name].counts) if name in evidence.rivals else 1.0 for name in fitting}
    named = suggest_count(evidence.union.head, {name: totals[name] for name in fitting if name in NAMED})
    likely = [name for name in fitting if name in NAMED]
    return [named] if named else likely or fitting


def shares_shown(evidence: Evidence) -> list[float] | None:
    """The pieces' shares by the denominators in their losses' graphs; None where these say nothing."""
    heads = [evidence.union.head, *(piece.head for piece in evidence.pieces)]
    denominators = [head.denominator for head in heads if head.terms == 1 and head.denominator]
    if len(denominators) < len(heads) or len(set(denominators)) == 1:
        return None
    whole, *parts = denominators
    return [part / whole for part in parts] if abs(sum(parts) - whole) <= 1e-6 * whole else None


def counts_shown(pieces: Sequence[Measured], rivals: Mapping[str, Rival]) -> list[str] | None:
    """The names of the common counts that are the denominators in the graphs of losses that were measured apart.

    "sum" where the denominator does not change; None where there is no denominator to be read.
    """
    denominators = [piece.head.denominator for piece in pieces if piece.head.terms == 1 and piece.head.denominator]
    if len(denominators) < len(pieces):
        return None
    counts = {name: rivals[name].counts for name in NAMED if name in rivals}
    constant = ["sum"] if len(pieces) > 1 and len(set(denominators)) == 1 else []
    return [name for name, numbers in counts.items() if same(denominators, numbers, _EXACT)] or constant


def ignores_its_seed(evidence: Evidence, other: Measured) -> bool:
    """Whether the gradient does not grow with what the backward starts from, as it must.

    Args:
        evidence: Of which the union was measured with one seed.
        other: The union measured with another.
    """
    union = evidence.union
    size = _rms(union.gradient, union.places)
    moved = _rms(other.gradient - union.gradient, union.places) > 0.4 * size
    fixed = _rms(other.gradient * other.seed - union.gradient * union.seed, union.places) <= 0.1 * size
    return bool(((size > 0) & moved & fixed).any())


def loss_differs(evidence: Evidence, again: Measured) -> bool:
    """Whether the union's loss, measured again, is another by more than rounding: it draws random numbers."""
    for name, value in evidence.union.losses.items():
        size = max(abs(value), *(abs(piece.losses[name]) for piece in evidence.pieces))
        if abs(again.losses[name] - value) > evidence.tolerance * size:
            return True
    return False


def not_linear(evidence: Evidence, other: Measured) -> bool:
    """Whether the union's gradient from another seed, divided by it again, is another by more than rounding.

    What cancels in a gradient may leave little but rounding, and other seeds round differently. In low precision that
    hides whatever else there is.
    """
    scales = [1.0] * len(evidence.pieces)
    moved = _rms(other.gradient - evidence.union.gradient, evidence.union.places) / _sizes(evidence, 1.0, scales)
    told = evidence.bits >= FRACTION_BITS[torch.float32]
    return told and bool((moved > 10 * evidence.tolerance + _gradient_noise(evidence, 1.0, scales)).any())


def same(one: Iterable[float], other: Iterable[float], tolerance: float = 1e-9) -> bool:
    """Whether two sets of shares are the same."""
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))


def proportional(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sets of counts give the same shares."""
    return same([a * sum(other) for a in one], [b * sum(one) for b in other], _EXACT)


def _statable(name: str, evidence: Evidence) -> bool:
    return name not in evidence.rivals or evidence.rivals[name].code is not None


def _untold(evidence: Evidence, stated: Sequence[float]) -> frozenset[str]:
    shares = evidence.rival_shares
    return frozenset(
        name
        for name, rival in evidence.rivals.items()
        if name in shares and same(shares[name], stated) and not rival.varies
    )


def _check_additive_count(evidence: Evidence) -> None:
    for term, whole in evidence.union.counts.items():
        parts = [piece.counts[term] for piece in evidence.pieces]
        if abs(sum(parts) - whole) > max(_ADDITIVE, 2.0 ** (1 - evidence.bits)) * max(abs(whole), 1e-30):
            raise CountError(
                f"the count of {term!r} is not additive: {' + '.join(f'{part:g}' for part in parts)} in the parts of a "
                f"few examples, but {whole:g} in all of them together. It must count units (or sum weights), not "
                "average them, nor count padding."
            )


def _rms(gradient: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The root mean square of each parameter's part."""
    sizes = places.bincount()
    return (torch.zeros(len(sizes), dtype=gradient.dtype).index_add_(0, places, gradient.square()) / sizes).sqrt()


def _finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf
