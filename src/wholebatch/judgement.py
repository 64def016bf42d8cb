"""Whether a batch's gradient is to be used: its labels, its finiteness, and how often in a row it was not."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wholebatch.errors import BadBatchWarning, NoLabelsError, NonFiniteLossError, TooManySkippedBatchesError
from wholebatch.options import OnBadBatch


@dataclass(frozen=True)
class Verdict:
    """What is to become of a batch's gradient."""

    should_step: bool = True
    reason: str | None = None
    bad_examples: tuple[int, ...] = ()


@dataclass
class Judge:
    """Applies `on_bad_batch` and counts skips in a row.

    Args:
        on_bad_batch: What to do with a batch that has no label or a non-finite loss.
        max_skipped: How many in a row are too many.
        skipped_in_a_row: How many there have been; part of the accumulator's state.
    """

    on_bad_batch: OnBadBatch
    max_skipped: int
    skipped_in_a_row: int = 0
    _unread: torch.Tensor | None = None

    def good(self) -> Verdict:
        """A batch with labels and a finite loss."""
        self.skipped_in_a_row = 0
        return Verdict()

    def unlabelled(self, num_examples: int) -> Verdict:
        """A batch that holds nothing that the loss is a mean over."""
        reason = f"none of the {num_examples} examples has a label (the count is 0)"
        if self.on_bad_batch == "raise":
            raise NoLabelsError(f"{reason}; .grad is as it was before the call")
        return self._skip(reason, tuple(range(num_examples)))

    def not_finite(self, losses: Sequence[float], examples: tuple[int, ...]) -> Verdict:
        """A batch in which some micro-batches' losses are inf or nan."""
        shown = ", ".join(f"{loss:g}" for loss in losses[:3])
        reason = f"the loss is not finite ({shown}); it comes from the examples at positions {_some(examples)}"
        if self.on_bad_batch == "raise":
            raise NonFiniteLossError(f"{reason}; .grad is as it was before the call")
        return self._skip(reason, examples)

    def _skip(self, reason: str, examples: tuple[int, ...]) -> Verdict:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.max_skipped:
            raise TooManySkippedBatchesError(
                f"{self.skipped_in_a_row} batches in a row were skipped (max_skipped_batches={self.max_skipped}); "
                f"the last because {reason}. Look at the learning rate, the data at these positions, or fp16 overflow "
                "in the forward; .grad is as it was before the call."
            )
        return Verdict(False, reason, examples)

    def read_later(self, usable: torch.Tensor) -> Verdict:
        """Let a batch through unread (`on_bad_batch="ignore"`); `read_now` looks at it when the next one comes."""
        self._unread = usable
        return Verdict()

    def read_now(self) -> None:
        """Look at the flag of the batch before, which the device has computed in the meantime."""
        usable, self._unread = self._unread, None
        if usable is None:
            return
        if bool(usable):
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.max_skipped:
            raise TooManySkippedBatchesError(
                f"{self.skipped_in_a_row} batches in a row had a non-finite loss, or no label, and were let through "
                f'(on_bad_batch="ignore", max_skipped_batches={self.max_skipped}); the parameters are likely lost.'
            )
        warnings.warn(
            'the batch before this one had a non-finite loss, or no label, and was let through (on_bad_batch="ignore")',
            BadBatchWarning,
            stacklevel=4,
        )


def _some(examples: tuple[int, ...]) -> str:
    return f"{list(examples[:10])}" + (f" and {len(examples) - 10} more" if len(examples) > 10 else "")
