"""The few examples of a batch with which its loss is checked."""

import itertools
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from wholebatch.batch.containers import copied, leaves, map_tensors
from wholebatch.batch.flattened import FlatPiece
from wholebatch.batch.joining import join
from wholebatch.batch.layout import Piece
from wholebatch.batch.trimming import Padding, trimmed
from wholebatch.candidates import CLASSES, OF_LABELS, candidates
from wholebatch.cut import CollateFunction, CutBatch, Knife, spared
from wholebatch.facts import IGNORED_LABEL, BatchLayout
from wholebatch.loss.counting import as_numbers
from wholebatch.undisturbed import drawn_so_far

T = TypeVar("T")

LOOKED_AT = 32
"""Examples among which those to check with are chosen."""

MOST_EXAMPLES = 3
"""Examples of a check, which holds them all at once: one more than a micro-batch of two. With micro-batches of one they
are two, again one more."""

_COMPARED, _COLLATED, _ENOUGH = 6, 8, 0.05


@dataclass(frozen=True)
class Sample:
    """A few examples: all together, and in unequal parts; on the host."""

    source: Any
    """What they were cut from."""

    layout: BatchLayout
    rows: Sequence[Sequence[int]]
    """The rows of `source` in each part."""

    apart: bool = False
    """Whether the parts cannot be put together: `source` is then a list of them, and there is no union."""

    collated: Sequence[Any] = ()
    """All together, and the parts, where each was collated, or trimmed, by itself."""

    def _take(self, rows: Sequence[int]) -> Any:
        return Piece(self.source, self.layout).take(list(rows))

    @property
    def union(self) -> Any:
        """All of them."""
        return self.collated[0] if self.collated else self._take([row for part in self.rows for row in part])

    @property
    def parts(self) -> Sequence[Any]:
        """In parts; a single one where there is a single example."""
        return self.collated[1:] if self.collated else [self._take(rows) for rows in self.rows]

    @property
    def sizes(self) -> Sequence[int]:
        """Examples in each part."""
        return [len(rows) for rows in self.rows]

    @property
    def num_examples(self) -> int:
        """Examples in all."""
        return sum(self.sizes)

    def other_layouts(self) -> Iterator[tuple[str, str, str, "Sample"]]:
        """The same examples under other layouts, each with one field read in another way; vectors first.

        Yields the field's path and shape, what to tell the layout, and the examples.
        """
        fields = [field for field in Piece(self.source, self.layout).fields if field.role == "per example"]
        stated = {*self.layout.batch_dims, *self.layout.select}
        for field in sorted(fields, key=lambda field: field.what.count(",")):
            if field.path in stated:
                continue
            shared = replace(self.layout, shared_fields=(*self.layout.shared_fields, field.path))
            yield field.path, field.what, f"shared_fields=({field.path!r},)", replace(self, layout=shared, collated=())
            dims = replace(self.layout, batch_dims={**self.layout.batch_dims, field.path: 1})
            yield field.path, field.what, f"batch_dims={{{field.path!r}: 1}}", replace(self, layout=dims, collated=())


@dataclass(frozen=True)
class _Row:
    """One example that could be checked with."""

    place: int
    counts: Mapping[str, float]
    """By the name of a candidate."""

    stated: Sequence[float]
    """What the stated count finds in it, for each term; empty where the count comes with the loss."""

    def figures(self) -> tuple[float, ...]:
        """All counts."""
        return (*self.counts.values(), *self.stated)


def choose(
    batch: Any, cut: CutBatch, knife: Knife, shifted: bool, most: int = MOST_EXAMPLES, alike: bool = False
) -> Sample:
    """Choose examples in two parts, one and two of them, whose shares differ most from one way of counting to another.

    Args:
        batch: The whole batch.
        cut: The same, cut.
        knife: Which collates and counts.
        shifted: As for `candidates`.
        most: At most so many examples.
        alike: Choose two of one class instead, since a loss may compare only those with each other.
    """
    layout = knife.layout or BatchLayout()
    if max(micro_batch.num_examples for micro_batch in cut.micro_batches) == 1:
        most = 2
    if knife.collate_fn is not None:
        return _collated(batch, cut, knife, knife.collate_fn, shifted, partial(_parts, most=most, alike=alike))
    piece, source = _largest(cut)
    if piece.num_examples == 1 < len(cut.micro_batches):
        return _apart(cut, knife, shifted)
    places = range(0, piece.num_examples, -(-piece.num_examples // LOOKED_AT))
    return Sample(source, layout, _parts(_rows(piece, places, places, knife, shifted), most, alike))


def _largest(cut: CutBatch) -> tuple[Piece, Any]:
    """The piece with the most examples; where each has a single one, two that fit together are put into one."""
    pieces = [p for p in {id(m.piece): m.piece for m in cut.micro_batches}.values() if isinstance(p, Piece)]
    data = [piece.take(range(piece.num_examples)) for piece in pieces[:LOOKED_AT]]
    largest = max(pieces, key=lambda piece: piece.num_examples)
    if largest.num_examples == 1:
        for one, other in itertools.combinations(range(len(data)), 2):
            together = join([pieces[one], pieces[other]], [data[one], data[other]])
            if together is not None:
                return Piece(together), together
    return largest, largest.take(range(largest.num_examples))


def _apart(cut: CutBatch, knife: Knife, shifted: bool) -> Sample:
    """Two examples that cannot be put together, as they were padded apart."""
    first = cut.micro_batches[:LOOKED_AT]
    rows = [row for i, m in enumerate(first) for row in _rows(m.piece, m.rows[:1], [i], knife, shifted)]
    chosen = [place for part in _parts(rows, 2, alike=False) for place in part]
    parts = [first[place].data() for place in chosen]
    return Sample(parts, knife.layout or BatchLayout(), [[0]] * len(parts), apart=True, collated=(None, *parts))


def trimmed_sample(piece: Piece, padding: Padding, most: int, knife: Knife, shifted: bool) -> Sample | None:
    """The shortest examples of a padded batch, all together as they are, and in parts with their padding left out.

    None where there are no two with anything to learn from, the shorter of them shorter than the batch.
    """
    lengths = padding.lengths
    places = sorted(range(piece.num_examples), key=lengths.__getitem__)[:LOOKED_AT]
    found = [row.place for row in _rows(piece, places, places, knife, shifted) if any(row.stated) or not row.stated]
    if len(found) < 2 or lengths[found[0]] == padding.width:
        return None
    others = sorted(found[1:], key=lambda place: lengths[place] == lengths[found[0]])[: most - 1]
    parts = [[found[0]], others]
    cut = [trimmed(piece.take(part), padding.columns(part), padding.fields) for part in parts]
    together = piece.take([place for part in parts for place in part])
    return Sample(piece.whole, knife.layout or BatchLayout(), parts, collated=(together, *cut))


def _rows(
    piece: Piece | FlatPiece, rows: Sequence[int], places: Sequence[int], knife: Knife, shifted: bool
) -> list[_Row]:
    """These rows of `piece`, each under the name that it has in `places`."""
    counted = candidates(piece.take(list(rows)), len(rows), shifted)
    stated = as_numbers([knife.counter(piece.take(range(row, row + 1)), 1) for row in rows])
    found = []
    for i, (place, own) in enumerate(zip(places, stated, strict=True)):
        counts = {name: candidate.rows[i] for name, candidate in counted.items()}
        found.append(_Row(place, counts, tuple(own.values())))
    return found


def _parts(rows: Sequence[_Row], most: int, alike: bool) -> list[list[int]]:
    """The places of the best parts; a single part where there are no two as wanted with anything to learn from."""
    rank, few = _ranked(rows), _different(rows)
    pairs = list(itertools.combinations(few, 2))
    if len(few) == 2 or most == 2:
        choices = [[[one], [other]] for one, other in pairs]
    else:
        choices = [[[one], list(pair)] for one in few for pair in pairs if one not in pair]
    if alike:
        choices = [parts for parts in choices if CLASSES in few[0].counts and _share_a_class(parts)]
    best = max(choices, key=rank, default=[])
    if not best or rank(best)[0] < 0:
        best = [[max(rows, key=lambda row: sum(row.stated))]]
    return [[row.place for row in part] for part in best]


def _share_a_class(parts: Sequence[Sequence[_Row]]) -> bool:
    first, *others = (row.counts.get(CLASSES) for part in parts for row in part)
    return first in others


def _different(rows: Sequence[_Row]) -> list[_Row]:
    """A few rows from the lowest counts to the highest, each only once, and some more that are like one of them."""
    ordered = sorted(rows, key=_Row.figures)
    unlike = _spread(list({row.figures(): row for row in reversed(ordered)}.values())[::-1], _COMPARED)
    return unlike + _spread([row for row in ordered if row not in unlike], MOST_EXAMPLES)


def _spread(rows: Sequence[T], number: int) -> list[T]:
    """At most `number` of them, from the first to the last."""
    last = len(rows) - 1
    return [rows[round(i * last / (number - 1))] for i in range(number)] if last >= number else list(rows)


def _ranked(rows: Sequence[_Row]) -> Callable[[list[list[_Row]]], tuple[float, ...]]:
    """How well parts tell the candidates apart.

    First, no part of them without any unit of what is stated; then few without any label; then two of one class, but
    not all; then shares far from each other; and where all are alike, examples far from each other, since neighbours
    are alike in other things.
    """
    names, stated = set.intersection(*(set(row.counts) for row in rows)), any(row.stated for row in rows)

    def rank(parts: list[list[_Row]]) -> tuple[float, ...]:
        empty = [part for part in parts if stated and not any(any(row.stated) for row in part)]
        sums = {name: [sum(row.counts[name] for row in part) for part in parts] for name in names}
        shares = [one / (one + other) for one, other in sums.values() if one + other]
        apart = [abs(one - other) for one, other in itertools.combinations(shares, 2)]
        classes = {row.counts.get(CLASSES) for part in parts for row in part}
        places = [row.place for part in parts for row in part]
        return (
            -len(empty),
            -sum(1 for name in OF_LABELS for number in sums.get(name, ()) if not number),
            len(places) > 2 and len(classes) > 1 and _share_a_class(parts),
            sum(min(distance, _ENOUGH) for distance in apart),
            sum(apart),
            min(abs(one - other) for one, other in itertools.combinations(places, 2)),
        )

    return rank


def _collated(
    batch: Sequence[Any],
    cut: CutBatch,
    knife: Knife,
    collate_fn: CollateFunction,
    shifted: bool,
    parts_of: Callable[[Sequence[_Row]], list[list[int]]],
) -> Sample:
    """Collate each part by itself, as training does.

    What a random collator has made is cut and trimmed instead, since it never makes the same twice.
    """
    layout, collate = knife.layout or BatchLayout(), _again(spared(collate_fn))
    rows: list[_Row] = []
    labelled = [micro_batch for micro_batch in cut.micro_batches if not micro_batch.unlabelled]
    for micro_batch in _spread(labelled, LOOKED_AT):  # long and short ones
        few = micro_batch.rows[: -(-LOOKED_AT // len(labelled))]
        rows += _rows(micro_batch.piece, few, [micro_batch.places[row] for row in few], knife, shifted)
    several = [batch[row.place] for row in _spread(rows, _COLLATED)]
    whole = _made_at_random(collate, several)
    if whole is None:
        examples = [[batch[place] for place in part] for part in parts_of(rows)]
        numbers = iter(range(sum(map(len, examples))))
        together = collate([example for part in examples for example in part])
        parts = [collate(part) for part in examples]
        return Sample(
            together, layout, [[next(numbers) for _ in part] for part in examples], collated=(together, *parts)
        )
    piece = Piece(whole, layout)
    places = range(piece.num_examples)
    cut_only = Sample(whole, layout, parts_of(_rows(piece, places, places, knife, shifted)))
    return replace(cut_only, collated=tuple(_trimmed([cut_only.union, *cut_only.parts], whole)))


class CannotCollateAgainError(Exception):
    """A collator takes something off its examples, so that they cannot be collated a second time."""


def _again(collate_fn: CollateFunction) -> CollateFunction:
    """The same for copies of examples that have been collated before."""

    def collate(examples: list[Any]) -> Any:
        try:
            return collate_fn([copied(example) for example in examples])
        except Exception as error:
            raise CannotCollateAgainError(f"{type(error).__name__}: {error}") from error

    return collate


def _made_at_random(collate: CollateFunction, examples: list[Any]) -> Any:
    """What a collator makes of the examples if it never makes the same twice, or draws random numbers; else None."""
    before = drawn_so_far()
    whole, again = (collate(examples) for _ in range(2))
    return None if drawn_so_far() == before and _equal(whole, again) else whole


def _trimmed(parts: Sequence[Any], whole: Any) -> list[Any]:
    """Each part of what was collated without the columns that hold padding in all its rows: as if padded by itself."""
    for from_right in (True, False):
        if (padding := _padding(whole, from_right)) is not None:
            return [_without_padding(part, padding, from_right) for part in parts]
    return list(parts)


def _padding(whole: Any, from_right: bool) -> list[float] | None:
    """What each padded field holds in padding, taken from the row that ends in the longest run of one value.

    None if no row is padded on this side, or if it is not plain what would have to be trimmed.
    """
    fields = [field if from_right else field.flip(1) for field in _padded_fields(whole)]
    shortest = [min(of_row) for of_row in zip(*map(_runs, fields), strict=True)]
    if len(set(shortest)) < 2:
        return None
    row = shortest.index(max(shortest))
    padding = [field[row, -1].item() for field in fields]
    return padding if all(map(_may_be_padding, fields, padding)) else None


def _may_be_padding(field: torch.Tensor, value: float) -> bool:
    """A mask is 0 there, and labels are left out."""
    if bool((field == IGNORED_LABEL).any()):
        return value == IGNORED_LABEL
    return value == 0 if bool(((field == 0) | (field == 1)).all()) else True


def _padded_fields(batch: Any) -> list[torch.Tensor]:
    """The `(examples, length)` fields; none if another field has that length in another place."""
    found = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2]
    widths = Tally(field.shape[1] for field in found if field.ndim == 2 and not field.is_floating_point())
    if not widths:
        return []
    width = widths.most_common(1)[0][0]
    padded = [field for field in found if width in field.shape[1:]]
    return padded if all(field.ndim == 2 for field in padded) else []


def _runs(field: torch.Tensor) -> list[int]:
    """For each row, how many equal values it ends in."""
    same = (field == field[:, -1:]).flip(1).long()
    return [int(number) for number in same.cumprod(dim=1).sum(dim=1).tolist()]


def _without_padding(part: Any, padding: Sequence[float], from_right: bool) -> Any:
    fields = _padded_fields(part)
    real = torch.stack([(field != value).any(dim=0) for field, value in zip(fields, padding, strict=True)]).any(dim=0)
    columns = real.nonzero().flatten().tolist() or [0]
    kept = slice(0, columns[-1] + 1) if from_right else slice(columns[0], None)
    return map_tensors(lambda tensor: tensor[:, kept] if any(tensor is field for field in fields) else tensor, part)


def _equal(one: Any, other: Any) -> bool:
    ones, others = list(leaves(one)), list(leaves(other))
    return len(ones) == len(others) and all(map(_same, ones, others))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and bool((a == b).all())
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return bool((a == b).all())
