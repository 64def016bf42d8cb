"""What a training run was and did: figures in, `report.json` and a readable `report.md` out."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wholebatch.facts import StepReport
from wholebatch.training.settings import TrainingSettings

MIB = 2**20

MOST_SIZES = 3
"""Sizes of micro-batches that are told one by one."""


@dataclass
class UpdateTotals:
    """What the updates came to so far."""

    batches: int = 0
    """Whole batches seen."""

    skipped_batches: int = 0
    """Those without an optimizer step, because their loss or gradient was not finite, or they had no label."""

    num_units: int = 0
    """What the loss is a mean over (tokens to predict, or examples to classify), in all of them."""

    count: float = 0.0
    """The same, in the last batch."""

    seconds: float = 0.0
    """Wall-clock time of the updates."""

    loss: float = float("nan")
    """The last batch's, before its update: nats per token, or per example."""

    micro_batch_sizes: tuple[int, ...] = ()
    """The last batch's cut: examples in each micro-batch."""

    peak_memory_bytes: int | None = None
    """The most in any of them: resident memory of the process on a CPU, allocated bytes on a GPU; None if unknown."""

    num_tokens: int = 0
    """Tokens read in all of them, padding left out."""

    padded_tokens: int = 0
    """Tokens of their micro-batches, padding included."""

    def add(self, report: StepReport, seconds: float, num_tokens: int, applied: bool) -> None:
        """Add one batch; `seconds` is the time of its whole update."""
        self.batches += 1
        self.skipped_batches += not applied
        self.num_tokens += num_tokens
        self.count = float(report.count)  # type: ignore[arg-type]  # one term, hence one number
        self.num_units += round(self.count)
        self.seconds += seconds
        self.loss = float(report.loss)
        self.micro_batch_sizes = report.micro_batch_sizes
        self.padded_tokens += report.padded_tokens or 0
        known = [peak for peak in (self.peak_memory_bytes, report.peak_memory_bytes) if peak is not None]
        self.peak_memory_bytes = max(known, default=None)

    @property
    def tokens_per_second(self) -> float:
        """Tokens read by the time of the updates."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The figures of one training run."""

    settings: TrainingSettings
    """As given."""

    model: str
    """Class of the model."""

    auto_class: str
    """Of transformers, which loads it."""

    num_parameters: int
    """Numbers in it, tied ones once."""

    num_trainable: int
    """Those that are trained."""

    device: str
    """Where it was trained."""

    num_threads: int
    """Threads of torch on the CPU."""

    packing: str
    """How documents lie in the training examples, in words."""

    num_train_examples: int | None
    """Examples of one epoch; None where that is not known."""

    num_validation_examples: int
    """Examples of the documents that were held out."""

    unit: str
    """What losses are means over: tokens, or examples."""

    validation_before: Mapping[str, float]
    """The loss, in nats per unit, and what else is measured on the documents held out, before the first update."""

    validation_after: Mapping[str, float]
    """The same after the last update; empty if the run was stopped before its end."""

    guess: str
    """What a guesser without a model would come to there."""

    guess_value: float
    """Its figure: nats per token, or the accuracy."""

    best: tuple[float, int]
    """The lowest validation loss, and the update after which it was measured."""

    left_out: Mapping[str, int]
    """Documents that could not be used, by reason."""

    total_updates: int
    """Updates of the whole run."""

    stopped_by: str | None
    """The signal that stopped it; None if it is complete."""

    exit_code: int
    """0, or what shells have for a program that this signal ended: 130 for Ctrl-C, 143 for SIGTERM."""

    problems: Mapping[str, int]
    """What could not be written, by reason."""

    folder: str
    """Where it lies."""

    memory_budget_bytes: int | None
    """What the run had to stay within; None where neither the user nor the device says."""

    updates: UpdateTotals
    """What the updates came to."""

    seconds: float
    """Wall-clock time from reading the text to saving the model."""

    versions: Mapping[str, str]
    """Of Python and the packages."""

    @property
    def within_memory_budget(self) -> bool | None:
        """Whether the peak stayed within the budget; None where either is unknown."""
        peak = self.updates.peak_memory_bytes
        return None if peak is None or self.memory_budget_bytes is None else peak <= self.memory_budget_bytes

    def write(self, folder: Path) -> None:
        """Write `report.json` and `report.md` into `folder`."""
        figures = asdict(self)
        figures["settings"] = self.settings.given()
        figures["within_memory_budget"] = self.within_memory_budget
        figures["updates"]["gradient_accumulation_steps"] = len(self.updates.micro_batch_sizes)
        figures["updates"]["tokens_per_second"] = self.updates.tokens_per_second
        (folder / "report.json").write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The report for a reader."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in self._rows().items())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"# Training run\n\n| | |\n|---|---|\n{rows}\n\nWith {versions}.\n"

    def _rows(self) -> dict[str, str]:
        updates = self.updates
        verdict = {True: "kept", False: "**exceeded**", None: "unknown"}[self.within_memory_budget]
        settings = {name: str(value) for name, value in self.settings.given().items()}
        return {
            "before training": measured(self.validation_before, self.unit),
            "after training": measured(self.validation_after, self.unit) or f"stopped by {self.stopped_by}",
            "to compare with": self.guess,
            "lowest validation loss": f"{self.best[0]:.3f}, after update {self.best[1]:,}",
            "last batch": arithmetic(updates.micro_batch_sizes),
            "batches": f"{updates.batches:,}, {updates.skipped_batches:,} of them skipped",
            "examples": f"{number(self.num_train_examples)} to train on, {self.num_validation_examples:,} held out",
            "packing": self.packing,
            "documents left out": listed(self.left_out) or "none",
            "tokens": f"{updates.num_tokens:,} read, {updates.tokens_per_second:,.0f} per second; with padding "
            f"{updates.padded_tokens / max(updates.num_tokens, 1):.2f} times as many",
            "peak memory": mebibytes(updates.peak_memory_bytes),
            "memory budget": f"{mebibytes(self.memory_budget_bytes)}: {verdict}",
            "time": f"{duration(updates.seconds)} for the updates, {duration(self.seconds)} in all",
            "model": f"{self.model}, {self.num_parameters:,} parameters, {self.num_trainable:,} of them trained",
            "device": f"{self.device}, CPU threads: {self.num_threads}",
            "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        }


def arithmetic(sizes: Sequence[int]) -> str:
    """How a batch was cut: `64 examples = 16 micro-batches × 4`; of many unequal sizes, the extremes."""
    total = f"{sum(sizes):,} example{'s' if sum(sizes) > 1 else ''}"
    if len(set(sizes)) > MOST_SIZES:
        return f"{total} = {len(sizes)} micro-batches of {min(sizes)} to {max(sizes)}"
    parts = (f"{number} micro-batch{'es' if number > 1 else ''} × {size}" for size, number in Counter(sizes).items())
    return f"{total} = {' + '.join(parts)}"


def measured(figures: Mapping[str, float], unit: str) -> str:
    """What was measured on the documents held out: `loss 4.173 nats per token`."""
    return ", ".join(
        f"{name} {value:.3f}" + (f" nats per {unit.removesuffix('s')}" if name == "loss" else "")
        for name, value in figures.items()
    )


def listed(reasons: Mapping[str, int]) -> str:
    """Reasons, with their numbers where there are several: `empty (a.txt), text missing (b.jsonl): 3 times`."""
    return ", ".join(reason + (f": {times:,} times" if times > 1 else "") for reason, times in reasons.items())


def counted(number: int, what: str) -> str:
    """`1 update`, `1,234 updates`."""
    return f"{number:,} {what}" + "s" * (number != 1)


def number(known: int | None) -> str:
    """`1,234`; of data without a length, words."""
    return "an unknown number" if known is None else f"{known:,}"


def mebibytes(size: int | None) -> str:
    """`431 MiB`."""
    return "unknown" if size is None else f"{size / MIB:,.0f} MiB"


def duration(seconds: float) -> str:
    """Minutes and seconds, `2:05`; hours too where there are any, `3:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
