"""Known faults about what the loss of a batch is divided by, in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import wholebatch as wb
from lin import AB, EXACT, FORMS, Batch, Form, Lin, accumulator, batches, collated, examples, mask_of, num_tokens, rows
from wholebatch.errors import CountRequiredError, LossFormError, LossNotAdditiveError

pytestmark = pytest.mark.smoke

BA = rows([10], [1, 2, 3])


def right_is(value: float, model: Lin, report: wb.StepReport) -> None:
    """Both the gradient and the loss, since w = 1."""
    assert model.w.grad.item() == pytest.approx(value, rel=EXACT)
    assert report.loss.item() == pytest.approx(value, rel=EXACT)
    assert report.should_step


# ---- LN1 ----


@pytest.mark.parametrize("batch", [AB, BA], ids=["AB", "BA"])
@pytest.mark.parametrize("size", [1, 2, "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_ln1_mean_of_means(form: str, size: Any, batch: Batch) -> None:
    """4.0 in every form of the loss, at one row and at two, with the rows swapped; the mean of means is 6.0."""
    model = Lin()
    right_is(4.0, model, accumulator(model, form, size).backward(batch))


@pytest.mark.parametrize("batch", [AB, BA], ids=["AB", "BA"])
@pytest.mark.parametrize("size", [1, 2, "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_ln1_for_examples_that_are_collated(form: str, size: Any, batch: Batch) -> None:
    """The same of a list of examples, where each micro-batch is padded to its own longest."""
    model = Lin()
    right_is(4.0, model, accumulator(model, form, size, collate_fn=collated).backward(examples(batch)))


@pytest.mark.parametrize("form", FORMS)
def test_ln1_for_batches_of_other_lengths(form: str) -> None:
    """4.0 for a loader's small batches too, each padded to its own length and regrouped to a whole one."""
    [batch] = wb.whole_batches([rows([1, 2, 3], [4]), rows([10], [4])], global_batch_size=4)
    model = Lin()
    right_is(4.0, model, accumulator(model, form, 2).backward(batch))


@pytest.mark.parametrize(("size", "regroup"), [(1, True), (2, True), (3, True), (4, False), (5, True), (7, True)])
def test_ln1_where_the_micro_batches_differ_in_size(size: int, regroup: bool) -> None:
    """Seven rows of 1 to 7 tokens: the mean of all 28 tokens, whatever the cut."""
    lines = [[float(row)] * row for row in range(1, 8)]
    model = Lin()
    report = accumulator(model, size=size, regroup=regroup).backward(rows(*lines))
    right_is(sum(map(sum, lines)) / 28, model, report)
    assert report.count == 28


# ---- LN2 ----

VOCABULARY, LENGTHS = 7, (6, 2, 5, 1)


class TwoLayers(nn.Module):
    """A language model of two layers; `teacher` is frozen, for distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.teacher = nn.Embedding(VOCABULARY, VOCABULARY).requires_grad_(False)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.embed(tokens))))


def four_rows() -> Batch:
    tokens = torch.randint(VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    beyond = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS).unsqueeze(1)
    return {"tokens": tokens, "labels": tokens.roll(1, dims=1).masked_fill(beyond, -100)}


def per_token(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    """Over the labelled tokens."""
    scores, labels = model(batch["tokens"])[mask_of(batch)], batch["labels"][mask_of(batch)]
    return cross_entropy(scores, labels, reduction="none", label_smoothing=smoothing)


def plain(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    scores = model(batch["tokens"]).flatten(0, 1)
    return cross_entropy(scores, batch["labels"].flatten(), label_smoothing=smoothing)


def distilled(model: TwoLayers, batch: Batch) -> torch.Tensor:
    """Kullback-Leibler divergence from the teacher, a mean over the labelled tokens."""
    student = model(batch["tokens"])[mask_of(batch)].log_softmax(-1)
    return kl_div(student, model.teacher(batch["tokens"])[mask_of(batch)].softmax(-1), reduction="batchmean")


def mean_of(losses: Callable[[nn.Module, Batch], torch.Tensor]) -> Callable[[nn.Module, Batch], torch.Tensor]:
    return lambda model, batch: losses(model, batch).mean()


LOSS_PATHS: dict[str, tuple[Form, Callable[[TwoLayers, Batch], torch.Tensor]]] = {
    "plain": ((plain, "tokens"), mean_of(per_token)),
    "label smoothing": (
        (lambda model, batch: plain(model, batch, 0.1), "tokens"),
        mean_of(lambda model, batch: per_token(model, batch, 0.1)),
    ),
    "distillation": ((distilled, "tokens"), distilled),
    "a mean of one's own": ((mean_of(per_token), num_tokens), mean_of(per_token)),
    "plain and distillation": (
        (lambda model, batch: plain(model, batch) + 0.5 * distilled(model, batch), "tokens"),
        lambda model, batch: per_token(model, batch).mean() + 0.5 * distilled(model, batch),
    ),
    "a sum and a count": (
        (lambda model, batch: wb.LossSum(per_token(model, batch, 0.1).sum(), num_tokens(batch)), None),
        mean_of(lambda model, batch: per_token(model, batch, 0.1)),
    ),
}
"""The loss as it is stated, and as one pass over the batch computes it."""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("path", LOSS_PATHS)
def test_ln2_second_loss_path_forgets_the_count(path: str, size: int) -> None:
    """Four rows of unequal length: the gradient of one pass, to 1e-12, whichever loss is switched on."""
    stated, whole = LOSS_PATHS[path]
    model, batch = TwoLayers(), four_rows()
    loss = whole(model, batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    right = torch.autograd.grad(loss, trained)
    report = accumulator(model, stated, size).backward(batch)
    assert report.loss.item() == pytest.approx(loss.item(), rel=EXACT)
    for parameter, gradient in zip(trained, right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=EXACT, atol=1e-14)


def test_ln2_a_bare_mean_is_refused() -> None:
    """A mean without a count is not averaged over micro-batches; the error says which count it looks like."""
    with pytest.raises(CountRequiredError, match='count="tokens"'):
        accumulator(TwoLayers(), (plain, None)).backward(four_rows())


def test_ln2_a_loss_per_token_is_refused() -> None:
    """Unreduced losses of tokens are not taken for losses of examples; the error shows how to sum them."""
    model = TwoLayers()
    with pytest.raises(LossFormError, match=r"wb\.LossSum"):
        accumulator(model, (per_token, None), size=2).backward(four_rows())
    assert model.second.weight.grad is None


# ---- LN4 ----


def left_out(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Losses of tokens, summed without the rows whose weight is 0."""
    return (model(batch["x"]) * mask_of(batch) * batch["weight"].unsqueeze(1)).sum()


def kept_tokens(batch: Batch) -> torch.Tensor:
    return (mask_of(batch) * batch["weight"].unsqueeze(1)).sum()


TWO_MASKS = rows([1, 2, 3], [10, 10]) | {"weight": torch.tensor([1.0, 0.0], dtype=torch.float64)}
THREE_ROWS = rows([1, 2, 3], [10, 10], [2]) | {"weight": torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)}


@pytest.mark.filterwarnings("ignore:the count of this loss could not be verified")  # a single row is left
@pytest.mark.parametrize("batch", [TWO_MASKS, THREE_ROWS], ids=["two rows", "three rows"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "form",
    [
        (lambda model, batch: wb.LossSum(left_out(model, batch), kept_tokens(batch)), None),
        (lambda model, batch: left_out(model, batch) / kept_tokens(batch), kept_tokens),
        (lambda model, batch: {"term": wb.LossSum(left_out(model, batch), kept_tokens(batch))}, {"term": kept_tokens}),
    ],
    ids=["sum and count", "count function", "term"],
)
def test_ln4_two_masks(form: Form, size: int, batch: Batch) -> None:
    """What a second mask leaves out of the sum is not counted either: 2.0, not 1.2."""
    model = Lin()
    right_is(2.0, model, accumulator(model, form, size).backward(batch))


def test_ln4_a_count_of_what_was_left_out_is_refused() -> None:
    """A mean over the rows that are kept, said to be one over all labelled tokens."""
    batch = rows([1, 2, 3], [10, 10], [4]) | {"weight": torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)}
    model = Lin()
    with pytest.raises(LossNotAdditiveError):
        accumulator(model, (lambda model, batch: left_out(model, batch) / kept_tokens(batch), "tokens")).backward(batch)
    assert model.w.grad is None


# ---- LN5 ----


@pytest.mark.parametrize("fetched", [1, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_ln5_count_over_another_group_of_rows(form: str, fetched: int) -> None:
    """Tokens 1 to 4, fetched in groups of another size than the batches of 2: the two updates see 1.5 and 3.5."""
    gradients = []
    for batch in wb.whole_batches(list(batches([1, 2, 3, 4], fetched)), global_batch_size=2):
        model = Lin()
        assert accumulator(model, form).backward(batch).count == 2
        gradients.append(model.w.grad.item())
    assert gradients == pytest.approx([1.5, 3.5], rel=EXACT)


def test_ln5_for_examples() -> None:
    """The same of a loader that yields examples."""
    gradients = []
    dataset = examples(rows([1], [2], [3], [4]))
    for batch in wb.whole_batches(dataset, global_batch_size=2, loader_yields="examples"):
        model = Lin()
        accumulator(model, collate_fn=collated).backward(batch)
        gradients.append(model.w.grad.item())
    assert gradients == pytest.approx([1.5, 3.5], rel=EXACT)


# ---- LN8 ----


def weighted_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) * mask_of(batch) * batch["token_weight"]).sum()


def weights(batch: Batch) -> torch.Tensor:
    return (mask_of(batch) * batch["token_weight"]).sum()


def weighted_classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    """PyTorch's mean, which it divides by the sum of the classes' weights."""
    other = model(batch["x"]).expm1().log()
    scores = torch.stack([torch.zeros_like(other), other], dim=-1).flatten(0, 1)
    return cross_entropy(scores, batch["labels"].flatten(), weight=torch.ones(2, dtype=torch.float64))


WEIGHTED: dict[str, Form] = {
    "sum and count": (lambda model, batch: wb.LossSum(weighted_sum(model, batch), weights(batch)), None),
    "mean": (lambda model, batch: weighted_sum(model, batch) / weights(batch), weights),
    "mean over tokens": (lambda model, batch: weighted_sum(model, batch) / weights(batch), "tokens"),
    "weights of classes": (weighted_classes, "tokens"),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
@pytest.mark.parametrize("form", WEIGHTED)
def test_ln8_weighted_loss_over_the_length_of_a_row(form: str, num_rows: int, size: int) -> None:
    """Weights of 1 change nothing: the mean over all tokens, as without weights, for 1, 2 and 4 rows."""
    lines = [[1, 2, 3], [10], [4, 5], [6]][:num_rows]
    batch = rows(*lines, length=3)
    weighted = batch | {"token_weight": torch.ones_like(batch["x"])}
    right = sum(map(sum, lines)) / sum(map(len, lines))
    for stated, rows_of_it in ((WEIGHTED[form], weighted), (FORMS["masked mean"], batch)):
        model = Lin()
        right_is(right, model, accumulator(model, stated, size).backward(rows_of_it))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("form", ["sum and count", "mean"])
def test_ln8_unequal_weights(form: str, size: int) -> None:
    """Each token counts by its weight, in the sum and in the denominator."""
    batch = rows([1, 2, 3], [10], [4, 5])
    weight = torch.tensor([[0.5, 1, 2], [0.25, 9, 9], [4, 0, 9]], dtype=torch.float64)
    model = Lin()
    report = accumulator(model, WEIGHTED[form], size).backward(batch | {"token_weight": weight})
    right_is((0.5 + 2 + 6 + 2.5 + 16) / (0.5 + 1 + 2 + 0.25 + 4), model, report)
