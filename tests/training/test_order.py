"""Which examples each update sees."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.training.order import InOrder, Position, Shuffled, Source, batches, mixed


def gone_on(source: Source, size: int, start: Position, number: int) -> tuple[list[list[int]], Position]:
    """So many updates from `start`, and where they lead."""
    seen, position = [], start
    for batch, epoch, place in itertools.islice(batches(source, size, start), number):
        position = position.after(epoch, place, len(batch), 0)
        seen.append([drawn.example for drawn in batch])
    return seen, position


def test_an_epoch_holds_each_example_once_in_an_order_of_its_own() -> None:
    orders = {key: Shuffled(range(50), key[0]).positions(key[1]) for key in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert Shuffled(range(50), 0).positions(1) == orders[0, 1]


def test_the_order_leaves_the_global_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    Shuffled(range(5), seed=0).positions(0)
    assert torch.equal(torch.get_rng_state(), before)


@given(
    num_examples=st.integers(1, 20),
    size=st.integers(1, 25),
    stopped_after=st.integers(0, 12),
    shuffled=st.booleans(),
)
def test_a_run_that_goes_on_sees_what_it_would_have_seen(
    num_examples: int, size: int, stopped_after: int, shuffled: bool
) -> None:
    source = Shuffled(range(num_examples), 3) if shuffled else InOrder(range(num_examples), 3)
    whole, _ = gone_on(source, size, Position(), stopped_after + 5)
    first, position = gone_on(source, size, Position(), stopped_after)
    rest, _ = gone_on(source, size, position, 5)
    assert first + rest == whole


def test_the_last_batch_of_an_epoch_holds_what_is_left() -> None:
    rows, _ = gone_on(InOrder(range(10), 0), 4, Position(), 6)
    assert [len(row) for row in rows] == [4, 4, 2, 4, 4, 2]
    assert list(itertools.chain(*rows)) == [*range(10), *range(10)]


@given(size=st.integers(1, 30), other=st.integers(1, 30), updates=st.integers(0, 6))
def test_another_batch_size_goes_on_with_the_same_example(size: int, other: int, updates: int) -> None:
    source = Shuffled(range(17), 0)
    seen, position = gone_on(source, size, Position(), updates)
    rest, _ = gone_on(source, other, position, 40)
    rows = Counter(itertools.chain(*seen, *rest))
    epochs, more = divmod(sum(rows.values()), 17)
    assert set(rows.values()) <= {epochs, epochs + 1}
    assert sum(number == epochs + 1 for number in rows.values()) == more


def test_a_source_without_anything_ends() -> None:
    assert list(batches(InOrder([], 0), 4, Position())) == []


def test_a_position_adds_up() -> None:
    position = Position().after(0, 0, 4, 100).after(0, 4, 3, 50)
    assert position == Position(epoch=0, in_epoch=7, examples=7, tokens=150, updates=2)
    assert position.after(1, 0, 2, 5) == Position(epoch=1, in_epoch=2, examples=9, tokens=155, updates=3)


@pytest.mark.parametrize("source", [Shuffled(range(9), 5), InOrder(range(9), 5)], ids=["shuffled", "in order"])
def test_the_seed_of_an_example_is_its_own_in_each_epoch(source: Source) -> None:
    """Masked in the same way again when a run goes on, in another way in the next epoch."""
    seeds = {(epoch, one.example): one.seed for epoch in range(3) for one in source.epoch(epoch, 0)}
    assert len(set(seeds.values())) == 27
    assert {one.example: one.seed for one in source.epoch(1, 4)}.items() <= {
        example: seed for (epoch, example), seed in seeds.items() if epoch == 1
    }.items()


def test_seeds_are_not_sums() -> None:
    assert len({mixed(0, 1), mixed(1, 0), mixed(0, 1, 0), mixed(1)}) == 4
