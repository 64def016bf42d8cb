"""The learning rate as a function of how far a run has come, in examples or tokens: the same at every batch size."""

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Schedule:
    """Rises along a line to the peak, then falls to `final` of it along half a cosine or a line, or stays."""

    peak: float
    total: float
    """Examples or tokens of the whole run."""

    warm_up: float
    """Examples or tokens of the rise."""

    final: float
    """At the end, as a part of the peak."""

    shape: Literal["cosine", "linear", "constant"]

    def learning_rate(self, before: float, after: float) -> float:
        """For the update that leads from `before` examples or tokens to `after`.

        The rise is taken at the end of the update, so that the first one is not lost; the fall at its beginning.
        """
        if self.warm_up and before < self.warm_up:
            return self.peak * min(1.0, after / self.warm_up)
        return self.peak * self._fall(before)

    def _fall(self, seen: float) -> float:
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (seen - self.warm_up) / max(self.total - self.warm_up, 1e-9))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final + (1 - self.final) * left

    def apply(self, optimizer: torch.optim.Optimizer, before: float, after: float) -> float:
        """Set the learning rate of an update; it is returned."""
        rate = self.learning_rate(before, after)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate
