"""Collated batches put together into one, where that invents no padding."""

from collections.abc import Sequence
from typing import Any

import torch

from wholebatch.batch.containers import is_array, opened
from wholebatch.batch.fields import children
from wholebatch.batch.layout import Piece


class _CannotJoinError(Exception):
    """The batches differ in something other than their rows."""


def join(pieces: Sequence[Piece], batches: Sequence[Any]) -> Any | None:
    """One batch with the rows of all, in order; None where they do not fit together.

    They fit if they have the same containers and shared fields, and the fields of examples agree in type, device and
    every dimension but the first. `pieces[i]` is the analysis of `batches[i]`, or of a batch that it was cut from.
    """
    if len(batches) == 1:
        return batches[0]
    if not all(piece.one_reading for piece in pieces):
        return None
    # Shared in one of them (a leading 1 among more examples) is shared in all: in a batch of one it cannot be told.
    shared = {field.path for piece in pieces for field in piece.fields if field.role == "shared"}
    fields = {field.path for piece in pieces for field in piece.fields}
    try:
        return _joined(batches, "", shared, fields)
    except _CannotJoinError:
        return None


def _joined(values: Sequence[Any], path: str, shared: set[str], fields: set[str]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _CannotJoinError
    if path in shared:
        if not all(_equal(first, value) for value in values[1:]):
            raise _CannotJoinError
        return first
    if path in fields:
        return _concatenated(values)
    inside = [children(value, path) for value in values]
    names = [[its_path for _, its_path in pairs] for pairs in inside]
    if any(its_paths != names[0] for its_paths in names):
        raise _CannotJoinError
    columns = zip(*([child for child, _ in pairs] for pairs in inside), strict=True)
    joined = [_joined(column, its_path, shared, fields) for column, its_path in zip(columns, names[0], strict=True)]
    return opened(first).rebuild(joined)


def _concatenated(values: Sequence[Any]) -> Any:
    first = values[0]
    if not is_array(first):
        return type(first)(item for value in values for item in value)  # a list, or a tuple of strings
    if any(_row_form(value) != _row_form(first) for value in values):
        raise _CannotJoinError
    if not isinstance(first, torch.Tensor):
        return _numpy_concatenated(values)
    if first.layout not in (torch.strided, torch.sparse_coo) or first.is_nested:
        raise _CannotJoinError
    if first.layout == torch.strided and first.is_pinned() and not any(value.requires_grad for value in values):
        rows = sum(value.shape[0] for value in values)
        whole = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, pin_memory=True)
        return torch.cat(list(values), out=whole)
    return torch.cat(list(values))


def _numpy_concatenated(arrays: Sequence[Any]) -> Any:
    import numpy

    return numpy.concatenate(arrays)


def _row_form(array: Any) -> tuple[object, ...]:
    """Everything in which arrays have to agree to be put together row by row."""
    if not isinstance(array, torch.Tensor):
        return array.shape[1:], array.dtype
    if array.is_nested:
        return (None,)
    return tuple(array.shape[1:]), array.dtype, array.device, array.layout


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        if is_array(one):
            return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
        return bool(one == other)
    except Exception:  # noqa: BLE001  things that cannot be compared are not the same
        return False
