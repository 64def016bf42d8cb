"""Whether a model can be accumulated exactly: wrappers, hooks that step, modules with batch statistics."""

import dis
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from wholebatch.errors import BatchStatisticsWarning, UnsupportedModelError
from wholebatch.gradients.set_aside import SetAside

_REPLICATING = {"DataParallel": "nn.DataParallel averages over replicas with equal weight, whatever they hold"}


def refuse_wrappers(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a wrapper that weighs its replicas without regard to the count."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile
    for kind in type(inner).__mro__:
        if (why := _REPLICATING.get(kind.__name__)) is not None:
            raise UnsupportedModelError(
                f"the model is wrapped in {kind.__name__}: {why}, so the gradient would not be the batch's. "
                "Pass the module inside it (model.module); several devices need one process each."
            )


def refuse_unknown_parameters(losses: Iterable[torch.Tensor], known: Iterable[nn.Parameter]) -> None:
    """Raise `UnsupportedModelError` if a loss leads to a parameter that neither the model nor the optimizer has.

    Its `.grad` could not be put back after an error, nor corrected where the denominator comes with the loss.
    """
    unknown = parameters_behind(losses) - set(known)
    if unknown:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unknown)
        raise UnsupportedModelError(
            f"the loss depends on {len(unknown)} parameter(s) of shape {shapes} that are not the model's, and no "
            "optimizer was given that has them. Pass optimizer=optimizer if they are trained; if not, freeze them: "
            "parameter.requires_grad_(False)."
        )


def parameters_behind(losses: Iterable[torch.Tensor]) -> set[nn.Parameter]:
    """The parameters at the leaves of the losses' autograd graphs."""
    waiting: list[Any] = [loss.grad_fn for loss in losses]
    seen, found = set(waiting), set()
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        if isinstance(leaf, nn.Parameter):
            found.add(leaf)
        following = {node for node, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        waiting += following
    return found


def warn_of_batch_statistics(model: nn.Module) -> None:
    """Give a `BatchStatisticsWarning` that names the modules whose statistics are those of a micro-batch."""
    if names := [name for name, module in _named(model) if getattr(module, "scale_grad_by_freq", False)]:
        warnings.warn(
            f"{_listed(names)}: scale_grad_by_freq=True divides each row's gradient by how often it occurs in what the "
            "module sees, and it sees micro-batches. Not exact: the gradient of its weight. Exact: everything else. "
            "Way out: scale_grad_by_freq=False.",
            BatchStatisticsWarning,
            stacklevel=4,
        )
    if names := batch_statistics(model):
        warnings.warn(
            f"{_listed(names)}: normalises with, or tracks, the statistics of what it sees, and it sees micro-batches. "
            "Not exact: the activations after it, hence the gradient, and its running statistics, which move once "
            "per micro-batch. Exact: everything else. Since the order of the examples matters to it, they are not "
            "regrouped by length. Way out: LayerNorm or GroupNorm, or put these modules in "
            "eval() to freeze them.",
            BatchStatisticsWarning,
            stacklevel=4,
        )


def batch_statistics(model: nn.Module) -> list[str]:
    """The names of the modules in training mode that use or track the statistics of a batch."""
    return [name for name, module in _named(model) if module.training and tracks_the_batch(module)]


def order_matters(model: nn.Module) -> bool:
    """Whether a module in training mode sees which examples are together in a micro-batch."""
    return any(module.training and tracks_the_batch(module) for module in model.modules())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name and type, for messages."""
    for name, module in model.named_modules():
        yield f"{name or 'the model itself'} ({type(module).__name__})", module


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def tracks_the_batch(module: nn.Module) -> bool:
    """Whether a module uses, or keeps, the statistics of the batch it sees."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def refuse_stepping_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Raise `UnsupportedModelError` if a hook on a parameter steps an optimizer as soon as a gradient arrives.

    Such hooks (torch's "optimizer in backward") would step once per micro-batch. What a hook does cannot be known in
    general, so a hook counts as stepping if its code calls `step` and an optimizer is within its reach, or if it sets
    a `.grad`. `parameters_untouched` catches what this does not see.
    """
    for parameter in parameters:
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            if _steps(hook):
                raise UnsupportedModelError(
                    f"a post-accumulate-grad hook ({_name(hook)}) on a parameter of shape {tuple(parameter.shape)} "
                    "steps the optimizer inside backward: it would step once per micro-batch, each time on a part of "
                    "the batch. Remove the hook (handle.remove()) and call optimizer.step() after backward."
                )


def accumulation_hooks(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """The keys of the post-accumulate-grad hooks on these parameters; torch never uses one twice."""
    hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) or () for parameter in parameters]
    return frozenset(key for of_one in hooks for key in of_one)


@contextmanager
def parameters_untouched(aside: SetAside, parameters: Iterable[nn.Parameter], thorough: bool) -> Iterator[None]:
    """Refuse whatever changes a parameter while a batch is being accumulated, and leave the parameters as they were.

    An `optimizer.step()` is refused before it does anything. With `thorough`, for hooks not seen before, so is a hook
    that changes its parameter by other means; that costs a copy of the parameters that have hooks.
    """
    hooked = [p for p in parameters if getattr(p, "_post_accumulate_grad_hooks", None)] if thorough else []
    before = [parameter.detach().clone() for parameter in hooked]
    handle = register_optimizer_step_pre_hook(partial(_refuse_step, aside))
    try:
        yield
    finally:
        handle.remove()
        changed = _put_back(hooked, before)
    if changed:
        raise UnsupportedModelError(
            f"post-accumulate-grad hooks changed {changed} parameters during backward: they would be changed once per "
            "micro-batch, on a part of the batch. The parameters were put back. Remove the hooks."
        )


def _refuse_step(aside: SetAside, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not aside.is_open:  # Ctrl-C came before this hook could be removed
        return
    raise UnsupportedModelError(
        f"{type(optimizer).__name__}.step() was called inside backward (by a hook, or by loss_fn): it would step on a "
        "part of the batch. Call it after backward has returned."
    )


@torch.no_grad()
def _put_back(parameters: list[nn.Parameter], before: list[torch.Tensor]) -> int:
    changed = [(parameter, old) for parameter, old in zip(parameters, before, strict=True) if not parameter.equal(old)]
    for parameter, old in changed:
        parameter.copy_(old)
    return len(changed)


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _steps(hook: Callable[..., Any]) -> bool:
    bound: list[Any] = []
    while isinstance(hook, partial):
        bound += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    function = inspect.unwrap(hook)
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        function = vars(type(hook)).get("__call__", hook)  # a callable object
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    names = _names(code)
    if "step" in names and any(map(_holds_optimizer, (*bound, *_reachable(hook, function, names)))):
        return True
    return _sets_grad(code)


def _names(code: CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*(_names(inner) for inner in nested))


def _sets_grad(code: CodeType) -> bool:
    return any(step.opname == "STORE_ATTR" and step.argval == "grad" for step in dis.get_instructions(code))


def _reachable(hook: Any, function: Any, names: set[str]) -> Iterator[Any]:
    yield getattr(hook, "__self__", hook)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from (getattr(function, "__defaults__", None) or ())
    known = getattr(function, "__globals__", {})
    yield from (known[name] for name in names if name in known)


def _holds_optimizer(value: Any, depth: int = 2) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return any(_holds_optimizer(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_optimizer(item, depth - 1) for item in value)
    attributes = getattr(value, "__dict__", None)
    if attributes is None or isinstance(value, (type, nn.Module)) or inspect.ismodule(value):
        return False
    return any(_holds_optimizer(item, depth - 1) for item in attributes.values())
