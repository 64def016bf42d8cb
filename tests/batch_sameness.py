"""Batches that several tests cut, and what it means for two of them to be the same."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch

from wholebatch.batch.layout import Piece
from wholebatch.errors import BatchLayoutError
from wholebatch.facts import BatchLayout

X = torch.arange(12).reshape(4, 3)
"""Four examples; row i starts with 3 i."""


class Pair(NamedTuple):
    image: torch.Tensor
    target: Any


def same(one: Any, other: Any) -> bool:
    """Equal in type, containers, dtypes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if hasattr(one, "dtype"):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return vars(one).keys() == vars(other).keys() and all(same(vars(one)[k], vars(other)[k]) for k in vars(one))
    return bool(one == other)


def refused(batch: Any, *parts: str, layout: BatchLayout | None = None) -> None:
    """Assert that the batch is refused with a message that contains each part."""
    with pytest.raises(BatchLayoutError) as caught:
        Piece(batch, layout)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def roles(batch: Any, layout: BatchLayout | None = None) -> dict[str, str]:
    return {field.path: field.role for field in Piece(batch, layout).fields}
