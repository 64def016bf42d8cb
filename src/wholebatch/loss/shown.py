"""The denominator that a loss shows in its own graph, for every micro-batch, without waiting for the device.

`suggested` reads whatever can be read, once, and waits for numbers. This reads what is there as a tensor: the weight
that a cross-entropy divided by (labels that are not ignored, times class weights), and the divisor of a sum.
"""

import torch

Node = torch.autograd.graph.Node

_PASSED_OVER = frozenset(
    f"{name}Backward0" for name in ("ToCopy", "View", "UnsafeView", "Alias", "Clone", "Squeeze", "Unsqueeze")
)
_SUMS = ("SumBackward0", "LinearCrossEntropyBackward")  # the latter is `chunked`'s
_MEAN = 1
"""How the graph numbers `reduction="mean"`."""

_EXACT = (torch.float32, torch.float64, torch.int64)
"""Types that hold a count without rounding it."""


def shown_denominator(loss: torch.Tensor) -> torch.Tensor | None:
    """What a mean cross-entropy, or a sum that was divided, at the head of the graph of `loss` was divided by.

    Args:
        loss: 0-d, before its backward.

    Returns:
        0-d, not read. None for any other loss; for a mean that is divided once more (`ce / 8` is a scale); where it was
        rounded to half precision; and where saved-tensor hooks keep it, since unpacking would run the user's code.
    """
    node = _below(loss.grad_fn)
    if node is None:
        return None
    name = node.name()
    if name.startswith("NllLoss") and getattr(node, "_saved_reduction", None) == _MEAN:
        return _saved(node, "total_weight")
    if name == "DivBackward0" and (over := _below(node.next_functions[0][0])) and over.name() in _SUMS:
        return _saved(node, "other")
    return None


def _below(node: Node | None) -> Node | None:
    """The first node that changes values, from `node` on."""
    while node is not None and node.name() in _PASSED_OVER:
        node = node.next_functions[0][0]
    return node


def _saved(node: Node, name: str) -> torch.Tensor | None:
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", None) is not None:
        return None
    value = getattr(node, f"_saved_{name}")
    told = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad
    return value.reshape(()) if told and value.dtype in _EXACT else None
