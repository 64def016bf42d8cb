"""torch.compile compiles a ragged family of shapes twice at most; and a step keeps nothing alive."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb
from oracle.one_pass import copied_gradients, distance, gradient_in_one_pass

Batch = dict[str, torch.Tensor]


class Tagger(nn.Module):
    """Labels each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 5)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(tokens)))


def batch_of(num_examples: int, length: int = 6) -> Batch:
    """Rows with 1 to `length` labels."""
    tokens = torch.randint(11, (num_examples, length))
    labelled = torch.arange(length) <= torch.arange(num_examples).unsqueeze(1) % length
    return {"tokens": tokens, "labels": torch.where(labelled, tokens % 5, -100)}


def mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def summed(model: nn.Module, batch: Batch) -> wb.LossSum:
    losses = cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return wb.LossSum(losses, (batch["labels"] != -100).sum())


# ---- torch.compile ----


class Backend:
    """Runs graphs as they are, and counts how many there were."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


@pytest.fixture
def backend() -> Backend:
    torch.compiler.reset()
    return Backend()


@pytest.mark.parametrize("what", ["model", "loss_fn", "loss_fn with a sum and a count"])
@pytest.mark.parametrize(
    ("num_examples", "size", "cut", "most"),
    [(10, 4, (4, 3, 3), 2), (9, 2, (2, 2, 2, 2, 1), 3), (12, 4, (4, 4, 4), 1)],
    ids=["4, 3, 3", "with a micro-batch of one", "equal sizes"],
)
def test_few_compilations(
    backend: Backend, what: str, num_examples: int, size: int, cut: tuple[int, ...], most: int
) -> None:
    """Over three batches of the same shapes; the check of the first batch compiles nothing; gradients are exact."""
    model, batch = Tagger(), batch_of(num_examples)
    right = gradient_in_one_pass(model, mean(model, batch))
    stated: Any = summed if "count" in what else mean
    compiled: Any = model
    if what == "model":
        compiled = torch.compile(model, backend=backend)
    else:
        stated = torch.compile(stated, backend=backend)
    accumulator = wb.GradientAccumulator(
        compiled, stated, count=None if "count" in what else "tokens", micro_batch_size=size
    )
    for _ in range(3):
        model.zero_grad()
        assert accumulator.backward(batch).micro_batch_sizes == cut
        assert distance(copied_gradients(model), right, floor=1e-3) <= 1e-12
    assert 1 <= backend.compiled <= most


# ---- What a step keeps alive ----


@pytest.mark.parametrize("on_bad_batch", ["skip", "ignore"])
@pytest.mark.parametrize("stated", [mean, summed], ids=["mean", "sum and count"])
def test_no_activation_input_or_graph_outlives_its_micro_batch(stated: Any, on_bad_batch: Any) -> None:
    """Outputs, inputs, loss and graph of each micro-batch are gone when the next one's forward begins.

    Without help of the garbage collector.
    """
    model, batch = Tagger(), batch_of(10)
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []

    def watched(model: nn.Module, batch: Batch) -> Any:
        counts.append(sum(reference() is not None for reference in alive))
        loss = stated(model, batch)
        of_loss = loss if isinstance(loss, torch.Tensor) else loss.sum
        node = of_loss.grad_fn.metadata["lives as long as the graph"] = Backend()
        alive.extend(map(weakref.ref, (batch["tokens"], batch["labels"], of_loss, node)))
        return loss

    model.out.register_forward_hook(lambda module, inputs, output: alive.append(weakref.ref(output)))
    accumulator = wb.GradientAccumulator(
        model, watched, count="tokens" if stated is mean else None, micro_batch_size=3, on_bad_batch=on_bad_batch
    )
    for _ in range(2):
        report = accumulator.backward(batch)
        assert sum(reference() is not None for reference in alive) == 0
    assert report.micro_batch_sizes == (3, 3, 2, 2)
    assert max(counts) == 0
    assert report.loss.grad_fn is None


@pytest.mark.parametrize("options", [{}, {"on_bad_batch": "ignore"}, {"accumulate_in_fp32": True}], ids=str)
def test_as_many_tensors_are_alive_after_fifty_batches_as_after_three(options: dict[str, Any]) -> None:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = wb.GradientAccumulator(model, summed, optimizer=optimizer, micro_batch_size=3, **options)
    tensors = {}
    for number in range(1, 51):
        report = accumulator.backward(batch_of(10))
        optimizer.step()
        optimizer.zero_grad()
        del report
        if number in (3, 20, 50):
            gc.collect()
            tensors[number] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    assert tensors[3] == tensors[20] == tensors[50]


def test_the_batch_is_not_kept_alive() -> None:
    """Not by the accumulator, nor by the report."""
    model, batch = Tagger(), batch_of(10)
    accumulator = wb.GradientAccumulator(model, mean, count="tokens", micro_batch_size=3)
    report = accumulator.backward(batch)
    references = [weakref.ref(field) for field in batch.values()]
    del batch
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert report.should_step
