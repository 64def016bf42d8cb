"""The page of candidates: what stands in it, and that it needs no network."""

import json
import re

import pytest

from wholebatch.bench import Candidate, Comparison, Figures, Result, Spread
from wholebatch.report.bench_page import figure, page

MIB = 2**20


def measured(name: str, size: int, regroup: bool, speed: float, peak: int) -> Result:
    figures = Figures(
        num_micro_batches=4,
        largest_examples=size,
        largest_tokens=10 * size,
        real_tokens=100,
        padded_tokens=150,
        seconds=Spread(0.5, 0.25, 0.75),
        examples_per_second=1.0,
        tokens_per_second=speed,
        steadiness=1.0,
        peak_bytes=peak * MIB,
    )
    return Result(Candidate(name, size, regroup), figures)


RESULTS = (
    measured("1 in order", 1, False, 1000.0, 20),
    measured("2 in order", 2, False, 1500.0, 40),
    measured("1 by length", 1, True, 2000.0, 30),
    Result(Candidate("2 by length", 2), problem="not tried: about <99> MiB"),
)


@pytest.fixture(scope="module")
def written() -> str:
    return page(
        Comparison(RESULTS, RESULTS[2], "the fastest"),
        title="Speed & memory",
        introduction="Up is faster.",
        advice="wholebatch train --data 'a <b>'",
        command="wholebatch bench",
        facts={"model": "M, 7 parameters"},
    )


def test_each_candidate_is_a_point_of_its_kind() -> None:
    traces = {trace.name: trace for trace in figure(Comparison(RESULTS, RESULTS[2], "")).data}
    points = {name: (list(trace.x), list(trace.y)) for name, trace in traces.items()}
    assert points == {
        "in order": ([20, 40], [1000, 1500]),
        "by length": ([30], [2000]),
        "recommended": ([30], [2000]),
    }
    assert (
        "<b>2 in order</b><br>1,500 real tokens per second<br>0.5 seconds per batch (0.25 to 0.75)<br>40 MiB"
        in (traces["in order"].hovertext[1])
    )


def test_without_a_recommendation_there_is_no_ring() -> None:
    assert {trace.name for trace in figure(Comparison(RESULTS[:1], None, "")).data} == {"in order"}


def test_the_page_needs_no_network(written: str) -> None:
    """All code is in it, and nothing outside its scripts names an address."""
    around = re.sub(r"<script[^>]*>.*?</script>", "", written, flags=re.DOTALL)
    assert re.findall(r"https?:|//[a-z]|<link|<img|<iframe|@import|url\(", around) == []
    assert set(re.findall(r"<script\b[^>]*>", written)) == {"<script>"}  # none with a src
    assert "Plotly.newPlot(" in written
    assert 4e6 < len(written) < 6e6
    own = re.search(r"Plotly\.newPlot\(.*?\)\s*};?\s*</script>", written, flags=re.DOTALL)
    assert own is not None
    assert re.findall(r"https?://[^\"']*", own[0]) == []


def test_the_page_says_all_that_was_measured(written: str) -> None:
    around = re.sub(r"<script[^>]*>.*?</script>", "", written, flags=re.DOTALL)
    assert "<title>Speed &amp; memory</title>" in around
    assert "<strong>1 by length: the fastest</strong>" in around
    assert "wholebatch train --data &#x27;a &lt;b&gt;&#x27;" in around
    assert around.count("<tr>") == 4  # the heading, and three
    assert re.search(r'<tr class="best"><td>→ 1 by length</td>.*<td>2,000</td></tr>', around)
    assert "<td>not tried: about &lt;99&gt; MiB</td>" in around
    assert "<dt>model</dt><dd>M, 7 parameters</dd>" in around


def test_the_points_are_in_the_page(written: str) -> None:
    [text] = re.findall(r'"x":(\[20\.0,40\.0\])', written)
    assert json.loads(text) == [20.0, 40.0]
