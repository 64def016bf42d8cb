"""What a field of a batch is by itself, before it is known how many examples the batch holds.

Fields are named by their path through the containers: `"labels"`, `"inputs.mask"`, `"0"` for the first item of a tuple.
"""

import enum
from collections.abc import Iterator
from typing import Any

import torch

from wholebatch.batch.containers import all_plain, has_children, is_array, is_container, is_plain, leaves, opened
from wholebatch.errors import BatchLayoutError
from wholebatch.facts import BatchLayout

CLASS_VECTOR_NAMES = frozenset({
    "class_weight", "class_weights", "cls_weight", "cls_weights", "label_weight", "label_weights",
    "pos_weight", "pos_weights", "neg_weight", "neg_weights",
    "class_prior", "class_priors", "class_counts", "class_frequencies",
})  # fmt: skip
"""Names, or ends of names, of vectors with one value per class: with as many classes as examples, nothing but the name
tells them from one value per example."""


class Kind(enum.Enum):
    """The ways in which a field can be treated."""

    SELECTED = "the layout gives a function for it"
    SHARED = "the layout says that it is not cut"
    STATED = "the layout says which dimension counts the examples"
    ARRAY = "a tensor or numpy array"
    PLAIN = "a single thing"
    PLAIN_TUPLE = "a tuple of single things"
    LIST = "a list: of examples, or of tensors that each hold all examples"
    CONTAINER = "a container"


def kind_of(value: Any, path: str, layout: BatchLayout) -> Kind:
    """How to treat a field. Raises `BatchLayoutError` for a type that is not known."""
    if path in layout.select:
        return Kind.SELECTED
    if path in layout.shared_fields:
        return Kind.SHARED
    if path in layout.batch_dims:
        return Kind.STATED
    if is_array(value):
        return Kind.ARRAY
    if is_plain(value):
        return Kind.PLAIN
    if not is_container(value):
        raise BatchLayoutError(_unknown(value, path))
    if isinstance(value, list) and value:
        return Kind.LIST
    is_row = isinstance(value, tuple) and not hasattr(value, "_fields")  # a named tuple's items are fields
    return Kind.PLAIN_TUPLE if is_row and value and all_plain(value) else Kind.CONTAINER


def children(value: Any, path: str) -> list[tuple[Any, str]]:
    """The children of a container, each with its path."""
    container = opened(value)
    prefix = f"{path}." if path else ""
    return [(child, prefix + name) for name, child in zip(container.names, container.values, strict=True)]


def shown(path: str) -> str:
    """A path as messages show it."""
    return repr(path) if path else "the batch itself"


def described(value: Any) -> str:
    """The shape of an array, the length of a list, the type of anything else."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"nested, {value.size(0)} rows"
    if is_array(value):
        return str(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        sizes = leading_sizes(value)
        inside = f" of leading sizes {', '.join(map(str, sizes[:8]))}{', …' * (len(sizes) > 8)}" if sizes else ""
        return f"{type(value).__name__} of {len(value)}{inside}"
    return type(value).__name__


def described_fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and description of every field, for messages."""
    if not has_children(value) or (path and isinstance(value, list)):
        yield path, described(value)
        return
    for child, its_path in children(value, path):
        yield from described_fields(child, its_path)


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Every path that a layout can name, containers included."""
    yield path
    for child, its_path in children(value, path) if has_children(value) else ():
        yield from paths(child, its_path)


def leading_size(array: Any) -> int:
    """The size of dimension 0; -1 for an array of no dimensions."""
    return int(array.shape[0] if not isinstance(array, torch.Tensor) else array.size(0)) if array.ndim else -1


def leading_sizes(value: Any) -> list[int]:
    """The leading size of every array in a container; -1 for those of no dimensions."""
    return [leading_size(leaf) for leaf in leaves(value) if is_array(leaf)]


def speaks_of_classes(value: Any, path: str) -> bool:
    """Whether the field is a vector whose name says that it holds one value per class."""
    is_vector = value.ndim == 1 if is_array(value) else isinstance(value, list) and all_plain(value)
    name = path.rpartition(".")[2].lower()
    return is_vector and any(name == known or name.endswith(f"_{known}") for known in CLASS_VECTOR_NAMES)


def may_be_rotary(value: Any, path: str) -> bool:
    """Whether the field is `position_ids` of three dimensions: `(3, B, L)` in multimodal models, examples second."""
    return path.rpartition(".")[2] == "position_ids" and value.ndim == 3 and not getattr(value, "is_nested", False)


def _unknown(value: Any, path: str) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return f"{shown(path)} is a {kind}, whose rows lie one time step after another: pad it, and pack it in loss_fn."
    return (
        f"{shown(path)} is a {kind}, and wholebatch does not know where the examples lie in it. Make it a tensor, "
        f"list, dict, tuple or dataclass; or say layout=wb.BatchLayout(select={{{path!r}: rows_of}}), where "
        f"rows_of(batch, rows) returns its part for these examples, or shared_fields=({path!r},) if it is none of them."
    )
