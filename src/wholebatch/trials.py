"""Runs micro-batches while their size is still being chosen, and tells the choice what each of them took."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from wholebatch.batch.containers import map_tensors
from wholebatch.batch.sizing import SizeSearch, Sizing
from wholebatch.cut import Knife, MicroBatch
from wholebatch.errors import MemoryBudgetError
from wholebatch.memory.device import PeakMeter, synchronize


def on_trial(
    micro_batches: Iterable[MicroBatch], knife: Knife, sizing: Sizing, meter: PeakMeter, device: torch.device
) -> Iterator[tuple[MicroBatch, Any]]:
    """Yield each micro-batch with its data on `device`; what the consumer does until the next one is what is measured.

    Their results are the training's own: nothing is run twice or thrown away. What turns out too large is split.
    """
    first, clock = True, _clock(device)
    for micro_batch in micro_batches:
        for part in knife.split(micro_batch, sizing.limit(micro_batch.length)):
            data = map_tensors(lambda tensor: tensor.to(device), part.data())
            meter.lap()
            base, started = meter.current_bytes(), clock()
            yield part, data
            del data
            synchronize(device)
            seconds, peak = clock() - started, meter.lap()
            # The batch's first micro-batch also allocates the gradients, which the next ones find there.
            sizing.observe(part.num_examples, part.length, part.tokens, seconds, None if first else base, peak)
            first = False
            _refuse_shortfall(sizing)


def _clock(device: torch.device) -> Callable[[], float]:
    """The thread's own time where it does all the work, so that other programs are not timed; else that of the wall."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def _refuse_shortfall(sizing: Sizing) -> None:
    if isinstance(sizing, SizeSearch) and sizing.explicit and (missing := sizing.shortfall_bytes) > 0:
        needed, budget = sizing.budget_bytes + missing, sizing.budget_bytes  # type: ignore[operator]
        raise MemoryBudgetError(
            f"a micro-batch of one example needs {needed / 2**20:,.0f} MiB (on a CPU that is the whole process, Python "
            "and torch included; and the optimizer's future state), but memory_budget is "
            f"{budget / 2**20:,.0f} MiB. .grad is as it was. "  # type: ignore[operator]
            "What would help: a larger budget, shorter examples, activation checkpointing, or a smaller model."
        )
