"""The training run: text in, a model out, in whole batches under a memory budget; stopped, it can be gone on with."""

import os
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import nn

import wholebatch as wb
from wholebatch.errors import ConfigurationError
from wholebatch.memory.device import budget_bytes
from wholebatch.training import checkpoint
from wholebatch.training.announcements import conclusion, facts_of, introduction
from wholebatch.training.checkpoint import CheckpointError
from wholebatch.training.course import Course, course_of, tokens_of
from wholebatch.training.data import Corpus, load_corpus, python_documentation
from wholebatch.training.documents import Document, Documents
from wholebatch.training.loop import MOST_BAD_IN_A_ROW, STATE_VERSION, Training
from wholebatch.training.model import (
    PRESETS,
    adamw,
    build_model,
    keeps_documents_apart,
    kept_tokenizer,
    learning_rate,
    own_tokenizer,
    rebuilt_model,
    save_model,
)
from wholebatch.training.objectives import Packing
from wholebatch.training.order import InOrder, Position, Shuffled, Source
from wholebatch.training.packing import packed
from wholebatch.training.progress import TrainingProgress
from wholebatch.training.run_folder import locked, new_run_folder
from wholebatch.training.run_log import RunLog
from wholebatch.training.run_report import RunReport, measured
from wholebatch.training.schedule import Schedule
from wholebatch.training.settings import BEFORE_RECORDED, OPTIONS, SETTINGS_FILE, TrainingSettings, recorded, typed
from wholebatch.training.stopping import StopRequest

ORIGIN = "origin"
"""The folder in it with the model's config and tokenizer, so that a run that is resumed needs nothing else."""

FIXED = (
    "objective", "model", "lora", "vocabulary_size", "dtype", "seed", "streaming",
    "documents", "text_column", "label_column", "context_length", "packing", "validation_fraction",
)  # fmt: skip
"""What a run that is resumed cannot change: it would not be the same model, or not the same examples."""


@dataclass(frozen=True)
class Resumed:
    """A run that is gone on with, as of its newest checkpoint."""

    folder: Path
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
    device = device_of(settings)
    budget = budget_bytes(settings.memory_budget, device)
    folder = new_run_folder(settings.output_dir) if resume is None else resume
    settings = _findable(replace(settings, output_dir=folder))
    with locked(folder):
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
    corpus, model = prepared(settings, device, console, resumed)
    training = _training(settings, corpus, model, device, budget, resumed, console)
    _record(settings, corpus, model, folder, anew=resumed is None)
    resumed_at = None if resumed is None else training.position.updates
    evaluated = training.measured_at == training.position.updates
    facts, unit = facts_of(training, budget), corpus.objective.unit
    with RunLog(folder, settings.given(), settings.track, resumed_at, evaluated) as log, StopRequest() as stop:
        training.log = log
        console.print(introduction(training, facts), highlight=False, soft_wrap=True, markup=False)
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


def device_of(settings: TrainingSettings) -> torch.device:
    """Where to train: the GPU if there is one. Sets the threads of torch."""
    # A small model gains little from more threads, and loses much where another program holds a core: the threads wait
    # for each other, spinning.
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 2) // 2))
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepared(
    settings: TrainingSettings, device: torch.device, console: Console, resumed: Resumed | None = None
) -> tuple[Corpus, nn.Module]:
    """The text as examples, and the model on its device, as training begins with them.

    Raises:
        ConfigurationError: The data or the model cannot be right.
    """
    corpus = _corpus(settings, resumed)
    model = _model(settings, corpus, console, resumed).to(device)
    return packed(corpus, _packing(settings, model, device, resumed)), model


def _findable(settings: TrainingSettings) -> TrainingSettings:
    """With absolute paths, so that the run can be gone on with from anywhere."""
    data = tuple(os.path.abspath(one) for one in settings.data)
    model = os.path.abspath(settings.model) if os.path.exists(settings.model) else settings.model
    return replace(settings, data=data, model=settings.model if settings.model in PRESETS else model)


def _resumed(folder: Path, settings: TrainingSettings, console: Console) -> Resumed | None:
    """The newest checkpoint of a run; None where it was stopped before its first, and begins anew.

    Raises:
        ConfigurationError: The folder holds no run, or a setting was changed that a run cannot change.
    """
    recorded(folder)  # so there is a run
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
    given = BEFORE_RECORDED | state["settings"]
    before = TrainingSettings(**{name: typed(name, value, str(newest)) for name, value in given.items()})
    resumed = Resumed(folder, newest, state, before)
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


def _corpus(settings: TrainingSettings, resumed: Resumed | None) -> Corpus:
    tokenizer = own_tokenizer(settings) if resumed is None else kept_tokenizer(resumed.folder / ORIGIN)
    corpus = load_corpus(_documents(settings), settings, tokenizer)
    if resumed is not None and resumed.state["fingerprint"] != corpus.fingerprint:
        raise ConfigurationError(
            f"resume={str(resumed.folder)!r}: the data is not what it was, so the run's place in it would mean other "
            "examples. Restore the files, or start a new run from its model: --model "
            f"{shlex.quote(str(resumed.folder / 'last'))}"
        )
    return corpus


def _documents(settings: TrainingSettings) -> Iterable[Document]:
    if settings.data:
        label = settings.label_column if settings.objective == "classify" else None
        return Documents(settings.data, unit=settings.documents, text_column=settings.text_column, label_column=label)
    if settings.objective == "classify":
        raise ConfigurationError("objective='classify': name files with a text and a class in each row, with data")
    return [Document(text) for text in python_documentation()]


def _model(settings: TrainingSettings, corpus: Corpus, console: Console, resumed: Resumed | None) -> nn.Module:
    if resumed is None:
        model, new = build_model(settings, corpus.objective)
        if new:
            line = f"not in the pretrained weights, so from nothing: {', '.join(new)}"
            console.print(line, highlight=False, soft_wrap=True)
        return model
    model = rebuilt_model(settings, corpus.objective, resumed.folder / ORIGIN)
    checkpoint.load_model(resumed.checkpoint, model)
    return model


def _packing(settings: TrainingSettings, model: nn.Module, device: torch.device, resumed: Resumed | None) -> Packing:
    """How documents are laid into contexts; in a run that goes on, as they were.

    Raises:
        ConfigurationError: They were kept apart, and this transformers does not do so.
    """
    if settings.packing == "off" or settings.objective != "causal-lm":
        return "off"
    if resumed is not None and resumed.state["packing"] != "apart":
        packing: Packing = resumed.state["packing"]
        return packing
    if resumed is None and settings.packing == "auto" and device.type == "cpu":
        return "off"  # pieces of one length at a time are as fast there in short contexts, and faster in long ones
    if keeps_documents_apart(model):
        return "apart"
    if resumed is not None:
        raise ConfigurationError(
            f"resume={str(settings.output_dir)!r}: the documents in a context were kept apart, and with transformers "
            f"{transformers.__version__} {type(model).__name__} does not do so; use the version of before (report.md)"
        )
    return "across" if settings.packing == "on" else "off"


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


def accumulator_of(
    settings: TrainingSettings,
    corpus: Corpus,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    regroup: bool = True,
) -> wb.GradientAccumulator:
    """The accumulator of these settings."""
    return wb.GradientAccumulator(
        model,
        corpus.objective.loss_fn,
        count=corpus.objective.count,
        optimizer=optimizer,
        micro_batch_size=settings.micro_batch_size,
        memory_budget=settings.memory_budget,
        regroup=regroup,
        collate_fn=corpus.objective.collate,
        max_skipped_batches=MOST_BAD_IN_A_ROW,
        deterministic=None if settings.seed is None else True,
    )


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
    before = None if resumed is None else (resumed.settings, int(resumed.state["total_examples"]))
    course = course_of(settings, None if known is None else len(known), start, before)
    optimizer = adamw(model, learning_rate(settings), settings.weight_decay)
    progress = TrainingProgress(console, course.total_updates, start.updates, corpus.objective.unit, budget)
    scaler = torch.amp.GradScaler(device.type) if settings.dtype == "float16" else None
    training = Training(
        settings=settings,
        corpus=corpus,
        source=source,
        folder=settings.output_dir or Path(),
        device=device,
        accumulator=accumulator_of(settings, corpus, model, optimizer),
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
    total = int(resumed.state["total_examples"])
    if course.total_examples != total:
        console.print(
            f"{course.total_examples:,} examples in all, {total:,} before: the learning rate follows the new course",
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
    complete = training.course.reached(training.position) and training.measured_at == training.position.updates
    stopped = None if complete else stop.signal  # one that came after the end stops nothing
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
    console.print(conclusion(report), highlight=False, soft_wrap=True, markup=False)
    if training.unsaved is not None:
        raise training.unsaved
    return report
