"""The accumulator's options, checked before anything runs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from wholebatch.batch.sizing import (
    ACCELERATOR_COST,
    ACCELERATOR_TOKENS,
    CPU_COST,
    CPU_TOKENS,
    FixedSize,
    RuleSize,
    SizeSearch,
    Sizing,
)
from wholebatch.errors import ConfigurationError
from wholebatch.facts import BatchLayout
from wholebatch.memory.device import budget_bytes

OnBadBatch: TypeAlias = Literal["skip", "raise", "ignore"]

COMPILED_MULTIPLE, TENSOR_CORE_MULTIPLE = 64, 8
"""Columns: of micro-batches for compiled models, and on devices with tensor cores."""


@dataclass(frozen=True)
class Options:
    """What the user asked for; see `GradientAccumulator`."""

    micro_batch_size: int | Literal["auto"]
    memory_budget: str | int | float
    regroup: bool
    collate_fn: Callable[[list[Any]], Any] | None
    layout: BatchLayout | None
    on_bad_batch: OnBadBatch
    max_skipped_batches: int
    accumulate_in_fp32: bool
    deterministic: bool | None
    loss_chunking: bool

    def __post_init__(self) -> None:
        size, most = self.micro_batch_size, self.max_skipped_batches
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigurationError(
                f'micro_batch_size={size!r}: it must be "auto" or a number of examples, at least 1'
            )
        if self.on_bad_batch not in ("skip", "raise", "ignore"):
            raise ConfigurationError(f'on_bad_batch={self.on_bad_batch!r}: use "skip", "raise" or "ignore"')
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigurationError(f"max_skipped_batches={most!r}: it must be a number of batches, at least 1")
        if not isinstance(self.regroup, bool):
            raise ConfigurationError(f"regroup={self.regroup!r}: it must be True or False")
        if not isinstance(self.loss_chunking, bool):
            raise ConfigurationError(f"loss_chunking={self.loss_chunking!r}: it must be True or False")
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise ConfigurationError(f"collate_fn={self.collate_fn!r} is not callable")
        if self.layout is not None and not isinstance(self.layout, BatchLayout):
            raise ConfigurationError(f"layout={self.layout!r}: it must be a wb.BatchLayout")

    def sizing(self, device: torch.device, reserved_bytes: int) -> Sizing:
        """How micro-batch sizes are chosen under these options."""
        budget = budget_bytes(self.memory_budget, device)  # checked even where it does not decide
        cost = CPU_COST if device.type == "cpu" else ACCELERATOR_COST
        if self.micro_batch_size != "auto":
            return FixedSize(self.micro_batch_size, exact=not self.regroup, cost=cost)
        deterministic = self.deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic:
            return RuleSize(CPU_TOKENS if device.type == "cpu" else ACCELERATOR_TOKENS, cost)
        return SizeSearch(budget, reserved_bytes, explicit=self.memory_budget != "auto", cost=cost)


def check_objects(model: Any, optimizer: Any) -> None:
    """Raise `ConfigurationError` if these are no model and no optimizer: a class, or arguments in another order."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"the first argument must be the model, an nn.Module, but it is {model!r:.80}: "
            "GradientAccumulator(model, loss_fn, ...)"
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigurationError(
            f"optimizer={optimizer!r:.80}: it must be one optimizer with its param_groups (of several, the one "
            "that holds parameters outside the model, or none)"
        )
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ConfigurationError(
            f"the parameters {lazy[:3]} have no shape yet (lazy modules): run the model once on a few examples first"
        )


def trainable_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Each parameter that may get a gradient, once: the model's, and the optimizer's others (a learned loss weight)."""
    groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
    candidates: Iterable[nn.Parameter] = (parameter for group in (model.parameters(), *groups) for parameter in group)
    return list({id(parameter): parameter for parameter in candidates if parameter.requires_grad}.values())


def future_state_bytes(optimizer: torch.optim.Optimizer | None, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that the optimizer will hold after its first step: two tensors per parameter, as AdamW; less for SGD.

    0 where the state exists already, since it is then part of what is measured.
    """
    if optimizer is not None and optimizer.state:
        return 0
    if isinstance(optimizer, torch.optim.SGD):
        copies = 1 if any(group["momentum"] for group in optimizer.param_groups) else 0
    else:
        copies = 2
    return copies * sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def shape_multiple(model: nn.Module, collate_fn: Callable[[list[Any]], Any] | None) -> int:
    """What the padded lengths of micro-batches are rounded up to, so that there are few shapes, or fast ones.

    A collator pads as it likes, and often says how (`pad_to_multiple_of`). Elsewhere 64 where each shape may be
    compiled anew, 8 where tensor cores want it, else 1.
    """
    if collate_fn is not None:
        stated = getattr(collate_fn, "pad_to_multiple_of", None)
        return stated if isinstance(stated, int) and stated > 0 else 1
    if hasattr(model, "_orig_mod"):
        return COMPILED_MULTIPLE
    return TENSOR_CORE_MULTIPLE if any(p.device.type == "cuda" for p in model.parameters()) else 1
