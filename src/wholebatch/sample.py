"""The few examples of a batch with which its loss is checked."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholebatch.batch.containers import leaves
from wholebatch.batch.layout import Piece
from wholebatch.cut import CollateFunction, CutBatch, Knife
from wholebatch.facts import BatchLayout
from wholebatch.loss.counting import as_numbers, label_counts

LOOKED_AT = 32
"""Examples among which those to check with are chosen."""


@dataclass(frozen=True)
class Sample:
    """A few examples: all together, in another order, and in unequal parts; on the host."""

    source: Any
    """What they were cut from."""

    layout: BatchLayout
    rows: Sequence[Sequence[int]]
    """The rows of `source` in each part."""

    collated: Sequence[Any] = ()
    """The union, the union in another order, and the parts, where each was collated by itself."""

    def _take(self, rows: Sequence[int]) -> Any:
        return Piece(self.source, self.layout).take(list(rows))

    @property
    def _all(self) -> list[int]:
        return [row for part in self.rows for row in part]

    @property
    def union(self) -> Any:
        """All of them."""
        return self.collated[0] if self.collated else self._take(self._all)

    @property
    def permuted(self) -> Any:
        """All of them in another order."""
        return self.collated[1] if self.collated else self._take(self._all[::-1])

    @property
    def parts(self) -> Sequence[Any]:
        """In unequal parts; a single one where the batch has a single example."""
        return self.collated[2:] if self.collated else [self._take(rows) for rows in self.rows]

    @property
    def first(self) -> Any:
        """One of them alone."""
        return self.parts[0] if len(self.rows[0]) == 1 else self._take(self.rows[0][:1])

    @property
    def sizes(self) -> Sequence[int]:
        """Examples in each part."""
        return [len(rows) for rows in self.rows]

    @property
    def num_examples(self) -> int:
        """Examples in all."""
        return sum(self.sizes)

    def suspects(self) -> Iterator[tuple[str, str]]:
        """Fields that are cut but might belong to the batch as a whole: path and shape. Vectors first."""
        cut = [field for field in Piece(self.source, self.layout).fields if field.role == "per example"]
        for field in sorted(cut, key=lambda field: field.what.count(",")):
            yield field.path, field.what

    def with_shared(self, path: str) -> "Sample":
        """The same examples if the field at `path` is given whole to each part."""
        layout = replace(self.layout, shared_fields=(*self.layout.shared_fields, path))
        return replace(self, layout=layout, collated=())


def choose(batch: Any, cut: CutBatch, knife: Knife) -> Sample:
    """Choose examples with labels, short ones for the memory's sake, of unequal count where there are such."""
    layout = knife.layout or BatchLayout()
    at_once = max(micro_batch.num_examples for micro_batch in cut.micro_batches)
    if knife.collate_fn is None:
        piece = max((m.piece for m in cut.micro_batches), key=lambda piece: piece.num_examples)
        rows = _unequal(_weights(piece, range(piece.num_examples), knife), at_once)
        return Sample(piece.take(range(piece.num_examples)), layout, rows)
    labelled = [micro_batch for micro_batch in cut.micro_batches if not micro_batch.unlabelled][:LOOKED_AT]
    weights = [weight for m in labelled for weight in _weights(m.piece, m.rows, knife, m.offset)]
    examples = [[batch[place] for place in part] for part in _unequal(weights, at_once)]
    return _collated(examples, layout, knife.collate_fn)


def _weights(piece: Piece, rows: range, knife: Knife, offset: int = 0) -> list[tuple[float, int]]:
    """For each row with something to count, how much, and the row's position."""
    looked_at = rows[:LOOKED_AT]
    alone = [piece.take(range(row, row + 1)) for row in looked_at]
    stated = as_numbers([knife.counter(one, 1) for one in alone])
    counts = [(label_counts(one) or [1])[0] for one in alone]
    found = [
        (float(count) if count else 0.0, offset + row)
        for row, count, known in zip(looked_at, counts, stated, strict=True)
        if not known or any(known.values())
    ]
    return [one for one in found if one[0]] or found or [(1.0, offset + rows[0])]


def _unequal(weights: Sequence[tuple[float, int]], at_once: int) -> list[list[int]]:
    """Positions in two parts whose weights tell counts apart: one against two, or one against one.

    Where all weigh the same they are far apart, since neighbours are often alike (routed to the same expert, say).
    """
    ordered = sorted(weights)
    if len(ordered) == 1:
        return [[ordered[0][1]]]
    if len(ordered) == 2 or at_once < 2:
        other = next((one for one in ordered[1:] if one[0] != ordered[0][0]), ordered[-1])
        return [[ordered[0][1]], [other[1]]]
    first, second, *rest = ordered
    other = next((one for one in rest if 2 * one[0] != first[0] + second[0]), rest[-1])
    return [[other[1]], [first[1], second[1]]]


def _collated(examples: list[list[Any]], layout: BatchLayout, collate_fn: CollateFunction) -> Sample:
    """Collate each part by itself, as training does; a random collator's result is cut instead, since it never makes
    the same twice.
    """
    collate = _spared(collate_fn)
    union = [example for part in examples for example in part]
    together, again = collate(list(union)), collate(list(union))
    places = iter(range(len(union)))
    rows = [[next(places) for _ in part] for part in examples]
    if not _equal(together, again):
        return Sample(together, layout, rows)
    return Sample(together, layout, rows, (together, collate(union[::-1]), *(collate(part) for part in examples)))


def _spared(collate_fn: CollateFunction) -> CollateFunction:
    """A copy of a collator that keeps state (its own generator), so that the check does not move it on."""
    try:
        return copy.deepcopy(collate_fn)
    except Exception:  # not everything can be copied, and then it is used as it is
        return collate_fn


def _equal(one: Any, other: Any) -> bool:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    return all(_same(a, b) for a, b in pairs)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and bool((a == b).all())
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return bool((a == b).all())
