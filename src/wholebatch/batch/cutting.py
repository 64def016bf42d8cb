"""The rows of one value: a tensor, a numpy array, a list, a nested tensor.

`cut_of(value, dim)` looks at the value once and returns the function that takes rows from it. A range of rows is a
view wherever the value's kind has views; a list of rows is a copy.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch


class Rows:
    """The examples to take, in every form in which the kinds of values ask for them."""

    __slots__ = ("_positions", "_shared", "indices", "span")

    def __init__(self, indices: range | Sequence[int], num_examples: int) -> None:
        ends = (indices[0], indices[-1]) if isinstance(indices, range) and indices else indices
        if ends and not 0 <= min(ends) <= max(ends) < num_examples:
            raise IndexError(f"rows {min(ends)} to {max(ends)} of a batch of {num_examples} examples")
        self.indices = indices
        self.span: slice | None = None
        """The rows as a slice, where they are neighbours in ascending order."""
        if isinstance(indices, range) and (indices.step == 1 or not indices):
            self.span = slice(indices.start, indices.start + len(indices)) if indices else slice(0, 0)
        self._positions: dict[torch.device, torch.Tensor] = {}
        self._shared: dict[object, torch.Tensor] = {}

    def positions(self, device: torch.device) -> torch.Tensor:
        """The rows as a tensor on `device`, made once for all fields that live there."""
        if device not in self._positions:
            self._positions[device] = torch.tensor(list(self.indices), dtype=torch.long, device=device)
        return self._positions[device]

    def share(self, key: object, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`make()`, once for each key: fields that shared a tensor before the cut share one after it."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


Cut: TypeAlias = Callable[[Rows], Any]
"""Takes rows from the one value it was made for."""


def cut_of(value: Any, dim: int) -> Cut | None:
    """The function that takes rows of an array along `dim`; None where its kind has no rows to take."""
    if not isinstance(value, torch.Tensor):
        return partial(_array_rows, value, (slice(None),) * dim)
    if value.is_nested:
        return _nested_cut(value) if dim == 0 else None
    if value.layout == torch.sparse_coo:
        return lambda rows: value.index_select(dim, rows.positions(value.device))
    return partial(_tensor_rows, value, dim, (slice(None),) * dim) if value.layout == torch.strided else None


def item_rows(items: Sequence[Any], rows: Rows) -> Sequence[Any]:
    """The items of a list or tuple at these rows, in a sequence of the same type."""
    taken = items[rows.span] if rows.span is not None else [items[row] for row in rows.indices]
    return taken if type(taken) is type(items) else type(items)(taken)  # type: ignore[call-arg]


def _tensor_rows(tensor: torch.Tensor, dim: int, before: tuple[slice, ...], rows: Rows) -> torch.Tensor:
    if rows.span is not None:
        return tensor[(*before, rows.span)]  # a view, with less overhead than `narrow`
    return tensor.index_select(dim, rows.positions(tensor.device))


def _array_rows(array: Any, before: tuple[slice, ...], rows: Rows) -> Any:
    return array[(*before, rows.span if rows.span is not None else list(rows.indices))]


def _nested_cut(tensor: torch.Tensor) -> Cut | None:
    if tensor.layout != torch.jagged:
        return partial(_nested_rows, tensor.unbind())
    shape: Sequence[object] = tensor.shape
    ragged = [dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    return _JaggedCut(tensor) if ragged == [1] else None


def _nested_rows(components: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(item_rows(components, rows)), layout=torch.strided)


class _JaggedCut:
    """Takes rows of a jagged tensor.

    Jagged tensors can be added or multiplied only if torch knows their lengths to be the same ones, by a symbol such
    as `j1` in their shapes. So fields with one symbol get one tensor of new offsets.
    """

    def __init__(self, tensor: Any) -> None:
        self.symbol = str(tensor.shape[1])
        self.values: torch.Tensor = tensor.values()
        self.offsets: torch.Tensor = tensor.offsets()
        self.lengths: torch.Tensor | None = tensor.lengths()
        self.starts: list[int] = self.offsets.tolist()
        self.sizes: list[int] = self.lengths.tolist() if self.lengths is not None else self.offsets.diff().tolist()
        self.without_gaps = self.lengths is None

    def __call__(self, rows: Rows) -> torch.Tensor:
        offsets = rows.share((self.symbol, self.offsets.device), partial(self._new_offsets, rows))
        return torch.nested.nested_tensor_from_jagged(self._new_values(rows), offsets)

    def _new_offsets(self, rows: Rows) -> torch.Tensor:
        ends = itertools.accumulate((self.sizes[row] for row in rows.indices), initial=0)
        return torch.tensor(list(ends), dtype=self.offsets.dtype, device=self.offsets.device)

    def _new_values(self, rows: Rows) -> torch.Tensor:
        if rows.span is not None and self.without_gaps:
            start, stop = self.starts[rows.span.start], self.starts[rows.span.stop]
            return self.values.narrow(0, start, stop - start)
        spans = (range(self.starts[row], self.starts[row] + self.sizes[row]) for row in rows.indices)
        positions = torch.tensor(list(itertools.chain.from_iterable(spans)), dtype=torch.long)
        return self.values.index_select(0, positions.to(self.values.device))
