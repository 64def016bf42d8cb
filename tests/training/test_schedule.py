"""The learning rate by examples, and how long a run is."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.training.course import Course, course_of, examples_after, tokens_of, updates_until
from wholebatch.training.order import Position, Shuffled, batches
from wholebatch.training.schedule import Schedule
from wholebatch.training.settings import DEFAULT_STEPS, TrainingSettings


def test_the_warm_up_is_a_line_and_the_first_update_is_not_lost() -> None:
    schedule = Schedule(peak=1.0, total=1000, warm_up=100, final=0.1, shape="cosine")
    assert [schedule.learning_rate(n, n + 20) for n in (0, 20, 80)] == pytest.approx([0.2, 0.4, 1.0])
    assert schedule.learning_rate(100, 120) == 1.0


@pytest.mark.parametrize(
    ("shape", "half", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_it_falls_to_its_end(shape: str, half: float, end: float) -> None:
    schedule = Schedule(peak=1.0, total=1100, warm_up=100, final=0.1, shape=shape)
    assert schedule.learning_rate(600, 610) == pytest.approx(half)
    assert schedule.learning_rate(1100, 1110) == pytest.approx(end)
    assert schedule.learning_rate(2000, 2010) == pytest.approx(end)


def test_the_cosine_is_one() -> None:
    schedule = Schedule(peak=2.0, total=800, warm_up=0, final=0.0, shape="cosine")
    assert schedule.learning_rate(200, 210) == pytest.approx(1 + math.cos(math.pi / 4))


@given(size=st.integers(1, 64))
def test_another_batch_size_has_the_same_course(size: int) -> None:
    """By examples, not by updates."""
    schedule = Schedule(peak=1.0, total=640, warm_up=64, final=0.0, shape="linear")
    assert schedule.learning_rate(320, 320 + size) == pytest.approx(1 - 256 / 576)


def test_it_is_set_in_every_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.25)]
    optimizer = torch.optim.SGD(groups)
    rate = Schedule(1.0, 100, 0, 0.0, "linear").apply(optimizer, 50, 60)
    assert [group["lr"] for group in optimizer.param_groups] == [rate, rate] == [0.5, 0.5]


@given(
    num_examples=st.integers(1, 30),
    size=st.integers(1, 40),
    done=st.integers(0, 5),
    updates=st.integers(0, 12),
)
def test_examples_and_updates_are_those_of_the_batches(num_examples: int, size: int, done: int, updates: int) -> None:
    """Counted by going through them."""

    def after(start: Position, number: int) -> Position:
        end = start
        for batch, epoch, place in itertools.islice(batches(source, size, start), number):
            end = end.after(epoch, place, len(batch), 0)
        return end

    source = Shuffled(range(num_examples), 0)
    position = after(Position(), done)
    end = after(position, updates)
    assert examples_after(position, updates, num_examples, size) == end.examples
    assert updates_until(position, end.examples, num_examples, size) == updates


def test_epochs_and_steps() -> None:
    for settings, updates, examples in [
        (TrainingSettings(global_batch_size=4, epochs=3), 9, 30),
        (TrainingSettings(global_batch_size=4, max_steps=4), 4, 14),
        (TrainingSettings(global_batch_size=10), DEFAULT_STEPS, 1500),
    ]:
        assert course_of(settings, 10, Position()) == Course(updates, examples)


def test_without_a_length_the_updates_decide() -> None:
    course = course_of(
        TrainingSettings(global_batch_size=4, max_steps=6, streaming=True, data=("x",)), None, Position()
    )
    assert course == Course(6, 24, in_examples=False)
    assert not course.reached(Position(examples=24, updates=5))
    assert course.reached(Position(examples=20, updates=6))


def test_another_batch_size_ends_after_the_same_examples() -> None:
    before = TrainingSettings(global_batch_size=4, max_steps=5)
    start = Position(epoch=0, in_epoch=8, examples=8, updates=2)
    after = TrainingSettings(global_batch_size=2, max_steps=5)
    assert course_of(after, 10, start, (before, 18)) == Course(2 + 1 + 4, 18)


def test_a_new_length_is_counted_from_where_the_run_stands() -> None:
    before = TrainingSettings(global_batch_size=4, max_steps=5)
    start = Position(epoch=0, in_epoch=8, examples=8, updates=2)
    longer = TrainingSettings(global_batch_size=4, max_steps=8)
    assert course_of(longer, 10, start, (before, 18)) == Course(8, 28)
    epochs = TrainingSettings(global_batch_size=4, epochs=2)
    assert course_of(epochs, 10, start, (before, 18)) == Course(6, 20)


def test_tokens_are_those_of_the_examples_seen() -> None:
    lengths = [3, 5, 7, 11]
    order = Shuffled(range(4), 2)
    first = order.positions(1)[:3]
    assert tokens_of(order, lengths, 7) == 26 + sum(lengths[place] for place in first)
    assert tokens_of(order, lengths, 8) == 52
