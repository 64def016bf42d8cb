"""How many examples a micro-batch holds, from their padded lengths. Numbers in, sizes out; no torch.

Throughput saturates at small micro-batches while memory grows linearly, so the choice is the smallest number of padded
tokens whose throughput is within `TOLERANCE` of the best, not the largest that fits. Under it, the cut is the one that
is predicted to be the fastest (`partition`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wholebatch.batch.costs import ByteModel, Cost, Timing, fitted
from wholebatch.batch.partition import full_sizes, partition

TOLERANCE = 0.02
"""A size counts as fast as the fastest within this; a doubling that gains less counts as no gain."""

REPEATS = 3
"""Micro-batches measured of each size; the fastest counts, since other work on the machine only slows one down."""

LEVELS_AT_ONCE = 3
"""Sizes tried in the first batch; after it each further one has to wait until those before it have been looked at."""

DOUBTFUL = 0.95
"""A size slower than this share of a smaller one is measured three times as often before that is believed: work per
example hardly ever grows with the size, but a busy machine can slow down every measurement of a size."""

MARGIN = 0.1
"""Share of the memory left over the base that is not planned with: allocators hold on to more than is in use."""

CPU_TOKENS, ACCELERATOR_TOKENS = 512, 16384
"""Padded tokens of a micro-batch under `deterministic`, where timings must not decide: enough to keep a CPU busy with a
Transformer of some million parameters, and a multiple of that on an accelerator."""

CPU_COST, ACCELERATOR_COST = Cost(32.0, 1.0), Cost(2048.0, 1.0)
"""The cost in tokens where nothing was measured: what a micro-batch costs beside its tokens."""


class Sizing(Protocol):
    """Chooses the sizes of a batch's micro-batches."""

    @property
    def settled(self) -> bool:
        """Whether the choice is made; if not, `observe` wants to hear of every micro-batch."""

    def limit(self, length: int) -> int | None:
        """The most examples of a padded length that a micro-batch may hold from now on; None while it is unknown."""

    def plan(self, lengths: Sequence[int]) -> Sequence[int]:
        """Sizes that sum to the number of examples, given their padded lengths (tokens, or 1), longest first."""

    def observe(
        self, size: int, length: int, tokens: int, seconds: float, base_bytes: int | None, peak_bytes: int | None
    ) -> None:
        """What a micro-batch took, planned with `size` examples of `length`, holding `tokens` padded tokens in all."""

    def state_dict(self) -> dict[str, Any]:
        """The choice, for a later run."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier run's choice."""


@dataclass
class FixedSize:
    """At most `size` examples, as the user said; exactly `size` where the examples keep their order (`exact`)."""

    size: int
    exact: bool = False
    cost: Cost = CPU_COST
    settled: bool = True

    def limit(self, length: int) -> int:
        """The size."""
        return self.size

    def plan(self, lengths: Sequence[int]) -> Sequence[int]:
        """See `Sizing`."""
        if self.exact:
            return full_sizes(len(lengths), self.size)
        return partition(lengths, self.cost, self.limit)

    def observe(
        self, size: int, length: int, tokens: int, seconds: float, base_bytes: int | None, peak_bytes: int | None
    ) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the size is the user's argument."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""


@dataclass
class RuleSize:
    """As many examples as come to at most `target_tokens` padded tokens: the same on every run."""

    target_tokens: int
    cost: Cost = CPU_COST
    settled: bool = True

    def limit(self, length: int) -> int:
        """See `Sizing`."""
        return max(1, self.target_tokens // length)

    def plan(self, lengths: Sequence[int]) -> Sequence[int]:
        """See `Sizing`."""
        return partition(lengths, self.cost, self.limit)

    def observe(
        self, size: int, length: int, tokens: int, seconds: float, base_bytes: int | None, peak_bytes: int | None
    ) -> None:
        """Timings do not decide."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep: the lengths say all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over."""


@dataclass
class SizeSearch:
    """Doubles the tokens of a micro-batch, on the training's own, while that pays and the memory budget allows it.

    The tokens tried are powers of two, from those of the longest example on: a micro-batch is a measurement of one of
    them if it holds as many examples of its length as fit into it.

    Args:
        budget_bytes: What the process (CPU) or the device may use; None where unknown, then speed alone decides.
        reserved_bytes: What will come on top later: the optimizer's state before its first step.
        explicit: Whether the user stated the budget, so that exceeding it with one example is an error.
        cost: In which proportion the cost of a micro-batch grows, until it is measured.
    """

    budget_bytes: int | None = None
    reserved_bytes: int = 0
    explicit: bool = False
    cost: Cost = CPU_COST
    choice: int | None = None
    """Padded tokens of a micro-batch at most."""

    _timings: dict[int, list[Timing]] = field(default_factory=dict)
    """By the power of two that they measure."""

    _rates: dict[int, float] = field(default_factory=dict)
    _fit: Cost = CPU_COST
    _refined: bool = True
    _capped_at: int = 0
    """Where the search ended because batches were too small for the next size: the largest such batch; else 0."""

    _first: int = 0
    """The smallest size tried: that of the longest example at the beginning."""

    _warm: bool = False
    _base: int | None = None
    _bytes: ByteModel = field(default_factory=ByteModel)
    _worst: float = 0.0
    """Bytes of the most that a micro-batch of one example may have needed."""

    @property
    def settled(self) -> bool:
        """Whether the search is over."""
        return self.choice is not None

    def limit(self, length: int) -> int | None:
        """See `Sizing`."""
        by_memory = self._memory_limit(length)
        if self.choice is None:
            return by_memory
        return min(max(1, self.choice // length), by_memory or self.choice)

    def plan(self, lengths: Sequence[int]) -> Sequence[int]:
        """The next sizes to try; what is left over runs at the last of them."""
        total = sum(lengths)
        if total > self._capped_at > 0:
            self.choice, self._capped_at = None, 0  # a batch that is large enough for a larger size has come
        if self.choice is None and self._complete():
            if 2 * max(self._timings) > total:
                self._choose()
                self._capped_at = 2 * max(self._timings) - 1
            elif len(self._timings) > 1 and self._larger_is_no_use(lengths):
                self._choose()
        if self.choice is not None:
            if not self._refined and lengths[0] != lengths[-1]:
                self._refine(lengths)
            return partition(lengths, self.cost, lambda length: self.limit(length) or 1)
        return self._trials(lengths)

    def _trials(self, lengths: Sequence[int]) -> list[int]:
        self._first = self._first or _power_of_two(lengths[0])
        sizes = [] if self._warm else [1]
        at, level = len(sizes), self._next_level()
        last, planned, total = level, Counter[int](), sum(lengths)
        largest = max(level, self._first * 2 ** (LEVELS_AT_ONCE - 1))
        while at < len(lengths):
            size = max(1, level // lengths[at])
            if size > len(lengths) - at:  # too few are left for this size
                level, size = last, min(max(1, last // lengths[at]), len(lengths) - at)
            sizes.append(size)
            at, last = at + size, level
            planned[level] += 1
            while planned[level] + len(self._timings.get(level, ())) >= self._wanted(level):
                if 2 * level * REPEATS > total or 2 * level > largest:
                    break  # whether larger ones are of use is asked first, as they cost memory
                level *= 2
        return sizes

    def _next_level(self) -> int:
        """The smallest of the sizes that are still to be measured."""
        unfinished = [level for level in self._timings if len(self._timings[level]) < self._wanted(level)]
        return min(unfinished, default=2 * max(self._timings) if self._timings else self._first)

    def observe(
        self, size: int, length: int, tokens: int, seconds: float, base_bytes: int | None, peak_bytes: int | None
    ) -> None:
        """Take a micro-batch into account; the very first one only for its memory, since it also warms things up."""
        if base_bytes is not None and peak_bytes is not None:
            self._base = base_bytes if self._base is None else max(self._base, base_bytes)
            self._bytes.observe(size * length, length, peak_bytes - base_bytes)
            self._worst = max(self._worst, self._bytes(1, length))
        if not self._warm:
            self._warm = True
            return
        level = _power_of_two(size * length)
        measured = self._timings.get(level, [])
        if level < self._first or size != max(1, level // length) or len(measured) >= self._wanted(level):
            return  # a rest, a part of what turned out too large, or measured often enough
        self._timings[level] = measured
        measured.append(Timing(tokens, tokens / size, max(seconds, 1e-9)))
        if len(measured) >= REPEATS:
            self._rates, self._fit = self._measured()
        if self._over():
            self._choose()

    @property
    def shortfall_bytes(self) -> int:
        """By how much a micro-batch of one example exceeds the budget; 0 where it fits, or nothing is known."""
        if self.budget_bytes is None or self._base is None:
            return 0
        return max(0, int(self._base + self.reserved_bytes + self._worst) - self.budget_bytes)

    def _measured(self) -> tuple[dict[int, float], Cost]:
        """The best throughput measured at each size, attention counted, as long examples come first; and the cost."""
        cost = fitted([one for measured in self._timings.values() for one in measured], self.cost)
        rates = {
            level: max(cost.work(one.tokens, one.length) / one.seconds for one in measured)
            for level, measured in self._timings.items()
            if len(measured) >= REPEATS
        }
        return rates, cost

    def _choose(self) -> None:
        best = max(self._rates.values())
        self.choice = min(level for level, rate in self._rates.items() if rate >= (1 - TOLERANCE) * best)
        self.cost, self._refined = self._fit, False

    def _larger_is_no_use(self, lengths: Sequence[int]) -> bool:
        """Whether, for unequal lengths, what larger micro-batches would save is predicted to be lost to padding."""
        if lengths[0] == lengths[-1]:
            return False
        largest = max(self._timings)
        seconds, best = (self._fit.of_cut(self._cut(lengths, most), lengths) for most in (largest, sum(lengths)))
        return seconds <= (1 + TOLERANCE) * best

    def _cut(self, lengths: Sequence[int], tokens: int) -> Sequence[int]:
        """The cut under a limit of tokens, by the cost as fitted."""
        return partition(lengths, self._fit, lambda length: max(1, tokens // length))

    def _refine(self, lengths: Sequence[int]) -> None:
        """Unequal lengths gain less from large micro-batches: the smallest that is predicted to be as fast as these."""
        levels = [level for level in sorted(self._rates) if level <= (self.choice or level)]
        predicted = {level: self._fit.of_cut(self._cut(lengths, level), lengths) for level in levels}
        as_fast = [level for level in levels if predicted[level] <= (1 + TOLERANCE) * min(predicted.values())]
        self.choice = min(as_fast, default=self.choice)
        self._refined = True

    def _complete(self) -> bool:
        """Whether every size tried so far has been measured often enough."""
        return bool(self._timings) and all(len(m) >= self._wanted(level) for level, m in self._timings.items())

    def _wanted(self, level: int) -> int:
        """How many micro-batches of a size are to be measured."""
        smaller = max((rate for other, rate in self._rates.items() if other < level), default=0.0)
        return REPEATS if self._rates.get(level, smaller) >= DOUBTFUL * smaller else 3 * REPEATS

    def _over(self) -> bool:
        if not self._complete():
            return False
        largest = max(self._timings)
        longest = max(int(one.length) for one in self._timings[largest])
        limit = self._memory_limit(longest)
        if limit is not None and 2 * largest > limit * longest:
            return True
        rates, fit = self._rates, self._fit
        gains = [rates[level] / rates[level // 2] - 1 for level in sorted(rates) if level // 2 in rates]
        if not gains or gains[-1] >= TOLERANCE:
            return False
        # A busy machine can hide a gain; where the fit says that there is none left either, or it happens twice, it is
        # believed. What is tried without need costs memory.
        left = fit.per_micro_batch / (2 * largest * fit.per_token)
        return left < TOLERANCE or (len(gains) >= 2 and gains[-2] < TOLERANCE)

    def _memory_limit(self, length: int) -> int | None:
        if self.budget_bytes is None or self._base is None:
            return None
        free = (1 - MARGIN) * (self.budget_bytes - self.reserved_bytes - self._base)
        return self._bytes.most(free, length)

    def state_dict(self) -> dict[str, Any]:
        """The choice, and what it rests on (padded tokens per second by size, the cost of a micro-batch)."""
        cost = self.cost
        return {
            "choice": self.choice,
            "capped_at": self._capped_at,
            "rates": dict(self._rates),
            "cost": [cost.per_micro_batch, cost.per_token, cost.per_token_squared],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an earlier run's choice; a search that was not over starts again."""
        self.choice, self._capped_at = state["choice"], int(state["capped_at"])
        if self.settled:
            self.cost = Cost(*map(float, state["cost"]))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, int(number) - 1).bit_length()
