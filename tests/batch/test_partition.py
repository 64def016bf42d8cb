"""The fastest cut of a batch in order of length, against every other cut."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.batch import costs
from wholebatch.batch.costs import Cost
from wholebatch.batch.partition import partition


def cost_of(sizes: Sequence[int], lengths: Sequence[int], cost: Cost) -> float:
    total, at = 0.0, 0
    for size in sizes:
        total += cost.per_micro_batch + size * cost.per_example(lengths[at])
        at += size
    assert at == len(lengths)
    return total


def fits(sizes: Sequence[int], lengths: Sequence[int], most: Callable[[int], int]) -> bool:
    starts = itertools.accumulate(sizes, initial=0)
    return all(size == 1 or size <= most(lengths[at]) for size, at in zip(sizes, starts, strict=False))


def every_cut(n: int) -> Iterator[list[int]]:
    """All ways to write `n` as an ordered sum."""
    for bits in itertools.product((False, True), repeat=n - 1):
        ends = [i + 1 for i, cut in enumerate(bits) if cut] + [n]
        yield [end - start for start, end in zip([0, *ends], ends, strict=False)]


def cheapest(lengths: Sequence[int], cost: Cost, most: Callable[[int], int]) -> float:
    """By looking at every group, in quadratic time."""
    best = [0.0]
    for j, length in enumerate(reversed(lengths), 1):
        room = max(1, most(length))
        best.append(
            min(best[i] + cost.per_micro_batch + (j - i) * cost.per_example(length) for i in range(max(0, j - room), j))
        )
    return best[-1]


LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=60).map(lambda lengths: sorted(lengths, reverse=True))
COSTS = st.builds(Cost, st.floats(0, 500), st.floats(0.01, 2), st.floats(0, 0.02))


@given(LENGTHS.filter(lambda lengths: len(lengths) <= 9), COSTS, st.integers(1, 2000), st.integers(1, 12))
def test_no_cut_at_all_is_cheaper(lengths: list[int], cost: Cost, tokens: int, examples: int) -> None:
    def most(length: int) -> int:
        return min(examples, tokens // length)

    sizes = partition(lengths, cost, most)
    assert fits(sizes, lengths, most)
    cheapest_of_all = min(cost_of(cut, lengths, cost) for cut in every_cut(len(lengths)) if fits(cut, lengths, most))
    assert cost_of(sizes, lengths, cost) == pytest.approx(cheapest_of_all, rel=1e-12)


@given(LENGTHS, COSTS, st.integers(1, 5000), st.integers(1, 80))
def test_as_cheap_as_the_best_by_looking_at_every_group(
    lengths: list[int], cost: Cost, tokens: int, examples: int
) -> None:
    def most(length: int) -> int:
        return min(examples, tokens // length)

    sizes = partition(lengths, cost, most)
    assert fits(sizes, lengths, most)
    assert cost_of(sizes, lengths, cost) == pytest.approx(cheapest(lengths, cost, most), rel=1e-12)


@given(LENGTHS, COSTS, st.sampled_from([8, 16, 64]), st.integers(64, 4096))
def test_the_rounding_of_lengths_is_part_of_the_optimum(
    lengths: list[int], cost: Cost, multiple: int, tokens: int
) -> None:
    """Rounded up, lengths are few, and the cut is still the cheapest: that of the rounded lengths."""
    rounded = [-(-length // multiple) * multiple for length in lengths]
    sizes = partition(rounded, cost, lambda length: tokens // length)
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    assert all(rounded[start] % multiple == 0 for start in starts)
    assert cost_of(sizes, rounded, cost) == pytest.approx(
        cheapest(rounded, cost, lambda length: tokens // length), rel=1e-12
    )


def test_a_byte_model_bounds_the_groups() -> None:
    """In examples and padded length, not in their product: attention that holds its scores grows with the square."""

    def most(length: int) -> int:
        return int(1_000_000 // (100 * length + length**2))

    lengths = sorted((8 + 5 * i for i in range(100)), reverse=True)
    sizes = partition(lengths, Cost(1e9, 1.0), most)
    starts = itertools.accumulate(sizes, initial=0)
    needed = [size * (100 * lengths[at] + lengths[at] ** 2) for size, at in zip(sizes, starts, strict=False)]
    assert max(needed) <= 1_000_000
    assert cost_of(sizes, lengths, Cost(1e9, 1.0)) == pytest.approx(cheapest(lengths, Cost(1e9, 1.0), most), rel=1e-12)


def test_one_look_at_the_cost_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 examples: fewer than 40 evaluations of the cost for each of them."""
    asked = 0
    per_example = costs.Cost.per_example

    def counted(self: Cost, length: int) -> float:
        nonlocal asked
        asked += 1
        return per_example(self, length)

    monkeypatch.setattr(costs.Cost, "per_example", counted)
    lengths = sorted((1 + i * i % 1999 for i in range(4096)), reverse=True)
    sizes = partition(lengths, Cost(32.0, 1.0, 0.001), lambda length: 4096 // length)
    assert sum(sizes) == 4096
    assert 0 < asked <= len(set(lengths))


def test_neighbours_of_one_length_are_equal_in_size() -> None:
    """7 of one length at most 3 at once are 3, 2, 2; with a longer one among them too."""
    assert partition([5] * 7, Cost(1.0, 1.0), lambda length: 3) == [3, 2, 2]
    assert partition([100, *[5] * 7], Cost(1.0, 1.0), lambda length: 3) == [1, 3, 2, 2]
