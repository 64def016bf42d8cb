"""Known faults of mixed precision: scaling, clipping, and updates that are left out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb

pytestmark = pytest.mark.smoke

Batch = dict[str, torch.Tensor]
OVERFLOWS = 1e306
"""Finite in float64, also as a loss; its gradient is not once it is multiplied by a scale of 1024."""


class Direction(nn.Module):
    """The loss of an example is `w @ x`, so that the batch's gradient is the mean of `x`."""

    def __init__(self, start: Sequence[float] = (0.0, 0.0), dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def batch_of(*xs: Sequence[float], dtype: torch.dtype = torch.float64) -> Batch:
    return {"x": torch.tensor(xs, dtype=dtype)}


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"]).mean()


def sum_and_count(model: nn.Module, batch: Batch) -> wb.LossSum:
    return wb.LossSum(model(batch["x"]).sum(), len(batch["x"]))


FORMS: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any]] = {
    "mean": (mean_loss, "examples"),
    "per example": (lambda model, batch: model(batch["x"]), None),
    "sum and count": (sum_and_count, None),
    "term": (lambda model, batch: {"term": sum_and_count(model, batch)}, {"term": "examples"}),
}


def accumulator(model: nn.Module, form: str = "mean", size: Any = 1, **options: Any) -> wb.GradientAccumulator:
    loss_fn, count = FORMS[form]
    return wb.GradientAccumulator(model, loss_fn, count=count, micro_batch_size=size, **options)


class CountingScaler(torch.amp.GradScaler):
    """Counts what is asked of it."""

    def __init__(self, scale: float = 1024.0) -> None:
        super().__init__("cpu", init_scale=scale)
        self.unscaled = 0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaled += 1
        super().unscale_(optimizer)


@dataclass
class ScaledLoop:
    """The loop with a GradScaler that the README shows, and what came of it."""

    accumulator: wb.GradientAccumulator
    optimizer: torch.optim.Optimizer
    scaler: CountingScaler = field(default_factory=CountingScaler)
    max_norm: float = 1.0
    reports: list[wb.StepReport] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def run(self, batches: Iterable[Batch]) -> "ScaledLoop":
        model, optimizer, scaler, scheduler = self.accumulator.model, self.optimizer, self.scaler, self.scheduler
        for batch in batches:
            report = self.accumulator.backward(batch, grad_scaler=scaler)
            outcome = "not used"
            if report.should_step:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
                old_scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                outcome = "overflow"
                if scaler.get_scale() >= old_scale:
                    scheduler.step()
                    outcome = "applied"
                    self.norms.append(float(norm))
            optimizer.zero_grad()
            self.reports.append(report)
            self.outcomes.append(outcome)
        return self

    def state(self) -> tuple[Any, ...]:
        parameters = [parameter.tolist() for parameter in self.accumulator.model.parameters()]
        states = [{name: value.tolist() for name, value in state.items()} for state in self.optimizer.state.values()]
        return parameters, states, self.scheduler.last_epoch


def scaled_loop(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, form: str = "mean", size: Any = 1, **options: Any
) -> ScaledLoop:
    model = Direction()
    return ScaledLoop(accumulator(model, form, size), optimizer(model.parameters(), **{"lr": 1.0, **options}))


FOUR = batch_of([12, 0], [0, 16], [0, 0], [0, 0])
"""Micro-batches of one example; the mean is (3, 4)."""


# ---- AM1, AM2, AM3 ----


@pytest.mark.parametrize("form", FORMS)
def test_am1_unscaled_once_per_micro_batch(form: str) -> None:
    """4 micro-batches, clipping on: the scaler raises nothing, and unscales once for each of 3 batches."""
    loop = scaled_loop(form=form).run([FOUR] * 3)
    assert [report.gradient_accumulation_steps for report in loop.reports] == [4] * 3
    assert loop.scaler.unscaled == 3
    assert loop.outcomes == ["applied"] * 3


class RestlessScaler(CountingScaler):
    """Doubles its scale each time it is used."""

    def scale(self, outputs: Any) -> Any:
        self.times = getattr(self, "times", 0) + 1
        return outputs * 2.0**self.times


def test_am1_one_scale_for_all_micro_batches() -> None:
    """The scale is read once for a batch: (12, 0) and (0, 16) come out in their own proportion, times that scale."""
    model, scaler = Direction(), RestlessScaler()
    accumulator(model).backward(FOUR, grad_scaler=scaler)
    assert scaler.times == 1
    assert model.w.grad.tolist() == [3 * 2.0, 4 * 2.0]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_am2_clipped_with_the_scale_on(form: str, size: int) -> None:
    """Gradient (3, 4) of norm 5.0, clipped to 1: the update is (0.6, 0.8), whatever the scale."""
    for scale in (1024.0, 2.0**-10):
        model = Direction()
        loop = ScaledLoop(
            accumulator(model, form, size), torch.optim.SGD(model.parameters(), lr=1.0), CountingScaler(scale)
        )
        loop.run([FOUR])
        assert loop.norms == pytest.approx([5.0], rel=1e-12)
        assert (-model.w).tolist() == pytest.approx([0.6, 0.8], rel=1e-6)  # clip_grad_norm_ adds 1e-6 to the norm


@pytest.mark.parametrize("with_scaler", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_am3_each_micro_batch_clipped(form: str, with_scaler: bool) -> None:
    """Shares (3, 0) and (0, 4), clipped to 1 together: (0.6, 0.8), not (0.2425, 0.9701)."""
    model = Direction()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    whole, batch = accumulator(model, form), batch_of([6, 0], [0, 8])
    if with_scaler:
        ScaledLoop(whole, optimizer).run([batch])
    else:
        whole.backward(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert (-model.w).tolist() == pytest.approx([0.6, 0.8], rel=1e-6)


# ---- AM5, AM8 ----

GOOD = batch_of([1, 2], [3, 4], [5, 6], [7, 8])


def good(scale: float) -> Batch:
    return {"x": GOOD["x"] * scale}


@pytest.mark.parametrize("bad_place", [0, 1, 2, 3])
@pytest.mark.parametrize("bad_row", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_am5_schedule_moves_although_the_scaler_skipped(form: str, bad_row: int, bad_place: int) -> None:
    """Gradients overflow in one batch of 4: nothing of it stays, the scale is halved once, the schedule is at 3."""
    batches = [good(1.0), good(2.0), good(-1.0), good(0.5)]
    overflowing = [batch["x"].clone() for batch in batches]
    overflowing[bad_place][bad_row, 0] = OVERFLOWS
    loop = scaled_loop(torch.optim.AdamW, form, lr=0.1).run([{"x": x} for x in overflowing])
    clean = scaled_loop(torch.optim.AdamW, form, lr=0.1)
    clean.run(batches[:bad_place] + batches[bad_place + 1 :])
    assert loop.outcomes == ["overflow" if place == bad_place else "applied" for place in range(4)]
    assert all(report.should_step for report in loop.reports)
    assert loop.scaler.get_scale() == 512.0
    assert loop.scheduler.last_epoch == 3
    assert loop.state() == clean.state()


@pytest.mark.parametrize("bad_place", [0, 1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_am5_schedule_stays_where_the_loss_is_not_finite(form: str, bad_place: int) -> None:
    """The batch is left out before the scaler hears of it: its scale, the optimizer and the schedule do not move."""
    batches = [good(1.0), good(2.0), good(-1.0), good(0.5)]
    batches.insert(bad_place, batch_of([1, 2], [float("inf"), 4], [5, 6], [7, 8]))
    loop = scaled_loop(torch.optim.AdamW, form, lr=0.1).run(batches)
    clean = scaled_loop(torch.optim.AdamW, form, lr=0.1)
    clean.run(batches[:bad_place] + batches[bad_place + 1 :])
    assert loop.outcomes == ["not used" if place == bad_place else "applied" for place in range(5)]
    assert loop.reports[bad_place].bad_examples == (1,)
    assert loop.scaler.get_scale() == 1024.0
    assert loop.scheduler.last_epoch == 4
    assert loop.state() == clean.state()


@pytest.mark.parametrize("bad_row", [0, 1, 2, 3])
def test_am8_whether_the_batch_is_used(bad_row: int) -> None:
    """One answer for each batch of 4 micro-batches: used, left out because it is not finite, and used again."""
    bad = {"x": GOOD["x"].clone()}
    bad["x"][bad_row, 1] = float("nan")
    loop = scaled_loop().run([GOOD, bad, GOOD])
    assert [report.gradient_accumulation_steps for report in loop.reports] == [4] * 3
    assert [report.should_step for report in loop.reports] == [True, False, True]
    assert [report.bad_examples for report in loop.reports] == [(), (bad_row,), ()]
    used, left_out, used_again = (report.reason for report in loop.reports)
    assert (used, used_again) == (None, None)
    assert "not finite" in (left_out or "")


def test_am8_overflow_is_the_scalers_answer() -> None:
    """Where the loss is fine and the scaled gradient is not, `should_step` is True, and the scaler skips."""
    overflowing = {"x": GOOD["x"].clone()}
    overflowing["x"][2, 0] = OVERFLOWS
    loop = scaled_loop().run([GOOD, overflowing, batch_of([1, 1], [float("nan"), 1]), GOOD])
    assert [report.should_step for report in loop.reports] == [True, True, False, True]
    assert loop.outcomes == ["applied", "overflow", "not used", "applied"]


# ---- AM7 ----


class TwoHeads(nn.Module):
    """The head that a batch asks for is used, the other one takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Direction((1.0, 1.0)), Direction((1.0, 1.0))

    def forward(self, x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        used = [(head == 0, self.first), (head == 1, self.second)]
        return torch.cat([module(x[rows]) for rows, module in used if rows.any()])


def of_head(batch: Batch, *heads: int) -> Batch:
    return batch | {"head": torch.tensor(heads)}


HEADS: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any]] = {
    "mean": (lambda model, batch: model(**batch).mean(), "examples"),
    "sum and count": (lambda model, batch: wb.LossSum(model(**batch).sum(), len(batch["x"])), None),
}


def step_each(optimizers: Sequence[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None) -> list[bool]:
    """Steps the optimizers that got a gradient, as a scaler demands; without a scaler, all of them."""
    stepped = []
    for optimizer in optimizers:
        has_gradient = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        stepped.append(has_gradient)
        if scaler is None:
            optimizer.step()
        elif has_gradient:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    return stepped


@pytest.mark.parametrize("before", ["None", "zeros"])
@pytest.mark.parametrize("accumulate_in_fp32", [False, True])
@pytest.mark.parametrize("with_scaler", [True, False])
@pytest.mark.parametrize("form", HEADS)
def test_am7_optimizer_without_a_gradient(form: str, with_scaler: bool, accumulate_in_fp32: bool, before: str) -> None:
    """The second head takes no part in a batch: its `.grad` stays None, its optimizer and weight decay stand still."""
    model, scaler = TwoHeads(), CountingScaler() if with_scaler else None
    optimizers = [
        torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0.5) for head in (model.first, model.second)
    ]
    if before == "zeros":
        model.first.w.grad = torch.zeros_like(model.first.w)
    loss_fn, count = HEADS[form]
    whole = wb.GradientAccumulator(
        model, loss_fn, count=count, micro_batch_size=1, accumulate_in_fp32=accumulate_in_fp32
    )
    whole.backward(of_head(batch_of([1, 2], [3, 4]), 0, 0), grad_scaler=scaler)
    assert model.second.w.grad is None
    assert step_each(optimizers, scaler) == [True, False]
    assert model.first.w.tolist() == pytest.approx([0.85, 0.85])
    assert (model.second.w.tolist(), len(optimizers[1].state)) == ([1.0, 1.0], 0)


@pytest.mark.parametrize("form", HEADS)
@pytest.mark.parametrize("heads", [(0, 1), (1, 0)])
def test_am7_a_parameter_used_by_one_micro_batch(heads: tuple[int, int], form: str) -> None:
    """Its gradient is that micro-batch's share of the batch, and both optimizers step."""
    model, scaler = TwoHeads(), CountingScaler()
    loss_fn, count = HEADS[form]
    whole = wb.GradientAccumulator(model, loss_fn, count=count, micro_batch_size=1)
    whole.backward(of_head(batch_of([2, 4], [6, 8]), *heads), grad_scaler=scaler)
    shares = {heads[0]: [1.0, 2.0], heads[1]: [3.0, 4.0]}
    for place, head in enumerate((model.first, model.second)):
        assert (head.w.grad / 1024).tolist() == pytest.approx(shares[place], rel=1e-12)
    optimizers = [torch.optim.SGD(head.parameters(), lr=1.0) for head in (model.first, model.second)]
    assert step_each(optimizers, scaler) == [True, True]


# ---- AM9 ----


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_am9_fused_optimizer_unscales_again(kind: str, clip: bool, size: int) -> None:
    """After 3 updates, parameters are those of one pass without a scaler, to 1e-6, fused or not."""
    options: dict[str, Any] = {"lr": 0.1, **({"weight_decay": 0.1} if kind == "AdamW" else {"momentum": 0.9})}
    batches = [
        batch_of([12, 1], [0, 16], [3, 0], [0, 5], dtype=torch.float32),
        batch_of([1e-3, 2e-3], dtype=torch.float32),
    ]
    batches.append(batch_of([-4, 1], [2, 2], [0, 1], dtype=torch.float32))
    plain = Direction((1.0, -1.0), torch.float32)
    plain_optimizer = getattr(torch.optim, kind)(plain.parameters(), **options)
    for batch in batches:
        mean_loss(plain, batch).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for fused in (True, False):
        model = Direction((1.0, -1.0), torch.float32)
        optimizer = getattr(torch.optim, kind)(model.parameters(), fused=fused, **options)
        ScaledLoop(accumulator(model, size=size), optimizer, max_norm=1.0 if clip else 1e9).run(batches)
        torch.testing.assert_close(model.w, plain.w, rtol=1e-6, atol=1e-6)
