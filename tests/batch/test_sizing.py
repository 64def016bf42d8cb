"""How many examples a micro-batch holds."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch.batch.partition import partition
from wholebatch.batch.sizing import FixedSize, RuleSize, SizeSearch


@given(st.integers(1, 3000), st.integers(1, 600))
def test_equal_sizes_are_as_few_and_as_equal_as_possible(num_examples: int, limit: int) -> None:
    """Examples of one length: the micro-batch with the most decides about memory, and few shapes are few compiles."""
    sizes = FixedSize(limit).plan([7] * num_examples)
    assert sum(sizes) == num_examples
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_examples // limit)


@given(st.integers(1, 5000), st.integers(1, 600))
def test_exact_sizes_are_the_limit_and_a_rest(num_examples: int, limit: int) -> None:
    sizes = FixedSize(limit, exact=True).plan([1] * num_examples)
    assert sum(sizes) == num_examples
    assert all(size == limit for size in sizes[:-1])
    assert 1 <= sizes[-1] <= limit


def test_ten_at_four() -> None:
    """The example of the documentation: equal micro-batches, or full ones where the order must stay (WN, CG1)."""
    assert FixedSize(4).plan([1] * 10) == [4, 3, 3]
    assert FixedSize(4, exact=True).plan([1] * 10) == [4, 4, 2]
    assert FixedSize(64).plan([1] * 10) == [10]


def train(search: SizeSearch, batches: int, num_examples: int, seconds, bytes_per_example: int = 10) -> list[int]:
    """Run batches whose micro-batches take `seconds(size)`; returns the sizes of the last batch."""
    ran: list[int] = []
    for _ in range(batches):
        ran = []
        for planned in search.plan([1] * num_examples):
            left = planned
            while left:
                size = min(left, search.limit(1) or left)
                search.observe(size, 1, size, seconds(size), 1000, 1000 + bytes_per_example * size)
                ran.append(size)
                left -= size
        assert sum(ran) == num_examples
    return ran


@settings(deadline=None)  # a fit for each micro-batch of a search
@given(st.integers(1, 300), st.integers(1, 4))
def test_a_search_uses_every_example_once(num_examples: int, batches: int) -> None:
    """Nothing is run for the measurement alone: each batch's sizes sum to the batch."""
    train(SizeSearch(), batches, num_examples, lambda size: 1.0 + size)


def test_the_search_takes_the_smallest_size_that_is_as_fast_as_the_best() -> None:
    """Throughput saturates at 8: per micro-batch 1 s, per example 0.001 s up to 8 and 0.126 s above."""
    search = SizeSearch()
    train(search, 5, 256, lambda size: 1.0 if size <= 8 else size / 8)
    assert search.choice == 8


def test_the_search_keeps_doubling_while_it_pays() -> None:
    search = SizeSearch()
    train(search, 12, 256, lambda size: 100.0 + size)
    assert search.choice is None or search.choice >= 64


def test_the_search_stays_inside_the_budget() -> None:
    """1000 bytes before, 10 per example: of 1060 bytes a tenth of what is left is kept free, and 54 hold 5 examples."""
    search = SizeSearch(budget_bytes=1060)
    sizes = train(search, 4, 256, lambda size: 1.0)
    assert search.choice == 4
    assert max(sizes) <= 5


def test_memory_reserved_for_the_optimizer_counts() -> None:
    search = SizeSearch(budget_bytes=1060, reserved_bytes=30)
    train(search, 4, 256, lambda size: 1.0)
    assert search.choice == 2


def test_one_example_over_the_budget_is_told() -> None:
    search = SizeSearch(budget_bytes=1004)
    search.observe(1, 1, 1, 1.0, 1000, 1010)
    assert search.shortfall_bytes == 6


def test_the_first_micro_batch_is_not_timed() -> None:
    """It also warms things up; a search that believed it would call every later size faster."""
    search = SizeSearch()
    seconds = iter([1000.0] + [1.0] * 2000)
    train(search, 3, 64, lambda size: next(seconds) * size)
    assert search.choice == 1


def test_a_choice_survives_in_the_state() -> None:
    search = SizeSearch()
    train(search, 5, 256, lambda size: 1.0 if size <= 8 else size / 8)
    later = SizeSearch()
    later.load_state_dict(search.state_dict())
    assert later.settled
    assert later.plan([1] * 20) == [7, 7, 6]
    assert later.cost == search.cost


@pytest.mark.parametrize(("length", "most"), [(1, 1024), (128, 8), (100, 10), (1024, 1), (4096, 1)])
def test_the_rule_size_depends_on_lengths_only(length: int, most: int) -> None:
    rule = RuleSize(target_tokens=1024)
    sizes = rule.plan([length] * 1000)
    assert (sum(sizes), max(sizes)) == (1000, min(most, 1000))
    rule.observe(1, 1, 1, 1e9, None, None)
    assert rule.plan([length] * 1000) == sizes


@pytest.mark.parametrize("num_examples", [1, 2, 3, 5, 7, 10, 17, 63, 64, 100, 1000])
def test_the_search_ends_whatever_the_batch(num_examples: int) -> None:
    """Also where larger is always faster, and where the batch never holds the next size twice."""
    search = SizeSearch()
    sizes = train(search, 30, num_examples, lambda size: 100.0 + size)
    assert search.settled
    assert max(sizes) <= num_examples


def test_small_batches_do_not_settle_it_for_large_ones() -> None:
    """The search goes on where a batch comes that holds the next size."""
    search = SizeSearch()
    train(search, 20, 3, lambda size: 100.0 + size)
    assert search.choice == 2
    train(search, 20, 64, lambda size: 100.0 + size)
    assert search.choice == 64


def test_rests_are_not_measured() -> None:
    """Sizes that are no power of two come from what is left of a batch."""
    search = SizeSearch()
    train(search, 3, 23, lambda size: 1e-9 if size in (3, 5, 6, 7) else 1.0 * size)
    assert search.choice == 1


def test_a_busy_machine_does_not_settle_it_for_the_smallest_size() -> None:
    """The first measurements of sizes above 1 are ten times too slow; sizes that look so slow are measured again."""
    search, seen = SizeSearch(), {}

    def seconds(size: int) -> float:
        seen[size] = seen.get(size, 0) + 1
        return (10.0 if size > 1 and seen[size] <= 4 else 1.0) * (1.0 if size <= 8 else size / 8)

    train(search, 12, 64, seconds)
    assert search.choice == 8


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(1, 6))
def test_a_search_over_unequal_lengths_uses_every_example_once(lengths: list[int], batches: int) -> None:
    search, lengths = SizeSearch(), sorted(lengths, reverse=True)
    for _ in range(batches):
        sizes, at = search.plan(lengths), 0
        assert sum(sizes) == len(lengths)
        for size in sizes:
            length = lengths[at]
            search.observe(size, length, size * length, 1.0 + size * length, 0, size * length)
            at += size


def unequal(search: SizeSearch, batches: int, seconds) -> list[tuple[int, int]]:
    """Batches of 64 examples of 20 to 256 tokens; returns the last one's micro-batches as (examples, padded length)."""
    lengths = sorted((20 + 236 * (i * i % 67) // 66 for i in range(64)), reverse=True)
    for _ in range(batches):
        ran, at = [], 0
        for size in search.plan(lengths):
            length = lengths[at]
            search.observe(size, length, size * length, seconds(size, length), 1000, 1000 + 10 * size * length)
            ran.append((size, length))
            at += size
    return ran


def test_over_unequal_lengths_the_choice_is_in_tokens() -> None:
    """Overhead 50 tokens. With equal lengths up to 2,048 tokens would pay by more than 2 %.

    Longer examples, which come first, do not mislead. With these lengths, what larger ones save is lost to padding:
    1,024 are as fast.
    """
    search = SizeSearch()
    ran = unequal(search, 40, lambda size, length: 50 + size * length * (1 + length / 2000))
    assert search.choice == 1024
    assert max(size * length for size, length in ran) <= 1024

    def cost(tokens: int) -> float:
        lengths = [length for size, length in ran for _ in range(size)]
        return search.cost.of_cut(partition(lengths, search.cost, lambda length: tokens // length), lengths)

    assert cost(1024) <= 1.02 * cost(2048)
    assert cost(512) > 1.02 * cost(2048)
    assert search.cost.per_micro_batch / search.cost.per_token == pytest.approx(50, rel=0.02)
    assert search.cost.per_token_squared / search.cost.per_token == pytest.approx(1 / 2000, rel=0.02)


def test_over_unequal_lengths_the_budget_is_in_tokens_too() -> None:
    """10 bytes a token: 9,000 bytes less a tenth hold 810 tokens, three examples of 256."""
    search = SizeSearch(budget_bytes=10_000)
    ran = unequal(search, 40, lambda size, length: 1.0)
    assert max(size * length for size, length in ran) <= 810
    assert search.limit(256) <= 3
    assert search.limit(27) <= 30


def test_a_longer_example_than_any_before_is_given_more_room() -> None:
    """Its attention may need as much more per token as it is longer."""
    search = SizeSearch(budget_bytes=10_000)
    search.observe(1, 100, 100, 1.0, 1000, 2000)
    assert search.limit(100) == 8
    assert search.limit(200) == 2
    assert search.limit(400) == 1


@pytest.mark.parametrize("seed", range(8))
def test_the_search_settles_over_lengths_that_are_never_the_same(seed: int) -> None:
    """Rests of short examples begin no smaller size that long ones, which come first, could never measure."""
    generator, search, batches = random.Random(seed), SizeSearch(), 0
    while not search.settled and batches < 12:
        batches += 1
        lengths = sorted((generator.randint(5, 80) for _ in range(generator.choice([16, 64]))), reverse=True)
        at = 0
        for size in search.plan(lengths):
            search.observe(size, lengths[at], size * lengths[at], 40.0 + size * lengths[at], 0, 0)
            at += size
    assert search.settled
    assert search.choice >= 128
