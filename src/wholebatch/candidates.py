"""What a loss could be a mean over, as the fields of a batch suggest it: examples, labels, masks, weights.

A count is verified against these, the error that refuses it names the one that fits, and the examples to check with
are chosen so that they differ under each.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.batch.containers import has_children, opened
from wholebatch.errors import CountError
from wholebatch.facts import IGNORED_LABEL
from wholebatch.loss.counting import find_labels

CLASSES = "an imagined weight per class"
"""Tells whether examples differ in their class: a loss with class weights may show only then."""

OF_LABELS = ("labelled examples", "tokens", "tokens after the shift")
"""Candidates of which an example without any unit may have no loss."""

_MOST_ELEMENTS = 2**22


@dataclass(frozen=True)
class Candidate:
    """One way of counting the units of a few examples."""

    rows: tuple[float, ...]
    """Units of each example."""

    words: str
    """What is counted, to follow a number: "labelled tokens"."""

    code: str | None
    """How to state it; None if it is no count that a user can state."""

    @property
    def total(self) -> float:
        """Units of all examples."""
        return sum(self.rows)

    @property
    def varies(self) -> bool:
        """Whether examples differ in their units."""
        return max(self.rows) != min(self.rows)


def candidates(
    batch: Any, num_examples: int, shifted: bool, only: Collection[str] | None = None
) -> dict[str, Candidate]:
    """Every candidate by name, the likely ones first.

    Args:
        batch: A few collated examples.
        num_examples: How many.
        shifted: Whether `count="tokens"` is counted after the shift here, as for a causal language model.
        only: If given, fields that none of these names speaks of are not looked at.
    """
    found = {"examples": Candidate((1.0,) * num_examples, "examples", 'count="examples"')}
    fields = [field for field in _fields(batch) if field[1].shape[0] == num_examples]
    try:
        labels = find_labels(batch)
    except CountError:
        labels = None
    wanted = only is None or any(name in only for name in (CLASSES, *OF_LABELS))
    if labels is not None and labels.shape[0] == num_examples and wanted:
        name = next((name for name, tensor in fields if tensor is labels), "the labels")
        found |= _of_labels(name, labels, shifted)
    for name, tensor in fields:
        if only is None or any(name in one for one in only):
            found |= _of_field(name, tensor, is_labels=tensor is labels)
    return found


def _of_labels(name: str, labels: torch.Tensor, shifted: bool) -> dict[str, Candidate]:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        return {}
    labelled = labels != IGNORED_LABEL
    if labels.ndim == 1:
        code = _counted(f"({name} != {IGNORED_LABEL}).sum()")
        classes = tuple(1.0 + (label * 0.618034) % 1.0 for label in labels.tolist())
        return {
            "labelled examples": Candidate(_row_sums(labelled), "labelled examples", code),
            CLASSES: Candidate(classes, CLASSES, None),
        }
    before, after = f"({name} != {IGNORED_LABEL}).sum()", f"({name}[..., 1:] != {IGNORED_LABEL}).sum()"
    stated = 'count="tokens"'
    return {
        "tokens": Candidate(_row_sums(labelled), "labelled tokens", _counted(before) if shifted else stated),
        "tokens after the shift": Candidate(
            _row_sums(labelled[..., 1:]), "labelled tokens after the shift", stated if shifted else _counted(after)
        ),
    }


def _of_field(name: str, values: torch.Tensor, is_labels: bool) -> dict[str, Candidate]:
    """Masks and weights by their sum, other whole numbers by how many are positive (tokens other than the padding)."""
    if values.is_complex() or values.is_quantized or values.numel() > _MOST_ELEMENTS:
        return {}
    if values.is_floating_point() and (values.ndim > 2 or not bool((values >= 0).all())):
        return {}
    weights = values.is_floating_point() or values.dtype == torch.bool or values.ndim == 1
    weights = weights or bool(((values == 0) | (values == 1)).all())
    if values.ndim == 1 and (is_labels or not bool((values >= 0).all())):
        return {}
    found = {}
    for part, index in ((values, ""), (values[:, 1:], "[:, 1:]")) if values.ndim > 1 else ((values, ""),):
        code = f"{name}{index}.sum()" if weights else f"({name}{index} > 0).sum()"
        found[code] = Candidate(_row_sums(part if weights else part > 0), code, _counted(code))
    return found


def _counted(code: str) -> str:
    return f"count=lambda micro_batch: {code}"


def _row_sums(values: torch.Tensor) -> tuple[float, ...]:
    rows = values.reshape(values.shape[0], -1)
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    return tuple(map(float, rows.sum(dim=1).tolist()))


def _fields(value: Any, name: str = "micro_batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch with at least one dimension, with the expression that reads it."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.layout == torch.strided and not value.is_nested:
            yield name, value
    elif has_children(value):
        container = opened(value)
        keys = list(value) if isinstance(value, Mapping) else list(container.names)
        for key, child in zip(keys, container.values, strict=False):
            yield from _fields(child, _read(value, name, key))


def _read(container: Any, name: str, key: Any) -> str:
    if isinstance(container, Mapping):
        return f'{name}["{key}"]' if isinstance(key, str) else f"{name}[{key!r}]"
    return f"{name}[{key}]" if isinstance(container, (tuple, list)) else f"{name}.{key}"
