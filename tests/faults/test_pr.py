"""Known faults of low precision: gradients that are summed in it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb

pytestmark = pytest.mark.smoke

Batch = dict[str, torch.Tensor]


class Weight(nn.Module):
    """The loss of an example is `w * x`; `twice` uses the parameter in two places."""

    def __init__(self, dtype: torch.dtype, twice: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=dtype))
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x + self.w * x) / 2 if self.twice else self.w * x


def small_after_large(dtype: torch.dtype) -> tuple[Batch, float]:
    """1.0 and then 256 addends that are each less than half of what can be added to 1.0; and the sum of all."""
    small = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]
    return {"x": torch.tensor([1.0] + [small] * 256, dtype=dtype)}, 1.0 + 256 * small


FORMS: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any, float]] = {
    "sum": (lambda model, batch: model(batch["x"]).sum(), "sum", 1.0),
    "mean": (lambda model, batch: model(batch["x"]).mean(), "examples", 1 / 257),
    "sum and count": (lambda model, batch: wb.LossSum(model(batch["x"]).sum(), 3 * len(batch["x"])), None, 1 / 771),
}
"""`loss_fn`, `count`, and what multiplies the sum."""


def accumulated(model: nn.Module, batch: Batch, form: str, in_fp32: bool, scaler: Any = None) -> None:
    loss_fn, count, _ = FORMS[form]
    whole = wb.GradientAccumulator(model, loss_fn, count=count, micro_batch_size=1, accumulate_in_fp32=in_fp32)
    assert whole.backward(batch, grad_scaler=scaler).gradient_accumulation_steps == 257


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pr1_small_addends_are_lost(dtype: torch.dtype) -> None:
    """Micro-gradients 1.0 and 256 times 1/512: exactly 1.5 in fp32, where bf16 by itself stays at 1.0."""
    batch, right = small_after_large(dtype)
    for in_fp32, expected in ((True, right), (False, 1.0)):
        model = Weight(dtype)
        accumulated(model, batch, "sum", in_fp32)
        assert model.w.grad.item() == expected
        assert model.w.grad.dtype == dtype  # what torch's optimizers accept


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("form", FORMS)
def test_pr1_in_every_form(form: str, scale: float | None, twice: bool) -> None:
    """The sum, rounded once at the end: also divided by the count, scaled, and of a parameter that is used twice."""
    batch, right = small_after_large(torch.bfloat16)
    model = Weight(torch.bfloat16, twice)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    accumulated(model, batch, form, in_fp32=True, scaler=scaler)
    expected = right * FORMS[form][2] * (scale or 1.0)
    # A mean's addends are no powers of two, so each of them is rounded where it arises; the sum is not.
    assert model.w.grad.item() == pytest.approx(expected, rel=0.0 if form == "sum" else 2.0**-8)


def test_pr1_added_to_what_was_there() -> None:
    """The batch's sum is complete before it meets an earlier gradient: 1.0 + 1.5."""
    batch, right = small_after_large(torch.bfloat16)
    model = Weight(torch.bfloat16)
    before = model.w.grad = torch.ones((), dtype=torch.bfloat16)
    accumulated(model, batch, "sum", in_fp32=True)
    assert model.w.grad is before
    assert before.item() == 1.0 + right


def test_pr1_parameters_in_full_precision_are_left_alone() -> None:
    """A model of both kinds: each gradient has its parameter's type, and the optimizer takes a step with both."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.full = Weight(torch.bfloat16), Weight(torch.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.low(x).float() + self.full(x.float())

    batch, right = small_after_large(torch.bfloat16)
    model = Both()
    accumulated(model, batch, "sum", in_fp32=True)
    assert (model.low.w.grad.item(), model.full.w.grad.item()) == (right, right)
    assert (model.low.w.grad.dtype, model.full.w.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert (model.low.w.item(), model.full.w.item()) == (0.25, 0.25)
