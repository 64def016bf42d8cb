"""How many examples a batch holds: what its fields agree on.

Fields that cannot be anything but rows (lists of text, nested tensors, dimensions stated in the layout) must agree.
A tensor with a leading dimension of 1 may be one that is broadcast over the batch, so it stands back where others
agree on more than one example; where such tensors are the greater part, they may as well be a batch of one example
beside a vector of classes, and the batch is refused.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.batch.containers import is_array, is_container, opened
from wholebatch.batch.fields import (
    Kind,
    children,
    described,
    described_fields,
    kind_of,
    leading_size,
    leading_sizes,
    may_be_rotary,
    shown,
    speaks_of_classes,
)
from wholebatch.errors import BatchLayoutError
from wholebatch.facts import BatchLayout


@dataclass(frozen=True, slots=True)
class _Vote:
    path: str
    size: int
    ndim: int
    firm: bool
    """It cannot be broadcast: its size is the number of examples, or the batch is wrong."""


def count_examples(batch: Any, layout: BatchLayout) -> int:
    """The number of examples. Raises `BatchLayoutError` where the fields do not agree on one."""
    votes = list(_votes(batch, "", layout))
    if not votes:
        raise BatchLayoutError(
            f"no batch dimension: no field says how many examples there are. {_listed(batch)} A batch holds tensors "
            "whose first dimension counts the examples, or lists with one item each; a list of examples needs "
            "collate_fn; another dimension is named with layout=wb.BatchLayout(batch_dims={name: dim})."
        )
    sizes = Counter(vote.size for vote in votes if vote.firm or vote.size != 1) or Counter({1: len(votes)})
    size, agreed = sizes.most_common(1)[0]
    if len(sizes) > 1:
        raise BatchLayoutError(_disagreement(batch, votes, sizes))
    if size == 0:
        raise BatchLayoutError(f"the batch holds 0 examples. {_listed(batch)} Leave empty batches out.")
    if _may_be_one_example(votes, size, agreed):
        raise BatchLayoutError(
            f"it is not clear whether the batch holds 1 example or {size}. {_listed(batch)} Name what belongs to the "
            "batch as a whole: layout=wb.BatchLayout(shared_fields=(name,))."
        )
    return size


def size_along(value: Any, path: str, dim: int) -> int:
    """The size of a field along the dimension that the layout states. Raises `BatchLayoutError` if it has none."""
    if is_array(value):
        if not -value.ndim <= dim < value.ndim:
            raise BatchLayoutError(f"batch_dims[{path!r}] is {dim}, and {shown(path)} is of shape {described(value)}.")
        return int(value.size(dim) if isinstance(value, torch.Tensor) else value.shape[dim])
    if dim == 0 and isinstance(value, (list, tuple)) and not hasattr(value, "_make"):
        return len(value)
    inside = ", ".join(repr(its_path) for _, its_path in children(value, path)) if is_container(value) else ""
    raise BatchLayoutError(
        f"batch_dims[{path!r}] is {dim}, and {shown(path)} is a {type(value).__name__}, which has no dimensions"
        + (f": name the fields in it ({inside})." if inside else ".")
    )


def _votes(value: Any, path: str, layout: BatchLayout) -> Iterator[_Vote]:
    kind = kind_of(value, path, layout)
    if kind is Kind.STATED:
        yield _Vote(path, size_along(value, path, layout.batch_dims[path]), 0, firm=True)
    elif kind is Kind.ARRAY:
        if value.ndim and not speaks_of_classes(value, path) and not may_be_rotary(value, path):
            is_nested = isinstance(value, torch.Tensor) and value.is_nested
            yield _Vote(path, leading_size(value), value.ndim, firm=is_nested)
    elif kind is Kind.LIST and path:
        if not speaks_of_classes(value, path) and _has_one_item_per_example(value):
            yield _Vote(path, len(value), 0, firm=True)
    elif kind in (Kind.CONTAINER, Kind.LIST):
        for child, its_path in children(value, path)[: -1 if opened(value).has_encodings else None]:
            yield from _votes(child, its_path, layout)


def _has_one_item_per_example(items: list[Any]) -> bool:
    """Whether no other reading is possible, or both lead to the same number of examples."""
    sizes = set(leading_sizes(items))
    return len(sizes) != 1 or sizes <= {len(items), -1}


def _may_be_one_example(votes: list[_Vote], size: int, agreed: int) -> bool:
    ones = [vote for vote in votes if vote.size == 1 and not vote.firm]
    others = [vote for vote in votes if vote.size == size]
    if size == 1 or not ones or any(vote.firm for vote in others):
        return False
    vectors_only = all(vote.ndim == 1 for vote in others) and any(vote.ndim > 1 for vote in ones)
    return len(ones) > agreed or (len(ones) == agreed and vectors_only)


def _disagreement(batch: Any, votes: list[_Vote], sizes: Mapping[int, int]) -> str:
    most = max(sizes.values())
    leaders = [size for size, fields in sizes.items() if fields == most]
    if len(leaders) > 1:
        counts = " or ".join(map(str, sorted(leaders)))
        found = f"there may be {counts} examples, with as many fields for each."
        odd = [vote.path for vote in votes if vote.size in sizes]
    else:
        odd = [vote.path for vote in votes if vote.size in sizes and vote.size != leaders[0]]
        found = f"most have {leaders[0]}; not so {', '.join(map(shown, odd))}."
    name = odd[-1]
    return (
        f"the fields of the batch disagree on the number of examples: {found} {_listed(batch)} For a field that "
        f"belongs to the batch as a whole: layout=wb.BatchLayout(shared_fields=({name!r},)); for one whose examples "
        f"lie in another dimension: batch_dims={{{name!r}: 1}}; for one without such a dimension: "
        f"select={{{name!r}: rows_of}}, where rows_of(batch, rows) returns its part for these examples."
    )


def _listed(batch: Any) -> str:
    fields = [f"{shown(path)}: {what}" for path, what in described_fields(batch)]
    return f"Fields: {'; '.join(fields) or 'none'}."
