"""A batch as the micro-batches of one step: put in order, collated, cut, and counted before the first of them runs."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from wholebatch.batch.containers import copied, tensors
from wholebatch.batch.flattened import FlatPiece, flattened
from wholebatch.batch.layout import BatchPieces, Piece
from wholebatch.batch.lengths import PaddedLengths, example_length, holds_tokens, padded_units, rounded_up
from wholebatch.batch.partition import equal_sizes
from wholebatch.batch.sizing import Sizing
from wholebatch.batch.trimming import Padding, Trims, masked_tokens, padding_of, trimmed
from wholebatch.errors import BatchLayoutError
from wholebatch.facts import BatchLayout
from wholebatch.loss.counting import ONLY, Counter, as_numbers
from wholebatch.undisturbed import same_random_state

SURPRISE = 1.25
"""A collator may make examples longer than expected by this before what it has made is split."""

CollateFunction = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one piece of a batch, on the host, with their counts."""

    piece: Piece | FlatPiece
    rows: Sequence[int]
    places: Sequence[int]
    """The position in the batch of each of the piece's rows."""

    start: int
    """How many examples of the batch come before it, in the order of the cut."""

    length: int
    """Padded tokens of each example as the cut was planned; 1 where lengths are not known."""

    tokens: int
    """Padded tokens in all."""

    counts: Mapping[str, float] = field(default_factory=dict)
    """By term; empty where the count comes with the loss."""

    padding: Padding | None = None
    """If given, columns that are padding in all rows are left out."""

    def data(self) -> Any:
        """The micro-batch that `loss_fn` gets, in the batch's containers: views where the rows are neighbours."""
        data = self.piece.take(self.rows)
        if self.padding is None:
            return data
        return trimmed(data, self.padding.columns(self.rows), self.padding.fields)

    @property
    def num_examples(self) -> int:
        """Examples in it."""
        return len(self.rows)

    @property
    def examples(self) -> Sequence[int]:
        """Their positions in the batch."""
        return [self.places[row] for row in self.rows]

    @property
    def unlabelled(self) -> bool:
        """Whether it is known to hold nothing that the loss is a mean over."""
        return bool(self.counts) and not any(self.counts.values())

    def parts(self, limit: int | None) -> "list[MicroBatch]":
        """In parts of at most `limit` examples, not counted: the micro-batch has turned out too large."""
        if limit is None or self.num_examples <= limit:
            return [self]
        sizes = equal_sizes(self.num_examples, limit)
        return [self._part(first, size) for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]

    def _part(self, first: int, size: int) -> "MicroBatch":
        tokens = self.tokens * size // self.num_examples
        rows = self.rows[first : first + size]
        return replace(self, rows=rows, start=self.start + first, tokens=tokens, counts={})


@dataclass(frozen=True)
class CutBatch:
    """The micro-batches of one step."""

    micro_batches: Sequence[MicroBatch]
    num_examples: int
    real_tokens: int | None = None
    """Tokens that are no padding; None where lengths are not known."""

    untried: Sequence[tuple[Piece, Padding]] = ()
    """What could be trimmed, but has never been checked."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples in each micro-batch."""
        return tuple(micro_batch.num_examples for micro_batch in self.micro_batches)

    @property
    def padded_tokens(self) -> int | None:
        """Tokens with padding; None where it is not known what a token is."""
        return None if self.real_tokens is None else sum(micro_batch.tokens for micro_batch in self.micro_batches)

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
    """Cuts batches: knows how examples are collated, where they lie, what is counted, and how long they are."""

    counter: Counter
    collate_fn: CollateFunction | None = None
    layout: BatchLayout | None = None
    multiple: int = 1
    """What the widths of trimmed micro-batches are rounded up to."""

    padded: PaddedLengths = field(default_factory=PaddedLengths)
    trims: Trims = field(default_factory=Trims)

    def cut(self, batch: Any, sizing: Sizing, in_order: bool = True) -> CutBatch:
        """Collate, cut and count all of `batch`; with `in_order`, its examples keep their order.

        Raises:
            BatchLayoutError: It cannot be cut safely.
            CountError: A count is impossible.
        """
        untried: list[tuple[Piece, Padding]] = []
        if self.collate_fn is not None:
            parts, real = self._collated(batch, self.collate_fn, sizing, in_order)
        else:
            parts, real = self._cut(batch, sizing, in_order, untried)
        counts = self._row_sums(parts) or self.counts(parts)
        counted = [replace(part, counts=one) for part, one in zip(parts, counts, strict=True)]
        return CutBatch(counted, sum(part.num_examples for part in parts), real, untried)

    def split(self, micro_batch: MicroBatch, limit: int | None) -> Iterator[MicroBatch]:
        """`micro_batch` in parts of at most `limit` examples. What was collated is never collated again."""
        for part in micro_batch.parts(limit):
            yield part if part is micro_batch else replace(part, counts=self.counts([part])[0])

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
        return [{ONLY: float(sum(rows[id(part.piece)][row] for row in part.rows))} for part in parts]

    # ---- Batches that are collated already ----

    def _cut(
        self, batch: Any, sizing: Sizing, in_order: bool, untried: list[tuple[Piece, Padding]]
    ) -> tuple[list[MicroBatch], int | None]:
        pieces = [Piece(part, self.layout) for part in (batch if isinstance(batch, BatchPieces) else [batch])]
        offsets = accumulate((piece.num_examples for piece in pieces), initial=0)
        parts: list[MicroBatch] = []
        real: int | None = 0
        for piece, offset in zip(pieces, offsets, strict=False):
            padding = None if in_order else self._padding(piece, untried)
            parts += self._parts(piece, offset, sizing, padding)
            tokens = padding.tokens if padding else masked_tokens(piece.whole)
            real = None if real is None or tokens is None else real + tokens
        return parts, real

    def _padding(self, piece: Piece, untried: list[tuple[Piece, Padding]]) -> Padding | None:
        """The padding that may be left out; what is not known to be safe is noted in `untried`."""
        padding = padding_of(piece, self.multiple) if self.layout is None else None
        if padding is None or padding.kind in self.trims.refused:
            return None
        if padding.kind in self.trims.allowed:
            return padding
        untried.append((piece, padding))
        return None

    def _parts(self, piece: Piece, offset: int, sizing: Sizing, padding: Padding | None) -> list[MicroBatch]:
        n = piece.num_examples
        unit = padded_units(piece.take(range(1)))
        lengths = [unit] * n if padding is None else padding.lengths
        order = by_length(lengths)
        parts, start, places = [], 0, range(offset, offset + n)
        for size in sizing.plan([lengths[row] for row in order]):
            rows = order[start : start + size]
            width = unit if padding is None else len(range(padding.width)[padding.columns(rows)])
            parts.append(
                MicroBatch(piece, rows, places, offset + start, lengths[rows[0]], size * width, padding=padding)
            )
            start += size
        return parts

    # ---- Batches that are lists of examples ----

    def _collated(
        self, batch: Any, collate_fn: CollateFunction, sizing: Sizing, in_order: bool
    ) -> tuple[list[MicroBatch], int | None]:
        if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)):
            raise BatchLayoutError(
                f"with collate_fn a batch is a list of examples, but it is a {type(batch).__name__}. "
                "Let the loader yield lists: DataLoader(dataset, batch_size=..., collate_fn=list), or "
                "wb.whole_batches(dataset, ..., loader_yields='examples'); "
                "or leave collate_fn out for batches that are collated already."
            )
        if not batch:
            raise BatchLayoutError("the batch is an empty list: there is no example to learn from")
        own = [example_length(example) for example in batch]
        if not self.padded.known:
            self._learn(batch, own, collate_fn)
        lengths = [rounded_up(length, self.multiple) for length in self.padded.of(own)]
        if in_order:
            lengths = [max(lengths)] * len(batch)
        order, parts, start = by_length(lengths), [], 0
        real: int | None = 0
        for size in sizing.plan([lengths[place] for place in order]):
            places = order[start : start + size]
            piece = self._piece(collate_fn, [batch[place] for place in places], places)
            tokens, longest = padded_units(piece.whole), max(own[place] for place in places)
            if isinstance(piece, Piece):
                self.padded.learn(longest, -(-tokens // size))
            part = MicroBatch(piece, range(size), places, start, max(1, tokens // size), tokens)
            surprised = part.length > SURPRISE * lengths[places[0]]
            parts += part.parts(sizing.limit(part.length)) if surprised else [part]
            real = _plus(real, piece, [own[place] for place in places] if holds_tokens(batch[places[0]]) else None)
            start += size
        return parts, real

    def _piece(self, collate_fn: CollateFunction, examples: list[Any], places: Sequence[int]) -> Piece | FlatPiece:
        collated = collate_fn(examples)
        if (flat := flattened(collated, len(examples))) is not None:
            return flat
        piece = Piece(collated, self.layout)
        if piece.num_examples != len(examples):
            shown = ", ".join(map(str, places[:8])) + ", ..." * (len(places) > 8)
            raise BatchLayoutError(
                f"collate_fn made {piece.num_examples} rows of the {len(examples)} examples at the positions {shown}. "
                "It must keep one row for each example, so that counts and errors can be traced to them."
            )
        return piece

    def _learn(self, batch: Sequence[Any], own: Sequence[int], collate_fn: CollateFunction) -> None:
        """See what the collator makes of a short, a middling and a long example, each alone; nothing is moved on."""
        order = sorted(range(len(batch)), key=own.__getitem__)
        places = sorted({order[0], order[len(order) // 2], order[-1]}, key=own.__getitem__)
        with same_random_state(torch.device("cpu")), suppress(Exception):  # some take no single example
            collate = spared(collate_fn)
            for place in places:
                self.padded.learn_first(own[place], padded_units(collate([copied(batch[place])])))


def by_length(lengths: Sequence[int]) -> Sequence[int]:
    """The positions of `lengths` from the longest on, those of one length in order; a range if that is all of them."""
    if all(length == lengths[0] for length in lengths):
        return range(len(lengths))
    return sorted(range(len(lengths)), key=lambda place: -lengths[place])


def _plus(real: int | None, piece: Piece | FlatPiece, own: Sequence[int] | None) -> int | None:
    """`real` and the tokens of a piece that are no padding: by its attention mask, else by its examples' lengths."""
    if real is None:
        return None
    if (masked := masked_tokens(piece.whole)) is not None:
        return real + masked
    if own is None:
        return None
    if isinstance(piece, FlatPiece):
        return real + padded_units(piece.whole)
    width = padded_units(piece.whole) // piece.num_examples
    return real + sum(min(length, width) for length in own)


def spared(collate_fn: CollateFunction) -> CollateFunction:
    """A copy of a collator that keeps state (its own generator), so that a check does not move it on."""
    try:
        return copy.deepcopy(collate_fn)
    except Exception:  # noqa: BLE001  not everything can be copied, and then it is used as it is
        return collate_fn
