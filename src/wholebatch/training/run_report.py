"""What a training run was and did: figures in, `report.json` and a readable `report.md` out."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wholebatch.facts import StepReport
from wholebatch.training.settings import TrainingSettings

MIB = 2**20


@dataclass
class UpdateTotals:
    """What the updates came to so far."""

    batches: int = 0
    """Whole batches seen."""

    skipped_batches: int = 0
    """Those without an optimizer step, because their loss was not finite."""

    num_loss_tokens: int = 0
    """Predicted tokens in all of them."""

    seconds: float = 0.0
    """Wall-clock time of the updates."""

    loss: float = float("nan")
    """The last batch's, before its update: nats per token."""

    micro_batch_sizes: tuple[int, ...] = ()
    """The last batch's cut: examples in each micro-batch."""

    peak_memory_bytes: int | None = None
    """The most in any of them: resident memory of the process on a CPU, allocated bytes on a GPU; None if unknown."""

    def add(self, report: StepReport, seconds: float) -> None:
        """Add one batch; `seconds` is the time of its whole update."""
        self.batches += 1
        self.skipped_batches += not report.should_step
        self.num_loss_tokens += round(float(report.count))  # type: ignore[arg-type]  # one term, hence one number
        self.seconds += seconds
        self.loss = float(report.loss)
        self.micro_batch_sizes = report.micro_batch_sizes
        known = [peak for peak in (self.peak_memory_bytes, report.peak_memory_bytes) if peak is not None]
        self.peak_memory_bytes = max(known, default=None)

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens by the time of the updates."""
        return self.num_loss_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The figures of one training run."""

    settings: TrainingSettings
    """As given."""

    model: str
    """Class of the model."""

    num_parameters: int
    """Trainable numbers in it, tied ones once."""

    device: str
    """Where it was trained."""

    num_threads: int
    """Threads of torch on the CPU."""

    num_train_examples: int
    """Examples of one epoch."""

    num_validation_examples: int
    """Examples of the documents that were held out."""

    validation_loss_before: float
    """Nats per token, before the first update."""

    validation_loss_after: float
    """Nats per token, after the last update."""

    unigram_entropy: float
    """Nats per token of the validation part, if only the frequency of each token were known."""

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
        settings = {name: str(value) for name, value in asdict(self.settings).items()}
        return {
            "validation loss, before training": f"{self.validation_loss_before:.3f} nats per token",
            "validation loss, after training": f"{self.validation_loss_after:.3f} nats per token",
            "unigram entropy of the same tokens": f"{self.unigram_entropy:.3f} nats per token",
            "last batch": arithmetic(updates.micro_batch_sizes),
            "batches": f"{updates.batches:,}, {updates.skipped_batches:,} of them skipped",
            "examples": f"{self.num_train_examples:,} to train on, {self.num_validation_examples:,} to validate on",
            "tokens": f"{updates.num_loss_tokens:,} predicted, {updates.tokens_per_second:,.0f} per second",
            "peak memory": mebibytes(updates.peak_memory_bytes),
            "memory budget": f"{mebibytes(self.memory_budget_bytes)}: {verdict}",
            "time": f"{duration(updates.seconds)} for the updates, {duration(self.seconds)} in all",
            "model": f"{self.model}, {self.num_parameters:,} parameters",
            "device": f"{self.device}, CPU threads: {self.num_threads}",
            "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
        }


def arithmetic(sizes: Sequence[int]) -> str:
    """How a batch was cut: `64 examples = 16 micro-batches × 4`; unequal sizes are added up."""
    parts = (f"{number} micro-batch{'es' if number > 1 else ''} × {size}" for size, number in Counter(sizes).items())
    return f"{sum(sizes):,} example{'s' if sum(sizes) > 1 else ''} = {' + '.join(parts)}"


def mebibytes(size: int | None) -> str:
    """`431 MiB`."""
    return "unknown" if size is None else f"{size / MIB:,.0f} MiB"


def duration(seconds: float) -> str:
    """Minutes and seconds: `2:05`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
