"""Known faults about where a batch ends: the last, smaller one, and what clears gradients in the middle."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from lin import AB, EXACT, FORMS, Batch, Lin, accumulator, batches, collated, examples, masked_mean, num_tokens, rows
from wholebatch.errors import UnsupportedModelError

pytestmark = pytest.mark.smoke


def trained(
    model: Lin, accumulator: wb.GradientAccumulator, loader: Iterable[Any], epochs: int = 1
) -> tuple[list[float], int]:
    """The documented loop with SGD at 0.1. Returns the gradients stepped on, and how far the schedule has moved."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    gradients = []
    for _ in range(epochs):
        for batch in loader:
            report = accumulator.backward(batch)
            if report.should_step:
                gradients.append(model.w.grad.item())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
    return gradients, scheduler.last_epoch


def one_token_rows(xs: list[float]) -> list[Batch]:
    return [row for x in xs for row in batches([x], 1)]


def loaders(xs: list[float], size: int) -> dict[str, tuple[Iterable[Any], dict[str, Any]]]:
    """The same batches, as loaders of every kind make them, each with the options that it needs."""
    dataset = examples(rows(*([x] for x in xs)))
    return {
        "batches": (list(batches(xs, size)), {}),
        "regrouped": (wb.whole_batches(one_token_rows(xs), size), {}),
        "regrouped from larger ones": (wb.whole_batches(list(batches(xs, 4)), size), {}),
        "examples": (wb.whole_batches(dataset, size, loader_yields="examples"), {"collate_fn": collated}),
        "DataLoader": (
            torch.utils.data.DataLoader(dataset, batch_size=size, collate_fn=list),  # type: ignore[arg-type]
            {"collate_fn": collated},
        ),
    }


KINDS = list(loaders([1.0], 1))


@pytest.mark.parametrize("size", [1, 2, "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_wn1_last_batch_divided_by_the_full_number_of_micro_batches(kind: str, size: Any) -> None:
    """Tokens 1 to 5 in batches of 2, from w = 0: gradients 1.5, 3.5 and the last one's own 5.0, so w = -1.0."""
    loader, options = loaders([1, 2, 3, 4, 5], 2)[kind]
    model = Lin(0.0)
    gradients, _ = trained(model, accumulator(model, size=size, **options), loader)
    assert gradients == pytest.approx([1.5, 3.5, 5.0], rel=EXACT)
    assert model.w.item() == pytest.approx(-1.0, rel=EXACT)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("cross-entropy")])  # no log of w = 0
def test_wn1_in_every_form_of_the_loss(form: str) -> None:
    model = Lin(0.0)
    gradients, _ = trained(model, accumulator(model, form), batches([1, 2, 3, 4, 5], 2))
    assert gradients == pytest.approx([1.5, 3.5, 5.0], rel=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_wn2_last_batch_never_stepped_on(kind: str) -> None:
    """5 rows in batches of 2 are 3 updates in each of 2 epochs, and the schedule moves with each."""
    loader, options = loaders([1, 2, 3, 4, 5], 2)[kind]
    model = Lin(0.0)
    gradients, last_epoch = trained(model, accumulator(model, **options), loader, epochs=2)
    assert gradients == pytest.approx([1.5, 3.5, 5.0] * 2, rel=EXACT)
    assert last_epoch == 6
    assert model.w.item() == pytest.approx(-2.0, rel=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_wn2_fewer_rows_than_a_batch(kind: str) -> None:
    """3 rows in batches of 4 are one update with gradient 2.0, not none."""
    loader, options = loaders([1, 2, 3], 4)[kind]
    model = Lin(0.0)
    gradients, _ = trained(model, accumulator(model, **options), loader)
    assert gradients == pytest.approx([2.0], rel=EXACT)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_wn8_zero_grad_between_batches_loses_nothing(set_to_none: bool) -> None:
    """Each batch is whole when `backward` returns, so clearing the model before the next one takes nothing from it."""
    model = Lin()
    whole = accumulator(model)
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        whole.backward(AB)
        assert model.w.grad.item() == pytest.approx(4.0, rel=EXACT)


def clearing_loss(
    clear: Callable[[], None], when: Callable[[], bool] = lambda: True
) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """A masked mean that clears gradients as a training script's own loop would."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        if when():
            clear()
        return masked_mean(model, batch)

    return loss_fn


@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["the model's", "the optimizer's"])
def test_wn8_zero_grad_in_the_loss_is_refused(whose: str, set_to_none: bool, from_the_start: bool) -> None:
    """It would leave 2.5, the share of the last micro-batch; it is refused, and `.grad` is what it was."""
    model, clears = Lin(), [from_the_start]
    owner = model if whose == "the model's" else torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = clearing_loss(lambda: owner.zero_grad(set_to_none=set_to_none), lambda: clears[-1])
    whole = accumulator(model, (loss_fn, "tokens"))
    if not from_the_start:
        whole.backward(AB)
        clears.append(True)
    before = model.w.grad = torch.tensor(0.25, dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=r"zero_grad\(\)"):
        whole.backward(AB)
    assert model.w.grad is before
    assert before.item() == 0.25


class Chain(nn.Module):
    """Two parameters, one after the other in backward; the gradient of `first` is LIN's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Lin(), Lin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def hooks(model: Chain) -> dict[str, Callable[[], Any]]:
    """Places from which a hook may clear what the micro-batches before have added."""

    def clear(*_: Any) -> None:
        model.zero_grad()

    return {
        "forward": lambda: model.register_forward_hook(clear),
        "before forward": lambda: model.first.register_forward_pre_hook(clear),
        "backward of a module": lambda: model.second.register_full_backward_hook(clear),
        "before backward of a module": lambda: model.second.register_full_backward_pre_hook(clear),
        "a gradient": lambda: model.first.w.register_hook(clear),
    }


@pytest.mark.parametrize("place", list(hooks(Chain())))
def test_wn8_zero_grad_in_a_hook_is_refused(place: str) -> None:
    model = Chain()
    hooks(model)[place]()
    with pytest.raises(UnsupportedModelError, match=r"zero_grad\(\)"):
        accumulator(model).backward(AB)
    assert model.first.w.grad is None
    assert model.second.w.grad is None


@pytest.mark.parametrize("size", [1, 2])
def test_wn8_a_backward_in_the_loss_is_refused(size: int) -> None:
    """A loss that is differentiated by `loss_fn` too would count twice, also where the batch is not cut."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = masked_mean(model, batch)
        loss.backward(retain_graph=True)
        return loss

    model = Lin()
    with pytest.raises(UnsupportedModelError, match=r"backward\(\)"):
        accumulator(model, (loss_fn, "tokens"), size).backward(AB)
    assert model.w.grad is None


@pytest.mark.parametrize("form", [(None, "tokens"), (None, None)], ids=["mean", "sum and count"])
def test_wn8_a_backward_in_evaluation_adds_nothing(form: Any) -> None:
    """A loss that differentiates in evaluation mode, in which the first batch is checked, leaves nothing behind."""

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        loss = masked_mean(model, batch)
        if not model.training:
            loss.backward(retain_graph=True)
        return loss if form[1] else wb.LossSum(loss * num_tokens(batch), num_tokens(batch))

    model = Lin()
    accumulator(model, (loss_fn, form[1])).backward(AB)
    assert model.w.grad.item() == pytest.approx(4.0, rel=EXACT)


def test_wn8_zero_grad_in_the_only_micro_batch_loses_nothing() -> None:
    """With one micro-batch there is nothing yet to lose: the batch's gradient, as in one pass."""
    model = Lin()
    accumulator(model, (clearing_loss(model.zero_grad), "tokens"), size=2).backward(AB)
    assert model.w.grad.item() == pytest.approx(4.0, rel=EXACT)
