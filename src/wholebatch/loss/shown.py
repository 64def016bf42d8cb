"""The denominator that a cross-entropy shows in its own graph, for every micro-batch, without waiting for the device.

`suggested` reads whatever can be read, once, and waits for numbers. This reads the one thing that is there as a tensor:
the weight that `F.cross_entropy` and `F.nll_loss` divided by (labels that are not ignored, times class weights).
"""

import torch

_PASSED_OVER = frozenset(
    f"{name}Backward0" for name in ("ToCopy", "View", "UnsafeView", "Alias", "Clone", "Squeeze", "Unsqueeze")
)
_MEAN = 1
"""How the graph numbers `reduction="mean"`."""


def shown_denominator(loss: torch.Tensor) -> torch.Tensor | None:
    """What a mean cross-entropy at the head of the graph of `loss` was divided by; None for any other loss.

    Args:
        loss: 0-d, before its backward.

    Returns:
        0-d, on the loss's device, not read. None too where it was rounded to half precision, or where saved-tensor
        hooks keep it: unpacking would run the user's code.
    """
    node = loss.grad_fn
    while node is not None and node.name() in _PASSED_OVER:
        node = node.next_functions[0][0]
    if node is None or not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    saved = getattr(node, "_raw_saved_total_weight", None)
    if saved is None or getattr(saved, "unpack_hook", None) is not None:
        return None
    weight: torch.Tensor = node._saved_total_weight  # type: ignore[attr-defined]
    return weight if weight.dtype in (torch.float32, torch.float64) else None
