"""One pass over the whole batch by plain torch, and how far something else is from it. Knows nothing of wholebatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LossOf = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """What some updates left behind. Tensors are copies."""

    losses: list[float]
    gradients: list[list[torch.Tensor | None]]
    """For each update, the gradient of each parameter."""

    parameters: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    """The optimizer's, for each parameter that has one."""


def adamw(model: nn.Module, eps: float = 1e-8) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=eps)


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    backward: Callable[[nn.Module, Any], torch.Tensor],
) -> Trained:
    """One update for each batch; `backward` leaves the batch's gradient in `.grad` and returns its loss."""
    losses, gradients = [], []
    for batch in batches:
        losses.append(float(backward(model, batch)))
        gradients.append(copied_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(
        losses,
        gradients,
        [parameter.detach().clone() for parameter in model.parameters()],
        [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()],
    )


def one_pass(loss_of: LossOf, autocast: torch.dtype | None = None) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Forward over the whole batch, `loss.backward()`."""

    def backward(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    return backward


def copied_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def gradient_in_one_pass(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradient of `loss`; leaves `.grad` None."""
    model.zero_grad()
    loss.backward()
    gradients = copied_gradients(model)
    model.zero_grad()
    return gradients


def distance(found: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None], floor: float = 1.0) -> float:
    """The largest relative difference between tensors in pairs.

    Relative to the norm of the right tensor, or to `floor` times the norm of all of them where that is more: with
    1.0, relative to the norm of the whole gradient; with less, small parameters are looked at in their own right.
    Infinite where one of a pair is None.
    """
    if [tensor is None for tensor in found] != [tensor is None for tensor in right]:
        return float("inf")
    pairs = [(dense(a), dense(b)) for a, b in zip(found, right, strict=True) if a is not None and b is not None]
    whole = torch.stack([b.norm() for _, b in pairs]).norm()
    if floor == 1.0:
        return float(torch.stack([(a - b).norm() for a, b in pairs]).norm() / whole)
    return max(float((a - b).norm() / torch.maximum(b.norm(), floor * whole)) for a, b in pairs)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).to(torch.float64)
