"""Known faults with parameters of a special kind: sparse ones, and those that a micro-batch does not touch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from lin import AB, EXACT, Batch, Lin, accumulator, mask_of, num_tokens, rows
from wholebatch.errors import LossFormError

pytestmark = pytest.mark.smoke

# ---- PA1 ----

SPARSE = {"ids": torch.tensor([[0, 0], [0, 2]]), "weight": torch.tensor([0.25, 0.5])}
"""Ids 0, 0 with weight 1/4 and 0, 2 with weight 2/4: the gradient is (1.0, 0, 0.5)."""


def each(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of each example."""
    vectors = model(batch["ids"]).squeeze(-1)
    return vectors.sum(dim=1) * batch["weight"].to(vectors.dtype)


LOOKUPS: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any]] = {
    "sum": (lambda model, batch: each(model, batch).sum(), "sum"),
    "mean": (lambda model, batch: 2 * each(model, batch).mean(), "examples"),
    "per example": (lambda model, batch: 2 * each(model, batch), None),
    "sum and count": (lambda model, batch: wb.LossSum(2 * each(model, batch).sum(), len(batch["ids"])), None),
}


def table(sparse: bool = True, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    return nn.Embedding(3, 1, sparse=sparse).to(dtype)


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("form", LOOKUPS)
def test_pa1_sparse_gradients(form: str, size: int, in_fp32: bool) -> None:
    """The gradient stays sparse and is, once coalesced, that of a dense table: (1.0, 0, 0.5), of norm 1.118."""
    for sparse in (True, False):
        model = table(sparse)
        accumulator(model, LOOKUPS[form], size, accumulate_in_fp32=in_fp32).backward(SPARSE)
        gradient = model.weight.grad
        assert gradient.is_sparse == sparse
        assert (gradient.coalesce().to_dense() if sparse else gradient).flatten().tolist() == [1.0, 0.0, 0.5]
    assert model.weight.grad.norm().item() == pytest.approx(math.sqrt(1.25))


@pytest.mark.parametrize("form", LOOKUPS)
def test_pa1_summed_in_fp32_without_becoming_dense(form: str) -> None:
    """A sparse table in bf16: summed in fp32 row by row, and the optimizer for sparse gradients takes it."""
    model = table(dtype=torch.bfloat16)
    accumulator(model, LOOKUPS[form], accumulate_in_fp32=True).backward(SPARSE)
    gradient = model.weight.grad
    assert (gradient.is_sparse, gradient.dtype) == (True, torch.bfloat16)
    assert gradient.coalesce().indices().flatten().tolist() == [0, 2]
    assert gradient.float().to_dense().flatten().tolist() == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("form", LOOKUPS)
def test_pa1_clipped_and_stepped_on(form: str) -> None:
    """Clipped by the norm of its coalesced values, and taken by SGD and SparseAdam, as a dense gradient is."""
    model = table()
    before = model.weight.detach().clone()
    accumulator(model, LOOKUPS[form]).backward(SPARSE)
    model.weight.grad = gradient = model.weight.grad.coalesce()
    assert gradient.values().norm().item() == pytest.approx(1.118, abs=1e-3)
    gradient.values().mul_(0.5 / gradient.values().norm())  # to a norm of 0.5; clip_grad_norm_ takes no sparse ones
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    moved = (before - model.weight.detach()).flatten().tolist()
    assert moved == pytest.approx([0.5 / math.sqrt(1.25), 0.0, 0.25 / math.sqrt(1.25)], abs=1e-6)
    torch.optim.SparseAdam(model.parameters(), lr=0.1).step()


def test_pa1_added_to_a_gradient_that_was_there() -> None:
    """Twice the batch is twice the gradient, still sparse; added to a dense one it is dense, as autograd has it."""
    model = table()
    whole = accumulator(model, LOOKUPS["mean"])
    whole.backward(SPARSE)
    whole.backward(SPARSE)
    assert model.weight.grad.is_sparse
    assert model.weight.grad.to_dense().flatten().tolist() == [2.0, 0.0, 1.0]
    model.weight.grad = torch.ones_like(model.weight)
    whole.backward(SPARSE)
    assert model.weight.grad.flatten().tolist() == [2.0, 1.0, 1.5]


class TiedTable(nn.Module):
    """A sparse table that some examples use densely as well, as a tied output layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors, dense = self.table(ids), (ids == 2).any(dim=1)
        return vectors + self.table.weight.sum() * dense[:, None, None] if dense.any() else vectors


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_pa1_sparse_and_dense_gradients_of_one_parameter(in_fp32: bool, order: list[int]) -> None:
    """One micro-batch gives a sparse gradient and the other a dense one, in either order: their sum."""
    model = TiedTable()
    batch = {name: value[order] for name, value in SPARSE.items()}
    accumulator(model, LOOKUPS["sum"], accumulate_in_fp32=in_fp32).backward(batch)
    assert model.table.weight.grad.to_dense().flatten().tolist() == [1.0 + 1.0, 1.0, 0.5 + 1.0]


# ---- PA2 ----


class Adapted(nn.Module):
    """LIN for the rows that are routed to it; the others take a frozen copy, without any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = Lin(), Lin().requires_grad_(False)

    def forward(self, x: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        if not trained.any():
            return self.frozen(x)
        return torch.where(trained.unsqueeze(1), self.trained(x), self.frozen(x))


def routed(batch: Batch, *trained: bool) -> Batch:
    return batch | {"trained": torch.tensor(trained)}


def routed_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"], batch["trained"]) * mask_of(batch)).sum()


def routed_sum_and_count(model: nn.Module, batch: Batch) -> wb.LossSum:
    return wb.LossSum(routed_sum(model, batch), num_tokens(batch))


ROUTED: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any]] = {
    "mean": (lambda model, batch: routed_sum(model, batch) / num_tokens(batch), "tokens"),
    "sum and count": (routed_sum_and_count, None),
    "term": (lambda model, batch: {"term": routed_sum_and_count(model, batch)}, {"term": "tokens"}),
}


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("trained", [(True, False), (False, True)])
@pytest.mark.parametrize("form", ROUTED)
def test_pa2_micro_batch_without_a_trainable_parameter(
    form: str, trained: tuple[bool, bool], size: int, in_fp32: bool
) -> None:
    """It adds nothing to the gradient, its tokens are in the loss and in the denominator, and nothing raises."""
    model = Adapted()
    report = accumulator(model, ROUTED[form], size, accumulate_in_fp32=in_fp32).backward(routed(AB, *trained))
    assert report.should_step
    assert model.trained.w.grad.item() == pytest.approx((6 if trained[0] else 10) / 4, rel=EXACT)
    assert report.loss.item() == pytest.approx(4.0, rel=EXACT)
    assert report.count == 4
    assert model.frozen.w.grad is None


@pytest.mark.parametrize("form", ROUTED)
def test_pa2_a_batch_of_nothing_else_is_refused(form: str) -> None:
    """As `loss.backward()` refuses a loss without a graph; the batches around it are not touched."""
    model = Adapted()
    whole = accumulator(model, ROUTED[form])
    whole.backward(routed(AB, True, True))
    model.zero_grad()
    with pytest.raises(LossFormError, match="no graph"):
        whole.backward(routed(AB, False, False))
    assert model.trained.w.grad is None
    whole.backward(routed(rows([1], [2, 3]), False, True))
    assert model.trained.w.grad.item() == pytest.approx(5 / 3, rel=EXACT)
