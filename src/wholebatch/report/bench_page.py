"""Candidates side by side, as one page with a plot that opens without a network: speed against peak memory."""

import html
import string
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go  # type: ignore[import-untyped]

from wholebatch.bench import Comparison, Result
from wholebatch.memory.device import MIB
from wholebatch.report.bench_table import HEADINGS, cells, largest, mebibytes, unit

PAGE = string.Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; white-space: pre; } tr { border-bottom: 1px solid #ddd; }
tr.best { font-weight: bold; background: #e8f5e9; } code { background: #f3f3f3; padding: .1rem .3rem; }
</style>
<h1>$title</h1>
<p>$introduction</p>
<p><strong>$verdict</strong></p>
<p><code>$advice</code></p>
$plot
$table
<p>Measured with <code>$command</code></p>
<dl>$facts</dl>
</html>
""")

KINDS = {"in order": "circle", "by length": "square", "auto": "diamond"}
"""How the examples of a batch are put together, by the plot's symbols."""


def page(
    comparison: Comparison, *, title: str, introduction: str, advice: str, command: str, facts: Mapping[str, str]
) -> str:
    """The page; figures and texts in, HTML out, with plotly's code in it (about 5 MB)."""
    best = comparison.recommended
    verdict = comparison.reason if best is None else f"{best.candidate.name}: {comparison.reason}"
    listed = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items())
    return PAGE.substitute(
        title=html.escape(title),
        introduction=html.escape(introduction),
        verdict=html.escape(verdict),
        advice=html.escape(advice),
        plot=figure(comparison).to_html(full_html=False, include_plotlyjs=True, config={"displaylogo": False}),
        table=_table(comparison),
        command=html.escape(command),
        facts=listed,
    )


def figure(comparison: Comparison) -> go.Figure:
    """Speed against peak memory, a point for each candidate that was measured; the recommended one has a ring."""
    shown = go.Figure()
    measured = [one for one in comparison.results if one.figures is not None and one.figures.peak_bytes is not None]
    for kind, symbol in KINDS.items():
        if points := [one for one in measured if _kind(one) == kind]:
            shown.add_trace(_points(points, kind, symbol, comparison))
    if comparison.recommended in measured and comparison.recommended is not None:
        ring = _points([comparison.recommended], "recommended", "circle-open", comparison)
        shown.add_trace(ring.update(mode="markers", marker={"size": 26, "color": "#2e7d32", "line": {"width": 3}}))
    shown.update_layout(
        template="plotly_white",
        height=520,
        xaxis={"title": {"text": "peak memory above what was in use before, MiB"}, "rangemode": "tozero"},
        yaxis={"title": {"text": f"{unit(comparison)} per second"}, "rangemode": "tozero"},
        hoverlabel={"align": "left"},
    )
    return shown


def _points(results: Sequence[Result], name: str, symbol: str, comparison: Comparison) -> go.Scatter:
    figures = [one.figures for one in results if one.figures is not None]
    return go.Scatter(
        name=name,
        mode="lines+markers+text" if len(results) > 1 else "markers+text",
        x=[(one.peak_bytes or 0) / MIB for one in figures],
        y=[one.speed for one in figures],
        text=["" if name == "recommended" else str(one.candidate.micro_batch_size) for one in results],
        textposition="top center",
        line={"width": 1, "dash": "dot"},
        marker={"size": 11, "symbol": symbol},
        hovertext=[hover(one, unit(comparison)) for one in results],
        hoverinfo="text",
    )


def hover(result: Result, counted: str) -> str:
    """All that was measured of a candidate, in lines."""
    if (figures := result.figures) is None:
        return f"{result.candidate.name}: {result.problem}"
    seconds = figures.seconds
    lines = [
        f"<b>{html.escape(result.candidate.name)}</b>",
        f"{figures.speed:,.0f} {counted} per second",
        f"{seconds.median:.3g} seconds per batch ({seconds.low:.3g} to {seconds.high:.3g})",
        f"{mebibytes(figures.peak_bytes)} MiB at the peak",
        f"{figures.num_micro_batches:.3g} micro-batches, the largest {largest(figures)}",
    ]
    return "<br>".join(lines + ([] if figures.padding is None else [f"{figures.padding:.2f} padded by real tokens"]))


def _kind(result: Result) -> str:
    if result.candidate.micro_batch_size == "auto":
        return "auto"
    return "by length" if result.candidate.regroup else "in order"


def _table(comparison: Comparison) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in (*HEADINGS, f"{unit(comparison)} per second"))
    rows = []
    for result in comparison.results:
        best = result is comparison.recommended
        last = f"{result.figures.speed:,.0f}" if result.figures is not None else result.problem or ""
        tds = "".join(f"<td>{html.escape(text)}</td>" for text in [*cells(result, best), last])
        rows.append(('<tr class="best">' if best else "<tr>") + f"{tds}</tr>")
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"
