"""What a micro-batch costs in seconds and in bytes, from its number of examples and its padded length.

Measurements in, figures out; the least squares are torch's. Nothing here touches a device.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

WORTH_A_TERM = 0.9
"""A further term of the cost must bring the squared error below this share of what it was: measurements are noisy, and
some say nothing about a term (those of one length about the square of it)."""

MOST_ATTENTION = 1 / 128
"""The most that attention may add to the work of a token for each token of the example: in a Transformer of width d it
is about 1 / (6 d). A fit that says more has been misled by other work on the machine."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a micro-batch of `examples` examples of `length` padded tokens: the sum of three terms.

    `per_micro_batch + examples * (per_token * length + per_token_squared * length**2)`: what each micro-batch costs
    whatever is in it, what is linear in its tokens, and what attention adds.
    """

    per_micro_batch: float
    per_token: float
    per_token_squared: float = 0.0

    def per_example(self, length: int) -> float:
        """What each example of a micro-batch of this padded length adds."""
        return length * (self.per_token + self.per_token_squared * length)

    def of(self, timing: "Timing") -> float:
        """What a micro-batch of these tokens and this length costs."""
        each = self.per_token + self.per_token_squared * timing.length
        return self.per_micro_batch + timing.tokens * each

    def of_cut(self, sizes: Sequence[int], lengths: Sequence[int]) -> float:
        """What a batch cut like this costs; `lengths` longest first."""
        starts = accumulate(sizes, initial=0)
        return sum(
            self.per_micro_batch + size * self.per_example(lengths[at]) for size, at in zip(sizes, starts, strict=False)
        )

    def work(self, tokens: float, length: float) -> float:
        """Tokens, with attention counted as the tokens that take as long."""
        return tokens * (1.0 + min(self.per_token_squared / self.per_token, MOST_ATTENTION) * length)


@dataclass(frozen=True)
class Timing:
    """One measured micro-batch."""

    tokens: float
    """Padded tokens in all."""

    length: float
    """Padded tokens of each example."""

    seconds: float


def fitted(timings: Sequence[Timing], default: Cost) -> Cost:
    """The cost with the smallest squared relative error over the faster half of `timings` of each size.

    The faster half, because other work on the machine only ever slows a micro-batch down. No term is negative, only
    terms that the measurements speak of are used, and a micro-batch costs at least as much beside its tokens as by
    `default`: few measurements hide that easily, and cuts into single examples would follow. Where there are too few,
    the shape is that of `default`.
    """
    found, kept = default, list(timings)
    for _ in range(3):
        found = _fitted(kept, default)
        kept = _faster_half(timings, found)
    least = found.per_token * default.per_micro_batch / default.per_token
    return replace(found, per_micro_batch=max(found.per_micro_batch, least))


def _faster_half(timings: Sequence[Timing], cost: Cost) -> list[Timing]:
    by_size: dict[int, list[Timing]] = defaultdict(list)
    for timing in timings:
        by_size[int(timing.tokens - 1).bit_length()].append(timing)
    kept = []
    for alike in by_size.values():
        alike.sort(key=lambda one: one.seconds / cost.of(one))
        kept += alike[: (len(alike) + 1) // 2]
    return kept


def _fitted(timings: Sequence[Timing], default: Cost) -> Cost:
    if len(timings) < 2:
        return _scaled(default, timings)
    best, error = _scaled(default, timings), float("inf")
    for columns in ((1,), (0, 1), (1, 2), (0, 1, 2)):
        found, its_error = _least_squares(timings, columns)
        if found is not None and its_error < WORTH_A_TERM * error:
            best, error = found, its_error
    return best


def _scaled(default: Cost, timings: Sequence[Timing]) -> Cost:
    """`default`, in the seconds of the fastest timing."""
    factor = min((one.seconds / default.of(one) for one in timings), default=1.0)
    return Cost(default.per_micro_batch * factor, default.per_token * factor, default.per_token_squared * factor)


def _least_squares(timings: Sequence[Timing], columns: Sequence[int]) -> tuple[Cost | None, float]:
    """The cost of these terms alone, and its error; None if a term would be negative."""
    rows = [[1.0, one.tokens, one.tokens * one.length] for one in timings]
    relative = [[row[c] / one.seconds for c in columns] for row, one in zip(rows, timings, strict=True)]
    design = torch.tensor(relative, dtype=torch.float64, device="cpu")
    scale = design.abs().amax(dim=0)
    target = torch.ones(len(rows), 1, dtype=torch.float64, device="cpu")
    solution = torch.linalg.lstsq(design / scale, target, driver="gelsd").solution
    error = float(((design / scale) @ solution - target).square().mean()) + 1e-9
    terms = [0.0, 0.0, 0.0]
    for column, value in zip(columns, (solution.flatten() / scale).tolist(), strict=True):
        terms[column] = value
    return (Cost(*terms) if min(terms) >= 0.0 < terms[1] else None), error


@dataclass
class ByteModel:
    """Bytes of a micro-batch on top of what is held before it, from what micro-batches have needed so far.

    Per token as much as the worst so far; examples longer than any so far are taken to need as much more per token as
    they are longer, as attention that holds its scores does.
    """

    per_token: float = 0.0
    longest: float = 0.0

    def observe(self, tokens: float, length: float, needed: float) -> None:
        """A micro-batch of `tokens` padded tokens needed so many bytes."""
        self.per_token = max(self.per_token, needed / max(tokens, 1.0))
        self.longest = max(self.longest, length)

    def __call__(self, examples: float, length: float) -> float:
        """Bytes of a micro-batch of `examples` examples of `length` padded tokens."""
        return examples * length * self.per_token * max(1.0, length / max(self.longest, 1.0))

    def most(self, free: float, length: float) -> int | None:
        """How many examples of this length `free` bytes hold, 1 at least; None where nothing is known."""
        if self.per_token <= 0.0:
            return None
        return max(1, int(free / self(1, length)))
