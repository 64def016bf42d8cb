"""What a run says of itself before it starts and when it has ended."""

import os
import shlex
from typing import Any

import torch

from wholebatch.training.data import Corpus
from wholebatch.training.documents import Documents
from wholebatch.training.loop import Training
from wholebatch.training.run_report import RunReport, counted, listed, measured, mebibytes
from wholebatch.training.settings import TrainingSettings
from wholebatch.training.versions import installed_versions

FEW_HELD_OUT = 10
"""With fewer examples held out, their loss says little."""

SHOWN_LABELS = 12

PACKED = {
    "off": "no: each document has contexts of its own",
    "apart": "yes: several documents in a context, and none sees another",
    "across": "yes, and the model cannot be told where documents begin: each sees those before it in its context",
}
"""By what `wholebatch.training.objectives.Packing` says."""


def facts_of(training: Training, budget: int | None) -> dict[str, Any]:
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
        "packing": PACKED[training.corpus.objective.packing],
        "num_train_examples": None if known is None else len(known),
        "num_validation_examples": len(training.corpus.validation),
        "guess": training.corpus.guess,
        "guess_value": training.corpus.guess_value,
        "total_updates": training.course.total_updates,
        "memory_budget_bytes": budget,
        "versions": installed_versions(),
    }


def introduction(training: Training, facts: dict[str, Any]) -> str:
    """Model, text, what is left out, how long it will be, and where it lies."""
    settings, corpus = training.settings, training.corpus
    trained = facts["num_trainable"] != facts["num_parameters"]
    lines = [
        f"{facts['model']}, {facts['num_parameters']:,} parameters"
        + (f", {facts['num_trainable']:,} of them trained" if trained else "")
        + f", on {facts['device']}; memory budget {mebibytes(facts['memory_budget_bytes'])}",
        f"{_text(settings, corpus)}: {_examples(facts['num_train_examples'])} of at most {settings.context_length} "
        f"tokens to train on, {facts['num_validation_examples']:,} held out",
    ]
    if corpus.objective.packing != "off":
        lines.append(f"packed: {facts['packing']}")
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


def conclusion(report: RunReport) -> str:
    """What came of it, where it is, and the command to go on."""
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
