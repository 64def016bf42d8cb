"""What each term's sum is divided by: the batch's count, known before the first backward or corrected at the end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from wholebatch.cut import CutBatch
from wholebatch.errors import CountError, LossNotAdditiveError
from wholebatch.facts import Number
from wholebatch.loss.counting import ONLY, Counter


@dataclass(frozen=True)
class Divisor:
    """The denominators of one batch."""

    by_term: Mapping[str, float]
    """What the backward of each term is divided by."""

    counts: Mapping[str, Number]
    """The batch's count of each term, as far as it is known; what the report shows."""

    provisional: bool = False
    """Whether `by_term` is a power of two in place of a count that comes with the loss. Scaling by a power of two is
    exact, so the correction at the end leaves one rounding, as the division would have."""

    def corrected(self, counts: Mapping[str, Number]) -> "Divisor":
        """The same with the counts that came with the loss."""
        return Divisor(self.by_term, counts, self.provisional)

    @property
    def true(self) -> Mapping[str, Number]:
        """What the loss is divided by in the end."""
        return self.counts if self.provisional else self.by_term

    @property
    def correction(self) -> Number:
        """What the gradient of the batch still has to be multiplied by, if `provisional`; 0 for a count of 0."""
        count = self.counts[ONLY]
        if isinstance(count, torch.Tensor):
            return torch.where(count > 0, self.by_term[ONLY] / count, 0.0)
        return self.by_term[ONLY] / count if count else 0.0


@dataclass
class Divisors:
    """Finds the denominators of batches; remembers how many units an example had, for a first guess at the next."""

    counter: Counter
    units_per_example: float = 1.0

    def of(self, cut: CutBatch, form: str) -> Divisor:
        """The denominators of `cut`, for a loss of `form`."""
        counts = cut.counts
        if self.counter.summed:
            return Divisor({ONLY: 1.0}, counts)
        if counts:  # a term without any unit in this batch adds nothing, whatever its divisor
            return Divisor({term: count or 1.0 for term, count in counts.items()}, counts)
        if form == "per example":
            return Divisor({ONLY: float(cut.num_examples)}, {ONLY: float(cut.num_examples)})
        guess = max(cut.num_examples * self.units_per_example, 1.0)
        return Divisor({ONLY: 2.0 ** round(math.log2(guess))}, {}, provisional=True)

    def check(self, cut: CutBatch, counts: Mapping[str, float]) -> None:
        """Compare the counts that came with the loss with those stated; remember them for the next guess.

        Raises:
            CountError: They differ, or are negative or not finite.
        """
        for term, count in counts.items():
            if not math.isfinite(count) or count < 0:
                raise CountError(f"LossSum.count of {term!r} is {count:g} over the batch; it must not be negative")
            stated = cut.counts.get(term, count)
            if abs(stated - count) > 1e-6 * max(abs(stated), abs(count)):
                raise CountError(
                    f"LossSum.count of {term!r} comes to {count:g} over the batch, but count= says {stated:g}: "
                    "one of the two counts other units than the loss is summed over"
                )
        if not cut.counts and counts.get(ONLY):
            self.units_per_example = counts[ONLY] / cut.num_examples


def check_shown(shown: Sequence[float], weights: Sequence[float]) -> None:
    """Compare the denominators in the graphs of a batch's losses with what the losses are weighted by.

    Args:
        shown: By micro-batch; empty where they cannot be read.
        weights: By micro-batch: its count, or 1 for a sum.

    Raises:
        LossNotAdditiveError: They are not in proportion.
    """
    ratios = [denominator / weight for denominator, weight in zip(shown, weights, strict=True) if weight]
    if not ratios or max(ratios) - min(ratios) <= 1e-5 * max(ratios):
        return
    pairs = list(zip(shown, weights, strict=True))[:4]
    raise LossNotAdditiveError(
        "the losses of this batch's micro-batches were divided by "
        f"{', '.join(f'{denominator:g}' for denominator, _ in pairs)}{' ...' if len(shown) > 4 else ''}, but by count= "
        f"they weigh {', '.join(f'{weight:g}' for _, weight in pairs)}: not in proportion, so their gradients do not "
        "add up to the batch's. Some labels are ignored, or weighted, and count= does not know: count what the loss is "
        "a mean over, with a function of the micro-batch, or return wb.LossSum(sum, count). .grad is as it was; the "
        "batches before were in proportion."
    )
