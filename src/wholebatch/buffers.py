"""Puts back the buffers that the forward passes of a batch have moved, if the batch comes to nothing.

Running statistics move in every forward. If a batch is skipped because its inputs were not finite, they would be lost
for good, although `.grad` and the parameters are as before.
"""

from types import TracebackType

import torch
from torch import nn


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

    def keep(self) -> None:
        """The batch is good: leave the buffers where its forward passes have moved them."""
        self._keep = True

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before, self._before = self._before, []
        if not self._keep:
            for buffer, values in before:
                buffer.copy_(values)
        elif self._moving is None:
            self._moving = [buffer for buffer, values in before if not torch.equal(buffer, values)]
