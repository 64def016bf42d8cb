"""How many examples a micro-batch holds. Numbers in, sizes out; no torch.

Throughput saturates at small sizes while memory grows linearly, so the choice is the smallest size whose throughput
is within `TOLERANCE` of the best, not the largest that fits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TOLERANCE = 0.02
"""A size counts as fast as the fastest within this; a doubling that gains less counts as no gain."""

REPEATS = 3
"""Micro-batches measured of each size; the fastest counts, since other work on the machine only slows one down."""

DOUBTFUL = 0.8
"""A size slower than this share of a smaller one is measured three times as often before that is believed: work per
example hardly ever grows with the size, but a busy machine can slow down every measurement of a size."""

MARGIN = 0.1
"""Share of the memory left over the base that is not planned with: allocators hold on to more than is in use."""

UNITS_CPU, UNITS_ACCELERATOR = 1024, 16384
"""Padded tokens of a micro-batch under `deterministic`, where timings must not decide: enough to keep a CPU busy with a
Transformer of some million parameters, and a multiple of that on an accelerator."""


def equal_sizes(num_examples: int, limit: int) -> list[int]:
    """As few micro-batches of at most `limit` as possible, as equal as possible: 10 at 4 are 4, 3, 3.

    Equal, because the memory needed is that of the largest, and because fewer shapes mean fewer compiles.
    """
    steps = math.ceil(num_examples / limit)
    smaller, larger = num_examples // steps, num_examples % steps
    return [smaller + 1] * larger + [smaller] * (steps - larger)


def full_sizes(num_examples: int, limit: int) -> list[int]:
    """Micro-batches of exactly `limit`, and one of what is left: 10 at 4 are 4, 4, 2."""
    left = num_examples % limit
    return [limit] * (num_examples // limit) + ([left] if left else [])


class Sizing(Protocol):
    """Chooses the sizes of a batch's micro-batches."""

    @property
    def settled(self) -> bool:
        """Whether the choice is made; if not, `observe` wants to hear of every micro-batch."""

    @property
    def limit(self) -> int | None:
        """The most examples a micro-batch may hold from now on; None while it is unknown."""

    def plan(self, num_examples: int, units: Callable[[], int]) -> Sequence[int]:
        """Sizes that sum to `num_examples`. `units()` is an example's padded length in tokens, or 1."""

    def observe(self, size: int, units: int, seconds: float, base_bytes: int | None, peak_bytes: int | None) -> None:
        """What a micro-batch of `size` examples and `units` padded tokens in all took."""

    def state_dict(self) -> dict[str, Any]:
        """The choice, for a later run."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier run's choice."""


@dataclass
class FixedSize:
    """At most `size` examples, as the user said; exactly `size` where the examples keep their order (`exact`)."""

    size: int
    exact: bool = False
    settled: bool = True

    @property
    def limit(self) -> int:
        """The size."""
        return self.size

    def plan(self, num_examples: int, units: Callable[[], int]) -> Sequence[int]:
        """See `Sizing`."""
        return (full_sizes if self.exact else equal_sizes)(num_examples, self.size)

    def observe(self, size: int, units: int, seconds: float, base_bytes: int | None, peak_bytes: int | None) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the size is the user's argument."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""


@dataclass
class RuleSize:
    """A power of two of examples whose padded tokens come to at most `target_units`: the same on every run."""

    target_units: int
    size: int | None = None
    settled: bool = True

    @property
    def limit(self) -> int | None:
        """The size, once a batch has been seen."""
        return self.size

    def plan(self, num_examples: int, units: Callable[[], int]) -> Sequence[int]:
        """See `Sizing`."""
        if self.size is None:
            self.size = 2 ** max(0, int(math.log2(self.target_units / max(units(), 1))))
        return equal_sizes(num_examples, self.size)

    def observe(self, size: int, units: int, seconds: float, base_bytes: int | None, peak_bytes: int | None) -> None:
        """Timings do not decide."""

    def state_dict(self) -> dict[str, Any]:
        """The size."""
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the size."""
        self.size = state["size"]


@dataclass
class SizeSearch:
    """Doubles the size on the training's own micro-batches while that pays and the memory budget allows it.

    Args:
        budget_bytes: What the process (CPU) or the device may use; None where unknown, then speed alone decides.
        reserved_bytes: What will come on top later: the optimizer's state before its first step.
        explicit: Whether the user stated the budget, so that exceeding it with one example is an error.
    """

    budget_bytes: int | None = None
    reserved_bytes: int = 0
    explicit: bool = False
    choice: int | None = None
    _rates: dict[int, float] = field(default_factory=dict)
    _runs: dict[int, int] = field(default_factory=dict)
    _capped_at: int = 0
    """Where the search ended because batches were too small for the next size: the largest such batch; else 0."""

    _warm: bool = False
    _base: int | None = None
    _per_example: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether the search is over."""
        return self.choice is not None

    @property
    def limit(self) -> int | None:
        """The choice; while searching, the largest size that memory allows."""
        return self.choice if self.choice is not None else self._memory_limit()

    def plan(self, num_examples: int, units: Callable[[], int]) -> Sequence[int]:
        """The next sizes to try; what is left over runs at the last of them."""
        if num_examples > self._capped_at > 0:
            self.choice, self._capped_at = None, 0  # a batch that is large enough for a larger size has come
        if self.choice is None and self._complete() and 2 * max(self._rates) > num_examples:
            self._choose()
            self._capped_at = 2 * max(self._rates) - 1
        if self.choice is not None:
            return equal_sizes(num_examples, self.choice)
        sizes = [] if self._warm else [1]
        size = min(
            (one for one in self._rates if self._runs[one] < self._wanted(one)), default=max(self._rates, default=1)
        )
        while sum(sizes) + size <= num_examples:
            wanted = self._wanted(size) - self._runs.get(size, 0)
            room = (num_examples - sum(sizes)) // size
            sizes += [size] * max(0, min(wanted, room))
            if room < wanted:
                break
            size *= 2
        left, last = num_examples - sum(sizes), sizes[-1] if sizes else min(size, num_examples)
        return sizes + (full_sizes(left, last) if left else [])

    def observe(self, size: int, units: int, seconds: float, base_bytes: int | None, peak_bytes: int | None) -> None:
        """Take a micro-batch into account; the very first one only for its memory, since it also warms things up."""
        if base_bytes is not None and peak_bytes is not None:
            self._base = base_bytes if self._base is None else max(self._base, base_bytes)
            self._per_example = max(self._per_example, (peak_bytes - base_bytes) / size)
        if not self._warm:
            self._warm = True
            return
        if size.bit_count() > 1 or self._runs.get(size, 0) >= self._wanted(size):
            return  # a rest, a part of what turned out too large, or measured often enough
        self._runs[size] = self._runs.get(size, 0) + 1
        self._rates[size] = max(self._rates.get(size, 0.0), units / max(seconds, 1e-9))
        if self._over():
            self._choose()

    @property
    def shortfall_bytes(self) -> int:
        """By how much a micro-batch of one example exceeds the budget; 0 where it fits, or nothing is known."""
        if self.budget_bytes is None or self._base is None:
            return 0
        return max(0, int(self._base + self.reserved_bytes + self._per_example) - self.budget_bytes)

    def _choose(self) -> None:
        best = max(self._rates.values())
        self.choice = min(size for size, rate in self._rates.items() if rate >= (1 - TOLERANCE) * best)

    def _complete(self) -> bool:
        """Whether every size tried so far has been measured often enough."""
        return bool(self._rates) and all(self._runs[size] >= self._wanted(size) for size in self._rates)

    def _wanted(self, size: int) -> int:
        """How many micro-batches of a size are to be measured."""
        smaller = max((rate for other, rate in self._rates.items() if other < size), default=0.0)
        return REPEATS if self._rates.get(size, smaller) >= DOUBTFUL * smaller else 3 * REPEATS

    def _over(self) -> bool:
        if not self._complete():
            return False
        largest, limit = max(self._rates), self._memory_limit()
        if limit is not None and 2 * largest > limit:
            return True
        gains = [self._rates[size] / self._rates[size // 2] - 1 for size in self._rates if size // 2 in self._rates]
        return len(gains) >= 2 and all(gain < TOLERANCE for gain in gains[-2:])

    def _memory_limit(self) -> int | None:
        if self.budget_bytes is None or self._base is None or self._per_example <= 0:
            return None
        free = (1 - MARGIN) * (self.budget_bytes - self.reserved_bytes - self._base)
        return max(1, int(free / self._per_example))

    def state_dict(self) -> dict[str, Any]:
        """The choice, and the measurements it rests on (padded tokens per second by size)."""
        return {"choice": self.choice, "capped_at": self._capped_at, "rates": dict(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier run's choice; a search that was not over starts again."""
        self.choice, self._capped_at = state["choice"], int(state["capped_at"])
        self._rates = {int(size): float(rate) for size, rate in state["rates"].items()} if self.settled else {}
