"""One measurement: one contestant trains one model for a few updates, in a process of its own."""

import gc
import multiprocessing
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from workloads import WORKLOADS, Collator, Example, real_tokens

from wholebatch.memory.device import peak_meter


@dataclass(frozen=True)
class Task:
    """What a process is to measure."""

    workload: str
    contestant: str
    """A name in `contestants.CONTESTANTS`."""

    batches: list[list[Example]]
    """The whole batch of each update, as lists of examples."""

    warm_up: int = 1
    """How many of the updates come before the clock starts."""

    num_updates: int | None = None
    """Stop after so many; None for all of `batches`."""

    settling: list[list[Example]] = field(default_factory=list)
    """Batches for wholebatch to choose its sizes with, before the first update and without changing the model."""

    num_labels: int = 0
    micro_batch_size: int = 8
    count_tensor_bytes: bool = False
    """Record every allocation of torch; the times are then worthless."""


@dataclass(frozen=True)
class Mark:
    """The state of the process at the end of an update."""

    process_seconds: float
    thread_seconds: float
    wall_seconds: float
    collated: int
    """Micro-batches made so far that were used so far."""

    peak_bytes: int | None
    """The most resident memory since the last mark."""


@dataclass
class Job:
    """What a contestant is given: it calls `started` before its first update, `updated` after each."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[list[Example]]
    micro_batch_size: int
    num_updates: int
    settling: list[list[Example]] = field(default_factory=list)
    collate: Collator = field(default_factory=Collator)
    losses: list[torch.Tensor] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """What the contestant wants to have said about itself."""

    marks: list[Mark] = field(default_factory=list)
    marked_ns: list[int] = field(default_factory=list)
    """When, on the clock of the profiler."""

    base_bytes: int | None = None

    def __post_init__(self) -> None:
        self._meter = peak_meter(torch.device("cpu"))

    def started(self) -> None:
        """The model is loaded, everything imported, and nothing trained yet."""
        gc.collect()
        self.base_bytes = self._meter.current_bytes()
        self._meter.start()
        self._mark(0, None)

    def updated(self, loss: torch.Tensor, collated: int | None = None, peak_bytes: int | None = None) -> None:
        """Gradients are applied and emptied.

        Args:
            loss: The mean over the update's examples or tokens, as the contestant sees it.
            collated: Micro-batches collated for the updates so far; None for the same number in each (some contestants
                collate ahead).
            peak_bytes: The most resident memory, where the contestant itself has reset the kernel's record.
        """
        self.losses.append(loss.detach())
        if collated is None:
            collated = self.marks[-1].collated + len(self.batches[0]) // self.micro_batch_size
        self._mark(collated, peak_bytes)

    def _mark(self, collated: int, peak_bytes: int | None) -> None:
        clocks = time.process_time(), time.thread_time(), time.perf_counter()
        peak = self._meter.lap()
        if peak is not None and peak_bytes is not None:
            peak = max(peak, peak_bytes)
        self.marks.append(Mark(*clocks, collated, peak))
        self.marked_ns.append(time.time_ns())


def measure(task: Task) -> dict[str, Any]:
    """Run the contestant in this process."""
    from contestants import CONTESTANTS
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = WORKLOADS[task.workload].model(task.num_labels).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    num_updates = task.num_updates or len(task.batches)
    job = Job(model, optimizer, task.batches, task.micro_batch_size, num_updates, task.settling)
    if not task.count_tensor_bytes:
        CONTESTANTS[task.contestant](job)
        return figures(task, job)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        CONTESTANTS[task.contestant](job)
    return tensor_peaks(profile, job.marked_ns[task.warm_up]) | job.notes


def tensor_peaks(profile: torch.profiler.profile, warm_ns: int) -> dict[str, int]:
    """The most bytes that torch held at once of those it allocated while the profile ran; in all, and once warm."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peaks = 0, {False: 0, True: 0}
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        warm = event.start_ns() >= warm_ns
        peaks[warm] = max(peaks[warm], held)
    return {"tensor_peak_bytes": max(peaks.values()), "tensor_peak_bytes_after_warm_up": peaks[True]}


def figures(task: Task, job: Job) -> dict[str, Any]:
    """What the marks say of the updates after the warm-up."""
    first, last = job.marks[task.warm_up], job.marks[-1]
    assert len(job.marks) - 1 == job.num_updates, f"{len(job.marks) - 1} updates instead of {job.num_updates}"
    used = job.collate.calls[first.collated : last.collated]
    real, padded = (sum(column) for column in zip(*used, strict=True)) if used else (0, 0)
    if not used:  # what was given already padded
        real = padded = sum(map(real_tokens, task.batches[task.warm_up :]))
    peaks = [mark.peak_bytes for mark in job.marks[1:]]
    over = [None if peak is None or job.base_bytes is None else peak - job.base_bytes for peak in peaks]
    return {
        "process_seconds": last.process_seconds - first.process_seconds,
        "thread_seconds": last.thread_seconds - first.thread_seconds,
        "wall_seconds": last.wall_seconds - first.wall_seconds,
        "real_tokens": real,
        "padded_tokens": padded,
        "loaded_bytes": job.base_bytes,
        "peak_bytes_over_loaded": None if None in over else max(over),
        "peak_bytes_over_loaded_after_warm_up": None if None in over else max(over[task.warm_up :]),
        "losses": [float(loss) for loss in job.losses],
        **job.notes,
    }


# ---- Processes ----


def processes() -> Any:
    """Where fresh processes come from: forked from one that has imported the libraries and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "torch.profiler",
            "transformers.trainer",
            "transformers.models.bert.modeling_bert",
            "transformers.models.gpt2.modeling_gpt2",
            "transformers.models.llama.modeling_llama",
            "contestants",
        ]
    )
    return context


def in_fresh_process(context: Any, task: Task) -> dict[str, Any]:
    """Measure, and let the process die."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, *_sent(task)))
    process.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is None:
        raise RuntimeError(f"{task.contestant} on {task.workload} ended with exit status {process.exitcode}")
    return answer


def _answer(there: Any, batches: Any, settling: Any, rest: dict[str, Any]) -> None:
    there.send(measure(Task(batches=_with(torch.tensor, batches), settling=_with(torch.tensor, settling), **rest)))


def _sent(task: Task) -> tuple[Any, Any, dict[str, Any]]:
    """The task without tensors, which would travel through files of their own."""
    rest = {name: value for name, value in vars(task).items() if name not in ("batches", "settling")}
    return _with(torch.Tensor.tolist, task.batches), _with(torch.Tensor.tolist, task.settling), rest


def _with(function: Callable[[Any], Any], batches: Any) -> Any:
    return [[{name: function(field) for name, field in one.items()} for one in batch] for batch in batches]
