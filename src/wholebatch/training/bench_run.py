"""Candidate cuts of a training run, side by side: a table on the terminal, a page and the figures in a folder."""

import dataclasses
import itertools
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import wholebatch as wb
from wholebatch.bench import Candidate, Comparison, candidates_for, compare
from wholebatch.errors import ConfigurationError, MemoryBudgetError
from wholebatch.memory.device import budget_bytes
from wholebatch.options import future_state_bytes
from wholebatch.report.bench_page import page
from wholebatch.report.bench_table import WIDTH, table
from wholebatch.training.checkpoint import write_text
from wholebatch.training.data import Corpus
from wholebatch.training.model import adamw, autocast, learning_rate
from wholebatch.training.order import Drawn, InOrder, Position, Shuffled, Source
from wholebatch.training.order import batches as batches_of
from wholebatch.training.recipe import accumulator_of, device_of, prepared
from wholebatch.training.run_folder import free_folder
from wholebatch.training.run_report import counted, duration, mebibytes
from wholebatch.training.settings import OF_A_BATCH, OPTIONS, TrainingSettings
from wholebatch.training.versions import installed_versions

FIGURES, PAGE = "bench.json", "bench.html"
"""What is written into the folder."""


STEADY = 0.8
"""Below this, what the batches of one candidate say of its speed is too far apart to compare it with others."""


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured, and with what."""

    comparison: Comparison

    settings: TrainingSettings

    num_batches: int
    """Measured, beside the one that warms up."""

    num_examples: int
    """In a batch."""

    model: str
    """Its class."""

    num_parameters: int

    device: str

    num_threads: int
    """Of torch on the CPU."""

    memory_budget_bytes: int | None
    """None where neither the user nor the device says."""

    seconds: float
    """Wall-clock time of the whole measurement."""

    versions: Mapping[str, str]

    @property
    def command(self) -> str:
        """The command that measures this."""
        options = [*_flags(self.settings), "--batches", str(self.num_batches)]
        return shlex.join(["wholebatch", "bench", *options])

    @property
    def advice(self) -> str:
        """The line to train with."""
        best = self.comparison.recommended
        if best is None:
            return ""
        size = best.candidate.micro_batch_size
        if best.candidate.regroup:
            return shlex.join(["wholebatch", "train", *_flags(self.settings), "--micro-batch-size", str(size)])
        return f"wb.GradientAccumulator(..., micro_batch_size={size}, regroup=False)"

    @property
    def facts(self) -> dict[str, str]:
        """With what, for a reader."""
        return {
            "model": f"{self.model}, {self.num_parameters:,} parameters",
            "batch": f"{counted(self.num_examples, 'example')}; {self.num_batches} measured, after one to warm up",
            "device": f"{self.device}, CPU threads: {self.num_threads}",
            "memory budget": mebibytes(self.memory_budget_bytes),
            "time": duration(self.seconds),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        plain = dataclasses.asdict(self)
        best = self.comparison.recommended
        plain["comparison"] = {
            "candidates": [_plain(result) for result in self.comparison.results],
            "recommended": None if best is None else best.candidate.name,
            "reason": self.comparison.reason,
        }
        return plain | {"settings": self.settings.given(), "command": self.command, "advice": self.advice}


def bench(settings: TrainingSettings, console: Console, num_batches: int = 3, output: Path | None = None) -> Path:
    """Measure the candidates for these settings; nothing is trained, and files are written at the end only.

    Args:
        settings: As for `train`; its micro-batch size is what the candidates take the place of.
        console: Where the table is shown.
        num_batches: Batches that are measured, after one to warm up.
        output: Folder for `bench.json` and `bench.html`; the next free one of `runs/bench-1`, ... if not named.

    Returns:
        The folder.

    Raises:
        WholeBatchError: As for `train`; or no candidate fits in the memory budget.
    """
    if num_batches < 1:
        raise ConfigurationError(f"batches={num_batches}: use a whole number from 1 up")
    folder = free_folder(output, "bench-", (FIGURES, PAGE))
    report = measured(settings, console, num_batches)
    if not console.is_terminal:  # then it is narrow for no reason
        console.width = max(console.width, WIDTH)
    console.print(table(report.comparison))
    if report.comparison.recommended is None:
        raise MemoryBudgetError(
            f"no candidate fits in {mebibytes(report.memory_budget_bytes)}, the memory budget, optimizer included: "
            "what would help is a larger one, a shorter context, or a smaller model"
        )
    _write(report, folder)
    console.print(conclusion(report, folder), highlight=False, soft_wrap=True, markup=False)
    return folder


def measured(settings: TrainingSettings, console: Console, num_batches: int) -> BenchReport:
    """Build what `train` would, and measure each candidate with it."""
    started = time.perf_counter()
    device = device_of(settings)
    budget = budget_bytes(settings.memory_budget, device)
    corpus, model = prepared(settings, device, console)
    batches = drawn(settings, corpus, num_batches + 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{type(model).__name__}, {parameters:,} parameters, on {device}; memory budget {mebibytes(budget)}\n"
        f"batches of {counted(len(batches[0]), 'example')}: {num_batches} to measure with, one to warm up",
        highlight=False,
        soft_wrap=True,
    )
    comparison = _compared(settings, corpus, model, batches, budget, console)
    return BenchReport(
        comparison=comparison,
        settings=settings,
        num_batches=num_batches,
        num_examples=len(batches[0]),
        model=type(model).__name__,
        num_parameters=parameters,
        device=str(device),
        num_threads=torch.get_num_threads(),
        memory_budget_bytes=budget,
        seconds=time.perf_counter() - started,
        versions=installed_versions(),
    )


def drawn(settings: TrainingSettings, corpus: Corpus, number: int) -> list[list[Drawn]]:
    """The first full batches of a run; the one with the most long examples comes first, as it needs the most memory."""
    seed = settings.seed or 0
    source: Source = InOrder(corpus.train, seed) if corpus.known is None else Shuffled(corpus.known, seed)
    every = (batch for batch, _, _ in batches_of(source, settings.global_batch_size, Position()))
    first = next(every)
    full = itertools.chain([first], (batch for batch in every if len(batch) == len(first)))
    return sorted(itertools.islice(full, number), key=_lengths, reverse=True)


def _lengths(batch: Sequence[Drawn]) -> list[int]:
    """Of its examples, the longest first: so batches compare by the longest, then by the second longest, and so on."""
    return sorted((len(one.example.ids) for one in batch), reverse=True)


def _compared(
    settings: TrainingSettings,
    corpus: Corpus,
    model: nn.Module,
    batches: Sequence[Sequence[Drawn]],
    budget: int | None,
    console: Console,
) -> Comparison:
    optimizer = adamw(model, learning_rate(settings), settings.weight_decay)
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def build(candidate: Candidate) -> wb.GradientAccumulator:
        own = dataclasses.replace(settings, micro_batch_size=candidate.micro_batch_size)
        return accumulator_of(own, corpus, model, optimizer, regroup=candidate.regroup)

    with console.status("measuring") as status:
        return compare(
            build,
            batches,
            candidates_for(len(batches[0])),
            budget_bytes=None if budget is None else budget - future_state_bytes(optimizer, trained),
            optimizer=optimizer,
            within=lambda: autocast(settings, device),
            seed=settings.seed or 0,
            say=status.update,
        )


def conclusion(report: BenchReport, folder: Path) -> str:
    """What to use, why, and where it all is."""
    best = report.comparison.recommended
    if best is None:
        return report.comparison.reason
    lines = [f"recommended: {best.candidate.name}, {report.comparison.reason}", f"to use it: {report.advice}"]
    if not best.candidate.regroup:
        lines.append("(wholebatch train always puts examples of like length together; the line is for your own loop)")
    if (steadiness := report.comparison.steadiness) < STEADY:
        lines.append(
            f"the machine was busy: from batch to batch, the speed of one cut differs {1 / steadiness:.1f}-fold. "
            f"Measure again when it is idle, or with --batches {3 * report.num_batches}"
        )
    return "\n".join([*lines, f"written: {folder / PAGE}, {folder / FIGURES}"])


def _write(report: BenchReport, folder: Path) -> None:
    title = f"Speed and memory of {report.model}"
    introduction = (
        "Each candidate computes the same gradients of the same batches, in other micro-batches. Up is faster, left "
        "needs less memory. Numbers are examples at once at most."
    )
    text = page(
        report.comparison,
        title=title,
        introduction=introduction,
        advice=report.advice,
        command=report.command,
        facts=report.facts,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output={str(folder)!r}: {error.strerror}; name another folder") from error
    write_text(folder / PAGE, text)
    write_text(folder / FIGURES, json.dumps(report.figures(), indent=2, default=str) + "\n")


def _plain(result: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dataclasses.asdict(result)
    if result.figures is not None:
        plain["figures"]["padding"] = result.figures.padding
    return plain


def _flags(settings: TrainingSettings) -> list[str]:
    """The options of a batch that are not at their default, as on a command line."""
    flags = []
    for name in OF_A_BATCH:
        value = getattr(settings, name)
        if value != OPTIONS[name].default:
            values = value if isinstance(value, tuple) else (value,)
            flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags
