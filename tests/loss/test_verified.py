"""Every way of writing a loss against every count that one might state: right ones pass, wrong ones are refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from verification import PRECISIONS, accepted, in_precision, refusal, suggestion

ROWS, LENGTH, VOCABULARY, CLASSES, IGNORED = 7, 9, 19, 5, -100
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.25, 3.0, 1.5])

Batch = dict[str, torch.Tensor]


# ---- Models and batches ----


class Tagger(nn.Module):
    """One label per token, or one per example."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(ids)).tanh())


def token_batch(lengths: Sequence[int] = (5, 2, 9, 3, 7, 4, 6)) -> Batch:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    labels = torch.randint(CLASSES, mask.shape, generator=generator).masked_fill(~mask, IGNORED)
    return {
        "ids": ids,
        "mask": mask.float(),
        "labels": labels,
        "scores": torch.rand(mask.shape, generator=generator),
        "weight": torch.rand(len(lengths), generator=generator) + 0.1,
    }


def class_batch(labels: Sequence[int] = (0, 3, 1, 4, 0, 2, 3)) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (len(labels), LENGTH), generator=generator)
    weight = torch.rand(len(labels), generator=generator) + 0.1
    return {"ids": ids, "labels": torch.tensor(labels), "weight": weight, "scores": torch.rand(len(labels))}


# ---- Losses ----


def logits_and_labels(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()


def per_token(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(*logits_and_labels(model, batch), reduction="none").view_as(batch["labels"])


def of_rows(model: Any, batch: Batch) -> list[torch.Tensor]:
    logits = model(batch["ids"])
    return [F.cross_entropy(one, labels) for one, labels in zip(logits, batch["labels"], strict=True)]


def pooled(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch["ids"]).mean(dim=1)


def masked(model: Any, batch: Batch) -> torch.Tensor:
    return (per_token(model, batch) * batch["mask"]).sum()


def normalised_inside(model: Any, batch: Batch) -> torch.Tensor:
    weights = batch["mask"] / batch["mask"].sum()
    return (per_token(model, batch) * weights).sum()


def guarded(model: Any, batch: Batch) -> torch.Tensor:
    total, number = masked(model, batch), batch["mask"].sum()
    return torch.where(number > 0, total / number, torch.zeros_like(total))


def smoothed(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(*logits_and_labels(model, batch), label_smoothing=0.1)


def class_weighted(model: Any, batch: Batch) -> torch.Tensor:
    logits, labels = logits_and_labels(model, batch)
    return F.cross_entropy(logits, labels, weight=CLASS_WEIGHTS.to(logits.dtype))


def class_weighted_by_hand(model: Any, batch: Batch) -> torch.Tensor:
    losses = F.cross_entropy(pooled(model, batch), batch["labels"], reduction="none")
    weights = CLASS_WEIGHTS.to(losses.dtype)[batch["labels"]]
    return (losses * weights).sum() / weights.sum()


def squared_error(model: Any, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["ids"])[..., 0], batch["scores"])


def binary(model: Any, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["ids"])[..., 0], batch["scores"])


def divergence(model: Any, batch: Batch) -> torch.Tensor:
    target = F.one_hot(batch["labels"], CLASSES).to(model.head.weight.dtype) * 0.7 + 0.3 / CLASSES
    return F.kl_div(pooled(model, batch).log_softmax(-1), target, reduction="batchmean")


# ---- Counts ----


def tokens(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


def shifted_tokens(batch: Batch) -> torch.Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def mask_sum(batch: Batch) -> torch.Tensor:
    return batch["mask"].sum()


def class_weight_sum(batch: Batch) -> torch.Tensor:
    return torch.cat([CLASS_WEIGHTS.double(), torch.zeros(1)])[batch["labels"].clamp(min=-1)].sum()


def weight_sum(batch: Batch) -> torch.Tensor:
    return batch["weight"].sum()


def num_examples(batch: Batch) -> int:
    return len(batch["labels"])


TOKEN_COUNTS = (
    "examples",
    "tokens",
    "sum",
    tokens,
    shifted_tokens,
    mask_sum,
    class_weight_sum,
    weight_sum,
    num_examples,
)
CLASS_COUNTS = ("examples", "sum", class_weight_sum, weight_sum, num_examples)
TOKENS, EXAMPLES = ("tokens", tokens, mask_sum), ("examples", num_examples)


@dataclass(frozen=True)
class Row:
    """A loss with the counts that are right for it."""

    loss: Callable[[Any, Batch], torch.Tensor]
    right: Sequence[Any]
    looks: str
    """Of the suggestion, if no count is stated."""

    batch: Callable[[], Batch] = token_batch
    counts: Sequence[Any] = TOKEN_COUNTS
    model: Callable[[], nn.Module] = Tagger
    precisions: Sequence[str] = PRECISIONS

    @property
    def wrong(self) -> list[Any]:
        """Of counts that are the same, the one with a name only."""
        return [count for count in self.counts if count not in (*self.right, tokens, mask_sum, num_examples)]


LOOKS_TOKENS = 'labelled tokens: pass count="tokens"'
LOOKS_EXAMPLES = 'a mean over 3 examples: pass count="examples"'
LOOKS_SUM = 'a plain sum: pass count="sum"'

LOSSES = {
    "token mean": Row(lambda m, b: F.cross_entropy(*logits_and_labels(m, b)), TOKENS, LOOKS_TOKENS),
    "(l * m).sum() / m.sum()": Row(lambda m, b: masked(m, b) / b["mask"].sum(), TOKENS, LOOKS_TOKENS),
    "weights normalised in loss_fn": Row(normalised_inside, TOKENS, LOOKS_TOKENS),
    "s * (1 / n)": Row(lambda m, b: masked(m, b) * (1 / b["mask"].sum()), TOKENS, LOOKS_TOKENS),
    "s * (1 / n), a Python number": Row(lambda m, b: masked(m, b) * (1 / int(b["mask"].sum())), TOKENS, LOOKS_TOKENS),
    "where(n > 0, s / n, 0)": Row(guarded, TOKENS, LOOKS_TOKENS),
    "label smoothing": Row(smoothed, TOKENS, LOOKS_TOKENS),
    "negated": Row(lambda m, b: -F.cross_entropy(*logits_and_labels(m, b)), TOKENS, LOOKS_TOKENS),
    "scaled": Row(lambda m, b: 3 * F.cross_entropy(*logits_and_labels(m, b)), TOKENS, LOOKS_TOKENS),
    "divided by 8": Row(lambda m, b: F.cross_entropy(*logits_and_labels(m, b)) / 8, TOKENS, LOOKS_TOKENS),
    "minus a constant": Row(lambda m, b: F.cross_entropy(*logits_and_labels(m, b)) - 1.5, TOKENS, LOOKS_TOKENS),
    "tiny": Row(lambda m, b: 1e-12 * F.cross_entropy(*logits_and_labels(m, b)), TOKENS, LOOKS_TOKENS),
    "huge": Row(lambda m, b: 1e12 * F.cross_entropy(*logits_and_labels(m, b)), TOKENS, LOOKS_TOKENS),
    "plus a penalty on the parameters": Row(
        lambda m, b: F.cross_entropy(*logits_and_labels(m, b)) + 0.1 * m.head.weight.square().sum(),
        TOKENS,
        LOOKS_TOKENS,
    ),
    "class weights, per token": Row(class_weighted, (class_weight_sum,), "class weights included"),
    "sum": Row(masked, ("sum",), LOOKS_SUM),
    "mean of means": Row(lambda m, b: torch.stack(of_rows(m, b)).mean(), EXAMPLES, LOOKS_EXAMPLES),
    "sum(list) / len(list)": Row(lambda m, b: sum(of_rows(m, b)) / len(b["ids"]), EXAMPLES, LOOKS_EXAMPLES),
    "(l * m).mean(), not trimmed": Row(lambda m, b: (per_token(m, b) * b["mask"]).mean(), EXAMPLES, LOOKS_EXAMPLES),
    "l.mean((0, 1))": Row(lambda m, b: per_token(m, b).mean((0, 1)), EXAMPLES, LOOKS_EXAMPLES),
    "sums per example, averaged": Row(lambda m, b: per_token(m, b).sum(1).mean(), EXAMPLES, LOOKS_EXAMPLES),
    "mse": Row(squared_error, EXAMPLES, LOOKS_EXAMPLES),
    "binary cross-entropy": Row(binary, EXAMPLES, LOOKS_EXAMPLES),
    "divided by a constant": Row(lambda m, b: masked(m, b) / 64, ("sum",), LOOKS_SUM),
}


def of_classes(loss: Any, right: Sequence[Any], looks: str, **options: Any) -> Row:
    return Row(loss, right, looks, class_batch, CLASS_COUNTS, **options)


LOSSES |= {
    "example mean": of_classes(lambda m, b: F.cross_entropy(pooled(m, b), b["labels"]), EXAMPLES, LOOKS_EXAMPLES),
    "class weights": of_classes(
        lambda m, b: F.cross_entropy(pooled(m, b), b["labels"], CLASS_WEIGHTS.to(m.head.weight.dtype)),
        (class_weight_sum,),
        "class weights included",
    ),
    "class weights by hand": of_classes(class_weighted_by_hand, (class_weight_sum,), "divided by"),
    "example weights": of_classes(
        lambda m, b: (
            (F.cross_entropy(pooled(m, b), b["labels"], reduction="none") * b["weight"]).sum() / b["weight"].sum()
        ),
        (weight_sum,),
        'count=lambda micro_batch: micro_batch["weight"].sum()',
    ),
    "kl batchmean": of_classes(divergence, EXAMPLES, LOOKS_EXAMPLES),
    "sum over examples": of_classes(
        lambda m, b: F.cross_entropy(pooled(m, b), b["labels"], reduction="sum"), ("sum",), LOOKS_SUM
    ),
}

PAIRS = [(name, precision) for name, row in LOSSES.items() for precision in row.precisions]


@pytest.mark.parametrize(("name", "precision"), PAIRS)
def test_right_counts_pass(name: str, precision: str) -> None:
    row = LOSSES[name]
    model, loss, batch = in_precision(precision, row.model(), row.loss, row.batch())
    for count in row.right:
        accepted(model, loss, batch, count, precision=precision)


@pytest.mark.parametrize(("name", "precision"), PAIRS)
def test_wrong_counts_are_refused(name: str, precision: str) -> None:
    row = LOSSES[name]
    model, loss, batch = in_precision(precision, row.model(), row.loss, row.batch())
    for count in row.wrong:
        refusal(model, loss, batch, count, precision=precision)


@pytest.mark.parametrize(("name", "precision"), PAIRS)
def test_the_right_count_is_suggested(name: str, precision: str) -> None:
    row = LOSSES[name]
    model, loss, batch = in_precision(precision, row.model(), row.loss, row.batch())
    message = suggestion(model, loss, batch, precision=precision)
    assert row.looks in message
