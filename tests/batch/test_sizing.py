"""How many examples a micro-batch holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.batch.sizing import FixedSize, RuleSize, SizeSearch, equal_sizes, full_sizes


@given(st.integers(1, 5000), st.integers(1, 600))
def test_equal_sizes_are_as_few_and_as_equal_as_possible(num_examples: int, limit: int) -> None:
    sizes = equal_sizes(num_examples, limit)
    assert sum(sizes) == num_examples
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_examples // limit)


@given(st.integers(1, 5000), st.integers(1, 600))
def test_full_sizes_are_the_limit_and_a_rest(num_examples: int, limit: int) -> None:
    sizes = full_sizes(num_examples, limit)
    assert sum(sizes) == num_examples
    assert all(size == limit for size in sizes[:-1])
    assert 1 <= sizes[-1] <= limit


def test_ten_at_four() -> None:
    """The example of the documentation: equal micro-batches, or full ones where the order must stay (WN, CG1)."""
    assert FixedSize(4).plan(10, lambda: 1) == [4, 3, 3]
    assert FixedSize(4, exact=True).plan(10, lambda: 1) == [4, 4, 2]
    assert FixedSize(64).plan(10, lambda: 1) == [10]


def train(search: SizeSearch, batches: int, num_examples: int, seconds, bytes_per_example: int = 10) -> list[int]:
    """Run batches whose micro-batches take `seconds(size)`; returns the sizes of the last batch."""
    ran: list[int] = []
    for _ in range(batches):
        ran = []
        for planned in search.plan(num_examples, lambda: 1):
            left = planned
            while left:
                size = min(left, search.limit or left)
                search.observe(size, size, seconds(size), 1000, 1000 + bytes_per_example * size)
                ran.append(size)
                left -= size
        assert sum(ran) == num_examples
    return ran


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
    search.observe(1, 1, 1.0, 1000, 1010)
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
    assert later.plan(20, lambda: 1) == [7, 7, 6]


@pytest.mark.parametrize(("units", "size"), [(1, 1024), (128, 8), (100, 8), (1024, 1), (4096, 1)])
def test_the_rule_size_depends_on_shapes_only(units: int, size: int) -> None:
    rule = RuleSize(target_units=1024)
    assert sum(rule.plan(1000, lambda: units)) == 1000
    assert rule.size == size
    rule.observe(1, 1, 1e9, None, None)
    assert rule.size == size


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
