"""How long examples are: before they are collated, and what a collator makes of that.

A length is the number of tokens of an example where it holds token ids, and the number of characters where it holds
text that the collator tokenises. What counts for memory and time is the padded length of a micro-batch, which may be
another: collators add tokens, truncate, tokenise, or pad to a fixed length. `PaddedLengths` learns that.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholebatch.batch.containers import leaves, tensors

MOST_ANCHORS = 64
"""Pairs of lengths that are remembered; more are not needed to tell what a collator does."""


def example_length(example: Any) -> int:
    """Length of an example before collation: of its longest field of one dimension, else of its longest text; or 1."""
    fields = list(leaves(example))
    lengths = [len(f) for f in fields if isinstance(f, (torch.Tensor, list)) and getattr(f, "ndim", 1) == 1]
    return max(lengths, default=0) or max((len(f) for f in fields if isinstance(f, str)), default=0) or 1


def holds_tokens(example: Any) -> bool:
    """Whether `example_length` counts tokens of it."""
    return any(isinstance(f, (torch.Tensor, list)) and getattr(f, "ndim", 1) == 1 for f in leaves(example))


def padded_units(batch: Any) -> int:
    """Padded tokens in a collated batch: elements of its largest integer tensor `(examples, length)`, or rows."""
    shapes = [tensor.shape for tensor in tensors(batch) if tensor.ndim >= 1]
    tokens = [t.numel() for t in tensors(batch) if t.ndim == 2 and not t.is_floating_point()]
    return max(tokens or [shape[0] for shape in shapes], default=1)


def rounded_up(length: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-length // multiple) * multiple


class PaddedLengths:
    """The padded length that a collator makes of the longest example given to it, learned from what it has made.

    Between the lengths seen it is interpolated; beyond them it goes on as between the last two, and by itself one
    token is one token.
    """

    def __init__(self) -> None:
        self._anchors: list[tuple[int, int]] = []

    @property
    def known(self) -> bool:
        """Whether anything has been learned."""
        return bool(self._anchors)

    def learn_first(self, length: int, padded: int) -> None:
        """The same, before anything else: it is remembered even where it is as expected."""
        if all(known != length for known, _ in self._anchors):
            insort(self._anchors, (length, padded))

    def learn(self, length: int, padded: int) -> None:
        """A collator has made `padded` tokens of examples of at most `length`."""
        place = bisect_left(self._anchors, (length, 0))
        if place < len(self._anchors) and self._anchors[place][0] == length:
            self._anchors[place] = (length, max(padded, self._anchors[place][1]))
        elif self(length) != padded and len(self._anchors) < MOST_ANCHORS:
            insort(self._anchors, (length, padded))

    def __call__(self, length: int) -> int:
        """The padded length to expect for examples of at most `length`."""
        if not self._anchors:
            return length
        place = bisect_left(self._anchors, (length, 0))
        if place < len(self._anchors) and self._anchors[place][0] == length:
            return self._anchors[place][1]
        if len(self._anchors) == 1:
            [(known, padded)] = self._anchors
            return max(1, padded + length - known)
        low, high = self._anchors[max(0, min(place - 1, len(self._anchors) - 2)) :][:2]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(1, round(low[1] + slope * (length - low[0])))

    def of(self, lengths: Sequence[int]) -> list[int]:
        """The same for each of `lengths`; it never shrinks as the length grows."""
        expected: Mapping[int, int] = self._growing(sorted(set(lengths)))
        return [expected[length] for length in lengths]

    def _growing(self, lengths: Sequence[int]) -> dict[int, int]:
        expected, longest = {}, 1
        for length in lengths:
            longest = max(longest, self(length))
            expected[length] = longest
        return expected

    def state_dict(self) -> list[list[int]]:
        """What was learned."""
        return [list(anchor) for anchor in self._anchors]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        """Take over what an earlier run learned."""
        self._anchors = [(int(length), int(padded)) for length, padded in state]
