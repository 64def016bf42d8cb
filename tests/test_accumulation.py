"""What `backward` promises: about `.grad`, whatever happens in between; about hooks, randomness and what stays behind.

The right values are those of one pass by plain torch, or of the loop written by hand at the same cut.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import wholebatch as wb
from oracle.one_pass import copied_gradients, distance, gradient_in_one_pass
from wholebatch.batch.layout import BatchPieces
from wholebatch.errors import BatchStatisticsWarning, LossNotAdditiveError, UnsupportedModelError
from wholebatch.gradients.hooks import ChangingHooks

Batch = dict[str, torch.Tensor]

NUM_FEATURES, NUM_CLASSES = 3, 4


def classifier(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    layers = (nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, NUM_CLASSES))
    return nn.Sequential(*layers).to(dtype)


def batch_of(num_examples: int, dtype: torch.dtype = torch.float64) -> Batch:
    x, labels = torch.randn(num_examples, NUM_FEATURES), torch.randint(NUM_CLASSES, (num_examples,))
    return {"x": x.to(dtype), "labels": labels}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]), batch["labels"])


def accumulator(model: nn.Module, loss_fn: Any = loss_fn, count: Any = "examples", **options: Any) -> Any:
    return wb.GradientAccumulator(model, loss_fn, count=count, **{"micro_batch_size": 2, **options})


def close(found: list[torch.Tensor | None], expected: list[torch.Tensor | None], bound: float = 1e-12) -> bool:
    return distance(found, expected, floor=1e-3) <= bound


@pytest.fixture
def model() -> nn.Sequential:
    return classifier()


@pytest.fixture
def batch() -> Batch:
    return batch_of(7)


# ---- .grad: added to what was there ----


def with_gradients(model: nn.Module, which: str) -> list[torch.Tensor | None]:
    """Set `.grad` of no, of some, or of all parameters, and return a copy of what is there."""
    for place, parameter in enumerate(model.parameters()):
        if which == "all" or (which == "some" and place % 2):
            parameter.grad = torch.randn_like(parameter)
    return copied_gradients(model)


@pytest.mark.parametrize("which", ["none", "some", "all"])
def test_the_gradient_is_added_to_what_was_there(model: nn.Module, batch: Batch, which: str) -> None:
    """As after `loss.backward()`, `.grad` is the same tensor as before, with the batch's gradient added."""
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    before = with_gradients(model, which)
    tensors = [parameter.grad for parameter in model.parameters()]
    accumulator(model).backward(batch)
    sums = [new if old is None else old + new for old, new in zip(before, right, strict=True)]
    assert close(copied_gradients(model), sums)
    for parameter, old in zip(model.parameters(), tensors, strict=True):
        assert old is None or parameter.grad is old


def test_two_batches_without_zero_grad_add_up(model: nn.Module) -> None:
    """The gradient of two batches of 4 and 3 is the sum of their means, as two calls of `loss.backward()` leave it."""
    first, second = batch_of(4), batch_of(3)
    right = gradient_in_one_pass(model, loss_fn(model, first) + loss_fn(model, second))
    accumulate = accumulator(model)
    for one in (first, second):
        accumulate.backward(one)
    assert close(copied_gradients(model), right)


# ---- .grad: as before, if it does not return ----


class Bomb:
    """Goes off in a training forward or backward pass, the `at`-th after it was armed; never while it is not armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.left = error, 0

    def arm(self, at: int) -> None:
        self.left = at

    def tick(self) -> None:
        if self.left == 1:
            self.left = 0
            raise self.error("the bomb went off")
        self.left = max(0, self.left - 1)


class Fuse(torch.autograd.Function):
    """The identity, with a bomb in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bomb: Bomb) -> torch.Tensor:
        ctx.bomb = bomb
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.bomb.tick()
        return gradient, None


def in_loss_fn(model: nn.Sequential, bomb: Bomb) -> Any:
    def exploding(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_fn(model, batch)
        if model.training:
            bomb.tick()
        return loss

    return exploding


def in_backward(model: nn.Sequential, bomb: Bomb) -> Any:
    """Between the layers, so that the last one has its gradient already."""

    def exploding(model: nn.Sequential, batch: Batch) -> torch.Tensor:
        hidden = model[:2](batch["x"])
        hidden = Fuse.apply(hidden, bomb) if model.training else hidden
        return cross_entropy(model[2:](hidden), batch["labels"])

    return exploding


def in_tensor_hook(model: nn.Sequential, bomb: Bomb) -> Any:
    model[0].weight.register_hook(lambda gradient: bomb.tick() if model.training else None)
    return loss_fn


def in_accumulation_hook(model: nn.Sequential, bomb: Bomb) -> Any:
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: bomb.tick())
    return loss_fn


def in_module_hook(model: nn.Sequential, bomb: Bomb) -> Any:
    model[1].register_full_backward_hook(lambda *_: bomb.tick() if model.training else None)
    return loss_fn


PLACES = [in_loss_fn, in_backward, in_tensor_hook, in_accumulation_hook, in_module_hook]


@pytest.mark.parametrize("form", ["scalar", "count comes with the loss", "fp32 sums"])
@pytest.mark.parametrize("which", ["none", "some"])
@pytest.mark.parametrize(("first", "at"), [(True, 1), (False, 1), (False, 4)], ids=["first batch", "first", "last"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_whatever_is_raised_grad_is_as_before_and_the_next_call_is_exact(
    batch: Batch, place: Any, error: type[BaseException], first: bool, at: int, which: str, form: str
) -> None:
    """The check of a first batch fails, or, later, the first or last of four micro-batches, in forward or in backward.

    Then every `.grad` is the tensor that it was, or None, with its old values; and the same call again, as from a
    notebook's cell, gives the exact gradient.
    """
    model = classifier(dtype=torch.bfloat16 if form == "fp32 sums" else torch.float64)
    batch = {"x": batch["x"].to(model[0].weight.dtype), "labels": batch["labels"]}
    bomb = Bomb(error)
    stated: Callable[..., Any] = place(model, bomb)
    if form == "count comes with the loss":
        accumulate = accumulator(model, summed(stated), count=None)
    else:
        accumulate = accumulator(model, stated, accumulate_in_fp32=form == "fp32 sums")
    if not first:
        accumulate.backward(batch)
        model.zero_grad()
    before = with_gradients(model, which)
    tensors = [parameter.grad for parameter in model.parameters()]

    bomb.arm(at)
    with pytest.raises(error, match="the bomb went off"):
        accumulate.backward(batch)
    assert all(p.grad is old for p, old in zip(model.parameters(), tensors, strict=True))
    assert all(same(now, old) for now, old in zip(copied_gradients(model), before, strict=True))

    accumulate.backward(batch)
    found = [
        now if old is None else now - old  # type: ignore[operator]
        for now, old in zip(copied_gradients(model), before, strict=True)
    ]
    right = gradient_in_one_pass(model, stated(model, batch))
    assert close(found, right, 0.1 if form == "fp32 sums" else 1e-12)


def summed(stated: Callable[..., torch.Tensor]) -> Callable[[nn.Module, Batch], wb.LossSum]:
    def as_sum(model: nn.Module, batch: Batch) -> wb.LossSum:
        num_examples = len(batch["labels"])
        return wb.LossSum(stated(model, batch) * num_examples, num_examples)

    return as_sum


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other is None or (one is not None and other is not None and torch.equal(one, other))


def no_labels(batch: Batch) -> Batch:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def not_finite(batch: Batch) -> Batch:
    x = batch["x"].clone()
    x[4] = float("nan")
    return {**batch, "x": x}


@pytest.mark.parametrize("which", ["none", "some", "all"])
@pytest.mark.parametrize("form", ["count before", "count comes with the loss"])
@pytest.mark.parametrize("spoilt", [no_labels, not_finite], ids=lambda spoilt: spoilt.__name__)
def test_a_batch_that_is_not_to_be_stepped_leaves_grad_as_it_was(
    model: nn.Module, batch: Batch, spoilt: Any, form: str, which: str
) -> None:
    """`should_step` is False and `.grad` is the same tensor with the same values, or None."""

    def per_label(model: nn.Module, batch: Batch) -> wb.LossSum:
        losses = cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
        return wb.LossSum(losses, (batch["labels"] != -100).sum())

    count = None if form == "count comes with the loss" else lambda batch: (batch["labels"] != -100).sum()
    accumulate = accumulator(model, per_label, count)
    before = with_gradients(model, which)
    tensors = [parameter.grad for parameter in model.parameters()]
    report = accumulate.backward(spoilt(batch))
    assert not report.should_step
    assert report.reason
    assert all(p.grad is old for p, old in zip(model.parameters(), tensors, strict=True))
    assert all(same(now, old) for now, old in zip(copied_gradients(model), before, strict=True))


def test_a_batch_that_is_not_to_be_stepped_may_be_stepped_without_harm(model: nn.Module, batch: Batch) -> None:
    """Who ignores `should_step`, has no scaler and starts from `.grad` None keeps parameters and optimizer state."""
    optimizer = torch.optim.AdamW(model.parameters())
    accumulate = accumulator(model, optimizer=optimizer)
    accumulate.backward(batch)
    optimizer.step()
    optimizer.zero_grad()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert not accumulate.backward(not_finite(batch)).should_step
    optimizer.step()
    assert all(map(torch.equal, parameters, model.parameters()))
    assert [state["step"].item() for state in optimizer.state.values()] == steps


# ---- Hooks ----


def test_hooks_see_one_gradient_for_each_micro_batch(model: nn.Sequential, batch: Batch) -> None:
    """A tensor hook sees each micro-batch's own gradient, an accumulation hook the sum so far."""
    accumulate = accumulator(model)
    accumulate.backward(batch)  # with the checks of a first batch, which also differentiate
    model.zero_grad()
    own, so_far = [], []
    model[0].weight.register_hook(lambda gradient: own.append(gradient.clone()))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: so_far.append(parameter.grad.clone()))
    report = accumulate.backward(batch)
    assert len(own) == len(so_far) == len(report.micro_batch_sizes) == 4
    torch.testing.assert_close(torch.stack(own).cumsum(dim=0), torch.stack(so_far), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(so_far[-1], model[0].weight.grad, rtol=0, atol=0)


def test_tensor_hooks_see_one_gradient_for_each_micro_batch_of_the_first_batch(
    model: nn.Sequential, batch: Batch
) -> None:
    own: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda gradient: own.append(gradient.clone()))
    report = accumulator(model).backward(batch)
    assert len(own) == len(report.micro_batch_sizes) == 4


def test_a_hook_that_changes_gradients_unevenly_is_refused(model: nn.Sequential, batch: Batch) -> None:
    """Clipping each micro-batch's gradient is not clipping the batch's: the first batch says so, nothing is changed."""
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    with pytest.raises(wb.WholeBatchError):
        accumulator(model).backward(batch)
    assert copied_gradients(model) == [None] * 4


def test_so_is_one_that_adds_to_them_and_one_that_comes_later(model: nn.Sequential, batch: Batch) -> None:
    accumulate = accumulator(model)
    accumulate.backward(batch)
    model.zero_grad()
    handle = model[0].weight.register_hook(lambda gradient: gradient + 0.1 * model[0].weight.detach())
    with pytest.raises(wb.WholeBatchError, match="hooks on 1 parameters change the gradient differently"):
        accumulate.backward(batch)
    assert copied_gradients(model) == [None] * 4
    handle.remove()
    accumulate.backward(batch)


def test_a_hook_that_masks_gradients_is_exact(model: nn.Sequential, batch: Batch) -> None:
    mask = (torch.arange(model[0].weight.numel()) % 2).reshape(model[0].weight.shape)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    accumulator(model).backward(batch)
    assert close(copied_gradients(model), right)


def test_a_hook_that_scales_gradients_is_exact(model: nn.Sequential, batch: Batch) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    accumulator(model).backward(batch)
    assert close(copied_gradients(model), right)


@pytest.mark.parametrize("seen_in_one_piece", [False, True], ids=["first batch", "after a batch of one micro-batch"])
def test_a_hook_that_changes_the_sum_so_far_is_refused(
    model: nn.Sequential, batch: Batch, seen_in_one_piece: bool
) -> None:
    """It would halve the first micro-batch's share once more with each of the others."""
    accumulate = accumulator(model)

    def halve(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)
    if seen_in_one_piece:  # where it is right, since it is called once
        few = {name: field[:2] for name, field in batch.items()}
        accumulate.backward(few)
        model.zero_grad()
    with pytest.raises(UnsupportedModelError, match=r"hooks on 1 parameters change \.grad in place"):
        accumulate.backward(batch)
    assert copied_gradients(model) == [None] * 4
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1


def test_hooks_of_two_devices_may_be_called_in_turn() -> None:
    """Each device has a thread of its own in backward: what came is kept by parameter."""
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    watched = ChangingHooks([])
    with watched:
        for _ in range(2):
            for parameter in (one, other):
                parameter.grad = torch.ones(2)
            watched._comes(one)
            watched._comes(other)
            watched._goes(one)
            watched._goes(other)


# Ways to step an optimizer as soon as a gradient is there.

OPTIMIZERS: dict[nn.Parameter, torch.optim.Optimizer] = {}


def stepping_global(parameter: nn.Parameter) -> None:
    OPTIMIZERS[parameter].step()
    OPTIMIZERS[parameter].zero_grad()


class Stepper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, parameter: nn.Parameter) -> None:
        self.optimizer.step()

    def step_it(self, parameter: nn.Parameter) -> None:
        self.optimizer.step()


def closure(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    def hook(parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return hook


def closure_over_dict(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    optimizers = {parameter: optimizer}
    return lambda parameter: optimizers[parameter].step()


def global_dict(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    OPTIMIZERS[parameter] = optimizer
    return stepping_global


def a_partial(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    return partial(lambda optimizer, parameter: optimizer.step(), optimizer)


def default_argument(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    def hook(parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
        optimizer.step()

    return hook


def without_gradients(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    return torch.no_grad()(closure(optimizer, parameter))


def inside_another_function(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Callable[..., None]:
    def hook(parameter: nn.Parameter) -> None:
        def step() -> None:
            optimizer.step()

        step()

    return hook


STEPPING = {
    "closure": closure,
    "closure over a dict": closure_over_dict,
    "global dict": global_dict,
    "partial": a_partial,
    "bound method": lambda optimizer, parameter: Stepper(optimizer).step_it,
    "callable object": lambda optimizer, parameter: Stepper(optimizer),
    "default argument": default_argument,
    "decorated": without_gradients,
    "nested function": inside_another_function,
}


@pytest.fixture
def no_optimizers_left() -> Iterator[None]:
    yield
    OPTIMIZERS.clear()


@pytest.mark.usefixtures("no_optimizers_left")
@pytest.mark.parametrize("way", STEPPING)
def test_hooks_that_step_an_optimizer_are_refused_before_the_first_backward(
    model: nn.Module, batch: Batch, way: str
) -> None:
    """Whichever way the hook reaches its optimizer: an error, before anything is run, and nothing is changed."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(STEPPING[way](torch.optim.SGD([parameter], lr=0.1), parameter))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    runs: list[int] = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    with pytest.raises(UnsupportedModelError, match="steps the optimizer inside backward"):
        accumulator(model).backward(batch)
    assert not runs
    assert all(map(torch.equal, before, model.parameters()))
    assert copied_gradients(model) == [None] * 4


def step_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def out_of_sight(optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    return lambda parameter: step_elsewhere(optimizer)


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[..., None]:
    def hook(parameter: nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    return hook


@pytest.mark.parametrize("batch_number", [1, 2], ids=["first batch", "later batch"])
@pytest.mark.parametrize("hook_of", [out_of_sight, by_hand], ids=lambda way: way.__name__)
def test_hooks_that_change_parameters_in_ways_unseen_are_caught_at_work(
    model: nn.Sequential, batch: Batch, hook_of: Any, batch_number: int
) -> None:
    """What cannot be told from a hook's code is noticed when it acts, on the first batch with that hook, and undone."""
    accumulate = accumulator(model)
    if batch_number == 2:
        accumulate.backward(batch)
        model.zero_grad()
    model[0].weight.register_post_accumulate_grad_hook(hook_of(torch.optim.SGD(model.parameters(), lr=0.1)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedModelError):
        accumulate.backward(batch)
    assert all(map(torch.equal, before, model.parameters()))
    assert copied_gradients(model) == [None] * 4


@pytest.mark.parametrize("error", [None, ValueError])
def test_optimizers_step_again_when_backward_is_over(
    model: nn.Module, batch: Batch, error: type[Exception] | None
) -> None:
    """The refusal of steps ends with the call, whether it returned or raised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bomb = Bomb(error or ValueError)
    accumulate = accumulator(model, in_loss_fn(model, bomb), optimizer=optimizer)  # type: ignore[arg-type]
    if error is not None:
        bomb.arm(2)
        with pytest.raises(error):
            accumulate.backward(batch)
    accumulate.backward(batch)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


# ---- Parameters of every kind ----


def test_frozen_and_unused_parameters_keep_no_gradient(model: nn.Sequential, batch: Batch) -> None:
    model[0].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    accumulator(model).backward(batch)
    assert model[0].weight.grad is None
    assert model.unused.grad is None
    assert close(copied_gradients(model), right)


@pytest.mark.parametrize("form", ["scalar", "count comes with the loss"])
@pytest.mark.parametrize("which", ["none", "all"])
def test_sparse_gradients_stay_sparse(form: str, which: str) -> None:
    """Gradients of a sparse embedding are those of one pass, also where a gradient was there before."""
    model = nn.EmbeddingBag(11, NUM_CLASSES, sparse=True, mode="sum").double()
    batch = {"x": torch.randint(11, (7, 3)), "labels": torch.randint(NUM_CLASSES, (7,))}
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    accumulate = accumulator(model, summed(loss_fn), None) if form != "scalar" else accumulator(model)
    for _ in range(2 if which == "all" else 1):
        accumulate.backward(batch)
    assert model.weight.grad.is_sparse
    times = 2 if which == "all" else 1
    assert close(copied_gradients(model), [None if g is None else times * g for g in right])


@pytest.mark.parametrize("form", ["scalar", "count comes with the loss"])
def test_a_parameter_that_only_the_optimizer_knows(model: nn.Module, batch: Batch, form: str) -> None:
    """A learned temperature that `loss_fn` holds gets its gradient like any other."""
    temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def tempered(model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model(batch["x"]) / temperature, batch["labels"])

    right = gradient_in_one_pass(nn.ModuleList([model, nn.ParameterList([temperature])]), tempered(model, batch))
    if form == "scalar":
        accumulate = accumulator(model, tempered, optimizer=optimizer)
    else:
        accumulate = accumulator(model, summed(tempered), None, optimizer=optimizer)
    accumulate.backward(batch)
    assert close([*copied_gradients(model), temperature.grad], right)


@pytest.mark.parametrize("stated", [loss_fn, summed(loss_fn)], ids=["scalar", "count comes with the loss"])
def test_a_parameter_that_nobody_told_of_is_refused(model: nn.Module, batch: Batch, stated: Any) -> None:
    """Neither the model's nor the optimizer's, so that its `.grad` could be neither put back nor corrected."""
    temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def tempered(model: nn.Module, batch: Batch) -> Any:
        return stated(lambda x: model(x) / temperature, batch)

    with pytest.raises(UnsupportedModelError, match=r"optimizer="):
        accumulator(model, tempered, count="examples" if stated is loss_fn else None).backward(batch)
    assert temperature.grad is None


def test_complex_and_empty_parameters(batch: Batch) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(NUM_FEATURES, NUM_CLASSES, dtype=torch.complex128))
            self.empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(self.weight.dtype) @ self.weight).abs() * self.scale + self.empty.sum()

    model = Spectral()
    loss_fn(model, batch).backward()
    right = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    accumulator(model).backward(batch)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_a_loss_that_differentiates_by_itself(model: nn.Module, batch: Batch) -> None:
    """A penalty on the gradient in the inputs, as for Wasserstein critics and force fields: twice differentiated."""

    def penalty(model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square()

    model.register_parameter("unused", None)
    right = gradient_in_one_pass(model, penalty(model, batch).mean())
    accumulator(model, penalty, None).backward(batch)
    assert close(copied_gradients(model), right)


# ---- Randomness, and what the check of the first batch leaves behind ----


def by_hand_loop(model: nn.Module, batch: Batch, sizes: tuple[int, ...]) -> None:
    """The loop written by hand: each micro-batch's mean times its share of the examples."""
    start, num_examples = 0, sum(sizes)
    for size in sizes:
        part = {name: field[start : start + size] for name, field in batch.items()}
        (loss_fn(model, part) * (size / num_examples)).backward()
        start += size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_is_bitwise_that_of_the_loop_by_hand(dtype: torch.dtype) -> None:
    """Same seed, same cut: the same gradients to the last bit, and the same random state after each of three batches.

    So nothing in the library draws a random number, neither in general nor for the check of the first batch.
    """
    model, batches = classifier(dropout=0.4, dtype=dtype), [batch_of(num, dtype) for num in (7, 5, 8)]
    accumulate = accumulator(model)
    torch.manual_seed(3)
    found, sizes, states = [], [], []
    for batch in batches:
        sizes.append(accumulate.backward(batch).micro_batch_sizes)
        found.append(copied_gradients(model))
        states.append(torch.get_rng_state())
        model.zero_grad()
    assert sizes == [(2, 2, 2, 1), (2, 2, 1), (2, 2, 2, 2)]
    torch.manual_seed(3)
    for batch, cut, gradients, state in zip(batches, sizes, found, states, strict=True):
        by_hand_loop(model, batch, cut)
        assert all(map(torch.equal, copied_gradients(model), gradients))  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), state)
        model.zero_grad()


class Remembering(nn.Module):
    """Has buffers that forward changes in place, replaces, and creates; draws from three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier(dropout=0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(NUM_FEATURES, dtype=torch.float64))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        self.last = x
        random.random()
        numpy.random.random()
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:the forward moves the buffers mean")
def test_the_check_of_the_first_batch_leaves_no_trace(batch: Batch) -> None:
    """After a first batch, buffers, modes and all random states are as after the loop by hand over the same cut."""

    def traces(run: Callable[[nn.Module], None]) -> tuple[Any, ...]:
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        model = Remembering()
        model.inner[1].eval()
        mean = model.mean
        run(model)
        modes = [module.training for module in model.modules()]
        drawn = (random.random(), numpy.random.random(), torch.rand(()).item())
        assert mean.tolist() == [0.0] * NUM_FEATURES, "the buffer that was replaced is itself unchanged"
        return model.calls.item(), model.mean.tolist(), model.last.tolist(), modes, drawn

    assert traces(lambda model: accumulator(model).backward(batch)) == traces(
        lambda model: by_hand_loop(model, batch, (2, 2, 2, 1))
    )


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_check_that_fails_leaves_no_trace(batch: Batch, error: type[BaseException]) -> None:
    """The same when the check itself is cut short by an error: nothing has moved."""
    model = Remembering()
    model.inner[2].eval()
    modes = [module.training for module in model.modules()]
    before = (model.mean, torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())

    def failing(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = loss_fn(model, batch)
        if len(batch["x"]) == 3:  # more than a micro-batch holds: in the check alone
            raise error
        return loss

    with pytest.raises(error):
        accumulator(model, failing).backward(batch)
    assert [module.training for module in model.modules()] == modes
    assert model.calls.item() == 0
    assert model.mean is before[0]
    assert model.last is None
    after = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    assert after == before[1:]


# ---- Batches of every shape ----


def padded(examples: list[Batch]) -> Batch:
    x = nn.utils.rnn.pad_sequence([example["x"] for example in examples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence(
        [example["labels"] for example in examples], batch_first=True, padding_value=-100
    )
    return {"x": x, "labels": labels}


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def token_loss_of_pair(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return token_loss(model, {"x": batch[0], "labels": batch[1]})


def test_examples_padded_batches_and_pieces_give_the_same(model: nn.Module) -> None:
    """Examples collated micro-batch by micro-batch, one padded batch, and pieces padded one by one: one gradient."""
    lengths = (3, 1, 6, 2, 5, 4, 1)
    examples = [
        {"x": torch.randn(length, NUM_FEATURES).double(), "labels": torch.randint(NUM_CLASSES, (length,))}
        for length in lengths
    ]
    right = gradient_in_one_pass(model, token_loss(model, padded(examples)))
    pieces = BatchPieces([padded(examples[:3]), padded(examples[3:4]), padded(examples[4:])])
    ways = {
        "list": (examples, {"collate_fn": padded}),
        "tuple": (tuple(examples), {"collate_fn": padded}),
        "padded": (padded(examples), {}),
        "pieces": (pieces, {}),
        "pair": (tuple(padded(examples).values()), {}),
    }
    for name, (batch, options) in ways.items():
        model.zero_grad()
        stated = token_loss_of_pair if name == "pair" else token_loss
        report = accumulator(model, stated, count="tokens", **options).backward(batch)
        assert close(copied_gradients(model), right), name
        assert (report.num_examples, report.count, sum(report.micro_batch_sizes)) == (7, sum(lengths), 7), name


def test_collate_fn_runs_once_for_each_micro_batch_and_before_any_forward(model: nn.Module) -> None:
    examples = [{"x": torch.randn(NUM_FEATURES).double(), "labels": torch.tensor(1)} for _ in range(7)]
    events: list[str] = []

    def collate(examples: list[Batch]) -> Batch:
        events.append("collate")
        return default_collate(examples)

    accumulate = accumulator(model, collate_fn=collate)
    accumulate.backward(examples)
    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    events.clear()
    accumulate.backward(examples)
    assert events == ["collate"] * 4 + ["forward"] * 4


# ---- Models that would not be exact ----


def test_data_parallel_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match=r"DataParallel.*model\.module"):
        accumulator(nn.DataParallel(model))


def test_batch_statistics_are_named_once_and_only_where_they_are_in_use() -> None:
    """A BatchNorm in training mode is named in one warning on the first batch that is cut; in eval mode it is exact."""
    model, batch = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double(), batch_of(6)
    accumulate = accumulator(model)
    with pytest.warns(BatchStatisticsWarning, match=r"^1 \(BatchNorm1d\): .*[Nn]ot exact"):
        accumulate.backward(batch)
    accumulate.backward(batch)  # warnings are errors
    model.zero_grad()
    model[1].eval()
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    accumulator(model).backward(batch)
    assert close(copied_gradients(model), right)


def test_an_embedding_that_scales_by_frequency_is_named() -> None:
    """It divides a token's gradient by how often it occurs, in a micro-batch here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2, 3, scale_grad_by_freq=True), nn.Linear(3, 1)).double()
    batch = {"x": torch.tensor([0, 1, 0, 0]), "y": torch.randn(4, 1, dtype=torch.float64)}

    def mse(model: nn.Module, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    whole = wb.GradientAccumulator(model, mse, count="examples", micro_batch_size=1)
    named = r"^0 \(Embedding\): scale_grad_by_freq=True .*[Nn]ot exact"
    with pytest.warns(BatchStatisticsWarning, match=named), suppress(LossNotAdditiveError):
        whole.backward(batch)


def test_a_loss_squeezed_to_nothing_is_told_how_to_keep_its_dimension() -> None:
    """`(B, 1)` squeezed is `(B,)`, except in a micro-batch of one example."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    whole = wb.GradientAccumulator(model, lambda model, x: model(x).square().squeeze(), micro_batch_size=2)
    with pytest.raises(wb.WholeBatchError, match=r"squeeze\(-1\)"):
        whole.backward(x)
    whole = wb.GradientAccumulator(model, lambda model, x: model(x).square().squeeze(-1), micro_batch_size=2)
    assert whole.backward(x).micro_batch_sizes == (2, 2, 1)


def test_what_is_taken_from_loss_fn_need_not_be_a_tensor_of_the_model(model: nn.Module, batch: Batch) -> None:
    """`(loss, extras)` and objects with a `loss`: the extras are dropped."""
    right = gradient_in_one_pass(model, loss_fn(model, batch))
    for wrapped in (
        lambda model, batch: (loss_fn(model, batch), {"logits": None}),
        lambda model, batch: SimpleNamespace(loss=loss_fn(model, batch)),
        lambda model, batch: {"loss": loss_fn(model, batch), "logits": 3},
    ):
        model.zero_grad()
        accumulator(model, wrapped).backward(batch)
        assert close(copied_gradients(model), right)
