"""The table of candidates: what stands in it, that it fits, and what is marked."""

import io
import re

import pytest
from rich.console import Console

from wholebatch.bench import Candidate, Comparison, Figures, Result, Spread
from wholebatch.report.bench_table import table

MIB = 2**20


def measured(name: str, tokens: float | None, peak: int | None, seconds: float = 12.345) -> Result:
    figures = Figures(
        num_micro_batches=123.4,
        largest_examples=128,
        largest_tokens=None if tokens is None else 131_072,
        real_tokens=None if tokens is None else 200,
        padded_tokens=None if tokens is None else 300,
        seconds=Spread(seconds, 0.9 * seconds, 1.1 * seconds),
        examples_per_second=77.0,
        tokens_per_second=tokens,
        steadiness=1.0,
        peak_bytes=peak,
    )
    return Result(Candidate(name, 1), figures)


@pytest.fixture
def comparison() -> Comparison:
    best = measured("128 by length", 1_234_567.0, 23_456 * MIB)
    half = measured("128 in order", 617_283.5, 3 * MIB // 2)
    return Comparison((half, best, Result(Candidate("auto", "auto"), problem="not tried: about 23,456 MiB")), best, "")


def shown(comparison: Comparison, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table(comparison))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_large_figures_fit_100_columns_with_one_line_each(comparison: Comparison) -> None:
    lines = shown(comparison)
    assert max(map(len, lines)) <= 100
    assert len(lines) == 3 + 3  # two lines of headings and a rule


def test_each_figure_stands_in_its_row(comparison: Comparison) -> None:
    half, best, untried = shown(comparison)[3:]
    assert re.match(r" *128 in order +123 +128 / 131,072 +1\.50 +12\.3 \(11–14\) +1\.5 +617,28[34] █", half)
    assert re.match(r" *→ 128 by length +123 +128 / 131,072 +1\.50 +12\.3 \(11–14\) +23,456 +1,234,567 █", best)
    assert re.match(r" *auto +–( +–){4} +not tried: about 23,456 MiB$", untried)


def test_bars_are_in_proportion(comparison: Comparison) -> None:
    half, best = (line.count("█") for line in shown(comparison)[3:5])
    assert best >= 6
    assert half == pytest.approx(best / 2, abs=1)


def test_examples_are_named_where_tokens_are_not_known() -> None:
    result = measured("1 in order", None, None)
    lines = shown(Comparison((result,), result, ""))
    assert lines[0].endswith("examples")
    assert re.match(r" *→ 1 in order +123 +128 +– +12\.3 \(11–14\) +– +77 █", lines[3])
