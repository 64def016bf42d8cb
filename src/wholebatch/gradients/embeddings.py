"""Gradients of embedding tables, summed row by row.

The gradient of a table is as large as the table, and zero but for the rows of a micro-batch's tokens. Made whole,
zeroed and added for each micro-batch, it is most of what a micro-batch costs beside its tokens: 30 ms for MiniLM's 47
MB on one core, as long as 16 of its tokens take. Here each micro-batch gives its rows alone
(`nn.Embedding(sparse=True)`, on for the while), and they are added to one table of zeros a batch.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.facts import Number

_FEWEST_ELEMENTS = 2**16
"""Smaller tables are not worth it."""


class EmbeddingRows:
    """Within the context, tables of `model` that nothing else looks at get their gradient by rows.

    On a CPU only, where zeroing and adding whole tables takes long. What is left in `.grad` by `finish` is an ordinary
    dense gradient.
    """

    def __init__(self, model: nn.Module, wanted: bool = True) -> None:
        self._modules = _tables(model) if wanted else []
        self._sums: dict[torch.Tensor, torch.Tensor] = {}

    def __enter__(self) -> None:
        for module in self._modules:
            module.sparse = True

    def __exit__(self, *error: Any) -> None:
        for module in self._modules:
            module.sparse = False

    def add(self) -> None:
        """Move the rows that a micro-batch has left in `.grad` into the sums."""
        for module in self._modules:
            gradient = module.weight.grad
            if gradient is not None and gradient.layout == torch.sparse_coo:
                self._add(module.weight, gradient)

    @torch.no_grad()
    def _add(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        if (total := self._sums.get(weight)) is None:
            total = self._sums[weight] = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        total.index_add_(0, gradient._indices()[0], gradient._values())
        weight.grad = None

    def multiply(self, factor: Number) -> None:
        """Multiply all sums by `factor`."""
        for total in self._sums.values():
            total.mul_(factor)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the sums into `.grad`."""
        for weight, total in self._sums.items():
            weight.grad = total if weight.grad is None else total.add_(weight.grad)
        self._sums.clear()


def _tables(model: nn.Module) -> list[nn.Embedding]:
    """The embeddings whose dense gradient may be made later: trained, of one module, without hooks, not compiled."""
    if hasattr(model, "_orig_mod"):
        return []
    modules: Sequence[nn.Module] = list(model.modules())
    found = [module for module in modules if type(module) is nn.Embedding and _by_rows(module)]
    if not found:
        return []
    uses = Counter(id(weight) for module in modules for weight in module._parameters.values() if weight is not None)
    return [module for module in found if uses[id(module.weight)] == 1]


def _by_rows(module: nn.Embedding) -> bool:
    weight = module.weight
    return (
        weight.requires_grad
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and weight.numel() >= _FEWEST_ELEMENTS
        and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        and not (weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))
        and not (module._backward_hooks or module._backward_pre_hooks)
        and module._compiled_call_impl is None
    )
