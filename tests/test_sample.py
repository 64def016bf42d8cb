"""Which examples a loss is checked with: of collated lists, random collators, odd layouts and pieces padded apart."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb
from verification import accepted, accumulator, nothing_changed, refusal, suggestion
from wholebatch.batch.layout import BatchPieces
from wholebatch.errors import BatchLayoutError, LossNotVerifiedWarning

VOCABULARY, CLASSES, IGNORED = 23, 4, -100

Batch = dict[str, torch.Tensor]
Collate = Callable[[list[torch.Tensor]], Batch]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(ids)).tanh())


@pytest.fixture
def model() -> Tagger:
    return Tagger()


@pytest.fixture
def texts() -> list[torch.Tensor]:
    return [torch.randint(2, VOCABULARY, (length,)) for length in (3, 9, 5, 2, 7, 4)]


# ---- Collators ----


def padded(texts: list[torch.Tensor]) -> Batch:
    ids = pad_sequence(texts, batch_first=True)
    return {"ids": ids, "mask": (ids > 0).float(), "labels": (ids % CLASSES).masked_fill(ids == 0, IGNORED)}


def padded_on_the_left(texts: list[torch.Tensor]) -> Batch:
    return {name: value.flip(1) for name, value in padded([text.flip(0) for text in texts]).items()}


def hidden(batch: Batch, chances: torch.Tensor) -> Batch:
    """Some tokens, and always the first, are replaced and have a label; the rest has none."""
    chosen = (chances < 0.5) & (batch["ids"] > 0)
    chosen[:, 0] |= batch["ids"][:, 0] > 0
    chosen[:, -1] |= batch["ids"][:, -1] > 0
    ids, labels = batch["ids"].masked_fill(chosen, 1), batch["labels"].masked_fill(~chosen, IGNORED)
    return {"ids": ids, "mask": (labels != IGNORED).float(), "labels": labels}


def by_torch(texts: list[torch.Tensor]) -> Batch:
    batch = padded(texts)
    return hidden(batch, torch.rand(batch["ids"].shape))


def by_python(texts: list[torch.Tensor]) -> Batch:
    batch = padded(texts)
    return hidden(batch, torch.tensor([[random.random() for _ in row] for row in batch["ids"]]))


def by_numpy(texts: list[torch.Tensor]) -> Batch:
    batch = padded_on_the_left(texts)
    return hidden(batch, torch.from_numpy(numpy.random.random(tuple(batch["ids"].shape))))


class ByItsOwnGenerator:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, texts: list[torch.Tensor]) -> Batch:
        batch = padded(texts)
        return hidden(batch, torch.rand(batch["ids"].shape, generator=self.generator))


RANDOM: dict[str, Callable[[], Collate]] = {
    "torch": lambda: by_torch,
    "Python": lambda: by_python,
    "numpy, padded on the left": lambda: by_numpy,
    "its own generator": ByItsOwnGenerator,
    "its own generator, bound": lambda: functools.partial(ByItsOwnGenerator.__call__, ByItsOwnGenerator()),
}
COLLATORS = {"padded": lambda: padded, "padded on the left": lambda: padded_on_the_left, **RANDOM}


def token_mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def padded_mean(model: Any, batch: Batch) -> torch.Tensor:
    """Its denominator contains the padded length."""
    losses = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses.view_as(batch["labels"]) * batch["mask"]).mean()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", COLLATORS)
def test_collated_lists(model: Tagger, texts: list[torch.Tensor], name: str, size: int) -> None:
    """Token means pass as such only, a mean over the padded length as nothing at all."""
    options = {"micro_batch_size": size, "one_pass": False}
    accepted(model, token_mean, texts, "tokens", collate_fn=COLLATORS[name](), **options)
    for count in ("examples", "sum"):
        refusal(model, token_mean, texts, count, collate_fn=COLLATORS[name](), micro_batch_size=size)
    for count in ("examples", "tokens", "sum"):
        message = refusal(model, padded_mean, texts, count, collate_fn=COLLATORS[name](), micro_batch_size=size)
        assert "padded length" in message


@pytest.mark.parametrize("name", COLLATORS)
def test_a_collated_list_without_a_count(model: Tagger, texts: list[torch.Tensor], name: str) -> None:
    collate = COLLATORS[name]()
    assert 'labelled tokens: pass count="tokens"' in suggestion(model, token_mean, texts, collate_fn=collate)
    assert "padded length" in suggestion(model, padded_mean, texts, collate_fn=collate)


def test_a_mean_over_the_padded_length_is_one_over_examples_where_nothing_is_trimmed(
    model: Tagger, texts: list[torch.Tensor]
) -> None:
    """Of a batch that was padded as one, and is cut by rows, every micro-batch has the same length."""
    accepted(model, padded_mean, padded(texts), "examples", precision="float32")


@pytest.mark.parametrize("name", RANDOM)
def test_random_collators_are_left_as_they_were(model: Tagger, texts: list[torch.Tensor], name: str) -> None:
    """The check draws from copies: two runs hide the same tokens, the verified one and one that is not."""

    def hidden_in(run: Callable[[wb.GradientAccumulator], Any]) -> list[list[list[int]]]:
        torch.manual_seed(2)
        random.seed(2)
        numpy.random.seed(2)
        seen: list[list[list[int]]] = []
        collate, inside = RANDOM[name](), []

        def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
            inside.append(batch["labels"].tolist())
            return token_mean(model, batch)

        engine = accumulator(model, loss_fn, "tokens", collate_fn=collate)
        run(engine)
        engine.backward(texts)
        seen += inside[-3:]
        return seen

    def skip_the_check(engine: wb.GradientAccumulator) -> None:
        verified = accumulator(model, token_mean, "tokens", collate_fn=padded)
        verified.backward(texts)
        engine.load_state_dict(verified.state_dict())

    state = torch.get_rng_state()
    verified = hidden_in(lambda engine: None)
    torch.set_rng_state(state)
    assert verified == hidden_in(skip_the_check)


def test_rows_without_a_label_in_a_random_collation(model: Tagger, texts: list[torch.Tensor]) -> None:
    """Short texts in which nothing was hidden have no loss of their own, which is no fault of the count."""

    def rarely(texts: list[torch.Tensor]) -> Batch:
        batch = padded(texts)
        chosen = (torch.rand(batch["ids"].shape) < 0.2) & (batch["ids"] > 0)
        return batch | {"labels": batch["labels"].masked_fill(~chosen, IGNORED)}

    for seed in range(12):
        torch.manual_seed(seed)
        accepted(model, token_mean, texts, "tokens", collate_fn=rarely, micro_batch_size=1 + seed % 3, one_pass=False)


def test_special_tokens_at_the_end_are_not_taken_for_padding(model: Tagger) -> None:
    """All texts of one length end in the same token: nothing is trimmed."""
    texts = [torch.cat([torch.randint(3, VOCABULARY, (4,)), torch.tensor([2])]) for _ in range(6)]
    accepted(model, padded_mean, texts, "examples", collate_fn=by_torch, one_pass=False)


# ---- Fields that do not hold one row per example ----


def classified(examples: int = CLASSES) -> Batch:
    ids = torch.randint(2, VOCABULARY, (examples, 5))
    return {"ids": ids, "labels": torch.tensor([0, 2, 1, 3, 0, 2, 1, 3][:examples])}


def by_weight(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).mean(1), batch["labels"], weight=batch["w"])


def by_index(model: Any, batch: Batch) -> torch.Tensor:
    losses = F.cross_entropy(model(batch["ids"]).mean(1), batch["labels"], reduction="none")
    return (losses * batch["w"][batch["labels"]]).mean()


def by_broadcast(model: Any, batch: Batch) -> torch.Tensor:
    """Without an error: a micro-batch of one broadcasts its single weight over all classes."""
    return (model(batch["ids"]).mean(1).log_softmax(-1) * batch["w"]).sum(-1).mean()


WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss_fn", "count"),
    [
        (by_weight, lambda b: WEIGHTS[b["labels"]].sum()),
        (by_index, "examples"),
        (by_broadcast, "examples"),
        (lambda m, b: wb.LossSum(by_index(m, b) * len(b["ids"]), len(b["ids"])), None),
    ],
    ids=["weight", "index", "broadcast", "LossSum"],
)
def test_a_vector_of_class_weights_is_named(model: Tagger, loss_fn: Any, count: Any, size: int) -> None:
    """As many classes as examples: only the loss shows that the vector is not cut, and how it is said."""
    batch = classified() | {"w": WEIGHTS}
    with nothing_changed(model), pytest.raises(BatchLayoutError) as caught:
        accumulator(model, loss_fn, count, micro_batch_size=size).backward(batch)
    message = str(caught.value)
    assert "'w' (4,)" in message
    assert "layout=wb.BatchLayout(shared_fields=('w',))" in message
    layout = wb.BatchLayout(shared_fields=("w",))
    accumulator(model, loss_fn, count, micro_batch_size=size, layout=layout).backward(batch)
    accumulator(model, loss_fn, count, micro_batch_size=4).backward(batch)  # in one piece it is right as it is


def test_a_wrong_count_is_not_blamed_on_a_field(model: Tagger) -> None:
    """Example weights hold one row per example, and the count is wrong."""
    batch = classified() | {"w": WEIGHTS}
    losses = lambda m, b: F.cross_entropy(m(b["ids"]).mean(1), b["labels"], reduction="none")  # noqa: E731
    loss_fn = lambda m, b: (losses(m, b) * b["w"]).sum() / b["w"].sum()  # noqa: E731
    for examples in (2, 3, 4):
        few = {name: value[:examples] for name, value in batch.items()}
        for size in range(1, examples):
            message = refusal(model, loss_fn, few, "examples", micro_batch_size=size)
            assert 'pass count=lambda micro_batch: micro_batch["w"].sum()' in message


def positioned(model: Any, batch: Batch) -> torch.Tensor:
    """Positions of three axes, the examples in dimension 1."""
    logits = model(batch["ids"]) + 0.1 * model(batch["places"].sum(0))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("size", [1, 2])
def test_examples_in_dimension_one_are_named(model: Tagger, size: int) -> None:
    """Three axes and three examples."""
    ids = torch.randint(2, VOCABULARY, (3, 4))
    batch = {"ids": ids, "labels": ids % CLASSES, "places": torch.randint(VOCABULARY // 3, (3, 3, 4))}
    layout = wb.BatchLayout(batch_dims={"places": 1})
    accepted(model, positioned, batch, "examples", precision="float32", micro_batch_size=size, layout=layout)
    with nothing_changed(model), pytest.raises(BatchLayoutError, match=r"batch_dims=\{'places': 1\}"):
        accumulator(model, positioned, "examples", micro_batch_size=size).backward(batch)
    with nothing_changed(model), pytest.raises(BatchLayoutError, match="position_ids"):
        accumulator(model, positioned, "examples").backward({**batch, "position_ids": batch["places"]})


# ---- Pieces padded apart ----


def alone(*lengths: int) -> BatchPieces:
    """A loader's batches of one example each."""
    return BatchPieces(padded([torch.randint(2, VOCABULARY, (length,))]) for length in lengths)


def test_two_pieces_of_one_length_are_put_together(model: Tagger) -> None:
    batch = alone(3, 7, 5, 7)
    accepted(model, masked_mean, batch, lambda b: b["mask"].sum(), one_pass=False)
    refusal(model, masked_mean, batch, "sum")


def masked_mean(model: Any, batch: Batch) -> torch.Tensor:
    losses = model(batch["ids"]).square().mean(-1)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def test_pieces_that_cannot_be_put_together_are_judged_by_their_graphs(model: Tagger) -> None:
    """No union to compare with: the denominators of two examples stand against their counts."""
    batch = alone(3, 7, 5)
    accepted(model, token_mean, batch, "tokens", one_pass=False)
    for count in ("examples", "sum"):
        assert 'pass count="tokens"' in refusal(model, token_mean, batch, count)
    assert 'pass count="tokens"' in suggestion(model, token_mean, batch)


def test_pieces_that_show_nothing_end_in_one_warning(model: Tagger) -> None:
    batch = alone(3, 7, 5)
    engine = accumulator(model, lambda m, b: token_mean(m, b).exp().log(), "tokens")
    with pytest.warns(LossNotVerifiedWarning, match="no two examples") as caught:
        engine.backward(batch)
    assert len(caught) == 1
    for _ in range(2):  # warnings are errors
        engine.backward(batch)


def test_a_sum_with_its_own_count_has_nothing_to_fail(model: Tagger) -> None:
    loss_fn = lambda m, b: wb.LossSum(token_mean(m, b) * b["mask"].sum(), b["mask"].sum())  # noqa: E731
    accepted(model, loss_fn, alone(3, 7, 5), None, one_pass=False)


@pytest.mark.parametrize("length", [1, 5])
def test_one_example_without_a_count(model: Tagger, length: int) -> None:
    """Its graph tells; a single token is as good as an example."""
    message = suggestion(model, token_mean, padded([torch.arange(2, 2 + length)]))
    assert ('pass count="tokens"' if length > 1 else 'pass count="examples"') in message
