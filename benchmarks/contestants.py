"""Who trains: wholebatch, a loop written by hand, and the peers, each as its own documentation has it.

All get the same model, the same fused AdamW, clip the norm at 1.0, and make the same updates of the same examples;
only Trainer with sampling by length draws its own.
"""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from measurement import Job
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from workloads import Example

import wholebatch as wb

CLIP = 1.0


def in_order(job: Job) -> list[Example]:
    """Every update's examples, one after the other."""
    return list(itertools.chain.from_iterable(job.batches))


def micro_batches(job: Job, batch: list[Example]) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(batch), job.micro_batch_size):
        yield job.collate(batch[start : start + job.micro_batch_size])


def steps_per_update(job: Job) -> int:
    return len(job.batches[0]) // job.micro_batch_size


def mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(losses).mean()


def num_units(labels: torch.Tensor) -> int:
    """What the loss of a Hugging Face model is a mean over: examples, or labels after the shift."""
    return len(labels) if labels.ndim == 1 else int((labels[:, 1:] != -100).sum())


# ---- By hand ----


def by_hand(job: Job) -> None:
    """The micro-batches in arrival order, each weighted by its share of the update's units."""
    job.started()
    for batch in job.batches:
        parts = list(micro_batches(job, batch))
        counts = [num_units(part["labels"]) for part in parts]
        total, shares = sum(counts), []
        for part, count in zip(parts, counts, strict=True):
            share = job.model(**part).loss * (count / total)
            share.backward()
            shares.append(share.detach())
        clip_grad_norm_(job.model.parameters(), CLIP)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.updated(torch.stack(shares).sum())


# ---- wholebatch ----


def wholebatch(job: Job, deterministic: bool = False) -> None:
    """The whole batch as a list of examples; the size is the library's choice."""
    accumulator = wb.GradientAccumulator(
        job.model, optimizer=job.optimizer, collate_fn=job.collate, deterministic=deterministic
    )
    job.started()
    settling_peaks = settle(accumulator, job)
    for batch in job.batches:
        report = accumulator.backward(batch)
        clip_grad_norm_(job.model.parameters(), CLIP)
        job.optimizer.step()
        job.optimizer.zero_grad()
        peaks = [] if report.peak_memory_bytes is None else [report.peak_memory_bytes, *settling_peaks]
        job.updated(report.loss, len(job.collate.calls), max(peaks, default=None))
        settling_peaks = []
    job.notes["micro_batch_sizes"] = report.micro_batch_sizes
    job.notes["reported_padded_tokens"] = getattr(report, "padded_tokens", None)
    job.notes["reported_real_tokens"] = getattr(report, "real_tokens", None)
    job.notes["sizing"] = accumulator.state_dict()["sizing"]


def settle(accumulator: wb.GradientAccumulator, job: Job) -> list[int]:
    """Let it choose its sizes, without an update; the resident peak of each batch that this took."""
    peaks = []
    for batch in job.settling:
        peaks.append(accumulator.backward(batch).peak_memory_bytes or 0)
        job.optimizer.zero_grad()
        if len(peaks) > 1 and is_settled(accumulator):
            break
    job.collate.calls.clear()
    job.notes["settling_batches"] = len(peaks)
    job.notes["settled"] = is_settled(accumulator)
    return peaks


def is_settled(accumulator: wb.GradientAccumulator) -> bool:
    """Whether the size is chosen, or was never a question of timings."""
    return accumulator.state_dict()["sizing"].get("choice", True) is not None


def wholebatch_deterministic(job: Job) -> None:
    """Cut from tokens alone, never from timings."""
    wholebatch(job, deterministic=True)


def wholebatch_gradient(job: Job) -> None:
    """The gradient alone, without optimizer, of batches that are padded already, at a stated size."""
    accumulator = wb.GradientAccumulator(job.model, micro_batch_size=job.micro_batch_size)
    batches = [job.collate(batch) for batch in job.batches]
    job.collate.calls.clear()
    job.started()
    for batch in batches:
        report = accumulator.backward(batch)
        job.model.zero_grad()
        job.updated(report.loss, 0, report.peak_memory_bytes)
    job.notes["micro_batch_sizes"] = report.micro_batch_sizes
    job.notes["batch_bytes"] = sum(field.nbytes for batch in batches for field in batch.values())


# ---- The peers ----


def accelerate(job: Job) -> None:
    """`accumulate`, as in its guide."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps_per_update(job))
    loader = DataLoader(in_order(job), batch_size=job.micro_batch_size, collate_fn=job.collate)
    model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, loader)
    job.started()
    losses = []
    for micro_batch in loader:
        with accelerator.accumulate(model):
            loss = model(**micro_batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            job.updated(mean(losses))
            losses = []


def trainer(job: Job, sampling: str = "sequential") -> None:
    """Hugging Face's Trainer without logging, saving and evaluation."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    losses: list[torch.Tensor] = []

    class Watching(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    class Marks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            job.started()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            job.updated(torch.stack(losses).sum())  # what it logs, and what its gradient is of
            losses.clear()

    arguments = TrainingArguments(
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=steps_per_update(job),
        max_grad_norm=CLIP,
        max_steps=job.num_updates,
        lr_scheduler_type="constant",
        train_sampling_strategy=sampling,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    watching = Watching(
        job.model,
        arguments,
        data_collator=job.collate,
        train_dataset=in_order(job),
        optimizers=(job.optimizer, None),
        callbacks=[Marks()],
    )
    watching.remove_callback(PrinterCallback)
    watching.train()


def trainer_by_length(job: Job) -> None:
    """The same with its own sampling by length: which examples share an update changes with it."""
    trainer(job, "group_by_length")


def lightning(job: Job) -> None:
    """`accumulate_grad_batches`, without logger, checkpoints and progress bar."""
    import lightning.pytorch as pl

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    steps = steps_per_update(job)
    losses: list[torch.Tensor] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

        def on_train_start(self) -> None:
            job.started()

        def on_train_batch_end(self, *args: Any) -> None:
            if len(losses) == steps:
                job.updated(mean(losses))
                losses.clear()

    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=steps,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(in_order(job), batch_size=job.micro_batch_size, collate_fn=job.collate))


# ---- The best size of a hand-written loop ----


def sweep(job: Job) -> None:
    """Tokens per second of the hand-written loop at every power of two, each the better of two tries, in turn."""
    import time

    batch, rates = job.batches[0], {}
    sizes = [2**power for power in range(len(batch).bit_length()) if 2**power <= job.micro_batch_size]
    job.started()
    for part in (batch[:1], batch[: sizes[-1]]):
        job.model(**job.collate(part)).loss.backward()
    for size in sizes * 2:
        num_parts = max(1, min(16, len(batch)) // size)
        parts = [job.collate(batch[size * place : size * (place + 1)]) for place in range(num_parts)]
        started = time.thread_time()
        for part in parts:
            job.model(**part).loss.backward()
        rate = sum(part["input_ids"].numel() for part in parts) / (time.thread_time() - started)
        rates[size] = max(rates.get(size, 0.0), rate)
    job.notes["tokens_per_second"] = rates
    job.updated(torch.zeros(()), 0)


CONTESTANTS = {
    "by hand": by_hand,
    "Accelerate": accelerate,
    "Trainer": trainer,
    "Lightning": lightning,
    "wholebatch": wholebatch,
    "wholebatch, deterministic": wholebatch_deterministic,
    "wholebatch, gradient alone": wholebatch_gradient,
    "Trainer, by length": trainer_by_length,
    "sweep": sweep,
}
