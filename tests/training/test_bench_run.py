"""The bench of a training run: which batches, which command, which folder, and what is written."""

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from wholebatch.errors import ConfigurationError, MemoryBudgetError
from wholebatch.training.bench_run import bench, drawn
from wholebatch.training.order import Position, Shuffled, batches
from wholebatch.training.recipe import prepared
from wholebatch.training.run_folder import free_folder
from wholebatch.training.settings import TrainingSettings


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a bench of seconds, beginning in an empty folder."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
    )
    Path("config.json").write_text(json.dumps(config.to_dict()))
    Path("lines.txt").write_text("\n".join(f"{n} binds names " * (1 + n % 3) for n in range(60)))
    return {
        "data": ("lines.txt",),
        "documents": "line",
        "model": "config.json",
        "vocabulary_size": 300,
        "context_length": 16,
        "global_batch_size": 4,
        "threads": 1,
        "seed": 3,
    }


def run(settings: TrainingSettings, **options: Any) -> tuple[Path, str]:
    out = io.StringIO()
    return bench(settings, Console(file=out, width=80), **options), out.getvalue()


def test_a_bench_writes_what_it_shows(small: dict[str, Any]) -> None:
    """The table, the recommendation, and the same figures in bench.json; the next bench has the next folder."""
    folder, printed = run(TrainingSettings(**small), num_batches=2)
    assert folder == Path("runs/bench-1")
    assert sorted(file.name for file in folder.iterdir()) == ["bench.html", "bench.json"]
    figures = json.loads((folder / "bench.json").read_text())
    found = {one["candidate"]["name"]: one for one in figures["comparison"]["candidates"]}
    assert list(found) == [
        *("1 in order", "2 in order", "whole batch", "1 by length", "2 by length", "4 by length", "auto"),
    ]
    rows = [line.strip() for line in printed.splitlines()]
    for name, one in found.items():
        [row] = [row for row in rows if row.removeprefix("→ ").startswith(name)]
        assert f"{one['figures']['tokens_per_second']:,.0f} " in row
        assert row.startswith("→") == (name == figures["comparison"]["recommended"])
    assert found["whole batch"]["figures"]["num_micro_batches"] == 1
    assert found["1 in order"]["figures"]["padding"] == 1
    assert f"to use it: {figures['advice']}" in printed
    assert figures["settings"]["vocabulary_size"] == 300
    assert set(figures["versions"]) >= {"wholebatch", "torch", "python"}
    assert shlex.split(figures["command"])[:2] == ["wholebatch", "bench"]
    assert f"<code>{figures['command']}</code>" in (folder / "bench.html").read_text(encoding="utf-8")
    assert free_folder(None, "bench-", ("bench.json",)) == Path("runs/bench-2")


def test_the_batches_are_those_of_the_run(small: dict[str, Any]) -> None:
    """The first full ones in the order of the seed; the one with the longest examples goes first."""
    settings = TrainingSettings(**small)
    corpus, _ = prepared(settings, torch.device("cpu"), Console(file=io.StringIO()))
    assert corpus.known is not None
    of_the_run = batches(Shuffled(corpus.known, 3), 4, Position())
    full = [batch for batch, _, _ in (next(of_the_run) for _ in range(30)) if len(batch) == 4][:20]
    found = drawn(settings, corpus, 20)
    assert sorted(map(id_of, found)) == sorted(map(id_of, full))
    longest = [max(len(one.example.ids) for one in batch) for batch in found]
    assert longest == sorted(longest, reverse=True)
    assert id_of(found[0]) != id_of(full[0])


def id_of(batch: list[Any]) -> list[int]:
    return [one.seed for one in batch]


def test_a_stream_can_be_measured_too(small: dict[str, Any]) -> None:
    settings = TrainingSettings(**small, streaming=True, max_steps=3)
    corpus, _ = prepared(settings, torch.device("cpu"), Console(file=io.StringIO()))
    assert [len(batch) for batch in drawn(settings, corpus, 3)] == [4, 4, 4]


def test_a_text_smaller_than_the_batch_is_the_batch(small: dict[str, Any]) -> None:
    settings = TrainingSettings(**small | {"global_batch_size": 4096})
    corpus, _ = prepared(settings, torch.device("cpu"), Console(file=io.StringIO()))
    assert corpus.known is not None
    assert [len(batch) for batch in drawn(settings, corpus, 3)] == [len(corpus.known)] * 3


def test_where_nothing_fits_nothing_is_written(small: dict[str, Any], tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(MemoryBudgetError, match="no candidate fits in 2 MiB"):
        bench(TrainingSettings(**small, memory_budget="2MiB"), Console(file=out, width=80), num_batches=1)
    assert "does not fit: " in out.getvalue()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("held", "complaint"),
    [("bench.json", "holds bench.json"), ("last/", "holds a run"), (None, "is no folder to write to")],
)
def test_a_folder_with_results_is_not_written_over(
    small: dict[str, Any], tmp_path: Path, held: str | None, complaint: str
) -> None:
    folder = tmp_path / "kept"
    if held is None:
        folder.write_text("a file")
    else:
        folder.mkdir()
        (folder / held).mkdir() if held.endswith("/") else (folder / held).touch()
    with pytest.raises(ConfigurationError, match=complaint):
        run(TrainingSettings(**small), output=folder)


def test_no_batch_is_too_few(small: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="batches=0: use a whole number from 1 up"):
        run(TrainingSettings(**small), num_batches=0)
