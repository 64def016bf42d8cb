"""Known faults of compiled models: here that every new size compiles them again."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb

pytestmark = pytest.mark.smoke

Batch = dict[str, torch.Tensor]


class Compiler:
    """A compiler that counts its calls and leaves the graph as it is."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.calls += 1
        return graph.forward


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def mean_square(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def square_and_count(model: nn.Module, batch: Batch) -> wb.LossSum:
    """Counts as a tensor: an int would be compiled into the code."""
    difference = model(batch["x"]) - batch["y"]
    return wb.LossSum(difference.square().sum(), torch.tensor(difference.numel()))


FORMS: dict[str, tuple[Callable[[nn.Module, Batch], Any], Any]] = {
    "mean": (mean_square, "examples"),
    "sum and count": (square_and_count, None),
}


def epochs(
    model: nn.Module, form: tuple[Any, Any], compiler: Compiler, batches: list[Batch], **options: Any
) -> list[tuple[list[tuple[int, ...]], int]]:
    """For each of 3 epochs, the sizes of each batch's micro-batches, and the compiles so far."""
    loss_fn, count = form
    whole = wb.GradientAccumulator(model, loss_fn, count=count, **{"micro_batch_size": 4, **options})
    rows = []
    for _ in range(3):
        sizes = []
        for batch in batches:
            model.zero_grad()
            sizes.append(whole.backward(batch).micro_batch_sizes)
        rows.append((sizes, compiler.calls))
    return rows


def batch_of(size: int) -> Batch:
    return {"x": torch.randn(size, 3, dtype=torch.float64), "y": torch.randn(size, 1, dtype=torch.float64)}


@pytest.mark.parametrize("compiled", ["model", "loss"])
@pytest.mark.parametrize("form", FORMS)
def test_cg1_every_size_compiles_again(form: str, compiled: str, compiler: Compiler) -> None:
    """10 examples, at most 4 at once: sizes 4, 3, 3, at most 2 compiles, none after the first epoch; nothing eager."""
    model, batch = small_model(), batch_of(10)
    loss_fn, count = FORMS[form]
    right = torch.autograd.grad(mean_square(model, batch), list(model.parameters()))
    trained = torch.compile(model, backend=compiler) if compiled == "model" else model
    stated = (torch.compile(loss_fn, backend=compiler) if compiled == "loss" else loss_fn, count)
    rows = epochs(trained, stated, compiler, [batch])
    assert [sizes for sizes, _ in rows] == [[(4, 3, 3)]] * 3
    assert 1 <= rows[0][1] <= 2
    assert rows[1][1] == rows[2][1] == rows[0][1]
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


def test_cg1_in_arrival_order(compiler: Compiler) -> None:
    """4, 4, 2 as the user asked: no more than 2 compiles either."""
    model = torch.compile(small_model(), backend=compiler)
    rows = epochs(model, FORMS["mean"], compiler, [batch_of(10)], regroup=False)
    assert [sizes for sizes, _ in rows] == [[(4, 4, 2)]] * 3
    assert [compiles for _, compiles in rows] == [2] * 3


def test_cg1_batches_of_many_sizes(compiler: Compiler) -> None:
    """Epochs of whole and smaller batches: 2 compiles, a third where a micro-batch of one occurs."""
    model = torch.compile(small_model(), backend=compiler)
    rows = epochs(model, FORMS["mean"], compiler, [batch_of(size) for size in (10, 8, 7)])
    assert [compiles for _, compiles in rows] == [2] * 3
    rows = epochs(model, FORMS["mean"], compiler, [batch_of(1)])
    assert [compiles for _, compiles in rows] == [3] * 3


def test_cg1_the_check_compiles_nothing(compiler: Compiler) -> None:
    """Sizes that the first batch is looked at with are not compiled for."""
    model = torch.compile(small_model(), backend=compiler)
    rows = epochs(model, FORMS["mean"], compiler, [batch_of(8)], micro_batch_size=4)
    assert [compiles for _, compiles in rows] == [1] * 3


class Replayed(torch.autograd.Function):
    """Puts its result where the last one was, as the replay of a CUDA graph does."""

    outputs: dict[str, torch.Tensor]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: str) -> torch.Tensor:
        kept = Replayed.outputs.setdefault(name, torch.empty_like(value))
        kept.copy_(value)
        return kept.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("form", ["mean", "sum and count"])
def test_cg3_outputs_are_kept_before_the_next_replay(form: str) -> None:
    """Four micro-batches whose loss, count and metric lie in one place, each over the last: all are in the report."""
    torch.manual_seed(0)
    Replayed.outputs = {}
    model, batch = small_model(), {"x": torch.randn(8, 3).double(), "y": torch.randn(8, 1).double()}

    def replayed(model: nn.Module, batch: Batch) -> Any:
        squares = (model(batch["x"]) - batch["y"]).square()
        if form == "mean":
            return Replayed.apply(squares.mean(), "loss")
        count = Replayed.apply(torch.tensor(float(len(squares))), "count")
        largest = Replayed.apply(squares.detach().sum(), "metric")
        metrics = {"square": (largest, count)}
        return wb.LossSum(Replayed.apply(squares.sum(), "sum"), count, metrics)

    count = "examples" if form == "mean" else None
    right = float(mean_square(model, batch).detach())
    compiled = torch.compile(model, backend="eager")
    accumulator = wb.GradientAccumulator(compiled, replayed, count=count, micro_batch_size=2)
    report = accumulator.backward(batch)
    assert report.gradient_accumulation_steps == 4
    assert float(report.loss) == pytest.approx(right, rel=1e-12)
    assert all(float(value) == pytest.approx(right, rel=1e-12) for value in report.metrics.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cg3_on_a_gpu() -> None:
    """The same with the graphs that `torch.compile(mode="reduce-overhead")` makes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).cuda()
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}
    right = float(mean_square(model, {name: value.cuda() for name, value in batch.items()}).detach())
    fast = torch.compile(mean_square, mode="reduce-overhead")
    accumulator = wb.GradientAccumulator(model, fast, count="examples", micro_batch_size=2)
    for _ in range(4):
        report = accumulator.backward(batch)
        model.zero_grad()
        assert float(report.loss) == pytest.approx(right, rel=1e-4)
