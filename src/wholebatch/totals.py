"""Sums over the micro-batches of one step: the loss, its counts, the metrics, and whether all was finite."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.errors import LossFormError
from wholebatch.facts import Number
from wholebatch.loss.counting import ONLY
from wholebatch.loss.stated import MicroBatchLoss


@dataclass(frozen=True)
class Reading:
    """What was read of a batch, on the host."""

    losses: Sequence[float]
    """Of each micro-batch that was run."""

    counts: Mapping[str, float]
    """The batch's counts that came with the loss, by term."""

    shown: Sequence[float]
    """The denominators that the graphs of the micro-batches' losses show; empty where any of them shows none."""

    weights: Sequence[float]
    """What these should be in proportion to."""


class Totals:
    """What a step's micro-batches add up to. Holds 0-d detached tensors only, and reads none of them before the end."""

    def __init__(self, device: torch.device, replayed: bool = False) -> None:
        """Of losses on `device`; `replayed`: their graphs may be replayed, each time into the same memory."""
        self._device, self._replayed = device, replayed
        self.differentiable = False
        self._values: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._weights: dict[str, list[Number]] = defaultdict(list)
        self._counts: dict[str, list[Number]] = defaultdict(list)
        self._metrics: dict[str, list[tuple[Number, Number]]] = defaultdict(list)
        self._shown: list[torch.Tensor | None] = []

    def add(self, loss: MicroBatchLoss) -> None:
        """Add one micro-batch's loss."""
        for name, term in loss.terms.items():
            self.differentiable |= term.value.requires_grad
            self._values[name].append(self._kept(term.value.detach()))
            self._weights[name].append(term.weight)
            self._counts[name].append(self._kept(term.count))
            self._shown.append(None if term.shown is None else self._kept(term.shown))
        for name, pair in loss.metrics.items():
            total, count = _checked_pair(name, pair)
            self._metrics[name].append((self._kept(total), self._kept(count)))

    def _kept(self, number: Any) -> Any:
        """A copy, where the next replay of a CUDA graph would overwrite what the last one has put out."""
        return number.clone() if self._replayed and isinstance(number, torch.Tensor) else number

    def read(self) -> Reading:
        """What the host has to know to judge the batch: one host sync."""
        values = torch.stack([torch.stack(values) for values in self._values.values()]).sum(dim=0).to(self._device)
        counts = self.counts()
        shown = [one for one in self._shown if one is not None]
        shown = shown if len(shown) == len(self._shown) else []
        parts = [values, torch.stack(list(counts.values())), *([self._vector(shown)] if shown else [])]
        numbers = torch.cat([part.to(parts[1].dtype) for part in parts]).tolist()
        losses, rest = numbers[: len(values)], numbers[len(values) :]
        weights = [float(weight) for weight in self._weights.get(ONLY, ())] if shown else []
        return Reading(losses, dict(zip(counts, rest, strict=False)), rest[len(counts) :], weights)

    def counts(self) -> dict[str, torch.Tensor]:
        """The summed counts that came with the loss, by term; 0-d, on the device."""
        return {name: self._vector(counts).sum() for name, counts in self._counts.items()}

    def usable(self) -> torch.Tensor:
        """Whether every loss is finite and the batch has something with a label: one flag, on the device."""
        finite = [torch.isfinite(torch.stack(values)).all() for values in self._values.values()]
        return torch.stack(finite).all() & (torch.stack(list(self.counts().values())).sum() > 0)

    def loss(self, denominators: Mapping[str, Number]) -> torch.Tensor:
        """The batch's loss: the sum over terms of their sums over `denominators`; 0-d, detached."""
        return torch.stack([self._sum(name) / denominators[name] for name in self._values]).sum()

    def sums(self) -> dict[str, torch.Tensor]:
        """The numerator of each term."""
        return {name: self._sum(name) for name in self._values}

    def metric_sums(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Each metric's numerator and count."""
        return {
            name: (self._vector([s for s, _ in pairs]).sum(), self._vector([c for _, c in pairs]).sum())
            for name, pairs in self._metrics.items()
        }

    def metrics(self) -> dict[str, torch.Tensor]:
        """The batch's means of the metrics."""
        return {name: total / count for name, (total, count) in self.metric_sums().items()}

    def _sum(self, name: str) -> torch.Tensor:
        values = torch.stack(self._values[name]).to(self._device)  # a model may end on another device than it begins
        return (values * self._vector(self._weights[name]).to(values.dtype)).sum()

    def _vector(self, numbers: Sequence[Number]) -> torch.Tensor:
        """Numbers and 0-d tensors as one vector on the device, in double precision where the device has it."""
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        kinds = {(one.dtype, one.device, one.shape) if isinstance(one, torch.Tensor) else None for one in numbers}
        if len(kinds) == 1 and kinds != {None}:
            return torch.stack(list(numbers)).detach().to(self._device, dtype).flatten()  # type: ignore[arg-type]
        if kinds != {None}:
            parts = [torch.as_tensor(number, device=self._device).detach().reshape(()).to(dtype) for number in numbers]
            return torch.stack(parts)
        return torch.tensor(numbers, dtype=dtype, device=self._device)


def _checked_pair(name: str, pair: Any) -> tuple[Number, Number]:
    """A metric's sum and count, without a graph."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise LossFormError(f"LossSum.metrics[{name!r}] must be a pair of numbers (sum, count), got {pair!r:.80}")
    total, count = (one.detach() if isinstance(one, torch.Tensor) else float(one) for one in pair)
    return total, count


def _is_number(one: Any) -> bool:
    return one.numel() == 1 if isinstance(one, torch.Tensor) else hasattr(one, "__float__")
