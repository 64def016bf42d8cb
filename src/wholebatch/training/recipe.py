"""The training run: a small Transformer from nothing, on real text, in whole batches under a memory budget."""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils import logging as transformers_logging

import wholebatch as wb
from wholebatch.errors import ConfigurationError
from wholebatch.memory.device import budget_bytes
from wholebatch.training.data import Corpus, collate, load_corpus, python_documentation, shuffled
from wholebatch.training.model import adamw, small_llama, warm_up_and_cosine
from wholebatch.training.progress import TrainingProgress
from wholebatch.training.run_report import RunReport, UpdateTotals, mebibytes
from wholebatch.training.settings import TrainingSettings
from wholebatch.training.versions import installed_versions

CONTEXT_LENGTH = 128
"""Tokens of an example at most."""

VOCABULARY_SIZE = 1024
CLIP_NORM = 1.0


def train(settings: TrainingSettings, console: Console) -> RunReport:
    """Train a causal language model on Python's documentation; model, tokenizer and report go into the output folder.

    Raises:
        WholeBatchError: A setting cannot be right, the output folder cannot be written to, or a single example
            exceeds the memory budget.
    """
    started = time.perf_counter()
    # A model as small as this gains little from more threads, and loses much where another program holds a core: the
    # threads wait for each other, spinning.
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    _make_writable(settings.output_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    budget = budget_bytes(settings.memory_budget, device)
    corpus = load_corpus(python_documentation(), CONTEXT_LENGTH, VOCABULARY_SIZE)
    model = small_llama(corpus.tokenizer, CONTEXT_LENGTH, settings.seed)
    model.to(device)  # type: ignore[arg-type]  # annotated as a method of the class, not of the object
    optimizer = adamw(model, settings.learning_rate)
    accumulator = wb.GradientAccumulator(
        model,  # a Hugging Face model: neither loss_fn nor count is needed
        optimizer=optimizer,
        micro_batch_size=settings.micro_batch_size,
        memory_budget=settings.memory_budget,
        collate_fn=collate,
    )
    facts = _facts(settings, corpus, model, budget)
    console.print(_introduction(facts), highlight=False, soft_wrap=True)

    before = _validation_loss(accumulator, corpus, settings)
    console.print(f"validation loss {before:.3f} before training", highlight=False)
    scheduler = warm_up_and_cosine(optimizer, settings.max_steps)
    batches = itertools.islice(whole_batches(corpus.train, settings), settings.max_steps)
    updates = run_updates(accumulator, optimizer, scheduler, batches, TrainingProgress(console, settings.max_steps))
    after = _validation_loss(accumulator, corpus, settings)

    with _without_bars():
        model.save_pretrained(settings.output_dir)
    corpus.tokenizer.save_pretrained(settings.output_dir)
    seconds = time.perf_counter() - started
    report = RunReport(
        **facts, validation_loss_before=before, validation_loss_after=after, updates=updates, seconds=seconds
    )
    report.write(settings.output_dir)
    console.print(_conclusion(report), highlight=False, soft_wrap=True)
    return report


def run_updates(
    accumulator: wb.GradientAccumulator,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    batches: Iterable[Any],
    progress: TrainingProgress,
) -> UpdateTotals:
    """One update for each whole batch: what follows the backward pass happens once, as in any loop."""
    totals = UpdateTotals()
    with progress:
        for batch in batches:
            started = time.perf_counter()
            report = accumulator.backward(batch)
            if report.should_step:
                nn.utils.clip_grad_norm_(accumulator.model.parameters(), CLIP_NORM)
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
            totals.add(report, time.perf_counter() - started)
            progress.show(totals)
    return totals


def whole_batches(examples: Sequence[Tensor], settings: TrainingSettings) -> Iterator[list[Tensor]]:
    """Batches without end. They run on across epochs, so that none is smaller than the others."""
    epochs = (shuffled(examples, settings.seed, epoch) for epoch in itertools.count())
    endless = itertools.chain.from_iterable(epochs)
    yield from wb.whole_batches(endless, settings.global_batch_size, loader_yields="examples")


def _validation_loss(accumulator: wb.GradientAccumulator, corpus: Corpus, settings: TrainingSettings) -> float:
    batches = wb.whole_batches(corpus.validation, settings.global_batch_size, loader_yields="examples")
    return accumulator.evaluate(batches).loss


@contextmanager
def _without_bars() -> Iterator[None]:
    """Saving a small model takes no time worth a progress bar of transformers' own."""
    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if were_shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _make_writable(folder: Path) -> None:
    """Find out before the training, not after it, whether its result can be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output_dir={str(folder)!r}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(folder)!r}: not writable; name another folder")


def _facts(settings: TrainingSettings, corpus: Corpus, model: nn.Module, budget: int | None) -> dict[str, Any]:
    """What is known of the run before it starts."""
    parameters = list(model.parameters())
    return {
        "settings": settings,
        "model": type(model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "device": str(parameters[0].device),
        "num_threads": torch.get_num_threads(),
        "num_train_examples": len(corpus.train),
        "num_validation_examples": len(corpus.validation),
        "unigram_entropy": corpus.unigram_entropy,
        "memory_budget_bytes": budget,
        "versions": installed_versions(),
    }


def _introduction(facts: dict[str, Any]) -> str:
    return (
        f"{facts['model']}, {facts['num_parameters']:,} parameters, on {facts['device']}; "
        f"memory budget {mebibytes(facts['memory_budget_bytes'])}\n"
        f"Python's documentation: {facts['num_train_examples']:,} examples of at most {CONTEXT_LENGTH} tokens to train "
        f"on, {facts['num_validation_examples']:,} to validate on"
    )


def _conclusion(report: RunReport) -> str:
    return (
        f"validation loss {report.validation_loss_after:.3f} after training "
        f"(unigram entropy {report.unigram_entropy:.3f})\n"
        f"saved in {report.settings.output_dir}: the model, the tokenizer, report.md and report.json"
    )
