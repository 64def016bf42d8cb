"""What a handful of ratios says: their range, their median, and how far the median can be trusted."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DRAWS = 5000


@dataclass(frozen=True)
class Spread:
    """A ratio over the rounds."""

    least: float
    median: float
    most: float
    low: float
    """With `high` the bootstrap 95 % interval of the median; over a few rounds it is about their range."""

    high: float

    def __str__(self) -> str:
        return f"{self.least:.3f} / {self.median:.3f} / {self.most:.3f}, 95 % {self.low:.3f} to {self.high:.3f}"


def spread(values: Sequence[float]) -> Spread:
    """The spread of ratios, one from each round."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    low, high = medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]
    return Spread(min(values), statistics.median(values), max(values), low, high)


def quotients(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The spread of the one over the other, round by round."""
    return spread([one / other for one, other in zip(above, below, strict=True)])


@dataclass(frozen=True)
class Target:
    """What was aimed at, and what was found."""

    says: str
    found: Spread
    at_least: float | None = None
    """Of the median, as are the others unless they say that they are of the interval."""

    at_most: float | None = None
    low_at_least: float | None = None
    high_at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether all of it was."""
        pairs = [
            (self.at_least, self.found.median),
            (self.found.median, self.at_most),
            (self.low_at_least, self.found.low),
            (self.found.high, self.high_at_most),
        ]
        return all(less <= more for less, more in pairs if less is not None and more is not None)

    @property
    def asked(self) -> str:
        """The limits in words."""
        words = {
            "at least": self.at_least,
            "at most": self.at_most,
            "lower bound at least": self.low_at_least,
            "upper bound at most": self.high_at_most,
        }
        return ", ".join(f"{name} {limit:g}" for name, limit in words.items() if limit is not None)
