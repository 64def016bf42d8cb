"""A batch that can be cut by rows, whatever its containers are.

What is cut, B being the number of examples that the fields agree on (`examples.py`):

* Tensors and numpy arrays: along dimension 0, or the dimension that the layout states. Those of no dimensions, and
  those of leading dimension 1 in a batch of more examples, are *shared*: every micro-batch gets them whole.
* Nested tensors, jagged and strided, and sparse COO tensors: by rows, in the same layout.
* Lists of length B of anything that is not a tensor of B rows (text, numbers, dicts, ragged lists, tensors of other
  lengths): one item per example. Tuples of B strings too.
* Lists of tensors that all have B rows: a container, cut inside.
* Mappings, tuples, named tuples, lists as above and dataclass instances: containers, cut inside, type kept. The
  `encodings` of a tokenizer's mapping go with the rows.
* Single things (numbers, text, None, enums, dtypes, functions), tuples of single things of another length than B, and
  empty containers: shared.

What is refused, by name, because two readings are possible and one would be silently wrong:

* a list inside the batch that holds B tensors of B rows each: one per example, or each with all examples?
* a batch that is a list of nothing but dicts (or of tuples, or lists): one collated batch, or a list of examples?
* a tuple of B numbers: one per example, or a setting such as an image size?
* a vector of length B whose name speaks of classes (`fields.CLASS_VECTOR_NAMES`);
* three-dimensional `position_ids` whose second dimension is B: multimodal models number positions as `(3, B, L)`;
* lists of another length than B, fields that disagree on B, and types that are not known.

`BatchLayout` is the way out of each. In a batch of one example the two readings of a list, a tuple or a vector of one
give the same micro-batch, and neither is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from wholebatch.batch.containers import is_array, is_container, opened
from wholebatch.batch.cutting import Cut, Rows, cut_of, item_rows
from wholebatch.batch.examples import count_examples, size_along
from wholebatch.batch.fields import (
    Kind,
    children,
    described,
    kind_of,
    leading_size,
    leading_sizes,
    may_be_rotary,
    paths,
    shown,
    speaks_of_classes,
)
from wholebatch.errors import BatchLayoutError
from wholebatch.facts import BatchLayout

MOST_FIELDS = 3
"""A list of more vectors than this is taken for a list of examples, not for the fields of a collated batch."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a batch and what happens to it when the batch is cut."""

    path: str
    """Its keys and positions from the outside in, joined by dots; empty if the batch is a bare tensor."""

    role: Literal["per example", "shared"]
    """Cut with the rows, or given whole to every micro-batch."""

    what: str
    """Its shape, or its type where it has none."""


class Piece:
    """One collated batch that can be cut by rows: analysed once, then cut as often as needed.

    Raises `BatchLayoutError` where it cannot be cut safely; the module's docstring has the rules.

    Example:
        >>> import torch
        >>> piece = Piece({"x": torch.arange(10), "id": list(range(10)), "scale": torch.tensor(2.0)})
        >>> piece.num_examples, piece.take(range(4, 6))
        (10, {'x': tensor([4, 5]), 'id': [4, 5], 'scale': tensor(2.)})
    """

    whole: Any
    """The batch itself."""

    num_examples: int
    """How many examples the batch holds; at least 1."""

    fields: tuple[Field, ...]
    """Every field that is not a container, in the order of the containers."""

    values: tuple[Any, ...]
    """The value of each of `fields`."""

    one_reading: bool
    """False if the batch holds one example and a field that would be ambiguous in a larger batch."""

    def __init__(self, batch: Any, layout: BatchLayout | None = None) -> None:
        layout = layout or BatchLayout()
        _check_layout(layout)
        _check_names(layout, batch)
        _refuse_list_of_examples(batch)
        self.num_examples = count_examples(batch, layout)
        analysis = _Analysis(batch, layout, self.num_examples)
        self.whole = batch
        self._cut = analysis.cut(batch, "")
        _check_used(layout, analysis.visited)
        self.fields, self.values = tuple(analysis.fields), tuple(analysis.values)
        self.one_reading = analysis.one_reading

    def take(self, rows: range | Sequence[int]) -> Any:
        """The same containers with these examples: a range gives views, other sequences of positions give copies.

        Shared fields are the batch's own objects. Raises `IndexError` for rows that the batch does not have.
        """
        return self._cut(Rows(rows, self.num_examples))


class BatchPieces(Sequence[Any]):
    """A whole batch whose parts were collated, and padded, one by one.

    `whole_batches` yields it where a loader's batches cannot be put together without more padding. It is a sequence
    of the loader's own batches, and `backward` and `evaluate` take it as one batch: it is stepped as a whole, and no
    micro-batch reaches across two of its pieces.

    Example:
        >>> import torch
        >>> batch = BatchPieces([torch.zeros(2, 7), torch.zeros(3, 5)])
        >>> len(batch), batch[1].shape
        (2, torch.Size([3, 5]))
    """

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._pieces = tuple(pieces)

    def __len__(self) -> int:
        """The number of pieces, not of examples."""
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> "BatchPieces": ...
    def __getitem__(self, index: int | slice) -> Any:
        return BatchPieces(self._pieces[index]) if isinstance(index, slice) else self._pieces[index]

    def __repr__(self) -> str:
        return f"BatchPieces({', '.join(map(repr, self._pieces))})"


class _Whole:
    """The cut of a shared field: always the field itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, rows: Rows) -> Any:
        return self.value


class _Analysis:
    """Finds the role of every field once the number of examples is known."""

    def __init__(self, batch: Any, layout: BatchLayout, num_examples: int) -> None:
        self.batch = batch
        self.layout = layout
        self.num_examples = num_examples
        self.fields: list[Field] = []
        self.values: list[Any] = []
        self.visited: set[str] = set()
        self.one_reading = True

    def cut(self, value: Any, path: str) -> Cut:
        self.visited.add(path)
        match kind_of(value, path, self.layout):
            case Kind.SELECTED:
                return self._selected(value, path, self.layout.select[path])
            case Kind.STATED:
                return self._stated(value, path, self.layout.batch_dims[path])
            case Kind.ARRAY:
                return self._array(value, path)
            case Kind.PLAIN_TUPLE:
                return self._plain_tuple(value, path)
            case Kind.LIST if path:
                return self._list(value, path)
            case Kind.LIST | Kind.CONTAINER:
                return self._container(value, path)
            case _:
                return self._whole(value, path)

    def _note(self, value: Any, field: Field) -> None:
        self.fields.append(field)
        self.values.append(value)

    def _whole(self, value: Any, path: str, *, one_reading: bool = True) -> Cut:
        self._note(value, Field(path, "shared", described(value)))
        self.one_reading = self.one_reading and one_reading
        return _Whole(value)

    def _rows(self, value: Any, path: str, dim: int = 0) -> Cut:
        self._note(value, Field(path, "per example", described(value)))
        if not is_array(value):
            return lambda rows: item_rows(value, rows)
        cut = cut_of(value, dim % value.ndim)
        if cut is None:
            raise self._refusal(value, path, f"{value.layout} has no rows along dimension {dim}.", dim=None)
        return cut

    def _selected(self, value: Any, path: str, select: Callable[[Any, Sequence[int]], Any]) -> Cut:
        self._note(value, Field(path, "per example", described(value)))
        return lambda rows: select(self.batch, rows.indices)

    def _stated(self, value: Any, path: str, dim: int) -> Cut:
        if size_along(value, path, dim) != self.num_examples:
            raise self._refusal(value, path, f"dimension {dim} does not hold the {self.num_examples} examples.")
        return self._rows(value, path, dim)

    def _array(self, array: Any, path: str) -> Cut:
        size, num_examples = leading_size(array), self.num_examples
        if may_be_rotary(array, path) and array.shape[1] == num_examples and max(array.shape[:2]) > 1:
            raise self._refusal(array, path, f"are the {num_examples} examples in dimension 0 or in 1?", dim=1)
        if size == -1 or size == 1 < num_examples:
            return self._whole(array, path)
        if speaks_of_classes(array, path):
            return self._class_vector(array, path, size)
        if size != num_examples:
            raise self._refusal(array, path, f"dimension 0 does not hold the {num_examples} examples.", dim=1)
        return self._rows(array, path)

    def _class_vector(self, vector: Any, path: str, size: int) -> Cut:
        if size == self.num_examples == 1:
            return self._whole(vector, path)
        why = f"its name says one value per class, and it is found in a batch of {self.num_examples} examples."
        raise self._refusal(vector, path, why)

    def _plain_tuple(self, items: tuple[Any, ...], path: str) -> Cut:
        if len(items) != self.num_examples or all(item is None for item in items):
            return self._whole(items, path)
        if type(items) is tuple and all(isinstance(item, (str, bytes)) for item in items):
            return self._rows(items, path)
        if self.num_examples == 1:
            return self._whole(items, path, one_reading=False)
        why = f"is there one for each of the {len(items)} examples? A list says so; of a tuple the layout must say it."
        raise self._refusal(items, path, why)

    def _list(self, items: list[Any], path: str) -> Cut:
        num_examples, sizes = self.num_examples, set(leading_sizes(items))
        if speaks_of_classes(items, path):
            return self._class_vector(items, path, len(items))
        one_each = len(items) == num_examples
        cut_inside = sizes == {num_examples} or (sizes == {1} and not one_each)
        if one_each and cut_inside and num_examples > 1:
            why = "is it one tensor per example, or do they each hold all? A tuple says that each holds all."
            raise self._refusal(items, path, why)
        if cut_inside:
            self.one_reading = self.one_reading and not one_each
            return self._container(items, path)
        if not one_each:
            why = f"it holds neither one item for each of the {num_examples} examples nor tensors of all their rows."
            raise self._refusal(items, path, why)
        return self._rows(items, path)

    def _container(self, value: Any, path: str) -> Cut:
        container = opened(value)
        if not container.values:
            return self._whole(value, path)
        inside = children(value, path)
        cuts = [self.cut(child, its_path) for child, its_path in (inside[:-1] if container.has_encodings else inside)]
        if container.has_encodings:
            cuts.append(self._encodings(*inside[-1]))
        if all(isinstance(cut, _Whole) for cut in cuts):
            return _Whole(value)
        rebuild = container.rebuild
        if type(value) not in (dict, tuple, list):
            _try_rebuild(value, path, lambda: rebuild([cut(Rows(range(1), self.num_examples)) for cut in cuts]))
        return lambda rows: rebuild([cut(rows) for cut in cuts])

    def _encodings(self, encodings: list[Any], path: str) -> Cut:
        """Encodings go with the rows, unless the fields have been reshaped since: then they stay as they are."""
        fitting = len(encodings) == self.num_examples
        return self._rows(encodings, path) if fitting else self._whole(encodings, path)

    def _refusal(self, value: Any, path: str, why: str, *, dim: int | None = 0) -> BatchLayoutError:
        ways = (
            f"batch_dims={{{path!r}: {dim}}} if that dimension counts the examples"
            if dim is not None
            else f"select={{{path!r}: rows_of}}, where rows_of(batch, rows) returns its part for these examples"
        )
        return BatchLayoutError(
            f"{shown(path)}, {described(value)}, cannot be cut safely: {why} Say layout=wb.BatchLayout(...) with "
            f"shared_fields=({path!r},) if every micro-batch needs it whole, or with {ways}."
        )


def _try_rebuild(value: Any, path: str, rebuild: Callable[[], Any]) -> None:
    try:
        rebuild()
    except Exception as error:
        raise BatchLayoutError(
            f"{shown(path)} is a {type(value).__module__}.{type(value).__qualname__}, which could not be built again "
            f"with fewer rows ({type(error).__name__}: {error}). Make it a dict, tuple or dataclass."
        ) from error


def _check_layout(layout: BatchLayout) -> None:
    shared = layout.shared_fields
    if isinstance(shared, str):
        raise BatchLayoutError(f"shared_fields is the text {shared!r}; it is a collection of names: ({shared!r},).")
    for path, dim in layout.batch_dims.items():
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise BatchLayoutError(f"batch_dims[{path!r}] is {dim!r}; a dimension is an int: {{{path!r}: 1}}.")
    for path, select in layout.select.items():
        if not callable(select):
            raise BatchLayoutError(f"select[{path!r}] is {select!r}; it is a function of the batch and the rows.")
    named = _named(layout)
    if twice := sorted({path for path in named if named.count(path) > 1}):
        raise BatchLayoutError(f"the layout gives {', '.join(map(repr, twice))} two roles; a field has one.")


def _check_names(layout: BatchLayout, batch: Any) -> None:
    named = _named(layout)
    known = set(paths(batch)) - {""} if named else set()
    if unknown := sorted(set(named) - known):
        raise BatchLayoutError(
            f"the layout names {', '.join(map(repr, unknown))}, which the batch does not have. It has: "
            f"{', '.join(map(repr, sorted(known)))}."
        )


def _check_used(layout: BatchLayout, visited: set[str]) -> None:
    if unused := sorted(set(_named(layout)) - visited):
        raise BatchLayoutError(
            f"the layout names {', '.join(map(repr, unused))}, inside a field that is cut or kept as one: name that."
        )


def _named(layout: BatchLayout) -> list[str]:
    return [str(path) for path in (*layout.shared_fields, *layout.batch_dims, *layout.select)]


def _refuse_list_of_examples(batch: Any) -> None:
    if isinstance(batch, BatchPieces):
        raise BatchLayoutError(f"a BatchPieces of {len(batch)} pieces is cut piece by piece, not as one.")
    if not isinstance(batch, list) or not batch:
        return
    if len(batch) > MOST_FIELDS and all(is_array(item) and item.ndim == 1 for item in batch):
        raise BatchLayoutError(
            f"the batch is a list of {len(batch)} vectors: most likely a list of examples. Pass collate_fn to have "
            "them collated; make it a tuple if each vector is a field that holds one value per example."
        )
    if not is_container(batch[0]):
        return
    kinds = {type(item) for item in batch}
    if len(kinds) == 1:
        name = kinds.pop().__name__
        raise BatchLayoutError(
            f"the batch is a list of {len(batch)} × {name}: a list of examples, or one collated batch? Pass "
            f"collate_fn to have examples collated; make the outer list a tuple if each {name} holds all examples."
        )
