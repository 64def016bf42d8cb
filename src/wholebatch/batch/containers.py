"""The containers of a batch: opened, walked, and built again as what they were.

Any mapping, tuple, named tuple, list or dataclass instance is a container. It is built again with other values in
it, its type and its other attributes kept: a `defaultdict` keeps its factory, a frozen dataclass its `init=False`
fields. Nothing here knows about examples; that is `layout.py`.
"""

import copy
import dataclasses
import datetime
import enum
import functools
import numbers
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (
    type(None), str, bytes, numbers.Number, enum.Enum, pathlib.PurePath, torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo,
)  # fmt: skip
_PLAIN_ITEMS = frozenset({type(None), str, bytes, bool, int, float, complex})


@dataclass(frozen=True, slots=True)
class Container:
    """One container, opened."""

    names: Sequence[str]
    """What each child is called: its key, position or attribute."""

    values: Sequence[Any]
    """The children, in the same order."""

    rebuild: Callable[[Sequence[Any]], Any]
    """The same container with these children in place of `values`."""

    has_encodings: bool = False
    """The last child is the list of a tokenizer's `encodings`, one an example, that the mapping carries."""


def is_array(value: object) -> bool:
    """Whether `value` is a tensor or a numpy array. numpy is asked only where the program has loaded it."""
    if isinstance(value, torch.Tensor):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_plain(value: object) -> bool:
    """Whether `value` is a single thing without rows: a number, text, a setting, a function."""
    numpy = sys.modules.get("numpy")
    return (
        isinstance(value, _PLAIN)
        or (numpy is not None and isinstance(value, (numpy.generic, numpy.dtype)))
        or (callable(value) and not is_container(value) and not is_array(value))
    )


def is_container(value: object) -> bool:
    """Whether `value` is a container that can be opened."""
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return False
    return isinstance(value, (Mapping, tuple, list)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, (type, enum.Enum))
    )


def all_plain(items: Sequence[Any]) -> bool:
    """Whether every item is a single thing. Long lists of numbers are told at C speed, without a look at each."""
    return _PLAIN_ITEMS.issuperset(map(type, items)) or all(is_plain(item) for item in items)


def has_children(value: Any) -> bool:
    """Whether `value` is a container with more in it than single things in a row."""
    return is_container(value) and not (isinstance(value, (tuple, list)) and all_plain(value))


def opened(value: Any) -> Container:
    """The children of a container and the way to build it again."""
    if isinstance(value, Mapping):
        return _opened_mapping(value)
    if isinstance(value, (tuple, list)):
        return Container([str(position) for position in range(len(value))], value, _sequence_builder(value))
    names = _attributes(value)
    return Container(names, [getattr(value, name) for name in names], functools.partial(_with_attributes, value, names))


def _opened_mapping(mapping: Mapping[Any, Any]) -> Container:
    keys, values = list(mapping.keys()), list(mapping.values())
    names = [str(key) for key in keys]
    # A property of the class, not any attribute: mappings that look missing attributes up among their keys exist.
    if isinstance(getattr(type(mapping), "encodings", None), property):
        encodings = mapping.encodings  # type: ignore[attr-defined]
        if isinstance(encodings, list) and encodings:
            rebuild = functools.partial(_with_encodings, mapping, keys)
            return Container([*names, "(encodings)"], [*values, encodings], rebuild, has_encodings=True)
    if type(mapping) is dict:
        return Container(names, values, lambda new: dict(zip(keys, new, strict=True)))
    return Container(names, values, functools.partial(_with_items, mapping, keys))


def _with_encodings(mapping: Any, keys: list[Any], values: Sequence[Any]) -> Any:
    *items, encodings = values
    return type(mapping)(dict(zip(keys, items, strict=True)), encoding=encodings, n_sequences=mapping.n_sequences)


def _with_items(mapping: Mapping[Any, Any], keys: list[Any], values: Sequence[Any]) -> Any:
    items = zip(keys, values, strict=True)
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(dict(items))  # type: ignore[call-arg]
    rebuilt = copy.copy(mapping)  # keeps what else it holds, and asks nothing of its constructor
    for key, value in items:
        rebuilt[key] = value
    return rebuilt


def _sequence_builder(sequence: tuple[Any, ...] | list[Any]) -> Callable[[Sequence[Any]], Any]:
    make = getattr(type(sequence), "_make", None)  # a named tuple takes its items one by one
    return type(sequence) if make is None else make


def _attributes(instance: Any) -> list[str]:
    """Fields and whatever else the instance holds, a cached property of all rows for one."""
    names = [field.name for field in dataclasses.fields(instance) if hasattr(instance, field.name)]
    return [*names, *(name for name in getattr(instance, "__dict__", ()) if name not in names)]


def _with_attributes(instance: Any, names: list[str], values: Sequence[Any]) -> Any:
    rebuilt = copy.copy(instance)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)  # also where the dataclass is frozen
    return rebuilt


def map_tensors(fn: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The same containers with `fn` of each tensor; what is not a tensor is kept.

    Where `fn` returns every tensor unchanged, the batch itself is returned and nothing is built.
    """
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if not has_children(batch):
        return batch
    container = opened(batch)
    values = [map_tensors(fn, value) for value in container.values]
    if all(new is old for new, old in zip(values, container.values, strict=True)):
        return batch
    return container.rebuild(values)


def copied(example: Any) -> Any:
    """The same containers, arrays and lists anew: what is done to the copy is not done to `example`.

    Not `copy.deepcopy`: of a row of a large tensor that copies the large tensor.
    """
    if isinstance(example, torch.Tensor):
        return example.clone()
    if is_array(example):
        return example.copy()
    if not is_container(example):
        return example
    if isinstance(example, list) and all_plain(example):
        return list(example)
    container = opened(example)
    return container.rebuild([copied(value) for value in container.values])


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the batch, in the order of its containers."""
    yield from (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in the batch that is not a container. A list or tuple of single things is one of them."""
    if not has_children(batch):
        yield batch
        return
    for value in opened(batch).values:
        yield from leaves(value)
