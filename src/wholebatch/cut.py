"""A batch as the micro-batches of one step: collated, cut, and counted before the first of them runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from wholebatch.batch.containers import leaves, tensors
from wholebatch.batch.layout import BatchPieces, Piece
from wholebatch.batch.sizing import Sizing
from wholebatch.errors import BatchLayoutError
from wholebatch.facts import BatchLayout
from wholebatch.loss.counting import ONLY, Counter, as_numbers

CollateFunction = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one piece of a batch, on the host, with their counts."""

    piece: Piece
    rows: range
    offset: int
    """The position in the batch of the piece's first row."""

    counts: Mapping[str, float]
    """By term; empty where the count comes with the loss."""

    def data(self) -> Any:
        """The micro-batch that `loss_fn` gets: views of the batch, in the same containers."""
        return self.piece.take(self.rows)

    @property
    def num_examples(self) -> int:
        """Examples in it."""
        return len(self.rows)

    @property
    def examples(self) -> range:
        """Their positions in the batch."""
        return range(self.offset + self.rows.start, self.offset + self.rows.stop)

    @property
    def unlabelled(self) -> bool:
        """Whether it is known to hold nothing that the loss is a mean over."""
        return bool(self.counts) and not any(self.counts.values())


@dataclass(frozen=True)
class CutBatch:
    """The micro-batches of one step."""

    micro_batches: Sequence[MicroBatch]
    num_examples: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples in each micro-batch."""
        return tuple(micro_batch.num_examples for micro_batch in self.micro_batches)

    @property
    def counts(self) -> dict[str, float]:
        """The batch's count of each term; empty where the counts come with the loss."""
        first = self.micro_batches[0].counts
        return {term: sum(micro_batch.counts[term] for micro_batch in self.micro_batches) for term in first}

    def lies_on(self, device: torch.device) -> bool:
        """Whether all of it is on `device`, so that nothing has to be moved."""
        pieces = {id(micro_batch.piece): micro_batch.piece for micro_batch in self.micro_batches}.values()
        return all(tensor.device == device for piece in pieces for tensor in tensors(piece.whole))

    @property
    def unlabelled(self) -> bool:
        """Whether the batch is known to hold nothing that the loss is a mean over."""
        return all(micro_batch.unlabelled for micro_batch in self.micro_batches)


@dataclass(frozen=True)
class Knife:
    """Cuts batches: knows how examples are collated, where they lie, and what is counted."""

    counter: Counter
    collate_fn: CollateFunction | None = None
    layout: BatchLayout | None = None

    def cut(self, batch: Any, sizing: Sizing) -> CutBatch:
        """Collate, cut and count all of `batch`.

        Raises:
            BatchLayoutError: It cannot be cut safely.
            CountError: A count is impossible.
        """
        pieces = self.pieces(batch, sizing)
        parts = [part for piece, offset in pieces for part in self._parts(piece, offset, sizing)]
        counts = self._row_sums(parts) or self.counts(parts)
        counted = [MicroBatch(p.piece, p.rows, p.offset, c) for p, c in zip(parts, counts, strict=True)]
        return CutBatch(counted, sum(piece.num_examples for piece, _ in pieces))

    def split(self, micro_batch: MicroBatch, limit: int | None) -> Iterator[MicroBatch]:
        """`micro_batch` in parts of at most `limit` examples. What was collated is never collated again."""
        if limit is None or micro_batch.num_examples <= limit:
            yield micro_batch
            return
        start = micro_batch.rows.start
        for first in range(start, micro_batch.rows.stop, limit):
            rows = range(first, min(first + limit, micro_batch.rows.stop))
            part = MicroBatch(micro_batch.piece, rows, micro_batch.offset, {})
            yield MicroBatch(part.piece, rows, part.offset, self.counts([part])[0])

    def counts(self, parts: Sequence[MicroBatch]) -> list[dict[str, float]]:
        """The counts of `parts`, by term, on the host."""
        needs_data = self.counter.needs_data
        return as_numbers([self.counter(part.data() if needs_data else None, part.num_examples) for part in parts])

    def _row_sums(self, parts: Sequence[MicroBatch]) -> list[dict[str, float]] | None:
        """The counts of `parts` where the rows can be counted by themselves: each piece is looked at once, as a whole.

        None elsewhere: a function of the user's sees micro-batches, and a layout may put labels anywhere.
        """
        if self.layout is not None or len(parts) == 1:
            return None
        rows: dict[int, Sequence[float]] = {}
        for piece in {id(part.piece): part.piece for part in parts}.values():
            counted = self.counter.by_row(piece.whole, piece.num_examples)
            if counted is None:
                return None
            rows[id(piece)] = counted
        return [{ONLY: float(sum(rows[id(part.piece)][part.rows.start : part.rows.stop]))} for part in parts]

    def pieces(self, batch: Any, sizing: Sizing) -> list[tuple[Piece, int]]:
        """The parts of `batch` that are padded together, each with the position of its first example."""
        if self.collate_fn is not None:
            pieces = self._collated(batch, self.collate_fn, sizing)
        else:
            parts = batch if isinstance(batch, BatchPieces) else [batch]
            pieces = [Piece(part, self.layout) for part in parts]
        offsets = accumulate((piece.num_examples for piece in pieces), initial=0)
        return list(zip(pieces, offsets, strict=False))

    def _collated(self, batch: Any, collate_fn: CollateFunction, sizing: Sizing) -> list[Piece]:
        if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)):
            raise BatchLayoutError(
                f"with collate_fn a batch is a list of examples, but it is a {type(batch).__name__}. "
                "Let the loader yield lists: DataLoader(dataset, batch_size=..., collate_fn=list), or "
                "wb.whole_batches(dataset, ..., loader_yields='examples'); "
                "or leave collate_fn out for batches that are collated already."
            )
        if not batch:
            raise BatchLayoutError("the batch is an empty list: there is no example to learn from")
        pieces, start = [], 0
        for size in sizing.plan(len(batch), lambda: max(map(_example_units, batch))):
            piece = Piece(collate_fn(list(batch[start : start + size])), self.layout)
            if piece.num_examples != size:
                raise BatchLayoutError(
                    f"collate_fn made {piece.num_examples} rows of the {size} examples from position {start} on. "
                    "It must keep one row for each example, so that counts and errors can be traced to them."
                )
            pieces.append(piece)
            start += size
        return pieces

    def _parts(self, piece: Piece, offset: int, sizing: Sizing) -> list[MicroBatch]:
        if self.collate_fn is not None:  # collated in the right size
            return [MicroBatch(piece, range(piece.num_examples), offset, {})]
        parts, start = [], 0
        for size in sizing.plan(piece.num_examples, lambda: padded_units(piece.take(range(1)))):
            parts.append(MicroBatch(piece, range(start, start + size), offset, {}))
            start += size
        return parts


def padded_units(batch: Any) -> int:
    """Padded tokens in a collated batch: elements of its largest integer tensor `(examples, length)`, or rows."""
    shapes = [tensor.shape for tensor in tensors(batch) if tensor.ndim >= 1]
    tokens = [t.numel() for t in tensors(batch) if t.ndim == 2 and not t.is_floating_point()]
    return max(tokens or [shape[0] for shape in shapes], default=1)


def _example_units(example: Any) -> int:
    """Length of an example before collation: that of its longest one-dimensional field, or 1."""
    one_dimensional = (torch.Tensor, list)
    lengths = [len(f) for f in leaves(example) if isinstance(f, one_dimensional) and getattr(f, "ndim", 1) == 1]
    return max(lengths, default=1)
