"""The training run: text in, a model out, in whole batches under a memory budget; stopped, it can be gone on with."""

import itertools
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import wholebatch as wb
from wholebatch.errors import ConfigurationError
from wholebatch.memory.device import budget_bytes
from wholebatch.training import checkpoint
from wholebatch.training.checkpoint import CheckpointError
from wholebatch.training.course import Course, course_of, tokens_of
from wholebatch.training.data import Corpus, load_corpus, python_documentation
from wholebatch.training.documents import Document, Documents
from wholebatch.training.loop import MOST_BAD_IN_A_ROW, STATE_VERSION, Training
from wholebatch.training.model import (
    PRESETS,
    adamw,
    build_model,
    kept_tokenizer,
    learning_rate,
    own_tokenizer,
    rebuilt_model,
    save_model,
)
from wholebatch.training.order import InOrder, Position, Shuffled, Source
from wholebatch.training.progress import TrainingProgress
from wholebatch.training.run_log import RunLog
from wholebatch.training.run_report import RunReport, counted, listed, measured, mebibytes
from wholebatch.training.schedule import Schedule
from wholebatch.training.settings import OPTIONS, TrainingSettings, typed
from wholebatch.training.stopping import StopRequest
from wholebatch.training.versions import installed_versions

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

FEW_HELD_OUT, SHOWN_LABELS = 10, 12

SETTINGS_FILE = "run.toml"
"""In the folder of a run: what it was started with."""

ORIGIN = "origin"
"""The folder in it with the model's config and tokenizer, so that a run that is resumed needs nothing else."""

FIXED = (
    "objective", "model", "lora", "vocabulary_size", "dtype", "seed", "streaming",
    "documents", "text_column", "label_column", "context_length", "validation_fraction",
)  # fmt: skip
"""What a run that is resumed cannot change: it would not be the same model, or not the same examples."""


@dataclass(frozen=True)
class Resumed:
    """A run that is gone on with, as of its newest checkpoint."""

    checkpoint: Path
    state: dict[str, Any]
    settings: TrainingSettings

    @property
    def position(self) -> Position:
        """Where it stands."""
        return Position(**self.state["position"])


def train(settings: TrainingSettings, console: Console, resume: Path | None = None) -> RunReport:
    """Train a model on text; checkpoints, logs, the best and the last model and a report go into the run's folder.

    Args:
        settings: What to do; of a run that is resumed, what it is to be from now on.
        console: Where the course of the run is shown.
        resume: The folder of a run to go on with, from its newest checkpoint.

    Raises:
        WholeBatchError: A setting, the data or the model cannot be right, the folder cannot be written to, a single
            example exceeds the memory budget, or no update came of ten batches in a row.
    """
    started = time.perf_counter()
    # A small model gains little from more threads, and loses much where another program holds a core: the threads wait
    # for each other, spinning.
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 2) // 2))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = budget_bytes(settings.memory_budget, device)
    folder = _run_folder(settings) if resume is None else resume
    settings = _findable(replace(settings, output_dir=folder))
    with _locked(folder):
        return _trained(settings, console, folder, device, budget, resume, started)


def _trained(
    settings: TrainingSettings,
    console: Console,
    folder: Path,
    device: torch.device,
    budget: int | None,
    resume: Path | None,
    started: float,
) -> RunReport:
    resumed = None if resume is None else _resumed(folder, settings, console)
    corpus = _corpus(settings, folder, resumed)
    model = _model(settings, corpus, folder, resumed, console).to(device)
    training = _training(settings, corpus, model, device, budget, resumed, console)
    _record(settings, corpus, model, folder, anew=resumed is None)
    resumed_at = None if resumed is None else training.position.updates
    evaluated = training.measured_at == training.position.updates
    facts, unit = _facts(training, budget), corpus.objective.unit
    with RunLog(folder, settings.given(), settings.track, resumed_at, evaluated) as log, StopRequest() as stop:
        training.log = log
        console.print(_introduction(training, facts), highlight=False, soft_wrap=True, markup=False)
        if not training.before:
            training.evaluate()
        if training.position.updates == 0:
            line = f"before training: {measured(training.before, unit)} ({corpus.guess})"
            console.print(line, highlight=False, soft_wrap=True)
        if training.course.reached(training.position):
            console.print(f"nothing is left to train: {training.position.updates:,} updates are done", highlight=False)
        with training.progress:
            training.run(stop)
        return _concluded(training, facts, stop, started, console)


def _findable(settings: TrainingSettings) -> TrainingSettings:
    """With absolute paths, so that the run can be gone on with from anywhere."""
    data = tuple(os.path.abspath(one) for one in settings.data)
    model = os.path.abspath(settings.model) if os.path.exists(settings.model) else settings.model
    return replace(settings, data=data, model=settings.model if settings.model in PRESETS else model)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. The system lets go of the lock when this one ends, however it ends.

    Raises:
        ConfigurationError: Another process trains there.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context((folder / ".lock").open("w"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"{str(folder)!r}: another process is training there") from None
        except OSError as error:
            raise ConfigurationError(f"{str(folder)!r} cannot be written to: {error.strerror}") from error
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if os.listdir(folder) == [".lock"]:  # refused before anything was written: no trace is left
                    shutil.rmtree(folder)
            raise


def _run_folder(settings: TrainingSettings) -> Path:
    """The folder for a new run. Found out before the training, not after it, whether its result can be kept.

    Raises:
        ConfigurationError: It cannot be written to, or holds a run.
    """
    folder = settings.output_dir or _free_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output_dir={str(folder)!r}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(folder)!r}: not writable; name another folder")
    if _holds_a_run(folder):
        raise ConfigurationError(
            f"output_dir={str(folder)!r} holds a run: go on with it (--resume {shlex.quote(str(folder))}), or name "
            "another folder"
        )
    return folder


def _holds_a_run(folder: Path) -> bool:
    """Whether something would be lost; a run that was refused, or stopped before its first update, left nothing."""
    if checkpoint.newest(folder) is not None or (folder / "last").exists():
        return True
    try:
        return '"part": "train"' in (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return False


def _free_folder() -> Path:
    return next(folder for number in itertools.count(1) if not (folder := Path("runs", str(number))).exists())


def _resumed(folder: Path, settings: TrainingSettings, console: Console) -> Resumed | None:
    """The newest checkpoint of a run; None where it was stopped before its first, and begins anew.

    Raises:
        ConfigurationError: The folder holds no run, or a setting was changed that a run cannot change.
    """
    if not (folder / SETTINGS_FILE).exists():
        raise ConfigurationError(f"resume={str(folder)!r}: no run there ({SETTINGS_FILE} is missing)")
    checkpoint.tidy(folder)
    newest = checkpoint.newest(folder)
    if missing := checkpoint.incomplete(folder):
        console.print(f"not used, as files are missing: {', '.join(missing)}", highlight=False)
    if newest is None and (folder / "last").exists():
        raise ConfigurationError(f"resume={str(folder)!r}: the run is complete, and its checkpoints have been removed")
    if newest is None:
        console.print(f"{folder}: stopped before its first checkpoint; it begins anew", highlight=False)
        return None
    state = checkpoint.load_state(newest)
    if state["version"] != STATE_VERSION:
        raise ConfigurationError(
            f"{newest} is of version {state['version']}, which version {STATE_VERSION} cannot read"
        )
    before = TrainingSettings(**{name: typed(name, value, str(newest)) for name, value in state["settings"].items()})
    resumed = Resumed(newest, state, before)
    changed = {name: (getattr(before, name), getattr(settings, name)) for name in OPTIONS if name != "output_dir"}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    if wrong := sorted(set(changed) & set(FIXED)):
        told = ", ".join(f"{name} ({changed[name][0]} there, {changed[name][1]} now)" for name in wrong)
        raise ConfigurationError(f"resume={str(folder)!r}: a run that goes on cannot change {told}")
    position = resumed.position
    console.print(
        f"going on after update {position.updates:,}, {position.examples:,} examples ({newest.name})", highlight=False
    )
    for name, (old, new) in changed.items():
        console.print(f"changed: {name} {old} -> {new}", highlight=False, markup=False)
    return resumed


def _corpus(settings: TrainingSettings, folder: Path, resumed: Resumed | None) -> Corpus:
    tokenizer = own_tokenizer(settings) if resumed is None else kept_tokenizer(folder / ORIGIN)
    corpus = load_corpus(_documents(settings), settings, tokenizer)
    if resumed is not None and resumed.state["fingerprint"] != corpus.fingerprint:
        raise ConfigurationError(
            f"resume={str(folder)!r}: the data is not what it was, so the run's place in it would mean other examples. "
            "Restore the files, or start a new run from its model: --model "
            f"{shlex.quote(str(folder / 'last'))}"
        )
    return corpus


def _documents(settings: TrainingSettings) -> Iterable[Document]:
    if settings.data:
        label = settings.label_column if settings.objective == "classify" else None
        return Documents(settings.data, unit=settings.documents, text_column=settings.text_column, label_column=label)
    if settings.objective == "classify":
        raise ConfigurationError("objective='classify': name files with a text and a class in each row, with data")
    return [Document(text) for text in python_documentation()]


def _model(
    settings: TrainingSettings, corpus: Corpus, folder: Path, resumed: Resumed | None, console: Console
) -> nn.Module:
    if resumed is None:
        model, new = build_model(settings, corpus.objective)
        if new:
            line = f"not in the pretrained weights, so from nothing: {', '.join(new)}"
            console.print(line, highlight=False, soft_wrap=True)
        return model
    model = rebuilt_model(settings, corpus.objective, folder / ORIGIN)
    checkpoint.load_model(resumed.checkpoint, model)
    return model


def _record(settings: TrainingSettings, corpus: Corpus, model: nn.Module, folder: Path, anew: bool) -> None:
    """Keep what a run that is resumed needs: its config and tokenizer, then, last, its settings.

    Raises:
        CheckpointError: The disk refuses.
    """
    if anew:
        with _saved(folder / ORIGIN) as aside:
            model.config.save_pretrained(aside)  # type: ignore[union-attr, operator]
            corpus.objective.tokenizer.save_pretrained(aside)
    checkpoint.write_text(folder / SETTINGS_FILE, settings.toml())


@contextmanager
def _saved(folder: Path) -> Iterator[Path]:
    """As `checkpoint.replaced`, with an error for the user."""
    try:
        with checkpoint.replaced(folder) as aside:
            yield aside
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} could not be saved: {error.strerror}; make room") from error


def _training(
    settings: TrainingSettings,
    corpus: Corpus,
    model: nn.Module,
    device: torch.device,
    budget: int | None,
    resumed: Resumed | None,
    console: Console,
) -> Training:
    start = Position() if resumed is None else resumed.position
    known, seed = corpus.known, settings.seed or 0
    order = None if known is None else Shuffled(known, seed)
    source: Source = InOrder(corpus.train, seed) if order is None else order
    recorded = None if resumed is None else (resumed.settings, int(resumed.state["total_examples"]))
    course = course_of(settings, None if known is None else len(known), start, recorded)
    optimizer = adamw(model, learning_rate(settings), settings.weight_decay)
    accumulator = wb.GradientAccumulator(
        model,
        corpus.objective.loss_fn,
        count=corpus.objective.count,
        optimizer=optimizer,
        micro_batch_size=settings.micro_batch_size,
        memory_budget=settings.memory_budget,
        collate_fn=corpus.objective.collate,
        max_skipped_batches=MOST_BAD_IN_A_ROW,
        deterministic=None if settings.seed is None else True,
    )
    progress = TrainingProgress(console, course.total_updates, start.updates, corpus.objective.unit, budget)
    scaler = torch.amp.GradScaler(device.type) if settings.dtype == "float16" else None
    training = Training(
        settings=settings,
        corpus=corpus,
        source=source,
        folder=settings.output_dir or Path(),
        device=device,
        accumulator=accumulator,
        optimizer=optimizer,
        schedule=_schedule(settings, course, order, corpus),
        course=course,
        progress=progress,
        scaler=scaler,
    )
    if resumed is None:
        torch.manual_seed(seed)
        return training
    training.load_state(resumed.state)
    before = int(resumed.state["total_examples"])
    if course.total_examples != before:
        console.print(
            f"{course.total_examples:,} examples in all, {before:,} before: the learning rate follows the new course",
            highlight=False,
        )
    return training


def _schedule(settings: TrainingSettings, course: Course, order: Shuffled | None, corpus: Corpus) -> Schedule:
    total = course.total_examples
    if settings.schedule_unit == "tokens" and order is not None:
        total = tokens_of(order, [len(example.ids) for example in corpus.known or ()], total)
    warm_up = settings.warm_up * total if settings.warm_up < 1 else settings.warm_up
    if warm_up > total:
        raise ConfigurationError(
            f"warm_up={settings.warm_up:g} {settings.schedule_unit}: the whole run has {total:,}, so that the learning "
            "rate would never reach its peak; a part below 1 is a part of the run"
        )
    return Schedule(learning_rate(settings), total, warm_up, settings.final_learning_rate, settings.schedule)


def _concluded(
    training: Training, facts: dict[str, Any], stop: StopRequest, started: float, console: Console
) -> RunReport:
    """Save the last model, and report.

    Raises:
        CheckpointError: The last checkpoint, or the model, could not be saved.
    """
    stopped = stop.signal
    with _saved(training.folder / "last") as aside:
        save_model(training.model, aside)
        training.corpus.objective.tokenizer.save_pretrained(aside)
    report = RunReport(
        **facts,
        left_out=dict(training.corpus.left_out),
        validation_before=training.before,
        validation_after=training.after if stopped is None else {},
        best=training.best,
        updates=training.totals,
        stopped_by=None if stopped is None else stopped.name,
        exit_code=0 if stopped is None else 128 + stopped,
        problems=dict(training.log.problems),
        seconds=time.perf_counter() - started,
    )
    try:
        report.write(training.folder)
    except OSError as error:
        console.print(f"the report could not be written: {error.strerror}", highlight=False)
    console.print(_conclusion(report), highlight=False, soft_wrap=True, markup=False)
    if training.unsaved is not None:
        raise training.unsaved
    return report


def _facts(training: Training, budget: int | None) -> dict[str, Any]:
    """What is known of the run before it starts."""
    parameters, known = list(training.model.parameters()), training.corpus.known
    return {
        "settings": training.settings,
        "folder": str(training.folder),
        "model": type(training.model).__name__,
        "auto_class": training.corpus.objective.auto_class,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "device": str(training.device),
        "num_threads": torch.get_num_threads(),
        "unit": training.corpus.objective.unit,
        "num_train_examples": None if known is None else len(known),
        "num_validation_examples": len(training.corpus.validation),
        "guess": training.corpus.guess,
        "guess_value": training.corpus.guess_value,
        "total_updates": training.course.total_updates,
        "memory_budget_bytes": budget,
        "versions": installed_versions(),
    }


def _introduction(training: Training, facts: dict[str, Any]) -> str:
    settings, corpus = training.settings, training.corpus
    trained = facts["num_trainable"] != facts["num_parameters"]
    lines = [
        f"{facts['model']}, {facts['num_parameters']:,} parameters"
        + (f", {facts['num_trainable']:,} of them trained" if trained else "")
        + f", on {facts['device']}; memory budget {mebibytes(facts['memory_budget_bytes'])}",
        f"{_text(settings, corpus)}: {_examples(facts['num_train_examples'])} of at most {settings.context_length} "
        f"tokens to train on, {facts['num_validation_examples']:,} held out",
    ]
    if corpus.left_out:
        lines.append(f"left out: {listed(corpus.left_out)}")
    if facts["num_validation_examples"] < FEW_HELD_OUT:
        lines.append("so few are held out that their loss says little")
    if labels := getattr(corpus.objective, "labels", ()):
        shown = ", ".join(labels[:SHOWN_LABELS]) + (", ..." if len(labels) > SHOWN_LABELS else "")
        lines.append(f"{len(labels):,} classes: {shown}")
    epochs = "" if corpus.known is None else f" ({training.course.total_examples / len(corpus.known):.3g} epochs)"
    lines += [
        f"{counted(facts['total_updates'], 'update')} of {counted(settings.global_batch_size, 'example')}{epochs}; "
        f"AdamW, learning rate up to {training.schedule.peak:g}, {settings.schedule}",
        f"run folder {facts['folder']}",
    ]
    return "\n".join(lines)


def _text(settings: TrainingSettings, corpus: Corpus) -> str:
    if not isinstance(corpus.documents, Documents):
        return "Python's documentation"
    shown = [os.path.relpath(one) for one in settings.data]
    return f"{', '.join(shown)} ({counted(len(corpus.documents.files), 'file')})"


def _examples(known: int | None) -> str:
    return "examples" if known is None else counted(known, "example")


def _conclusion(report: RunReport) -> str:
    again = f"wholebatch train --resume {shlex.quote(report.folder)}"
    lines = []
    if report.stopped_by is not None:
        lines.append(
            f"stopped by {report.stopped_by} after update {report.updates.batches:,} of {report.total_updates:,}; a "
            f"checkpoint, and the model so far (last), are saved in {report.folder}\nto go on: {again}"
        )
    else:
        lines += [
            f"after training: {measured(report.validation_after, report.unit)} ({report.guess})",
            f"saved in {report.folder}: last, best (loss {report.best[0]:.3f}, after update {report.best[1]:,}), for "
            f"{report.auto_class}.from_pretrained; metrics.jsonl, tensorboard, report.md, report.json",
            f"to train longer: {again} --max-steps {2 * report.total_updates}",
        ]
    if report.problems:
        lines.append(f"not all could be written: {listed(report.problems)}")
    return "\n".join(lines)
