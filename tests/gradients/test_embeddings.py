"""Gradients of embedding tables by rows: the same gradient, without a table for each micro-batch."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from oracle.one_pass import copied_gradients, distance
from wholebatch.gradients.embeddings import EmbeddingRows

pytestmark = pytest.mark.smoke

ROWS, WIDTH = 9000, 8


class Bag(nn.Module):
    """Looks tokens up in a large table, and in a small one."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.small = nn.Embedding(ROWS, WIDTH, **options), nn.Embedding(5, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(ids) + self.small(ids % 5)).sum(1))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["ids"]), batch["labels"])


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(0, ROWS, (10, 6)), "labels": torch.randint(0, 3, (10,))}


def in_one_pass(model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss_fn(model, batch()).backward()
    gradients = copied_gradients(model)
    model.zero_grad()
    return gradients


class LargestMade(TorchDispatchMode):
    """How many tensors of the table's size were made."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.layout == torch.strided and made.shape == (ROWS, WIDTH):
            view = any(made is arg for arg in args) or "detach" in str(function) or "alias" in str(function)
            self.tables += not view
        return made


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"sparse": True}, {"max_norm": 1.0}])
def test_the_gradient_is_that_of_one_pass(size: int, options: dict[str, object]) -> None:
    model = Bag(**options).double()
    right = in_one_pass(model)
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=size)
    accumulator.backward(batch())
    assert distance(copied_gradients(model), right) < 1e-12
    assert model.table.weight.grad.is_sparse == ("sparse" in options)
    assert model.table.sparse == ("sparse" in options)
    accumulator.backward(batch())  # on top of what is there
    doubled = [None if one is None else one.to_dense() * 2 if one.is_sparse else one * 2 for one in right]
    assert distance(copied_gradients(model), doubled) < 1e-12


def test_one_table_a_batch() -> None:
    model = Bag()
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=1)
    accumulator.backward(batch())  # the first is checked
    model.zero_grad()
    with LargestMade() as made:
        accumulator.backward(batch())
    assert made.tables == 1


def test_a_table_that_is_used_in_another_way_too() -> None:
    """In a penalty: its gradient is dense then."""

    def penalised(model: Bag, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_fn(model, batch) + model.table.weight.square().sum()

    model = Bag().double()
    penalised(model, batch()).backward()
    right = copied_gradients(model)
    model.zero_grad()
    wb.GradientAccumulator(model, penalised, count="examples", micro_batch_size=3).backward(batch())
    assert distance(copied_gradients(model), right) < 1e-12


def test_a_table_that_is_used_in_another_way_in_some_micro_batches_only() -> None:
    """Its gradient is by rows in the others; both parts count."""

    def penalised(model: Bag, batch: dict[str, torch.Tensor]) -> wb.LossSum:
        total, n = loss_fn(model, batch) * len(batch["labels"]), int((batch["labels"] == 1).sum())
        return wb.LossSum(total + n * model.table.weight.square().sum() if n else total, len(batch["labels"]))

    data = batch()
    data["labels"] = data["labels"].sort().values
    model = Bag().double()
    loss = penalised(model, data)
    (loss.sum / loss.count).backward()
    right = copied_gradients(model)
    model.zero_grad()
    wb.GradientAccumulator(model, penalised, micro_batch_size=2).backward(data)
    assert distance(copied_gradients(model), right) < 1e-12


@pytest.mark.parametrize("kind", ["tied", "frozen", "hooked", "small", "counted"])
def test_what_is_left_alone(kind: str) -> None:
    model = Bag()
    if kind == "tied":
        model.other = nn.Linear(WIDTH, ROWS)
        model.other.weight = model.table.weight
    if kind == "frozen":
        model.table.weight.requires_grad_(False)
    if kind == "hooked":
        model.table.weight.register_hook(lambda gradient: gradient)
    if kind == "small":
        model.table = nn.Embedding(10, WIDTH)
    if kind == "counted":
        model.table.scale_grad_by_freq = True
    with EmbeddingRows(model):
        assert not model.table.sparse
    with EmbeddingRows(Bag(), wanted=False):
        pass


def test_the_module_is_as_it_was_after_an_error() -> None:
    model = Bag()

    def failing() -> None:
        with EmbeddingRows(model):
            assert model.table.sparse
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        failing()
    assert not model.table.sparse


def test_a_failed_batch_leaves_the_gradient_as_it_was() -> None:
    model = Bag()
    right = in_one_pass(model)
    calls = 0

    def failing(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("in the third micro-batch")
        return loss_fn(model, batch)

    accumulator = wb.GradientAccumulator(model, failing, count="examples", micro_batch_size=2)
    loss_fn(model, batch()).backward()
    with pytest.raises(RuntimeError, match="third"):
        accumulator.backward(batch())
    assert calls == 9
    assert distance(copied_gradients(model), right) == 0.0
    assert not model.table.sparse


@pytest.mark.parametrize("form", ["the count comes with the loss", "a GradScaler"])
def test_with_a_late_count_and_with_a_scale(form: str) -> None:
    """The provisional denominator is corrected in the rows too."""
    model = Bag().double()
    right = in_one_pass(model)
    if form == "a GradScaler":
        accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=3)
        accumulator.backward(batch(), grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**7))
        found = [None if one is None else one / 2**7 for one in copied_gradients(model)]
    else:

        def summed(model: nn.Module, batch: dict[str, torch.Tensor]) -> wb.LossSum:
            return wb.LossSum(loss_fn(model, batch) * len(batch["labels"]), len(batch["labels"]))

        wb.GradientAccumulator(model, summed, micro_batch_size=3).backward(batch())
        found = copied_gradients(model)
    assert distance(found, right) < 1e-12
