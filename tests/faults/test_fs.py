"""Known faults of optimizers that are fused with other things: here with backward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lin import AB, EXACT, Lin, accumulator
from wholebatch.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.smoke,
    # By torch itself, when torch.distributed.optim is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Stepper:
    """A callable object, as training frameworks have them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, parameter: nn.Parameter) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_now(self, parameter: nn.Parameter) -> None:
        self.optimizer.step()


def in_a_table(model: "Chain", optimizer: torch.optim.Optimizer) -> None:
    """As torch's own tutorial has it: a mapping from parameters to optimizers."""
    optimizers = {model.last.w: optimizer}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    model.last.w.register_post_accumulate_grad_hook(step)


def by_hand(model: "Chain", optimizer: torch.optim.Optimizer) -> None:
    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model.last.w.register_post_accumulate_grad_hook(step)


def by_hand_in_the_data(model: "Chain", optimizer: torch.optim.Optimizer) -> None:
    def step(parameter: nn.Parameter) -> None:
        parameter.data.sub_(0.1 * parameter.grad)

    model.last.w.register_post_accumulate_grad_hook(step)


def by_torch(model: "Chain", optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


def hooked(make: Callable[[torch.optim.Optimizer], Callable[..., Any]]) -> Callable[..., None]:
    def register(model: "Chain", optimizer: torch.optim.Optimizer) -> None:
        model.last.w.register_post_accumulate_grad_hook(make(optimizer))

    return register


WAYS: dict[str, Callable[["Chain", torch.optim.Optimizer], Any]] = {
    "lambda": hooked(lambda optimizer: lambda parameter: (optimizer.step(), optimizer.zero_grad())),
    "partial": hooked(lambda optimizer: functools.partial(Stepper.__call__, Stepper(optimizer))),
    "callable object": hooked(Stepper),
    "method": hooked(lambda optimizer: Stepper(optimizer).step_now),
    "table": in_a_table,
    "by hand": by_hand,
    "by hand in the data": by_hand_in_the_data,
    "by torch": by_torch,
    "hook of a gradient": lambda model, optimizer: model.last.w.register_hook(lambda gradient: optimizer.step()),
    "hook of a module": lambda model, optimizer: model.last.register_full_backward_hook(
        lambda module, inputs, outputs: optimizer.step()
    ),
    "in the loss": lambda model, optimizer: model.register_forward_hook(lambda *_: optimizer.step()),
}


class Chain(nn.Module):
    """LIN behind another parameter, so that hooks of modules see gradients of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Lin(), Lin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("when", ["from the start", "later"])
@pytest.mark.parametrize("way", WAYS)
def test_fs4_step_per_micro_batch(way: str, when: str) -> None:
    """Whatever steps as gradients arrive is refused, and parameters, optimizer and `.grad` are as before."""
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = accumulator(model)
    if when == "later":
        whole.backward(AB)
        model.zero_grad()
    WAYS[way](model, optimizer)
    with pytest.raises(UnsupportedModelError, match=r"step|changed"):
        whole.backward(AB)
    assert [parameter.item() for parameter in model.parameters()] == [1.0, 1.0]
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("way", ["lambda", "partial", "callable object", "method", "table", "by hand"])
def test_fs4_refused_before_the_first_backward(way: str) -> None:
    """Hooks that step after each accumulated gradient are told by what they reach, before the model is run at all."""
    model, runs = Chain(), []
    WAYS[way](model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    with pytest.raises(UnsupportedModelError, match="post-accumulate-grad hook"):
        accumulator(model).backward(AB)
    assert runs == []


def test_fs4_hooks_that_only_look_are_allowed() -> None:
    """They see one gradient for each micro-batch, and the batch's gradient is right."""
    model, seen = Lin(), []
    model.w.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
    whole = accumulator(model)
    for _ in range(2):
        seen.clear()
        whole.backward(AB)
        assert seen == pytest.approx([6 / 4, 16 / 4], rel=EXACT)
        assert model.w.grad.item() == pytest.approx(4.0, rel=EXACT)
        model.zero_grad()
