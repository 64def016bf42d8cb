"""The general oracle: losses, gradients, parameters and optimizer state are those of one pass by plain torch.

Every family of models, every form of the loss, micro-batches that divide the batch and that do not.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from oracle.models import FAMILIES, FORMS, NUM_EXAMPLES, Batch, Family, Form, in_type
from oracle.one_pass import LossOf, Trained, adamw, copied_gradients, distance, one_pass, trained

pytestmark = [
    # PEFT still asks transformers for a property by its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SIZES = (1, 2, 3, 5, NUM_EXAMPLES)
NUM_UPDATES = 3
SMALL = 1e-4
"""In float64, a parameter's gradient is compared with its own norm if that is above this share of the whole one's."""

MAIN = [(family, "scalar") for family in FAMILIES] + [
    (name, "model's own") for name, family in FAMILIES.items() if family.hugging_face
]
OTHERS = [(family, form) for family in FAMILIES for form in FORMS if form not in ("scalar", "model's own")]


def loss_of(family: Family, form: Form) -> LossOf:
    """The whole batch's loss by plain torch."""
    loss_fn = form.loss_fn(family) or (lambda model, batch: model(**batch))
    return lambda model, batch: form.whole(loss_fn(model, batch))


def fresh(family: Family, dtype: torch.dtype) -> tuple[nn.Module, list[Batch]]:
    """The same model and the same batches each time."""
    torch.manual_seed(1)
    model = family.build().to(dtype)
    torch.manual_seed(2)
    batches = [in_type(family.batch(), dtype) for _ in range(NUM_UPDATES)]
    return family.prepare(model), batches


def epsilon(dtype: torch.dtype) -> float:
    """Adam's: above the rounding noise of gradients that are zero (key biases), which would become full steps."""
    return 1e-8 if dtype == torch.float64 else 1e-5


@functools.cache
def right(family: str, form: str, dtype: torch.dtype) -> Trained:
    """Training in one pass per batch."""
    model, batches = fresh(FAMILIES[family], dtype)
    return trained(model, adamw(model, epsilon(dtype)), batches, one_pass(loss_of(FAMILIES[family], FORMS[form])))


def accumulated(family: str, form: str, dtype: torch.dtype, size: int) -> Trained:
    """The same in micro-batches."""
    model, batches = fresh(FAMILIES[family], dtype)
    optimizer = adamw(model, epsilon(dtype))
    return trained(model, optimizer, batches, in_micro_batches(model, family, form, optimizer, size))


def in_micro_batches(
    model: nn.Module, family: str, form: str, optimizer: torch.optim.Optimizer | None, size: int
) -> Callable[[nn.Module, Any], torch.Tensor]:
    accumulator = wb.GradientAccumulator(
        model,
        FORMS[form].loss_fn(FAMILIES[family]),
        count=FORMS[form].count(FAMILIES[family]),
        optimizer=optimizer,
        micro_batch_size=size,
    )

    def backward(_: nn.Module, batch: Batch) -> torch.Tensor:
        report = accumulator.backward(batch)
        assert report.should_step
        assert sum(report.micro_batch_sizes) == NUM_EXAMPLES
        assert max(report.micro_batch_sizes) <= size
        return report.loss

    return backward


def float64_bound(family: str, form: str) -> float:
    """1e-10, or 1e-6 where something is computed in float32.

    That is the model's own causal loss, and the normalisations of Llama and T5: if the denominator comes with the loss,
    their backward starts from another number than in one pass.
    """
    upcast = form == "model's own" and FAMILIES[family].upcasts
    other_seed = form == "loss sum" and FAMILIES[family].float32_inside
    return 1e-6 if upcast or other_seed else 1e-10


def compare(found: Trained, expected: Trained, bound: float, floor: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=bound)
    gaps = [distance(a, b, floor) for a, b in zip(found.gradients, expected.gradients, strict=True)]
    assert max(gaps) <= bound
    assert distance(found.parameters, expected.parameters, floor) <= bound
    assert len(found.state) == len(expected.state) > 0
    for name in ("step", "exp_avg", "exp_avg_sq"):
        states = [[state[name] for state in one.state] for one in (found, expected)]
        assert distance(*states, floor) <= bound, name


# ---- float64: to 1e-10 ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("family", "form"), MAIN)
def test_float64_at_every_size(family: str, form: str, size: int) -> None:
    """Three updates in float64 are those of one pass to 1e-10."""
    found, expected = accumulated(family, form, torch.float64, size), right(family, form, torch.float64)
    compare(found, expected, float64_bound(family, form), SMALL)


@pytest.mark.parametrize(("family", "form"), OTHERS)
def test_float64_in_every_form(family: str, form: str) -> None:
    """Whatever `loss_fn` returns, 7 examples in 3, 2, 2 give the updates of one pass to 1e-10."""
    found, expected = accumulated(family, form, torch.float64, 3), right(family, form, torch.float64)
    compare(found, expected, float64_bound(family, form), SMALL)


@pytest.mark.parametrize("size", [1, 2, 5, NUM_EXAMPLES])
@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("scalar", "model's own")])
@pytest.mark.parametrize("family", ["gpt2", "bert classifier"])
def test_float64_in_every_form_at_every_size(family: str, form: str, size: int) -> None:
    compare(accumulated(family, form, torch.float64, size), right(family, form, torch.float64), 1e-10, SMALL)


@pytest.mark.parametrize("family", ["gpt2", "llama with grouped queries"])
def test_what_exceeds_float64_in_a_causal_models_own_loss_is_its_upcast_to_float32(family: str) -> None:
    """With transformers' causal loss computed in float64, and nothing else changed, 1e-8 become 1e-12."""
    upcast = max(gap_of_own_loss(family, size, None) for size in SIZES)
    in_float64 = max(gap_of_own_loss(family, size, causal_loss_in_float64) for size in SIZES)
    assert 1e-9 < upcast <= 1e-6
    assert in_float64 <= 1e-12


def gap_of_own_loss(family: str, size: int, loss_function: Any) -> float:
    """The larger of the gaps in gradient and loss, with the model's own loss or with another `loss_function` in it."""
    model, (batch, *_) = fresh(FAMILIES[family], torch.float64)
    if loss_function is not None:
        model.loss_function = loss_function
    loss = in_micro_batches(model, family, "model's own", None, size)(model, batch).item()
    found = copied_gradients(model)
    model.zero_grad()
    expected = one_pass(lambda model, batch: model(**batch).loss)(model, batch).item()
    return max(distance(found, copied_gradients(model), SMALL), abs(loss - expected) / expected)


def causal_loss_in_float64(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), shifted.reshape(-1), ignore_index=-100)


# ---- float32: to 1e-5 ----


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("family", "form"), [*MAIN, *((family, "loss sum") for family in FAMILIES)])
def test_float32(family: str, form: str, size: int) -> None:
    """Three updates in float32 are those of one pass, to 1e-5 of the gradient's norm."""
    compare(accumulated(family, form, torch.float32, size), right(family, form, torch.float32), 1e-5, 1.0)


# ---- bf16 autocast ----


def gradient_in_bf16(family: str, form: str, backward_of: Callable[[nn.Module], Any], order: Any = None) -> Any:
    """The gradient of the first batch under autocast, its examples in another `order` where one is given."""
    model, (batch, *_) = fresh(FAMILIES[family], torch.float32)
    if order is not None:
        batch = {name: value[order] for name, value in batch.items()}
    backward_of(model)(model, batch)
    return copied_gradients(model)


def accumulated_in_bf16(family: str, form: str, size: int) -> Any:
    def backward_of(model: nn.Module) -> Any:
        accumulate = in_micro_batches(model, family, form, None, size)

        def backward(model: nn.Module, batch: Batch) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                accumulate(model, batch)

        return backward

    return gradient_in_bf16(family, form, backward_of)


def whole_in_bf16(family: str, form: str, order: Any = None) -> Any:
    whole = one_pass(loss_of(FAMILIES[family], FORMS[form]), autocast=torch.bfloat16)
    return gradient_in_bf16(family, form, lambda model: whole, order)


BF16 = [*((family, "scalar") for family in FAMILIES), *((family, "loss sum") for family in ("gpt2", "vit", "t5"))]


@pytest.mark.xfail(strict=True, reason="each micro-batch's gradient is rounded to bf16; permuting rounds as before")
def test_bf16_autocast_within_twice_what_permuting_changes() -> None:
    """The gradient is at most twice as far from that of one pass as one pass over the batch in another order is."""
    whole = whole_in_bf16("gpt2", "scalar")
    permuted = [whole_in_bf16("gpt2", "scalar", torch.randperm(NUM_EXAMPLES)) for _ in range(5)]
    changed = max(distance(other, whole) for other in permuted)
    assert distance(accumulated_in_bf16("gpt2", "scalar", 2), whole) <= 2 * changed


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("family", "form"), BF16)
def test_bf16_autocast_is_as_near_the_truth_as_one_pass(family: str, form: str, size: int) -> None:
    """Under bf16 autocast the gradient is at most twice as far from that of float32 as one pass under autocast is."""
    truth = right(family, form, torch.float32).gradients[0]
    found, whole = accumulated_in_bf16(family, form, size), whole_in_bf16(family, form)
    assert distance(found, truth) <= 2 * distance(whole, truth)
