"""Puts back the buffers that the forward passes of a batch have moved, if the batch comes to nothing.

Running statistics move in every forward. If a batch is skipped because its inputs were not finite, they would be lost
for good, although `.grad` and the parameters are as before.
"""

import warnings
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from wholebatch.errors import BatchStatisticsWarning
from wholebatch.suitability import tracks_the_batch


@dataclass(frozen=True)
class _Slot:
    """A place where a module holds a buffer."""

    module: nn.Module
    name: str
    path: str

    @property
    def buffer(self) -> torch.Tensor | None:
        """What it holds now."""
        return self.module._buffers.get(self.name)


def _slots(model: nn.Module) -> list[_Slot]:
    return [
        _Slot(module, name, f"{prefix}.{name}".lstrip("."))
        for prefix, module in model.named_modules()
        for name in module._buffers
    ]


class MovingBuffers:
    """The buffers of a model that its forward moves; found in the first batch, copied at the start of the others.

    In the first batch all are copied, and compared afterwards: batch normalisation moves its statistics without
    counting it as a change of the tensor. Free where nothing moves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._moving: list[_Slot] | None = None
        self._before: list[tuple[_Slot, torch.Tensor, torch.Tensor]] = []
        self._keep = False

    def __enter__(self) -> "MovingBuffers":
        watched = _slots(self._model) if self._moving is None else self._moving
        there = [(slot, buffer) for slot in watched if (buffer := slot.buffer) is not None]
        self._before = [(slot, buffer, buffer.detach().clone()) for slot, buffer in there]
        self._keep = False
        return self

    def keep(self, steps: int) -> None:
        """The batch is good: leave the buffers where the forward passes of its `steps` micro-batches moved them.

        Warns here, where all can still be put back: a warning may be an error.
        """
        if self._moving is None:
            self._moving = [
                slot for slot, buffer, old in self._before if slot.buffer is not buffer or not torch.equal(buffer, old)
            ]
            if steps > 1:
                self._warn()
        self._keep = True

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before, self._before = self._before, []
        if not self._keep:
            for slot, buffer, values in before:
                buffer.copy_(values)
                if slot.buffer is not buffer:  # the forward put another tensor in its place
                    slot.module._buffers[slot.name] = buffer

    def _warn(self) -> None:
        """Of buffers other than batch statistics, which have a warning of their own; counters add up all the same."""
        names = [
            slot.path
            for slot in self._moving or ()
            if not tracks_the_batch(slot.module) and slot.buffer is not None and slot.buffer.is_floating_point()
        ]
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            warnings.warn(
                f"the forward moves the buffers {shown}, and it runs once per micro-batch. Not exact: whatever depends "
                "on them (a running mean, a moving average, the vectors of a spectral norm). Exact: everything else. "
                "Way out: move them once per batch, after backward.",
                BatchStatisticsWarning,
                stacklevel=4,
            )
