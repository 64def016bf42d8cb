"""How long examples are: before they are collated, and what a collator makes of that.

A length is the number of tokens of an example where it holds token ids, and the number of characters where it holds
text that the collator tokenises. What counts for memory and time is the padded length of a micro-batch, which may be
another: collators add tokens, truncate, tokenise, or pad to a fixed length. `PaddedLengths` learns that.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholebatch.batch.containers import is_array, leaves, tensors

_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)

MOST_ANCHORS = 64
"""Pairs of lengths that are remembered; more are not needed to tell what a collator does."""


def example_length(example: Any) -> int:
    """Length of an example before collation; 1 if it has none.

    That of `input_ids` if it has them, else of its longest row of whole numbers, else of its longest row, or text.
    """
    rows = _rows(example)
    return max((len(row) for row in rows), default=0) or 1


def holds_tokens(example: Any) -> bool:
    """Whether `example_length` counts tokens of it."""
    return any(not isinstance(row, str) for row in _rows(example))


def _rows(example: Any) -> list[Any]:
    """What the length of an example is the length of: the longest of these."""
    if isinstance(example, Mapping) and _is_row(ids := example.get("input_ids")):
        return [ids]
    fields = list(leaves(example))
    rows = [field for field in fields if _is_row(field)]
    return [row for row in rows if _of_whole_numbers(row)] or rows or [f for f in fields if isinstance(f, str)]


def _is_row(field: Any) -> bool:
    return field.ndim == 1 if is_array(field) else isinstance(field, (list, tuple)) and len(field) > 0


def _of_whole_numbers(row: Any) -> bool:
    if isinstance(row, torch.Tensor):
        return not row.is_floating_point() and not row.is_complex()
    return row.dtype.kind in "iu" if is_array(row) else isinstance(row[0], int)


def padded_units(batch: Any) -> int:
    """Padded tokens in a collated batch; its rows where it holds no tokens.

    Elements of its largest tensor of whole numbers `(examples, length)`, or `(examples, choices, length)`.
    """
    shapes = [tensor.shape for tensor in tensors(batch) if tensor.ndim >= 1]
    tokens = [t.numel() for t in tensors(batch) if t.ndim in (2, 3) and t.dtype in _WHOLE_NUMBERS]
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
