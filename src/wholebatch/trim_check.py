"""Whether padding may be left out of micro-batches: the model and its loss, with it and without.

The same few examples are evaluated together, as they came, and in parts without the columns that are padding in all
their rows. Losses and gradients must add up as they do with padding (`loss.verified`); a check of the loss alone would
let a zero-initialised head pass anything.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

from wholebatch.batch.layout import Piece
from wholebatch.batch.trimming import Padding
from wholebatch.cut import CutBatch, Knife
from wholebatch.errors import LossNotAdditiveError, PaddingKeptWarning
from wholebatch.evidence import Witness
from wholebatch.loss.verified import OTHER_SEED, Evidence, judge, loss_differs
from wholebatch.memory.device import is_out_of_memory
from wholebatch.sample import MOST_EXAMPLES, Sample, trimmed_sample

Witnessed = Callable[..., tuple[Evidence, Witness]]
"""Of a sample, and whether in the mode of training (by default where that is the only one that works)."""

AGREE = 1e-3
"""How well the loss must follow the padded length for it to be named as what the loss is divided by."""


class TrimCheck:
    """Checks each kind of padding the first time it could be left out, and again in the 2nd, 4th, 8th, ... batch.

    Args:
        knife: Whose `trims` hold what was found.
        witnessed: Evaluates the model and its loss on a sample, and leaves no trace.
        shifted: As for `candidates`.
    """

    def __init__(self, knife: Knife, shifted: bool) -> None:
        self._knife, self._shifted = knife, shifted
        self.batches = 0
        self.next_try: dict[str, int] = {}
        """By kind of padding that a batch has said nothing of: the batch from which on it is tried again."""

    def check(self, cut: CutBatch, most: int, witnessed: Witnessed) -> bool:
        """Check what has not been tried, and now and then what has; whether the batch is to be cut again.

        Raises:
            LossNotAdditiveError: The loss is divided by the padded length.
        """
        used = [(m.piece, m.padding) for m in cut.micro_batches if m.padding is not None and isinstance(m.piece, Piece)]
        if not used and not cut.untried:
            return False
        self.batches += 1
        again = self.batches.bit_count() == 1  # the 2nd, 4th, 8th, ...: models and losses change
        trims, changed = self._knife.trims, False
        for piece, padding in {p.kind: (one, p) for one, p in [*cut.untried, *used]}.values():
            allowed = padding.kind in trims.allowed
            due = again if allowed else self.batches >= self.next_try.get(padding.kind, 0)
            if padding.kind in trims.refused or not due:
                continue
            sample = trimmed_sample(piece, padding, min(most, MOST_EXAMPLES), self._knife, self._shifted)
            holds = None if sample is None else self._holds(sample, padding, witnessed)
            if holds is None:
                self.next_try[padding.kind] = 2 * self.batches
                continue
            trims.settle(padding.kind, holds)
            changed |= holds != allowed
        return changed

    def _holds(self, sample: Sample, padding: Padding, witnessed: Witnessed) -> bool | None:
        """None where the sample cannot tell."""
        try:
            evidence, witness = witnessed(sample)
            if not evidence.conclusive or evidence.blank:
                return None
            holds = judge(evidence).holds
            if not holds:
                noisy = (witness.disturbed(sample, evidence.bits), witness.again(sample, OTHER_SEED))
                holds = judge(replace(evidence, noisy=noisy)).holds
            if holds and self._holds_in_training(sample, witnessed) and _metrics_hold(sample, witness):
                return True
            kept, _ = witnessed(replace(sample, collated=()), holds)
        except Exception as error:  # noqa: BLE001  a model of one fixed length
            if is_out_of_memory(error) or _fails(witnessed, replace(sample, collated=())):
                return None  # whatever is wrong, it is not the padding that is left out
            warnings.warn(_kept(padding, f"it fails with {type(error).__name__}"), PaddingKeptWarning, stacklevel=6)
            return False
        if not judge(kept).holds:
            return False  # that is the count's business, not that of the padding
        if _follows_the_width(evidence, sample, padding):
            raise LossNotAdditiveError(_divided_by_the_width(padding))
        warnings.warn(_kept(padding, "the loss, its gradient or a metric is another"), PaddingKeptWarning, stacklevel=6)
        return False

    @staticmethod
    def _holds_in_training(sample: Sample, witnessed: Witnessed) -> bool:
        """In the mode of training; nothing can be said there of a model that draws random numbers, as dropout does."""
        evidence, witness = witnessed(sample, True)
        return judge(evidence).holds or loss_differs(evidence, witness.again(sample))


def _fails(witnessed: Witnessed, sample: Sample) -> bool:
    try:
        witnessed(sample)
    except Exception:  # noqa: BLE001  training will say what it is
        return True
    return False


def _metrics_hold(sample: Sample, witness: Witness) -> bool:
    """Whether the metrics of each part are what they are with its padding."""
    with_padding = replace(sample, collated=()).parts
    for kept, trimmed, size in zip(with_padding, sample.parts, sample.sizes, strict=True):
        right, found = witness.metrics(kept, size), witness.metrics(trimmed, size)
        pairs = [pair for name in right for pair in zip(right[name], found[name], strict=True)]
        if any(abs(one - other) > AGREE * max(abs(one), abs(other)) for one, other in pairs):
            return False
    return True


def _follows_the_width(evidence: Evidence, sample: Sample, padding: Padding) -> bool:
    """Whether losses and gradients agree once each is multiplied by how much narrower its micro-batch is."""
    widths = [len(range(padding.width)[padding.columns(rows)]) / padding.width for rows in sample.rows]
    if max(widths) > 1 - AGREE:
        return False
    union, parts = evidence.union, list(zip(evidence.pieces, widths, strict=True))
    losses = [
        abs(sum(piece.losses[name] * width for piece, width in parts) - loss) <= AGREE * abs(loss)
        for name, loss in union.losses.items()
    ]
    gradient = sum(piece.gradient * width for piece, width in parts)
    error = float((gradient - union.gradient).norm())
    return all(losses) and error <= AGREE * float(union.gradient.norm())


def _divided_by_the_width(padding: Padding) -> str:
    return (
        f"the loss is divided by the padded length: with the padding of this batch ({padding.width} columns) left out "
        "of a micro-batch, it grows by as much as the micro-batch is narrower. So it depends on the longest example "
        "that an example happens to be batched with. Divide by what the mask leaves in, (l * mask).sum() / mask.sum(), "
        "or return wb.LossSum((l * mask).sum(), mask.sum()); or keep the padding, with regroup=False. .grad is as it "
        "was."
    )


def _kept(padding: Padding, what: str) -> str:
    return (
        f"micro-batches keep the {padding.kind}: with it left out, {what}. The model sees the padding, or numbers "
        "positions from the edge of the batch. The result is exact; it takes longer than it need. Way out: give the "
        "model the mask, or position_ids; or pass a list of unpadded examples and a collate_fn. With regroup=False "
        "nothing is tried."
    )
