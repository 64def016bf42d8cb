"""What the benchmarks compute from their measurements, and every contestant from end to end; no timing is asserted."""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
LENGTHS = [3, 9, 5, 12, 4, 4, 8, 6]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of benchmarks/ by its name; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield lambda name: __import__(name)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_the_spread_of_ratios(script: Callable[[str], ModuleType]) -> None:
    """Least, median and greatest are the values' own; the interval lies round the median and narrows with more."""
    ratios = script("ratios")
    few, many = ratios.spread([1.0, 2.0, 4.0]), ratios.spread([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0])
    assert (few.least, few.median, few.most, few.low, few.high) == (1.0, 2.0, 4.0, 1.0, 4.0)
    assert (many.least, many.median, many.most, many.low, many.high) == (1.0, 2.0, 4.0, 2.0, 2.0)
    assert ratios.quotients([3.0, 8.0], [1.0, 2.0]).median == 3.5  # round by round: 3 and 4
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratios.quotients([3.0, 8.0], [1.0])


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"low_at_least": 1.0}, True),
        ({"low_at_least": 1.1}, False),
        ({"high_at_most": 4.0}, True),
        ({"high_at_most": 3.9}, False),
        ({"at_least": 2.0, "low_at_least": 1.1}, False),
    ],
)
def test_a_target_is_met_if_all_of_it_is(
    script: Callable[[str], ModuleType], limits: dict[str, float], met: bool
) -> None:
    ratios = script("ratios")
    assert ratios.Target("a ratio", ratios.spread([1.0, 2.0, 4.0]), **limits).met == met


def test_padding_is_counted_as_it_is_made(script: Callable[[str], ModuleType]) -> None:
    collate = script("workloads").Collator()
    batch = collate([{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([7, 8, 9], [5])])
    assert batch["input_ids"].tolist() == [[7, 8, 9], [5, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[7, 8, 9], [5, -100, -100]]
    assert collate.calls == [(4, 6)]


def test_every_contestant_makes_the_same_updates(script: Callable[[str], ModuleType]) -> None:
    """In processes of their own: as many updates, of the same tokens, with the losses of the hand-written loop."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    measurement = script("measurement")
    rows = [{"input_ids": torch.arange(1, 1 + length), "labels": torch.tensor(length % 5)} for length in LENGTHS]
    batches = [rows, rows[::-1], rows]
    contestants = ["by hand", "wholebatch", "Accelerate", "Trainer"] + ["Lightning"] * bool(find_spec("lightning"))
    context, found = measurement.processes(), {}
    for name in contestants:
        task = measurement.Task("scaling", name, batches, num_labels=5, micro_batch_size=2)
        found[name] = measurement.in_fresh_process(context, task)
    right = found["by hand"]["losses"]
    assert len(set(right)) == len(batches)
    for name, figures in found.items():
        assert figures["real_tokens"] == 2 * sum(LENGTHS), name
        assert figures["process_seconds"] > 0, name
        assert len(figures["losses"]) == len(batches), name
        if name != "Trainer":  # which scales the losses of classifiers
            assert figures["losses"] == pytest.approx(right, abs=1e-5), name
    in_fours = [max(LENGTHS[start : start + 2]) for start in range(0, 8, 2)]
    assert found["by hand"]["padded_tokens"] == 2 * 2 * sum(in_fours)


def test_a_process_that_fails_is_named(script: Callable[[str], ModuleType]) -> None:
    measurement = script("measurement")
    task = measurement.Task("scaling", "nobody", [], num_labels=5)
    with pytest.raises(RuntimeError, match="nobody on scaling ended with exit status 1"):
        measurement.in_fresh_process(measurement.processes(), task)
