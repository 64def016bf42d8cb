"""What a loss is a mean over, counted on the host before the first forward."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from wholebatch.errors import ConfigurationError, CountError
from wholebatch.facts import IGNORED_LABEL, LABEL_FIELDS, Number
from wholebatch.loss.hugging_face import OwnCount

ONLY = "loss"
"""The name of the term where a loss has only one."""

CountFunction: TypeAlias = Callable[[Any], Number]
Count: TypeAlias = Literal["examples", "tokens", "sum"] | CountFunction | Mapping[str, Any]


class Counter:
    """Counts the units of a micro-batch, by term of the loss.

    Args:
        count: As the user stated it; None where the count comes with the loss, or where `own` says it.
        own: What the model's own loss is a mean over, where that is the loss and it tells (`hugging_face.own_count`).
        shifted: Whether "tokens" are counted after the shift, as for a causal language model that shifts the labels.

    Raises:
        ConfigurationError: `count` is unknown.
    """

    def __init__(self, count: Count | None, own: OwnCount | None = None, shifted: bool = False) -> None:
        self.stated = _checked(count)
        self.name = self.stated if isinstance(self.stated, str) else own if self.stated is None else "function"
        if self.name == "tokens" and shifted:
            self.name = "tokens after the shift"
        self._functions = {term: _function(one, shifted) for term, one in _terms(self.stated, own)}

    @property
    def known(self) -> bool:
        """Whether the count is known before the forward; otherwise it comes with the loss."""
        return bool(self._functions)

    @property
    def needs_data(self) -> bool:
        """Whether counting looks into the micro-batch, or its number of examples says all."""
        return self.known and self.name not in ("examples", "sum")

    @property
    def summed(self) -> bool:
        """Whether the loss is stated to be a plain sum, which nothing divides."""
        return self.stated == "sum"

    def __call__(self, micro_batch: Any, num_examples: int) -> dict[str, Number]:
        """The count of each term, unchecked; empty where it comes with the loss."""
        return {term: function(micro_batch, num_examples) for term, function in self._functions.items()}

    def by_row(self, batch: Any, num_examples: int) -> Sequence[float] | None:
        """The count of each row of `batch` where a micro-batch's count is the sum of its rows'; None where not known.

        Labels on a device are left to `__call__`, so that the counts of a whole batch are waited for once.
        """
        if self.name not in ("tokens", "tokens after the shift", "labelled examples"):
            return None
        labels = find_labels(batch)
        plain = labels.layout == torch.strided and not labels.is_nested and labels.device.type == "cpu"
        if not plain or labels.shape[0] != num_examples:
            return None
        if self.name == "labelled examples":
            per_example = labels.ndim == 1 and not labels.is_floating_point()
            return (labels != IGNORED_LABEL).tolist() if per_example else [1] * num_examples
        if labels.ndim < 2:
            return None
        counted = labels[..., 1:] if self.name == "tokens after the shift" else labels
        return (counted != IGNORED_LABEL).flatten(1).sum(1).tolist()


def _checked(count: Count | None) -> Count | None:
    if count is None or callable(count) or count in ("examples", "tokens", "sum"):
        return count
    if isinstance(count, Mapping) and count:
        wrong = sorted(str(term) for term, one in count.items() if not (callable(one) or one in ("examples", "tokens")))
        if wrong:
            raise ConfigurationError(
                f'count: the terms {wrong} need "examples", "tokens" or a function of the micro-batch'
            )
        return dict(count)
    raise ConfigurationError(
        f'count={count!r} is unknown. Use "examples", "tokens" (labels other than {IGNORED_LABEL}), "sum", a function '
        "of the micro-batch that returns a number, or a mapping from the loss's terms to these."
    )


def _terms(stated: Count | None, own: OwnCount | None) -> Iterable[tuple[str, Any]]:
    if isinstance(stated, Mapping):
        return stated.items()
    if stated is not None:
        return [(ONLY, stated)]
    return [] if own is None else [(ONLY, own)]


def _function(one: Any, shifted: bool) -> Callable[[Any, int], Number]:
    if callable(one):
        return lambda micro_batch, num_examples: one(micro_batch)
    if one in ("examples", "sum"):
        return lambda micro_batch, num_examples: num_examples
    if one == "labelled examples":
        return labelled_examples
    count = tokens_after_the_shift if shifted or one == "tokens after the shift" else tokens
    return lambda micro_batch, num_examples: count(micro_batch)


def tokens(micro_batch: Any) -> Number:
    """Labels other than -100."""
    return (find_labels(micro_batch) != IGNORED_LABEL).sum()


def tokens_after_the_shift(micro_batch: Any) -> Number:
    """Labels other than -100 where position t predicts the label at t + 1: all labels but a sequence's first."""
    return (find_labels(micro_batch)[..., 1:] != IGNORED_LABEL).sum()


def labelled_examples(micro_batch: Any, num_examples: int) -> Number:
    """Examples whose class label is not -100; all of them where the labels are no class numbers."""
    labels = find_labels(micro_batch)
    per_example = labels.ndim == 1 and not labels.is_floating_point()
    return (labels != IGNORED_LABEL).sum() if per_example else num_examples


def find_labels(micro_batch: Any) -> torch.Tensor:
    """The labels of a micro-batch: the field of that name, or the second of a pair of tensors.

    Raises:
        CountError: There are no labels to be found, or they are no tensor.
    """
    if isinstance(micro_batch, Mapping):
        fields: Mapping[str, Any] = micro_batch
    elif isinstance(micro_batch, (tuple, list)) and not hasattr(micro_batch, "_fields"):
        fields = {"labels": micro_batch[1]} if len(micro_batch) == 2 else {}
    else:
        fields = {name: getattr(micro_batch, name) for name in LABEL_FIELDS if hasattr(micro_batch, name)}
    found = [fields[name] for name in LABEL_FIELDS if fields.get(name) is not None]
    if len(found) == 1 and isinstance(found[0], torch.Tensor) and found[0].ndim > 0:
        return found[0]
    there = f" with the fields {', '.join(map(str, micro_batch))}" if isinstance(micro_batch, Mapping) else ""
    raise CountError(
        f"the labels to count were not found in a batch of type {type(micro_batch).__name__}{there}: looked for one "
        f"tensor called {', '.join(LABEL_FIELDS)}, or the second of a pair. Add it, or pass a function: "
        f"count=lambda micro_batch: (micro_batch[...] != {IGNORED_LABEL}).sum()"
    )


def label_counts(batch: Any) -> list[int]:
    """Labels other than -100 of each example, where there is more than one label per example; empty elsewhere."""
    try:
        labels = find_labels(batch)
    except CountError:
        return []
    if labels.ndim < 2 or labels.is_floating_point():
        return []
    return [int(number) for number in (labels != IGNORED_LABEL).flatten(1).sum(dim=1).tolist()]


def as_numbers(counts: Sequence[Mapping[str, Number]]) -> list[dict[str, float]]:
    """The counts of all micro-batches as Python floats, with one transfer for those that are on a device.

    Raises:
        CountError: A count is no number, negative, or not finite.
    """
    flat = [(term, value) for one in counts for term, value in one.items()]
    on_device = [value for _, value in flat if isinstance(value, torch.Tensor) and value.numel() == 1]
    moved = iter(torch.stack([value.reshape(()).double() for value in on_device]).tolist() if on_device else ())
    checked = iter([_valid(term, value, moved) for term, value in flat])
    return [{term: next(checked) for term in one} for one in counts]


def _valid(term: str, value: Any, moved: Iterator[float]) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        number = next(moved)
    elif isinstance(value, (int, float)) or (hasattr(value, "__float__") and not isinstance(value, torch.Tensor)):
        number = float(value)
    else:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise CountError(f"the count of {term!r} is a {type(value).__name__}{shape}, not a number")
    if not math.isfinite(number) or number < 0:
        raise CountError(f"the count of {term!r} in a micro-batch is {number:g}; it must be finite and not negative")
    return number
