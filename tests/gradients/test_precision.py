"""Autocast, GradScaler and low-precision parameters: what the batch's gradient is worth, and the same skips."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from oracle.one_pass import copied_gradients, distance

Batch = dict[str, torch.Tensor]

NUM_FEATURES, NUM_CLASSES = 6, 4


def batch_of(num_examples: int, dtype: torch.dtype = torch.float32) -> Batch:
    x = torch.randn(num_examples, NUM_FEATURES)
    return {"x": x.to(dtype), "labels": torch.randint(NUM_CLASSES, (num_examples,))}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["x"]).float(), batch["labels"])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))


# ---- GradScaler ----


def half_loss(model: nn.Sequential, batch: Batch) -> torch.Tensor:
    """Passes through fp16 in the middle, where a gradient may overflow."""
    return cross_entropy(model[2](model[:2](batch["x"]).half().float()), batch["labels"])


def half_loss_sum(model: nn.Sequential, batch: Batch) -> wb.LossSum:
    return wb.LossSum(half_loss(model, batch) * len(batch["x"]), len(batch["x"]))


def trained_with_scaler(backward_of: Any) -> tuple[list[float], list[torch.Tensor]]:
    """The scale after each of 30 updates, and the parameters in the end; the loop of torch's documentation."""
    torch.manual_seed(1)
    model, batches = network(), [batch_of(12) for _ in range(30)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
    backward, scales = backward_of(model), []
    for batch in batches:
        backward(batch, scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [parameter.detach().clone() for parameter in model.parameters()]


def in_one_pass(model: nn.Sequential) -> Any:
    return lambda batch, scaler: scaler.scale(half_loss(model, batch)).backward()


@pytest.mark.parametrize(("stated", "count"), [(half_loss, "examples"), (half_loss_sum, None)])
@pytest.mark.parametrize("size", [1, 5])
def test_with_a_grad_scaler_the_same_updates_are_skipped_as_in_one_pass(size: int, stated: Any, count: Any) -> None:
    """Over 30 updates that overflow in fp16 again and again: the same scales, hence the same skips, and parameters."""

    def in_micro_batches(model: nn.Sequential) -> Any:
        accumulator = wb.GradientAccumulator(model, stated, count=count, micro_batch_size=size)

        def backward(batch: Batch, scaler: Any) -> None:
            assert accumulator.backward(batch, grad_scaler=scaler).should_step

        return backward

    scales, parameters = trained_with_scaler(in_micro_batches)
    right_scales, right = trained_with_scaler(in_one_pass)
    skips = sum(after < before for before, after in zip([2.0**22, *scales], scales, strict=False))
    assert 3 <= skips <= 20, "the premise: some updates overflow and some do not"
    assert scales == right_scales
    assert distance(parameters, right) <= 1e-3  # gradients pass through fp16


def test_a_disabled_grad_scaler_changes_nothing() -> None:
    model, batch = network(), batch_of(7)
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    accumulator.backward(batch)
    right = copied_gradients(model)
    model.zero_grad()
    accumulator.backward(batch, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert all(map(torch.equal, copied_gradients(model), right))  # type: ignore[arg-type]


def test_the_reported_loss_is_without_the_scale() -> None:
    model, batch = network(), batch_of(7)
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    report = accumulator.backward(batch, grad_scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert report.loss.item() == pytest.approx(loss_fn(model, batch).item(), rel=1e-6)
    scaled = copied_gradients(model)
    model.zero_grad()
    loss_fn(model, batch).backward()
    assert distance(scaled, [None if g is None else 1024 * g for g in copied_gradients(model)]) <= 1e-6


# ---- Parameters in low precision ----


class Weighing(nn.Module):
    """Its loss for an example is the example times the weights, so that their gradient is the mean example."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(dim=1)


@pytest.mark.parametrize("count_comes_with_the_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accumulating_in_fp32_rounds_once(dtype: torch.dtype, count_comes_with_the_loss: bool) -> None:
    """Of 300 micro-batches: gradients of the parameter's type, one rounding from the truth; without it, far off."""
    x = (torch.rand(300, 64) + 0.5).to(dtype)
    truth = x.double().mean(dim=0)
    errors = {}
    for in_fp32 in (False, True):
        model = Weighing(dtype)

        def stated(model: nn.Module, batch: Batch) -> Any:
            losses = model(batch["x"])
            return wb.LossSum(losses.float().sum(), len(losses)) if count_comes_with_the_loss else losses

        accumulator = wb.GradientAccumulator(model, stated, micro_batch_size=1, accumulate_in_fp32=in_fp32)
        accumulator.backward({"x": x})
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == dtype
        errors[in_fp32] = ((model.weight.grad.double() - truth).norm() / truth.norm()).item()
    assert errors[True] <= torch.finfo(dtype).eps
    assert errors[True] <= 0.25 * errors[False]


def test_in_fp32_gradients_from_before_are_added_to() -> None:
    model, x = Weighing(torch.bfloat16), torch.ones(10, 64, dtype=torch.bfloat16)
    model.weight.grad = before = torch.full_like(model.weight, 2.0)
    wb.GradientAccumulator(
        model, lambda model, batch: model(batch["x"]), micro_batch_size=3, accumulate_in_fp32=True
    ).backward({"x": x})
    assert model.weight.grad is before
    assert before.tolist() == [3.0] * 64


@pytest.mark.parametrize("sparse", [False, True])
def test_optimizers_take_gradients_that_were_summed_in_fp32(sparse: bool) -> None:
    """Mixed parameters: only those in low precision are summed in fp32, and torch's optimizers accept the result."""
    model = nn.ModuleDict({"embed": nn.EmbeddingBag(9, 8, sparse=sparse).bfloat16(), "head": nn.Linear(8, NUM_CLASSES)})

    def stated(model: nn.Module, batch: Batch) -> torch.Tensor:
        return cross_entropy(model["head"](model["embed"](batch["x"]).float()), batch["labels"])

    batch = {"x": torch.randint(9, (7, 3)), "labels": torch.randint(NUM_CLASSES, (7,))}
    wb.GradientAccumulator(model, stated, count="examples", micro_batch_size=2, accumulate_in_fp32=True).backward(batch)
    assert [p.grad.dtype for p in model.parameters()] == [torch.bfloat16, torch.float32, torch.float32]
    assert model["embed"].weight.grad.is_sparse is sparse
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


# ---- Autocast ----


def in_autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_fn(model, batch)


def two_updates(backward: Callable[[nn.Module, Batch], Any]) -> list[torch.Tensor]:
    """The parameters after two updates, the second with weights that must be cast anew."""
    torch.manual_seed(2)
    model, batches = network(), [batch_of(7), batch_of(7)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def loop_by_hand(model: nn.Module, batch: Batch) -> None:
    start = 0
    for size in (2, 2, 2, 1):
        part = {name: field[start : start + size] for name, field in batch.items()}
        (in_autocast(model, part) * (size / 7)).backward()
        start += size


@pytest.mark.parametrize("where", ["round backward", "in loss_fn", "round the training loop"])
def test_autocast_gives_bitwise_what_the_loop_by_hand_gives(where: str) -> None:
    """The caller's autocast, or one that loss_fn enters: at the same cut, the loop by hand to the last bit."""

    def accumulated(model: nn.Module, batch: Batch) -> None:
        stated = in_autocast if where == "in loss_fn" else loss_fn
        accumulator = wb.GradientAccumulator(model, stated, count="examples", micro_batch_size=2)
        with torch.autocast("cpu", torch.bfloat16, enabled=where != "in loss_fn"):
            accumulator.backward(batch)

    right = two_updates(loop_by_hand)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "round the training loop"):
        found = two_updates(accumulated)
    assert all(map(torch.equal, found, right))


def test_autocast_is_off_in_backward_and_as_before_afterwards() -> None:
    """As torch's documentation has it; and the caller's state is what it was."""
    model, batch, seen = network(), batch_of(7), []
    model[0].weight.register_hook(lambda gradient: seen.append(torch.is_autocast_enabled("cpu")))
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        accumulator.backward(batch)
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert len(seen) >= 4
    assert not any(seen)


@pytest.mark.smoke
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_recomputes_under_autocast_reaches_the_weights(use_reentrant: bool) -> None:
    """A reentrant checkpoint's forward runs without gradients: weights cast there must not be used in its backward."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(NUM_FEATURES, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh())
            self.head = nn.Linear(16, NUM_CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.block, self.first(x), use_reentrant=use_reentrant))

    model, batch = Recomputed(), batch_of(6)
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        accumulator.backward(batch)
    found = copied_gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(model, batch)
    loss.backward()
    assert distance(found, copied_gradients(model)) <= 1e-2
