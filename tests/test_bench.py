"""Candidate cuts side by side: the figures, what is left of it in the model, and which one is recommended."""

import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from wholebatch import bench
from wholebatch.bench import (
    Candidate,
    Comparison,
    Figures,
    Result,
    Spread,
    candidates_for,
    compare,
    extrapolated,
    recommended,
)
from wholebatch.errors import ConfigurationError
from wholebatch.memory.device import MIB, PeakMeter

pytestmark = pytest.mark.smoke

LENGTHS = [4, 2, 4, 2]
"""Of the examples of every batch: 12 tokens."""


class Model(nn.Module):
    """Next tokens, with dropout and a buffer that counts the forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(7, 5), nn.Dropout(0.5), nn.Linear(5, 7)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        self.passes += 1
        return self.head(self.dropout(self.embedding(ids)))


def collate(examples: list[Tensor]) -> dict[str, Tensor]:
    return {"ids": pad_sequence(examples, batch_first=True, padding_value=-100)}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
    labels = batch["ids"]
    logits = model(labels.clamp(min=0))
    return wb.LossSum(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum())


def builder(model: nn.Module, loss: Callable[..., Any] = loss_fn, **options: Any) -> Callable[[Candidate], Any]:
    def build(candidate: Candidate) -> wb.GradientAccumulator:
        size, regroup = candidate.micro_batch_size, candidate.regroup
        given = {"collate_fn": collate, "deterministic": True} | options
        return wb.GradientAccumulator(model, loss, micro_batch_size=size, regroup=regroup, **given)

    return build


def batches(number: int = 3, lengths: list[int] = LENGTHS) -> list[list[Tensor]]:
    return [[torch.randint(7, (length,)) for length in lengths] for _ in range(number)]


def by_name(comparison: Comparison) -> dict[str, Result]:
    return {result.candidate.name: result for result in comparison.results}


# ---- What is measured ----


def test_the_figures_are_those_of_the_cut() -> None:
    """Micro-batches, the largest one, real and padded tokens: counted by hand for lengths 4, 2, 4, 2."""
    found = by_name(compare(builder(Model()), batches(), candidates_for(4)))
    cuts = {
        name: (it.num_micro_batches, it.largest_examples, it.largest_tokens, it.real_tokens, it.padded_tokens)
        for name, result in found.items()
        if (it := result.figures) is not None and name != "auto"
    }
    assert cuts == {
        "1 in order": (4, 1, 4, 24, 24),
        "2 in order": (2, 2, 8, 24, 32),  # of each pair, one is padded from 2 to 4
        "whole batch": (1, 4, 16, 24, 32),
        "1 by length": (4, 1, 4, 24, 24),
        "2 by length": (2, 2, 8, 24, 24),  # 4 and 4, 2 and 2
        "4 by length": (1, 4, 16, 24, 32),  # one call costs less than two
    }
    assert found["2 in order"].figures.padding == pytest.approx(32 / 24)  # type: ignore[union-attr]


def test_times_and_rates_belong_together() -> None:
    """With one batch measured, the median is its time, and the rates are its examples and real tokens by that time."""
    started = bench.time.perf_counter()
    for result in compare(builder(Model()), batches(2), candidates_for(4)).results:
        figures = result.figures
        assert figures is not None
        assert 0 < figures.seconds.low == figures.seconds.median == figures.seconds.high
        assert figures.seconds.median < bench.time.perf_counter() - started
        assert figures.examples_per_second == pytest.approx(4 / figures.seconds.median)
        assert figures.speed == figures.tokens_per_second == pytest.approx(12 / figures.seconds.median)


def test_steadiness_compares_the_rates_of_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of 12, 24 and 12 tokens in 1, 2 and 4 seconds: twice 12 tokens per second, then 3."""
    clock = iter([0.0, 9.0, 0.0, 9.0, 0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    data = [batch for lengths in ([4], [4], [8], [4]) for batch in batches(1, 3 * lengths)]
    monkeypatch.setattr("wholebatch.accumulation.time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    [result] = compare(builder(Model()), data, [Candidate("all", 3, regroup=False)]).results
    assert result.figures is not None
    assert result.figures.seconds == Spread(2.0, 1.0, 4.0)
    assert (result.figures.tokens_per_second, result.figures.steadiness) == (12.0, 0.25)


def test_without_tokens_examples_are_counted() -> None:
    def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().flatten()

    rows = [{"x": torch.randn(4, 3)} for _ in range(3)]
    result = compare(builder(nn.Linear(3, 1), squared, collate_fn=None), rows, candidates_for(4)).results[1]
    figures = result.figures
    assert figures is not None
    assert (figures.real_tokens, figures.largest_tokens, figures.padding) == (None, None, None)
    assert figures.speed == figures.examples_per_second > 0


def test_results_come_in_the_order_of_the_candidates() -> None:
    candidates = [Candidate("b", 2), Candidate("a", 1, regroup=False), Candidate("c", "auto")]
    comparison = compare(builder(Model()), batches(), candidates)
    assert [result.candidate for result in comparison.results] == candidates


def test_each_batch_is_measured_with_every_candidate_in_random_order() -> None:
    said: list[str] = []
    names = [candidate.name for candidate in candidates_for(8)]
    compare(builder(Model()), batches(4, [2] * 8), candidates_for(8), say=said.append)
    assert said[: len(names)] == [f"{name}: warming up" for name in names]
    orders = []
    for number in (1, 2, 3):
        orders.append([one.partition(":")[0] for one in said if one.endswith(f"batch {number} of 3")])
        assert sorted(orders[-1]) == sorted(names)
    assert orders[0] != orders[1] != orders[2]


def test_auto_is_measured_once_it_has_chosen() -> None:
    accumulators = []

    def build(candidate: Candidate) -> wb.GradientAccumulator:
        accumulators.append(builder(model, deterministic=False)(candidate))
        return accumulators[-1]

    model = Model()
    comparison = compare(build, batches(3, [4] * 32), [Candidate("auto", "auto")])
    assert accumulators[0].state_dict()["sizing"]["choice"] is not None
    assert comparison.results[0].figures is not None


def test_a_choice_that_never_comes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_settled", lambda accumulator: False)
    comparison = compare(builder(Model()), batches(), [Candidate("auto", "auto")])
    assert comparison.results[0].problem == f"not settled after {bench.MOST_SETTLING} batches"


# ---- What is left of it ----


def test_nothing_of_the_model_is_changed() -> None:
    """Parameters, buffers, gradients (those of the optimizer's other parameters too), flags, hooks and random state."""
    model, weight = Model(), nn.Parameter(torch.ones(()))
    model.head.eval()
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    gradient = model.head.weight.grad = torch.ones_like(model.head.weight)
    weight.grad = torch.ones(())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    data = batches()
    states = torch.get_rng_state(), random.getstate()

    def weighted(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
        loss = loss_fn(model, batch)
        return wb.LossSum(loss.sum * weight, loss.count)

    compare(builder(model, weighted, optimizer=optimizer), data, candidates_for(4), optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert torch.equal(weight.grad, torch.ones(()))
    assert model.head.bias.grad is None
    assert [module.training for module in model.modules()] == flags
    assert not model._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_ctrl_c_leaves_nothing_behind() -> None:
    model = Model()
    gradient = model.head.bias.grad = torch.ones(7)
    calls: list[int] = []

    def stopped(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    with pytest.raises(KeyboardInterrupt):
        compare(builder(model, stopped), batches(), candidates_for(4))
    assert model.head.bias.grad is gradient
    assert int(model.passes) == 0
    assert not model._forward_pre_hooks


def test_each_call_is_made_within_the_context() -> None:
    inside: list[bool] = []

    @contextmanager
    def within() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def watched(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
        assert len(inside) == 1
        return loss_fn(model, batch)

    compare(builder(Model(), watched), batches(), candidates_for(2), within=within)
    assert inside == []


# ---- Memory ----


def failing_above(rows: int, error: Exception) -> Callable[..., wb.LossSum]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
        if len(batch["ids"]) > rows:
            raise error
        return loss_fn(model, batch)

    return loss


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), MemoryError()])
def test_what_runs_out_of_memory_is_said_and_the_others_are_measured(error: Exception) -> None:
    loss = failing_above(3, error)  # of the checks of the first batch, none sees more than three examples
    found = by_name(compare(builder(Model(), loss), batches(3, [2] * 8), candidates_for(8)))
    told = str(error).partition("\n")[0] or "MemoryError"
    problems = {name: result.problem for name, result in found.items() if result.figures is None}
    assert problems["4 in order"] == problems["4 by length"] == f"does not fit: {told}"
    assert str(problems["whole batch"]).startswith("not tried: ")
    assert set(found) - set(problems) == {"1 in order", "2 in order", "1 by length", "2 by length"}
    assert all(found[name].figures.num_micro_batches > 1 for name in set(found) - set(problems))  # type: ignore[union-attr]


def test_running_out_of_memory_late_is_said_too() -> None:
    """On a batch that is measured, not on the one that warms up."""
    data = batches(3, [2] * 4)
    data[2] = [torch.full((2,), 6), *data[2][1:]]
    data[:2] = [[example % 6 for example in batch] for batch in data[:2]]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
        if len(batch["ids"]) > 3 and bool((batch["ids"] == 6).any()):
            raise torch.OutOfMemoryError("out of memory")
        return loss_fn(model, batch)

    found = by_name(compare(builder(Model(), loss), data, candidates_for(4)))
    assert found["whole batch"].problem == "does not fit: out of memory"
    assert found["whole batch"].figures is None
    assert found["2 in order"].figures is not None


def test_another_error_is_no_result() -> None:
    with pytest.raises(ZeroDivisionError):
        compare(builder(Model(), failing_above(3, ZeroDivisionError())), batches(), candidates_for(4))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], Any]:
    """A process that holds 1,000 MiB, and as many more at the peak as the rows of a micro-batch are said to need."""

    def of(needed: Callable[[int], int]) -> Callable[..., wb.LossSum]:
        peak = [0]

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
            peak[0] = max(peak[0], needed(len(batch["ids"])))
            return loss_fn(model, batch)

        def meter(_: torch.device) -> PeakMeter:
            return PeakMeter(lambda: peak.__setitem__(0, 0), lambda: (1000 + peak[0]) * MIB, lambda: 1000 * MIB)

        monkeypatch.setattr("wholebatch.accumulation.peak_meter", meter)
        monkeypatch.setattr("wholebatch.bench.peak_meter", meter)
        return loss

    return of


def test_peaks_are_above_what_was_in_use(memory: Any) -> None:
    loss = memory(lambda rows: 100 * rows)
    found = by_name(compare(builder(Model(), loss), batches(3, [2] * 4), candidates_for(4)))
    peaks = [found[name].figures.peak_bytes for name in ("1 in order", "2 in order", "whole batch")]  # type: ignore[union-attr]
    assert peaks == [100 * MIB, 200 * MIB, 400 * MIB]


def test_what_would_exceed_the_budget_is_not_tried(memory: Any) -> None:
    """By the line through the two sizes before it: 500 MiB are free, less a tenth."""
    rows_seen: set[int] = set()

    def needed(rows: int) -> int:
        rows_seen.add(rows)
        return 100 * rows

    loss = memory(needed)
    found = by_name(
        compare(builder(Model(), loss), batches(3, [2] * 16), candidates_for(16)[:5], budget_bytes=1500 * MIB)
    )
    assert {name: result.problem for name, result in found.items()} == {
        "1 in order": None,
        "2 in order": None,
        "4 in order": None,
        "8 in order": "not tried: about 800 MiB",
        "whole batch": "not tried: about 1,600 MiB",
    }
    assert found["8 in order"].predicted_bytes == 800 * MIB
    assert max(rows_seen) == 4


def test_what_exceeds_the_budget_all_the_same_ends_the_doubling(memory: Any) -> None:
    loss = memory(lambda rows: 600 if rows > 3 else 100)
    found = by_name(
        compare(builder(Model(), loss), batches(3, [2] * 8), candidates_for(8)[:4], budget_bytes=1500 * MIB)
    )
    assert found["4 in order"].problem == "does not fit: 1,600 of 1,500 MiB"
    assert found["whole batch"].problem == "not tried: about 1,600 MiB"  # 600, and 250 for each of four more
    assert found["2 in order"].figures is not None


@pytest.mark.parametrize(
    ("peaks", "size", "expected"),
    [
        ([], 4, None),
        ([(2, 100)], 4, 200),
        ([(1, 100), (2, 150)], 4, 250),
        ([(1, 999), (2, 100), (4, 140)], 8, 220),
        ([(2, 100), (4, 140)], 5, 160),
        ([(1, 100), (2, 80)], 4, 80),
    ],
)
def test_the_line_through_two_sizes(peaks: list[tuple[int, int]], size: int, expected: int | None) -> None:
    assert extrapolated(peaks, size) == expected


# ---- Candidates, and which is recommended ----


def test_candidates_double_up_to_the_batch() -> None:
    found = [(one.micro_batch_size, one.regroup) for one in candidates_for(12)]
    sizes = [1, 2, 4, 8, 12]
    assert found == [(size, False) for size in sizes] + [(size, True) for size in sizes] + [("auto", True)]
    assert [one.micro_batch_size for one in candidates_for(1)] == [1, 1, "auto"]
    assert [one.micro_batch_size for one in candidates_for(4) if not one.regroup] == [1, 2, 4]


def result(name: str, speed: float, peak: int | None, regroup: bool = True) -> Result:
    figures = Figures(
        num_micro_batches=1,
        largest_examples=1,
        largest_tokens=1,
        real_tokens=1,
        padded_tokens=1,
        seconds=Spread(1.0, 1.0, 1.0),
        examples_per_second=0.0,
        tokens_per_second=speed,
        steadiness=1.0,
        peak_bytes=peak,
    )
    return Result(Candidate(name, 1, regroup), figures)


@pytest.mark.parametrize(
    ("results", "chosen", "reason"),
    [
        ([("a", 100, 50), ("b", 90, 10)], "a", "the fastest"),
        ([("a", 100, 50), ("b", 98, 10)], "b", "within 2% of the fastest (a), with the smallest peak"),
        ([("a", 100, 50), ("b", 97.9, 10)], "a", "the fastest"),
        ([("a", 100, 50), ("b", 99, 60)], "a", "the fastest, with the smallest peak of those as fast"),
        ([("a", 98.5, 50), ("b", 99, 51), ("c", 100, 70)], "b", "within 2% of the fastest (c), with the smallest peak"),
        ([("a", 100, 1000, False), ("b", 99, 1015)], "b", "within 2% of the fastest (a), with the smallest peak"),
        ([("a", 100, 1000, False), ("b", 99, 1030)], "a", "the fastest, with the smallest peak of those as fast"),
        ([("a", 100, None), ("b", 99, 10)], "a", "the fastest"),
    ],
)
def test_recommended_is_the_smallest_peak_of_the_fastest(results: list[Any], chosen: str, reason: str) -> None:
    for order in (results, results[::-1]):
        best, why = recommended([*(result(*one) for one in order), Result(Candidate("x", 9), problem="does not fit")])
        assert best is not None
        assert (best.candidate.name, why) == (chosen, reason)


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert recommended([Result(Candidate("x", 9), problem="does not fit")]) == (None, "none of them fits in memory")


# ---- What is refused ----


def test_one_batch_is_too_few() -> None:
    with pytest.raises(ConfigurationError, match="batches: 1, and two are needed"):
        compare(builder(Model()), batches(1), candidates_for(4))


def test_a_batch_that_comes_to_nothing_is_refused() -> None:
    def infinite(model: nn.Module, batch: dict[str, Tensor]) -> wb.LossSum:
        loss = loss_fn(model, batch)
        return wb.LossSum(loss.sum * math.inf, loss.count)

    with pytest.raises(ConfigurationError, match="a batch to measure with came to nothing"):
        compare(builder(Model(), infinite), batches(), [Candidate("all", 4, regroup=False)])


def test_the_example_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The block of docs/speed.md, as it stands there."""
    text = (Path(__file__).parent.parent / "docs" / "speed.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(block, {})
    assert re.match(r"Candidate\(name='.*?', micro_batch_size=.*\) (the fastest|within 2%)", capsys.readouterr().out)
