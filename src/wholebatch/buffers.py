"""Puts back the buffers that the forward passes of a batch have moved, if the batch comes to nothing.

Running statistics move in every forward. If a batch is skipped because its inputs were not finite, they would be lost
for good, although `.grad` and the parameters are as before.
"""

import warnings
from types import TracebackType

import torch
from torch import nn

from wholebatch.errors import BatchStatisticsWarning
from wholebatch.suitability import tracks_the_batch


class MovingBuffers:
    """The buffers of a model that its forward moves; found in the first batch, copied at the start of the others.

    In the first batch all are copied, and compared afterwards: batch normalisation moves its statistics without
    counting it as a change of the tensor. Free where nothing moves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._moving: list[torch.Tensor] | None = None
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._keep = False

    def __enter__(self) -> "MovingBuffers":
        watched = list(self._model.buffers()) if self._moving is None else self._moving
        self._before = [(buffer, buffer.detach().clone()) for buffer in watched]
        self._keep = False
        return self

    def keep(self, steps: int) -> None:
        """The batch is good: leave the buffers where the forward passes of its `steps` micro-batches moved them.

        Warns here, where all can still be put back: a warning may be an error.
        """
        if self._moving is None:
            self._moving = [buffer for buffer, values in self._before if not torch.equal(buffer, values)]
            if steps > 1:
                self._warn({id(buffer) for buffer in self._moving if buffer.is_floating_point()})
        self._keep = True

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before, self._before = self._before, []
        if not self._keep:
            for buffer, values in before:
                buffer.copy_(values)

    def _warn(self, moving: set[int]) -> None:
        """Of buffers other than batch statistics, which have a warning of their own; counters add up all the same."""
        names = [
            f"{name}.{own}".lstrip(".")
            for name, module in self._model.named_modules()
            if not tracks_the_batch(module)
            for own, buffer in module.named_buffers(recurse=False)
            if id(buffer) in moving
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
