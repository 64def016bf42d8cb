"""When a count is verified, with which examples, and what else is found out about the first batch."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from verification import accepted, accumulator, gradient, nothing_changed, refusal
from wholebatch.errors import (
    LossNotAdditiveError,
    LossNotVerifiedWarning,
    UnsupportedModelError,
)

LENGTH, VOCABULARY, CLASSES, IGNORED = 8, 17, 4, -100

Batch = dict[str, torch.Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(ids)).tanh())


@pytest.fixture
def model() -> Tagger:
    return Tagger().double()


def batch_of(*lengths: int) -> Batch:
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape) * mask
    labels = torch.randint(CLASSES, mask.shape).masked_fill(~mask, IGNORED)
    return {"ids": ids, "mask": mask.double(), "labels": labels}


def token_mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def token_losses(model: Any, batch: Batch) -> torch.Tensor:
    """Of every position, whether it has a label or not."""
    return model(batch["ids"]).square().mean(-1) + 0.1 * batch["ids"]


def masked_mean(model: Any, batch: Batch) -> torch.Tensor:
    return (token_losses(model, batch) * batch["mask"]).sum() / batch["mask"].sum()


def padded_mean(model: Any, batch: Batch) -> torch.Tensor:
    return (token_losses(model, batch) * batch["mask"]).mean()


def example_mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).mean(dim=1), batch["labels"])


RAGGED = (3, 8, 5, 2, 6, 4)
COUNTS = ("examples", "tokens", "sum")


class Watch:
    """Counts the examples that `loss_fn` is called with."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any]) -> None:
        self.loss_fn = loss_fn
        self.sizes: list[int] = []

    def __call__(self, model: Any, batch: Any) -> Any:
        self.sizes.append(len(batch["ids"]))
        return self.loss_fn(model, batch)


# ---- When ----


def without_labels(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def in_classes(*labels: int) -> Batch:
    return batch_of(*[LENGTH] * len(labels)) | {"labels": torch.tensor(labels)}


def weighted(weights: Sequence[float]) -> Callable[[Any, Batch], torch.Tensor]:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        per_class = torch.tensor(weights, dtype=torch.float64)[batch["labels"]]
        losses = F.cross_entropy(model(batch["ids"]).mean(dim=1), batch["labels"], reduction="none")
        return (losses * per_class).sum() / per_class.sum()

    return loss_fn


ALIKE: dict[str, tuple[Callable[[Any, Batch], Any], Any, Any, Callable[[], Batch], Callable[[], Batch]]] = {
    "tokens": (token_mean, "examples", "tokens", lambda: batch_of(4, 4, 4, 4), lambda: batch_of(*RAGGED)),
    "examples": (
        lambda m, b: torch.stack([token_mean(m, {n: v[i : i + 1] for n, v in b.items()}) for i in range(len(b["ids"]))])
        .mean(),
        "tokens", "examples", lambda: batch_of(4, 4, 4, 4), lambda: batch_of(*RAGGED),
    ),
    "a mask": (
        masked_mean, "examples", lambda b: b["mask"].sum(),
        lambda: without_labels(batch_of(8, 8, 8, 8)), lambda: without_labels(batch_of(*RAGGED)),
    ),
    "a count function": (
        masked_mean, lambda b: len(b["ids"]), lambda b: b["mask"].sum(),
        lambda: without_labels(batch_of(5, 5, 5)), lambda: without_labels(batch_of(*RAGGED)),
    ),
    "classes": (
        weighted([1, 2, 3, 4]), "examples", lambda b: (b["labels"] + 1).sum(),
        lambda: in_classes(2, 2, 2, 2), lambda: in_classes(0, 2, 1, 3, 3),
    ),
    "examples without a label": (
        example_mean, "examples", lambda b: (b["labels"] != IGNORED).sum(),
        lambda: in_classes(0, 2, 1, 3, 3), lambda: in_classes(0, IGNORED, 1, IGNORED, 3),
    ),
    "sums scaled by length": (
        lambda m, b: wb.LossSum(token_mean(m, b) * len(b["ids"]), len(b["ids"])), None, None,
        lambda: batch_of(4, 4, 4, 4), lambda: batch_of(*RAGGED),
    ),
}  # fmt: skip
"""A loss, a wrong count and the right one, a batch on which they are the same, and one on which they are not."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ALIKE)
def test_examples_that_are_alike_put_the_verdict_off(model: Tagger, name: str, size: int) -> None:
    """A wrong count passes while nothing tells it from the right one, and is refused on the first batch that does."""
    loss_fn, wrong, right, alike, unlike = ALIKE[name]
    engine = accumulator(model, loss_fn, wrong, micro_batch_size=size)
    for _ in range(3):
        engine.backward(alike())
    gradient(model)
    batch = unlike()
    if size == 1 and name == "examples without a label":  # whose loss alone is not finite
        assert engine.backward(batch).bad_examples == (1, 3)
        return
    with nothing_changed(model), pytest.raises(LossNotAdditiveError):
        engine.backward(batch)
    if right is not None:
        engine = accumulator(model, loss_fn, right, micro_batch_size=size)
        for make in (alike, alike, unlike, alike, unlike):
            engine.backward(make())


def test_what_the_first_batch_tells_is_not_asked_again(model: Tagger) -> None:
    watched = Watch(token_mean)
    engine = accumulator(model, watched, "tokens")
    engine.backward(batch_of(*RAGGED))
    watched.sizes.clear()
    engine.backward(batch_of(*RAGGED))
    assert watched.sizes == [2, 2, 2]


def test_alike_examples_cost_no_further_evaluation(model: Tagger) -> None:
    """Texts of one length: the question stays open, and costs a look at the counts of each batch."""
    watched = Watch(token_mean)
    engine = accumulator(model, watched, "tokens")
    for _ in range(5):
        watched.sizes.clear()
        batch = batch_of(8, 8, 8, 8)
        engine.backward(batch | {"labels": batch["labels"].clamp(min=1)})
    assert watched.sizes == [2, 2]


def test_a_batch_in_one_micro_batch_is_not_verified(model: Tagger) -> None:
    """A wrong count does no harm there; it is refused when a batch is first cut."""
    engine = accumulator(model, token_mean, "examples", micro_batch_size=6)
    batch = batch_of(*RAGGED)
    engine.backward(batch)
    found = gradient(model)
    token_mean(model, batch).backward()
    assert torch.allclose(found, gradient(model), rtol=1e-12)
    batch = batch_of(*RAGGED, 3)
    with nothing_changed(model), pytest.raises(LossNotAdditiveError, match='pass count="tokens"'):
        engine.backward(batch)


@pytest.mark.parametrize("lengths", [(2, 6), (3,), (0, 5, 0), (7, 0), (0, 4, 0, 0, 6)])
@pytest.mark.parametrize("size", [1, 2])
def test_few_examples(model: Tagger, lengths: tuple[int, ...], size: int) -> None:
    """One, two, or few among some without a label: the right count passes, a wrong one where two tell it apart."""
    batch = batch_of(*lengths)
    report = accepted(model, token_mean, batch, "tokens", precision="float64", micro_batch_size=size)
    assert report.count == sum(lengths)
    if sum(map(bool, lengths)) > 1 and size < len(lengths):
        for count in ("examples", "sum"):
            refusal(model, token_mean, batch, count, micro_batch_size=size)


@pytest.mark.parametrize(("size", "most", "in_all"), [(1, 2, 4), (2, 3, 6), (3, 3, 6), (5, 3, 6)])
def test_how_many_examples_are_evaluated(model: Tagger, size: int, most: int, in_all: int) -> None:
    """Three at once, two where a micro-batch holds one: at most one more than a micro-batch; six, or four, in all.

    That is beside a look at the form of the loss in both modes.
    """
    watched = Watch(token_mean)
    accumulator(model, watched, "tokens", micro_batch_size=size).backward(batch_of(*RAGGED, 3, 7, 5, 8))
    checked = watched.sizes[: -math.ceil(10 / size)]
    assert max(checked) == most
    assert sum(checked) == in_all + 2 * min(size, most)


# ---- What is left as it was ----


class Remembering(Tagger):
    """Keeps figures of its calls in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("longest", None)
        self.seen = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + self.embedding(ids).detach().mean(dim=(0, 1)).to(self.mean.dtype)
        self.longest = torch.tensor(ids.shape[1])
        self.seen += 1
        return super().forward(ids)


def test_a_refused_call_leaves_a_model_that_remembers_as_it_was() -> None:
    model = Remembering().double()
    mean = model.mean
    refusal(model, token_mean, batch_of(*RAGGED), "examples")
    assert (model.calls.item(), model.seen, model.longest) == (0, 0, None)
    assert model.mean is mean


@pytest.mark.filterwarnings("ignore:the forward moves the buffers mean")
def test_a_verified_call_leaves_only_the_traces_of_training() -> None:
    model = Remembering().double()
    accumulator(model, token_mean, "tokens").backward(batch_of(*RAGGED))
    assert (model.calls.item(), model.seen) == (3, 3)


class Merging(Tagger):
    """`eval()` merges an adapter into the weights, `train()` takes it out again, as some adapters do."""

    def train(self, mode: bool = True) -> "Merging":
        with torch.no_grad():
            self.head.weight.mul_(0.5 if mode and not self.training else 1.0 if mode else 2.0)
        return super().train(mode)


def test_flags_are_set_without_the_models_own_eval() -> None:
    model = Merging().double()
    refusal(model, token_mean, batch_of(*RAGGED), "examples")
    accepted(model, token_mean, batch_of(*RAGGED), "tokens", precision="float64")


def test_a_loss_that_masks_its_batch_in_place(model: Tagger) -> None:
    """The check works on copies: what it masked is not masked again in training."""
    batch = batch_of(*RAGGED)
    batch["labels"] = batch["labels"].clamp(min=0)

    def masking(model: Any, batch: Batch) -> torch.Tensor:
        batch["labels"] += 1
        return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten() % CLASSES)

    before = {name: value.clone() for name, value in batch.items()}
    refusal(model, masking, batch, "sum")
    assert all(torch.equal(batch[name], before[name]) for name in batch)


@pytest.mark.parametrize("draw", [torch.rand, lambda n: random.random(), lambda n: numpy.random.rand()])
def test_random_numbers_of_a_loss_are_not_used_up(model: Tagger, draw: Callable[[int], Any]) -> None:
    """A loss that draws and is not verified leaves the random state that its own micro-batches leave."""

    def noisy(model: Any, batch: Batch) -> torch.Tensor:
        return token_mean(model, batch) * (1 + float(draw(1)))

    def run(engine: wb.GradientAccumulator) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        report = engine.backward(batch)
        return report.loss, gradient(model)

    batch, engine = batch_of(*RAGGED), accumulator(model, noisy, "tokens")
    with pytest.warns(LossNotVerifiedWarning, match="random numbers of its own"):
        first = run(engine)
    second = run(engine)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


# ---- Errors of others ----


@pytest.mark.parametrize("error", [ValueError("mine"), KeyError("mine"), RuntimeError("mine"), AssertionError("mine")])
@pytest.mark.parametrize("only_in_check", [False, True])
def test_an_error_of_the_loss_is_raised_as_it_is(model: Tagger, error: Exception, only_in_check: bool) -> None:
    def failing(model: Any, batch: Batch) -> torch.Tensor:
        if not only_in_check or len(batch["ids"]) == 3:  # a micro-batch holds two
            raise error
        return token_mean(model, batch)

    batch = batch_of(*RAGGED)
    with nothing_changed(model), pytest.raises(type(error)) as caught:
        accumulator(model, failing, "tokens").backward(batch)
    assert caught.value is error


def test_a_backward_in_the_loss_is_refused(model: Tagger) -> None:
    """Its gradients would count twice; those that were there are there again."""

    def stepping(model: Any, batch: Batch) -> torch.Tensor:
        loss = token_mean(model, batch)
        loss.backward(retain_graph=True)
        return loss

    batch = batch_of(*RAGGED)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with nothing_changed(model), pytest.raises(UnsupportedModelError, match=r"backward\(\)"):
        accumulator(model, stepping, "tokens").backward(batch)


def test_an_optimizer_step_in_the_loss_is_refused(model: Tagger) -> None:
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1.0), batch_of(*RAGGED)

    def stepping(model: Any, batch: Batch) -> torch.Tensor:
        if len(batch["ids"]) == 3:
            optimizer.step()
        return token_mean(model, batch)

    with nothing_changed(model), pytest.raises(UnsupportedModelError, match="step"):
        accumulator(model, stepping, "tokens").backward(batch)


class OnlyInTraining(Tagger):
    """Has a second output in training alone, as some image models have."""

    def forward(self, ids: torch.Tensor) -> Any:
        logits = super().forward(ids)
        return (logits, 0.5 * logits) if self.training else logits


def two_outputs(model: Any, batch: Batch) -> torch.Tensor:
    first, second = model(batch["ids"])
    return sum(F.cross_entropy(one.flatten(0, 1), batch["labels"].flatten()) for one in (first, second))


def test_a_model_that_has_no_loss_in_evaluation_mode() -> None:
    """It is verified in training mode."""
    model, batch = OnlyInTraining().double(), batch_of(*RAGGED)
    accepted(model, two_outputs, batch, "tokens", precision="float64")
    for count in ("examples", "sum"):
        refusal(model, two_outputs, batch, count)


def test_a_model_that_has_no_loss_in_evaluation_mode_and_dropout() -> None:
    model, batch = OnlyInTraining().double(), batch_of(*RAGGED)
    model.embedding = nn.Sequential(model.embedding, nn.Dropout(0.5))
    with pytest.warns(LossNotVerifiedWarning, match="random numbers"):
        accumulator(model, two_outputs, "tokens").backward(batch)


# ---- Out of memory ----


class Hungry(torch.autograd.Function):
    """The identity, for so many examples at most."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: int) -> torch.Tensor:
        if len(x) > most:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} examples")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> tuple[torch.Tensor, None]:
        return seed.clone(), None


def hungry(most: int) -> Callable[[Any, Batch], torch.Tensor]:
    def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
        logits = Hungry.apply(model(batch["ids"]), most)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return loss_fn


def test_memory_for_two_is_enough(model: Tagger) -> None:
    """Three do not fit: two are looked at."""
    batch = batch_of(*RAGGED)
    accepted(model, hungry(2), batch, "tokens", one_pass=False)
    for count in ("examples", "sum"):
        assert "1 + 1 examples" in refusal(model, hungry(2), batch, count)


def test_memory_for_one_ends_in_one_warning(model: Tagger) -> None:
    """Two do not fit: the count is used as it is, and training goes on."""
    batch, engine = batch_of(*RAGGED), accumulator(model, hungry(1), "tokens", micro_batch_size=1)
    with pytest.warns(LossNotVerifiedWarning, match="too little memory") as caught:
        assert engine.backward(batch).should_step
    assert len(caught) == 1
    for _ in range(2):  # warnings are errors
        assert engine.backward(batch).should_step
    found = gradient(model) / 3
    token_mean(model, batch).backward()
    assert torch.allclose(found, gradient(model), rtol=1e-10)


# ---- Batches that are not finite ----


def poisoned(model: Any, batch: Batch) -> torch.Tensor:
    return token_mean(model, batch) + batch["poison"].sum()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("bad", range(6))
def test_a_first_batch_that_is_not_finite_is_skipped(model: Tagger, bad: int, size: int) -> None:
    """Whichever examples the check looks at: it says nothing of the count."""
    batch = batch_of(*RAGGED) | {"poison": torch.zeros(6, dtype=torch.float64)}
    batch["poison"][bad] = torch.nan
    engine = accumulator(model, poisoned, "tokens", micro_batch_size=size)
    with nothing_changed(model):
        report = engine.backward(batch)
    assert (report.should_step, report.bad_examples) == (False, (bad,))
    assert engine.backward(batch | {"poison": torch.zeros(6, dtype=torch.float64)}).should_step


def test_a_count_is_verified_on_the_first_batch_that_is_finite(model: Tagger) -> None:
    batch = batch_of(*RAGGED) | {"poison": torch.full((6,), torch.inf, dtype=torch.float64)}
    engine = accumulator(model, poisoned, "examples")
    assert not engine.backward(batch).should_step
    batch["poison"].zero_()
    with nothing_changed(model), pytest.raises(LossNotAdditiveError):
        engine.backward(batch)


class Attending(nn.Module):
    """Attention over all positions, padding too, unless a mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        return self.head(self.layer(self.embedding(ids), src_key_padding_mask=padding))


def test_a_model_that_sees_the_padding_is_told_so() -> None:
    """The loss of an example then depends on how far it is padded; with the mask, all is well."""
    torch.manual_seed(0)
    examples = [torch.randint(1, 9, (length,)) for length in (3, 9, 5, 7, 2, 8)]

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor], masked: bool) -> torch.Tensor:
        logits = model(batch["ids"], (batch["ids"] == 0) if masked else None)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    model = Attending().double()
    for masked in (False, True):
        whole = wb.GradientAccumulator(
            model, partial(loss_fn, masked=masked), count="tokens", micro_batch_size=2, collate_fn=collate
        )
        if masked:
            assert whole.backward(examples).should_step
        else:
            with pytest.raises(LossNotAdditiveError, match=r"unless all are padded alike.*the model sees the padding"):
                whole.backward(examples)
