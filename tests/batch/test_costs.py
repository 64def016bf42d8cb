"""What a micro-batch costs, from measurements."""

import pytest

from wholebatch.batch.costs import ByteModel, Cost, Timing, fitted

DEFAULT = Cost(32.0, 1.0)


def timings(cost: Cost, shapes: list[tuple[int, int]]) -> list[Timing]:
    return [Timing(n * length, length, cost.per_micro_batch + n * cost.per_example(length)) for n, length in shapes]


SHAPES = [(n, length) for n in (1, 2, 4, 8, 16) for length in (20, 60, 150, 400)]


@pytest.mark.parametrize("true", [Cost(0.02, 1e-4, 1e-7), Cost(0.5, 1e-4), Cost(0.004, 1e-4, 3e-8), Cost(0.05, 2e-3)])
def test_the_fit_finds_what_the_timings_were_made_of(true: Cost) -> None:
    found = fitted(timings(true, SHAPES), DEFAULT)
    for n, length in [(3, 100), (32, 30), (1, 400)]:
        predicted = found.per_micro_batch + n * found.per_example(length)
        assert predicted == pytest.approx(true.per_micro_batch + n * true.per_example(length), rel=0.03)


def test_slow_outliers_do_not_count_where_the_same_was_faster() -> None:
    """Other work on the machine only ever slows a micro-batch down."""
    true = Cost(0.02, 1e-4, 1e-7)
    slow = [Timing(one.tokens, one.length, one.seconds * 5) for one in timings(true, SHAPES)]
    found = fitted([*slow, *timings(true, SHAPES)], DEFAULT)
    for one in timings(true, SHAPES):
        assert found.of(one) == pytest.approx(one.seconds, rel=0.03)


def test_a_micro_batch_is_never_taken_to_cost_next_to_nothing() -> None:
    """Noise can hide it, and the cut would be into single examples then."""
    found = fitted(timings(Cost(0.0, 1e-4), SHAPES), DEFAULT)
    assert found.per_micro_batch / found.per_token == pytest.approx(32.0)


def test_lengths_that_are_all_alike_say_nothing_about_attention() -> None:
    found = fitted(timings(Cost(0.02, 1e-4), [(1, 128), (2, 128), (4, 128), (8, 128)]), DEFAULT)
    assert found.per_token_squared == 0.0
    assert found.per_micro_batch == pytest.approx(0.02, rel=1e-6)


def test_too_few_timings_keep_the_shape_of_the_default() -> None:
    """One micro-batch of 96 tokens in 1.28 s: 32 tokens' worth of overhead, so 0.01 s a token."""
    found = fitted([Timing(96, 96, 1.28)], DEFAULT)
    assert (found.per_micro_batch, found.per_token) == pytest.approx((0.32, 0.01))
    assert fitted([], DEFAULT) == DEFAULT


def test_no_term_is_negative() -> None:
    """Large micro-batches slower than in proportion would fit best with a negative overhead."""
    found = fitted([Timing(t, 128, t**1.2) for t in (128, 256, 512, 1024)], DEFAULT)
    assert min(found.per_micro_batch, found.per_token, found.per_token_squared) >= 0.0


def test_the_byte_model_is_the_worst_seen_and_grows_with_longer_examples() -> None:
    model = ByteModel()
    assert model.most(1e6, 100) is None
    model.observe(200, 100, 2000.0)
    model.observe(400, 50, 2000.0)
    assert model(2, 100) == 2000.0
    assert model(2, 50) == 1000.0
    assert model(1, 200) == 4000.0
    assert model.most(10_000.0, 50) == 20
    assert model.most(1.0, 50) == 1
