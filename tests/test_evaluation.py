"""Evaluation: summed numerators over summed counts, over any amount of data, and the model left as it was."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import wholebatch as wb

Batch = dict[str, torch.Tensor]


def ragged(examples: int, seed: int) -> Batch:
    """Sequences of six tokens, of which one to five have a label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (examples, 6), generator=generator)
    for row in range(examples):
        labels[row, 1 + (row + seed) % 5 :] = -100
    return {"x": torch.randint(0, 7, (examples, 6), generator=generator), "labels": labels}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Dropout(0.5), nn.Linear(8, 7)).double()


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mean over labelled tokens."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten())


def one_pass(model: nn.Module, batches: list[Batch]) -> float:
    """The loss over all batches at once, in evaluation mode."""
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    training = model.training
    model.eval()
    with torch.no_grad():
        loss = token_loss(model, whole).item()
    model.train(training)
    return loss


BATCHES = [ragged(5, 0), ragged(2, 1), ragged(4, 2)]


@pytest.mark.parametrize("size", [1, 2, 3, 64, "auto"])
def test_it_is_the_loss_of_one_pass_over_all_the_data(model: nn.Module, size: Any) -> None:
    accumulator = wb.GradientAccumulator(model, token_loss, count="tokens", micro_batch_size=size)
    report = accumulator.evaluate(BATCHES)
    assert report.loss == pytest.approx(one_pass(model, BATCHES), abs=1e-12)
    assert report.count == sum(int((batch["labels"] != -100).sum()) for batch in BATCHES)
    assert report.num_examples == 11


def test_every_kind_of_iterable_and_a_single_batch(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, token_loss, count="tokens", micro_batch_size=2)

    def generator() -> Iterator[Batch]:
        yield from BATCHES

    rows = [{name: field[i] for name, field in BATCHES[0].items()} for i in range(5)]
    expected = one_pass(model, BATCHES)
    assert accumulator.evaluate(generator()).loss == pytest.approx(expected, abs=1e-12)
    assert accumulator.evaluate(tuple(BATCHES)).loss == pytest.approx(expected, abs=1e-12)
    single = one_pass(model, BATCHES[:1])
    assert accumulator.evaluate(BATCHES[0]).loss == pytest.approx(single, abs=1e-12)
    assert accumulator.evaluate(DataLoader(rows, batch_size=2)).loss == pytest.approx(single, abs=1e-12)  # type: ignore[arg-type]


class Pair(NamedTuple):
    """A batch with names."""

    x: torch.Tensor
    labels: torch.Tensor


def test_tuples_of_tensors_are_one_batch_and_lists_of_tuples_are_several(model: nn.Module) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return token_loss(model, {"x": batch[0], "labels": batch[1]})

    accumulator = wb.GradientAccumulator(model, loss, count="tokens", micro_batch_size=2)
    pairs = [(batch["x"], batch["labels"]) for batch in BATCHES]
    expected, single = one_pass(model, BATCHES), one_pass(model, BATCHES[:1])
    assert accumulator.evaluate(pairs).loss == pytest.approx(expected, abs=1e-12)
    assert accumulator.evaluate(pairs[0]).loss == pytest.approx(single, abs=1e-12)
    assert accumulator.evaluate(list(pairs[0])).loss == pytest.approx(single, abs=1e-12)
    assert accumulator.evaluate(Pair(*pairs[0])).loss == pytest.approx(single, abs=1e-12)
    assert accumulator.evaluate([Pair(*pair) for pair in pairs]).loss == pytest.approx(expected, abs=1e-12)


def collate(examples: list[list[int]]) -> Batch:
    """Pads lists of token ids; each token is its own label."""
    length = max(map(len, examples))
    ids = torch.tensor([one + [0] * (length - len(one)) for one in examples])
    lengths = torch.tensor([[len(one)] for one in examples])
    return {"x": ids, "labels": ids.masked_fill(torch.arange(length) >= lengths, -100)}


def test_with_a_collate_fn_a_list_is_one_batch_of_examples(model: nn.Module) -> None:
    examples = [[1, 2, 3], [4], [5, 6], [1, 1, 1, 1]]
    accumulator = wb.GradientAccumulator(model, token_loss, count="tokens", micro_batch_size=2, collate_fn=collate)
    expected = one_pass(model, [collate(examples)])
    assert accumulator.evaluate(examples).loss == pytest.approx(expected, abs=1e-12)
    assert accumulator.evaluate(iter([examples[:1], examples[1:]])).loss == pytest.approx(expected, abs=1e-12)


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    """Flags of single modules, gradients, buffers and random state; and nothing has a graph."""
    model.train()
    model[2].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients, random = [parameter.grad for parameter in model.parameters()], torch.get_rng_state()
    report = wb.GradientAccumulator(model, token_loss, count="tokens", micro_batch_size=2).evaluate(BATCHES)
    assert [module.training for module in model] == [True, True, False]
    assert model.training
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert bool((gradient == 1).all())
    assert torch.equal(torch.get_rng_state(), random)
    assert isinstance(report.loss, float)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_runs_where_gradients_are_off(model: nn.Module, context: Any) -> None:
    accumulator = wb.GradientAccumulator(model, token_loss, count="tokens", micro_batch_size=2)
    accumulator.backward(BATCHES[0])
    with context():
        assert accumulator.evaluate(BATCHES).loss == pytest.approx(one_pass(model, BATCHES), abs=1e-12)


def test_metrics_terms_and_sums(model: nn.Module) -> None:
    def terms(model: nn.Module, batch: Batch) -> dict[str, wb.LossSum]:
        logits = model(batch["x"])
        labelled = batch["labels"] != -100
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        right = (logits.argmax(-1) == batch["labels"]).sum()
        size = logits.square().mean(dim=(1, 2)).sum()
        return {
            "tokens": wb.LossSum(loss, labelled.sum(), {"accuracy": (right, labelled.sum())}),
            "size": wb.LossSum(size, len(logits)),
        }

    count = {"tokens": "tokens", "size": "examples"}
    report = wb.GradientAccumulator(model, terms, count=count, micro_batch_size=2).evaluate(BATCHES)
    whole = {name: torch.cat([batch[name] for batch in BATCHES]) for name in BATCHES[0]}
    model.eval()
    with torch.no_grad():
        parts = terms(model, whole)
    model.train()
    assert report.loss == pytest.approx(sum(float(p.sum) / float(p.count) for p in parts.values()), abs=1e-12)
    assert report.count == {name: float(part.count) for name, part in parts.items()}
    right, tokens = parts["tokens"].metrics["accuracy"]
    assert report.metrics["accuracy"] == pytest.approx(float(right) / float(tokens))

    def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
        return terms(model, batch)["tokens"].sum

    total = wb.GradientAccumulator(model, summed, count="sum", micro_batch_size=2).evaluate(BATCHES)
    assert total.loss == pytest.approx(float(parts["tokens"].sum), abs=1e-10)
    assert total.count == 11


def test_batches_without_labels_among_others_add_nothing(model: nn.Module) -> None:
    none = {**BATCHES[1], "labels": torch.full_like(BATCHES[1]["labels"], -100)}
    accumulator = wb.GradientAccumulator(model, token_loss, count="tokens", micro_batch_size=2)
    report = accumulator.evaluate([none, BATCHES[0], none])
    assert report.loss == pytest.approx(one_pass(model, BATCHES[:1]), abs=1e-12)
    assert report.num_examples == 9
