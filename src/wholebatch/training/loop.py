"""The training loop: whole batches, one update each, and what is evaluated, logged and saved in between."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wholebatch as wb
from wholebatch.errors import TooManySkippedBatchesError
from wholebatch.training import checkpoint
from wholebatch.training.checkpoint import CheckpointError
from wholebatch.training.course import Course
from wholebatch.training.data import Corpus
from wholebatch.training.model import autocast, save_model
from wholebatch.training.order import Drawn, Position, Source, batches, mixed
from wholebatch.training.progress import TrainingProgress
from wholebatch.training.run_log import RunLog
from wholebatch.training.run_report import UpdateTotals, measured
from wholebatch.training.schedule import Schedule
from wholebatch.training.settings import TrainingSettings
from wholebatch.training.stopping import StopRequest

MOST_BAD_IN_A_ROW = 10
"""Batches without an update, one after another, after which a run gives up."""

MOST_SCALED_IN_A_ROW = 40
"""The same where a GradScaler looks for its scale: it halves that each time, from 65,536 to a ten-millionth."""

MEASURED = "measured.json"
"""Beside the best model: what was measured of it."""

STATE_VERSION = 1


@dataclass
class Training:
    """One run under way. What changes as it goes on is in its fields with a default, and in the objects it holds."""

    settings: TrainingSettings
    corpus: Corpus
    source: Source
    folder: Path
    device: torch.device
    accumulator: wb.GradientAccumulator
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    course: Course
    progress: TrainingProgress
    scaler: torch.amp.GradScaler | None = None
    log: RunLog = field(init=False)
    position: Position = field(default_factory=Position)
    totals: UpdateTotals = field(default_factory=UpdateTotals)
    before: dict[str, float] = field(default_factory=dict)
    """What was measured before the first update."""

    after: dict[str, float] = field(default_factory=dict)
    """What was measured last."""

    measured_at: int = -1
    """The update after which that was; -1 before the first time."""

    unsaved: CheckpointError | None = None
    """Why the newest checkpoint could not be saved."""

    best: tuple[float, int] = (math.inf, 0)
    """The lowest validation loss, and the update after which it was measured."""

    _good: tuple[Position, UpdateTotals] = field(default_factory=lambda: (Position(), UpdateTotals()))
    """As they were after the last batch that led to an update."""

    _bad_in_a_row: int = 0
    _saved: int = -1

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.accumulator.model

    def run(self, stop: StopRequest) -> None:
        """Train until the course is run, or a stop is asked for; a checkpoint is saved at the end of either.

        Raises:
            TooManySkippedBatchesError: No update came of ten batches in a row.
        """
        size = self.settings.global_batch_size
        for batch, epoch, place in batches(self.source, size, self.position):
            if self.course.reached(self.position) or stop.signal is not None:
                break
            num_tokens = sum(len(drawn.example.ids) for drawn in batch)
            try:
                self._update(batch, self.position.after(epoch, place, len(batch), num_tokens))
            except TooManySkippedBatchesError as error:
                raise self._given_up(error) from error
            self.progress.show(self.totals)
            complete = self.course.reached(self.position)
            if complete or self._due(self.settings.eval_every):
                self.evaluate(say=not complete)
            if not complete and self._due(self.settings.save_every):
                self._save_or_say()
        if stop.signal is None and (self.measured_at != self.position.updates or not math.isfinite(self.best[0])):
            self.evaluate()  # of a checkpoint after which nothing was measured
            self._saved = -1
        if self._saved != self.position.updates:
            self._save_or_say()
        if stop.signal is None and 0 < self.totals.batches == self.totals.skipped_batches:
            raise TooManySkippedBatchesError(
                f"none of the {self.totals.batches} batches led to an update: no loss or gradient was finite, or none "
                "had a label. metrics.jsonl says which; try float32, or a lower learning rate"
            )

    def _due(self, every: int) -> bool:
        return every > 0 and self.position.updates % every == 0

    # ---- One update ----

    def _update(self, batch: list[Drawn], after: Position) -> None:
        """One whole batch, which leads to `after`: what follows the backward pass happens once, as in any loop."""
        started = time.perf_counter()
        rate = self.schedule.apply(self.optimizer, self._progress(self.position), self._progress(after))
        with self.autocast():
            report = self.accumulator.backward(batch, grad_scaler=self.scaler)
        norm = self._stepped() if report.should_step else math.nan
        self.optimizer.zero_grad()
        num_tokens, self.position = after.tokens - self.position.tokens, after
        applied = math.isfinite(norm)
        self.totals.add(report, time.perf_counter() - started, num_tokens, applied)
        self._log(report, rate, norm, num_tokens)
        self._judge(applied, report.should_step)

    def _progress(self, position: Position) -> int:
        return position.tokens if self.settings.schedule_unit == "tokens" else position.examples

    def autocast(self) -> AbstractContextManager[Any]:
        """For bfloat16 and float16."""
        return autocast(self.settings, self.device)

    def _stepped(self) -> float:
        """Clip, step, and return the gradient's norm before it was clipped; no step if that is not finite."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm or math.inf))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)  # which it leaves out where a gradient is not finite
            self.scaler.update()
        elif math.isfinite(norm):
            self.optimizer.step()
        return norm

    def _judge(self, applied: bool, good_loss: bool) -> None:
        if applied:
            self._good, self._bad_in_a_row = (self.position, dataclasses.replace(self.totals)), 0
        elif good_loss:  # others are counted by the accumulator
            self._bad_in_a_row += 1
            if self._bad_in_a_row >= (MOST_BAD_IN_A_ROW if self.scaler is None else MOST_SCALED_IN_A_ROW):
                raise TooManySkippedBatchesError(
                    f"the gradient of {self._bad_in_a_row} batches in a row was not finite"
                )

    def _given_up(self, error: TooManySkippedBatchesError) -> TooManySkippedBatchesError:
        (self.position, self.totals), self._bad_in_a_row = self._good, 0
        self.save()
        return TooManySkippedBatchesError(
            f"stopped after update {self.position.updates}: {error}\nThe state after it, the last good one, is "
            f"saved. Try a lower learning rate (wholebatch train --resume {self.folder} --learning-rate "
            f"{self.schedule.peak / 3:.1g}), or look at the examples: metrics.jsonl says which batches were skipped."
        )

    def _log(self, report: wb.StepReport, rate: float, norm: float, num_tokens: int) -> None:
        figures = {
            "loss": float(report.loss),
            "count": self.totals.count,
            "learning_rate": rate,
            "gradient_norm": norm,
            "num_examples": report.num_examples,
            "num_tokens": num_tokens,
            "epoch": self.position.epoch,
            "examples_seen": self.position.examples,
            "gradient_accumulation_steps": report.gradient_accumulation_steps,
            "micro_batch_size": max(report.micro_batch_sizes),
            "padded_tokens": report.padded_tokens,
            "seconds": report.seconds,
            "peak_memory_bytes": report.peak_memory_bytes,
            "skipped": report.reason if not report.should_step else None if math.isfinite(norm) else "gradient",
            **{name: float(value) for name, value in report.metrics.items()},
        }
        self.log.write(self.position.updates, figures)

    # ---- Evaluation ----

    def evaluate(self, say: bool = False) -> None:
        """Measure the loss, and the metrics, on the documents held out; keep the model if it is the best so far."""
        with self.autocast():
            report = self.accumulator.evaluate(self._validation_batches())
        loss = float(report.loss)
        figures = {"loss": loss} | {name: float(value) for name, value in report.metrics.items()}
        self.log.write(self.position.updates, figures, part="validation")
        self.after, self.measured_at = figures, self.position.updates
        if self.position.updates == 0:
            self.before = figures
        if say:
            self.progress.say(f"after update {self.position.updates}: validation {measured(figures, self._unit)}")
        if loss < self.best[0] and self._kept(loss):
            self.best = (loss, self.position.updates)

    @property
    def _unit(self) -> str:
        return self.corpus.objective.unit

    def _validation_batches(self) -> Iterator[list[Drawn]]:
        """In order of length, so that little is padded; what is random about them is the same each time."""
        seed = self.settings.seed or 0
        drawn = [Drawn(example, mixed(seed, -1, place)) for place, example in enumerate(self.corpus.validation)]
        drawn.sort(key=lambda one: len(one.example.ids))
        yield from wb.whole_batches(drawn, self.settings.global_batch_size, loader_yields="examples")

    def _kept(self, loss: float) -> bool:
        """Keep the model as the best one; False if it could not be saved."""
        folder = self.folder / "best"
        try:
            with checkpoint.replaced(folder) as aside:
                save_model(self.model, aside)
                self.corpus.objective.tokenizer.save_pretrained(aside)
                (aside / MEASURED).write_text(json.dumps({"loss": loss, "update": self.position.updates}))
        except OSError as error:
            self.log.problems[f"best: {error.strerror}"] += 1
            self.progress.say(f"{folder} could not be saved: {error.strerror}; the one before is as it was")
            return False
        return True

    def _best_there(self) -> tuple[float, int]:
        """Of which model the folder of the best one is."""
        try:
            measured = json.loads((self.folder / "best" / MEASURED).read_text())
            return float(measured["loss"]), int(measured["update"])
        except (OSError, ValueError, LookupError):
            return math.inf, 0

    # ---- State ----

    def save(self) -> None:
        """Save a checkpoint of where the run stands.

        Raises:
            CheckpointError: It could not be saved; those before are as they were.
        """
        checkpoint.save(self.folder, self.position.updates, self.model, self.state(), self.settings.keep_checkpoints)
        self._saved = self.position.updates

    def _save_or_say(self) -> None:
        try:
            self.save()
            self.unsaved = None
        except CheckpointError as error:
            self.unsaved = error
            self.log.problems["checkpoint"] += 1
            self.progress.say(f"{error}. The run goes on")

    def state(self) -> dict[str, Any]:
        """All that the run depends on besides the model, as plain values and tensors."""
        accumulator = self.accumulator.state_dict()
        if self.position == self._good[0]:
            accumulator["skipped_in_a_row"] = 0
        return {
            "version": STATE_VERSION,
            "settings": self.settings.given(),
            "fingerprint": self.corpus.fingerprint,
            "packing": self.corpus.objective.packing,
            "total_examples": self.course.total_examples,
            "position": dataclasses.asdict(self.position),
            "good": [dataclasses.asdict(one) for one in self._good],
            "bad_in_a_row": self._bad_in_a_row,
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "accumulator": accumulator,
            "random": checkpoint.random_state(self.device),
            "totals": dataclasses.asdict(self.totals),
            "before": self.before,
            "after": self.after,
            "measured_at": self.measured_at,
            "best": list(self.best),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where a run of the same model and data stood."""
        self.position, self.totals = Position(**state["position"]), UpdateTotals(**state["totals"])
        self._good = (Position(**state["good"][0]), UpdateTotals(**state["good"][1]))
        self._bad_in_a_row = state["bad_in_a_row"]
        decay = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, now in zip(self.optimizer.param_groups, decay, strict=True):  # which may have been set anew
            group["weight_decay"] = now
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.accumulator.load_state_dict(state["accumulator"])
        checkpoint.set_random_state(state["random"], self.device)
        self.before, self.after = dict(state["before"]), dict(state["after"])
        self.measured_at, best = int(state["measured_at"]), (float(state["best"][0]), int(state["best"][1]))
        if best == self._best_there():
            self.best = best
        elif math.isfinite(best[0]):  # it is of a course that the run has left, or was removed
            self.progress.say(f"{self.folder / 'best'} is not of this course; the best is looked for anew")
        self._saved = self.position.updates
