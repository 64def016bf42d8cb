"""The denominator in the head of a loss's graph, one row for each way of writing a loss; the unreadable says so."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from wholebatch.loss.suggested import LossHead, read_head, suggest_count

ROWS, LENGTH, CLASSES, IGNORED = 4, 6, 5, -100
TOKENS = ROWS * LENGTH


class Losses(SimpleNamespace):
    """A model's output on 4 rows of 6 tokens, of which 13 have labels, with what losses are made of."""

    def __init__(self) -> None:
        self.linear = nn.Linear(3, CLASSES)
        self.features = torch.randn(ROWS, LENGTH, 3)
        self.scores = self.linear(self.features)
        self.labels = torch.randint(CLASSES, (ROWS, LENGTH))
        self.mask = torch.arange(LENGTH) < torch.tensor([[1], [2], [4], [6]])
        self.labels[~self.mask] = IGNORED
        self.flat = (self.scores.flatten(0, 1), self.labels.flatten())
        self.per_token = self.scores.logsumexp(-1)
        self.mask = self.mask.float()
        self.target = torch.rand(ROWS, LENGTH)
        self.probability = self.per_token.sigmoid()
        self.log_probability = self.scores.log_softmax(-1)
        self.other = torch.rand(ROWS, LENGTH, CLASSES).softmax(-1)
        self.class_weight = torch.tensor([1.0, 2.0, 0.25, 3.0, 1.5])
        self.labelled = sum(1 for label in self.labels.flatten().tolist() if label != IGNORED)
        self.masked_sum = (self.per_token * self.mask).sum()
        self.penalty = 0.1 * self.linear.weight.square().sum()

    def ce(self, **options: object) -> torch.Tensor:
        return F.cross_entropy(*self.flat, **options)

    def of_rows(self, **options: object) -> list[torch.Tensor]:
        return [F.cross_entropy(self.scores[row], self.labels[row], **options) for row in range(ROWS)]

    def total_class_weight(self) -> float:
        return sum(self.class_weight[label].item() for label in self.labels.flatten().tolist() if label != IGNORED)


@pytest.fixture
def losses() -> Losses:
    return Losses()


Row = Callable[[Losses], tuple[torch.Tensor, float]]
"""A loss, and what it was divided by."""

CROSS_ENTROPY: dict[str, Row] = {
    "mean, some ignored": lambda b: (b.ce(), b.labelled),
    "mean, own ignore_index": lambda b: (
        F.cross_entropy(b.flat[0], b.flat[1].clamp(min=0), ignore_index=0),
        int((b.flat[1] > 0).sum()),
    ),
    "mean, class weights": lambda b: (b.ce(weight=b.class_weight), b.total_class_weight()),
    "mean, classes in dimension 1": lambda b: (F.cross_entropy(b.scores.transpose(1, 2), b.labels), b.labelled),
    "mean, classes in dimension 1, class weights": lambda b: (
        F.cross_entropy(b.scores.transpose(1, 2), b.labels, weight=b.class_weight),
        b.total_class_weight(),
    ),
    "nll_loss": lambda b: (F.nll_loss(b.log_probability.flatten(0, 1), b.flat[1]), b.labelled),
    "target probabilities": lambda b: (F.cross_entropy(b.flat[0], b.other.flatten(0, 1)), TOKENS),
    "label smoothing": lambda b: (b.ce(label_smoothing=0.1), b.labelled),
    "label smoothing, class weights": lambda b: (
        b.ce(label_smoothing=0.1, weight=b.class_weight),
        b.total_class_weight(),
    ),
    "label smoothing, classes in dimension 1": lambda b: (
        F.cross_entropy(b.scores.transpose(1, 2), b.labels, label_smoothing=0.1),
        b.labelled,
    ),
    "label smoothing, sum divided": lambda b: (b.ce(label_smoothing=0.1, reduction="sum") / b.labelled, b.labelled),
    "label smoothing, halved": lambda b: (b.ce(label_smoothing=0.1) / 2, b.labelled),
    "label smoothing by hand, over classes too": lambda b: (smoothed_by_hand(b), b.labelled),
    "sum divided by an int": lambda b: (b.ce(reduction="sum") / b.labelled, b.labelled),
    "sum divided by a tensor": lambda b: (b.ce(reduction="sum") / torch.tensor(b.labelled), b.labelled),
    "sum divided by a count of the whole batch": lambda b: (b.ce(reduction="sum") / 99, 99),
    "unreduced, then divided": lambda b: (b.ce(reduction="none").sum() / b.labelled, b.labelled),
    "mean, rescaled to another count": lambda b: (b.ce() * b.labelled / 99, 99),
}

SUMS_AND_MEANS: dict[str, Row] = {
    "masked sum over the mask's sum": lambda b: (b.masked_sum / b.mask.sum(), b.labelled),
    "masked sum over a clamped count": lambda b: (b.masked_sum / b.mask.sum().clamp(min=1), b.labelled),
    "masked sum over an int tensor": lambda b: (b.masked_sum / b.mask.sum().long(), b.labelled),
    "masked sum over an int": lambda b: (b.masked_sum / b.labelled, b.labelled),
    "masked sum times a reciprocal": lambda b: (b.masked_sum * (1 / b.labelled), b.labelled),
    "masked sum times a reciprocal tensor": lambda b: (b.mask.sum().reciprocal() * b.masked_sum, b.labelled),
    "divided in place": lambda b: ((b.per_token * b.mask).sum().div_(b.labelled), b.labelled),
    "elements divided, then summed": lambda b: ((b.per_token * b.mask / b.mask.sum()).sum(), b.labelled),
    "elements scaled, rows summed, summed": lambda b: ((b.per_token * 0.125).sum(1).sum(), 8),
    "elements scaled, summed, divided": lambda b: ((-b.per_token / 0.7).sum() / b.labelled, b.labelled),
    "sums of rows, summed, divided": lambda b: ((b.per_token * b.mask).sum(1).sum() / b.labelled, b.labelled),
    "selected, then mean": lambda b: (b.per_token[b.mask.bool()].mean(), b.labelled),
    "mean": lambda b: (b.per_token.mean(), TOKENS),
    "masked mean": lambda b: ((b.per_token * b.mask).mean(), TOKENS),
    "mean over both dimensions": lambda b: (b.per_token.mean((0, 1)), TOKENS),
    "mean over the last dimension": lambda b: (b.per_token.flatten().mean(-1), TOKENS),
    "nanmean": lambda b: (b.per_token.nanmean(), TOKENS),
    "mean of means of rows": lambda b: (b.per_token.mean(dim=1).mean(), ROWS),
    "mean of masked means of rows": lambda b: (((b.per_token * b.mask).sum(1) / b.mask.sum(1)).mean(), ROWS),
    "sum of means of rows, divided": lambda b: (b.per_token.mean(1).sum() / ROWS, ROWS),
    "list of means, divided": lambda b: (sum(b.of_rows()) / ROWS, ROWS),
    "list of equal means, divided": lambda b: (sum(row.mean() for row in b.per_token) / ROWS, ROWS),
    "list of sums, divided": lambda b: (sum(b.of_rows(reduction="sum")) / b.labelled, b.labelled),
    "list of label-smoothed means, divided": lambda b: (sum(b.of_rows(label_smoothing=0.1)) / ROWS, ROWS),
    "list of 5,000, divided": lambda b: (sum(b.per_token[0, 0] * 2 for _ in range(5000)) / 5000, 5000),
    "list of shares": lambda b: (sum(loss / ROWS for loss in b.of_rows()), ROWS),
    "running total, divided": lambda b: (running_total(b) / ROWS, ROWS),
    "stack, mean": lambda b: (torch.stack(b.of_rows()).mean(), ROWS),
    "dot product, divided": lambda b: (b.per_token.flatten() @ b.mask.flatten() / b.labelled, b.labelled),
    "einsum, divided": lambda b: (torch.einsum("bt,bt->", b.per_token, b.mask) / b.labelled, b.labelled),
    "plain sum": lambda b: (b.masked_sum, 1),
    "plain nansum": lambda b: (b.per_token.nansum(), 1),
    "plain dot product": lambda b: (b.per_token.flatten() @ b.mask.flatten(), 1),
    "plain product of a row and a column": lambda b: (b.per_token.view(1, -1) @ b.mask.view(-1, 1), 1),
    "plain einsum": lambda b: (torch.einsum("bt,bt->", b.per_token, b.mask), 1),
    "plain sum of cross-entropy": lambda b: (b.ce(reduction="sum"), 1),
    "plain sum, doubled": lambda b: (2 * b.masked_sum, 1),
    "sum with weights normalised beforehand": lambda b: ((b.per_token * (b.mask / b.mask.sum())).sum(), 1),
    "mean times its count": lambda b: (b.per_token.mean() * TOKENS, 1),
}

OTHER_LOSSES: dict[str, Row] = {
    "mse": lambda b: (F.mse_loss(b.per_token, b.target), TOKENS),
    "mse, sum": lambda b: (F.mse_loss(b.per_token, b.target, reduction="sum"), 1),
    "mse, sum divided": lambda b: (F.mse_loss(b.per_token, b.target, reduction="sum") / ROWS, ROWS),
    "l1": lambda b: (F.l1_loss(b.per_token, b.target), TOKENS),
    "smooth l1": lambda b: (F.smooth_l1_loss(b.per_token, b.target), TOKENS),
    "huber": lambda b: (F.huber_loss(b.per_token, b.target), TOKENS),
    "bce": lambda b: (F.binary_cross_entropy(b.probability, b.target), TOKENS),
    "bce with weights": lambda b: (F.binary_cross_entropy(b.probability, b.target, weight=b.mask), TOKENS),
    "bce with logits": lambda b: (F.binary_cross_entropy_with_logits(b.per_token, b.target), TOKENS),
    "kl batchmean": lambda b: (F.kl_div(b.log_probability, b.other, reduction="batchmean"), ROWS),
    "kl batchmean, log target": lambda b: (
        F.kl_div(b.log_probability, b.other.log(), reduction="batchmean", log_target=True),
        ROWS,
    ),
    "gaussian nll": lambda b: (F.gaussian_nll_loss(b.per_token, b.target, b.probability), TOKENS),
    "poisson nll": lambda b: (F.poisson_nll_loss(b.per_token, b.target), TOKENS),
    "soft margin": lambda b: (F.soft_margin_loss(b.per_token, b.target), TOKENS),
    "multi margin": lambda b: (F.multi_margin_loss(b.flat[0], b.flat[1].clamp(min=0)), TOKENS),
    "multi-label margin": lambda b: (
        F.multilabel_margin_loss(b.flat[0], torch.randint(CLASSES, (TOKENS, CLASSES))),
        TOKENS,
    ),
    "multi margin of one example": lambda b: (F.multi_margin_loss(b.scores[0, 0], torch.tensor(1)), 1),
    "ctc": lambda b: (
        F.ctc_loss(
            b.log_probability.transpose(0, 1), torch.ones(ROWS, 2, dtype=torch.long), (LENGTH,) * ROWS, (2,) * ROWS
        ),
        ROWS,
    ),
}

AROUND_THE_HEAD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda loss: -loss,
    "halved": lambda loss: 0.5 * loss,
    "doubled": lambda loss: loss * 2,
    "scaled by a tensor": lambda loss: torch.tensor(0.1) * loss,
    "divided by accumulation steps": lambda loss: loss / 8,
    "less a constant": lambda loss: loss - 1.0,
    "from a constant": lambda loss: 1 - loss,
    "plus a detached term": lambda loss: loss + loss.detach(),
    "plus zero times the outputs": lambda loss: loss + 0.0 * torch.ones(3, requires_grad=True).sum(),
    "double": lambda loss: loss.double(),
    "bfloat16 and back": lambda loss: loss.bfloat16().float(),
    "unsqueeze": lambda loss: loss.unsqueeze(0),
    "squeeze": lambda loss: loss.unsqueeze(0).squeeze(),
    "view": lambda loss: loss.view(1, 1),
    "reshape": lambda loss: loss.reshape(1).reshape(()),
    "transposed": lambda loss: loss.view(1, 1).t().transpose(0, 1).permute(1, 0),
    "expand": lambda loss: loss.expand(1),
    "select": lambda loss: loss.view(1)[0],
    "index": lambda loss: loss.view(1)[[0]],
    "slice": lambda loss: loss.view(2 - 1)[:1],
    "clone": lambda loss: loss.clone(),
    "alias": lambda loss: torch.ops.aten.alias(loss),
    "mean of one": lambda loss: loss.mean(),
    "sum of one": lambda loss: loss.view(1).sum(0),
    "clamp": lambda loss: loss.clamp(min=-9.0),
    "clamp_min": lambda loss: loss.clamp_min(-9.0),
    "clamp_max": lambda loss: loss.clamp_max(9.0),
    "relu": lambda loss: loss.relu(),
    "minimum": lambda loss: torch.minimum(loss, torch.tensor(9.0)),
    "clamp on both sides": lambda loss: loss.clamp(-9.0, 9.0),
    "maximum": lambda loss: torch.maximum(loss, torch.tensor(-9.0)),
    "nan_to_num": lambda loss: loss.nan_to_num(),
    "masked_fill": lambda loss: loss.masked_fill(loss.isnan(), 0.0),
    "where": lambda loss: torch.where(torch.tensor(True), loss, 0.0),
    "where, second branch": lambda loss: torch.where(torch.tensor(False), 0 * loss, loss),
}


def smoothed_by_hand(b: Losses) -> torch.Tensor:
    """The second half is also a mean over the classes: its divisor is that many times larger."""
    log_probability = -F.log_softmax(b.flat[0], -1)
    masked = b.flat[1].unsqueeze(1).eq(IGNORED)
    wrong = log_probability.gather(1, b.flat[1].clamp(min=0).unsqueeze(1)).masked_fill(masked, 0.0)
    every = log_probability.sum(1, keepdim=True).masked_fill(masked, 0.0)
    labelled = masked.numel() - masked.long().sum()
    return 0.9 * wrong.sum() / labelled + 0.1 * every.sum() / (labelled * CLASSES)


def running_total(b: Losses) -> torch.Tensor:
    total = torch.zeros(1)
    for loss in b.of_rows():
        total += loss
    return total


ALL_ROWS = CROSS_ENTROPY | SUMS_AND_MEANS | OTHER_LOSSES


@pytest.mark.smoke
@pytest.mark.parametrize("row", ALL_ROWS.values(), ids=ALL_ROWS)
def test_denominator_of_each_way_to_write_a_loss(row: Row, losses: Losses) -> None:
    """One term is seen, and the denominator is the one that the loss was written with."""
    loss, denominator = row(losses)
    head = read_head(loss)
    assert head.terms == 1
    assert head.denominator == pytest.approx(denominator, rel=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("wrapped", AROUND_THE_HEAD.values(), ids=AROUND_THE_HEAD)
@pytest.mark.parametrize("form", ["mean", "sum divided", "label smoothing"])
def test_what_stands_around_the_head_is_seen_through(
    form: str, wrapped: Callable[[torch.Tensor], torch.Tensor], losses: Losses
) -> None:
    """A scale, a constant, a cast or a reshape does not hide the denominator, nor is taken for it."""
    loss = {
        "mean": lambda: losses.ce(),
        "sum divided": lambda: losses.masked_sum / losses.mask.sum(),
        "label smoothing": lambda: losses.ce(label_smoothing=0.1),
    }[form]()
    head = read_head(wrapped(loss))
    assert (head.denominator, head.terms) == (losses.labelled, 1)


@pytest.mark.smoke
def test_a_guard_against_empty_batches_is_seen_through(losses: Losses) -> None:
    """`where(n > 0, s / n, 0)`."""
    count = losses.mask.sum()
    loss = torch.where(count > 0, losses.masked_sum / count, torch.zeros(()))
    assert read_head(loss).denominator == losses.labelled


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_low_precision_count_is_counted_anew(dtype: torch.dtype, weighted: bool) -> None:
    """1,027 labels: torch saves a total weight of 1,024 in bfloat16."""
    scores = torch.randn(1030, CLASSES, dtype=dtype, requires_grad=True)
    labels = torch.randint(CLASSES, (1030,))
    labels[:3] = IGNORED
    weight = torch.tensor([1.0, 2.0, 0.25, 3.0, 1.5], dtype=dtype) if weighted else None
    total = sum(weight[label].item() for label in labels[3:]) if weight is not None else 1027
    assert read_head(F.cross_entropy(scores, labels, weight)).denominator == total


@pytest.mark.smoke
def test_autocast(losses: Losses) -> None:
    """Autocast's casts stand below the head."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = losses.linear(losses.features)
        assert scores.dtype == torch.bfloat16
        token_mean = F.cross_entropy(scores.flatten(0, 1), losses.flat[1])
        example_mean = (scores.logsumexp(-1).float() * losses.mask).sum(1).mean()
    assert read_head(token_mean).denominator == losses.labelled
    assert read_head(example_mean).denominator == ROWS


# --- several terms ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("sum_of_terms", "terms", "denominator"),
    [
        (lambda b: b.ce() + b.penalty, 2, 13),
        (lambda b: b.penalty + b.ce(), 2, 13),
        (lambda b: b.ce() - 0.01 * b.penalty + 1.0, 2, 13),
        (lambda b: b.ce(label_smoothing=0.1) + b.penalty, 2, 13),
        (lambda b: b.ce() + (b.penalty + b.masked_sum), 3, 13),
        (lambda b: (b.ce() + b.penalty).double() + b.masked_sum, 3, 13),
        (lambda b: torch.add(b.ce(), b.penalty, alpha=0.1), 2, 13),
        (lambda b: 0.5 * (b.ce() + b.penalty), 2, 13),
        (lambda b: (b.ce() + b.penalty) / 2, 2, 13),
        (lambda b: b.ce() + opaque(b.per_token), 2, 13),
        (lambda b: b.ce() + b.per_token.mean(), 2, None),
        (lambda b: 0.5 * b.ce() + 0.5 * b.per_token.mean(), 2, None),
        (lambda b: -b.log_probability.sum() + b.log_probability.sum() / CLASSES, 2, CLASSES),
        (lambda b: b.per_token.mean() + F.mse_loss(b.per_token, b.target), 2, TOKENS),
        (lambda b: b.ce(reduction="sum") + b.penalty, 2, 1),
        (lambda b: (b.ce(reduction="sum") + b.masked_sum) * (1 / 13), 2, pytest.approx(13)),
        (lambda b: sum(b.of_rows()), ROWS, None),
    ],
)
def test_added_terms_are_counted(
    sum_of_terms: Callable[[Losses], torch.Tensor], terms: int, denominator: float | None, losses: Losses
) -> None:
    """The denominator is that of the divided terms where they agree, and none where they do not."""
    assert losses.labelled == 13
    head = read_head(sum_of_terms(losses))
    assert (head.terms, head.denominator) == (terms, denominator)


# --- Hugging Face models ----------------------------------------------------------------------------------------------


def language_batch() -> tuple[dict[str, torch.Tensor], int]:
    """Inputs with labels, and the number of labels left after the shift."""
    tokens = torch.randint(3, 50, (4, 7))
    labels = tokens.clone()
    labels[0, 4:] = IGNORED
    return {"input_ids": tokens, "labels": labels}, int((labels[:, 1:] != IGNORED).sum())


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=16,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("num_items", [None, 99, torch.tensor(99)], ids=["none", "int", "tensor"])
def test_causal_language_model(num_items: object, gpt2: nn.Module) -> None:
    """Labels after the shift; with `num_items_in_batch`, that number and not the labels."""
    batch, shifted = language_batch()
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    head = read_head(gpt2(**batch, **options).loss)
    assert (head.denominator, head.terms) == (shifted if num_items is None else 99, 1)


@pytest.mark.parametrize("num_items", [None, 99])
def test_router_loss_is_a_second_term(num_items: int | None, mixtral: nn.Module) -> None:
    """Mixtral adds a loss of its router, which has a count of its own."""
    batch, shifted = language_batch()
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    head = read_head(mixtral(**batch, **options).loss)
    assert (head.denominator, head.terms) == (num_items or shifted, 2)
    assert head.form.startswith("sum of 2 terms: ")


# --- what cannot be read ----------------------------------------------------------------------------------------------


class Mean(torch.autograd.Function):
    """Named like an operation of torch."""

    @staticmethod
    def forward(ctx: object, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.expand(ROWS, LENGTH) / TOKENS


class Clone(Mean):
    """Also named like one; what it does to its input cannot be seen."""

    @staticmethod
    def forward(ctx: object, loss: torch.Tensor) -> torch.Tensor:
        return loss * 7


class Labelled(torch.Tensor):
    """As distributed tensors are: reading one may communicate."""


def opaque(losses: torch.Tensor) -> torch.Tensor:
    return Mean.apply(losses)


def after_backward(b: Losses) -> torch.Tensor:
    loss = b.masked_sum / b.mask.sum()
    loss.backward()
    return loss


def cross_entropy_after_backward(b: Losses) -> torch.Tensor:
    loss = b.ce()
    loss.backward()
    return loss


def divisor_changed_in_place(b: Losses) -> torch.Tensor:
    count = b.mask.sum()
    loss = b.masked_sum / count
    count += 1
    return loss


def written_into_a_slice(b: Losses) -> torch.Tensor:
    total = torch.zeros(1)
    total[0] = b.ce()
    return total


@contextmanager
def hooks_that_raise() -> Iterator[None]:
    def unpack(_: object) -> torch.Tensor:
        raise KeyError("not now")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        yield


def under_hooks_that_raise(b: Losses) -> torch.Tensor:
    with hooks_that_raise():
        return b.masked_sum / b.mask.sum()


UNREADABLE: dict[str, Callable[[Losses], torch.Tensor]] = {
    "custom Function named like torch's": lambda b: opaque(b.per_token),
    "custom Function of a mean": lambda b: Clone.apply(b.per_token.mean()),
    "custom Function, scaled": lambda b: 0.5 * opaque(b.per_token),
    "after its backward": after_backward,
    "cross-entropy after its backward": cross_entropy_after_backward,
    "divisor changed in place": divisor_changed_in_place,
    "hooks that raise": under_hooks_that_raise,
    "written into a slice": written_into_a_slice,
    "re-entrant checkpoint": lambda b: checkpoint(lambda one: one.mean(), b.per_token, use_reentrant=True),
    "no graph": lambda b: b.ce().detach(),
    "a leaf": lambda b: torch.tensor(1.0, requires_grad=True),
    "more than one element": lambda b: b.per_token,
    "one of several means": lambda b: b.per_token.mean(1)[0],
    "a maximum": lambda b: b.per_token.max(),
    "a logarithm of a mean": lambda b: b.per_token.mean().log(),
    "a product of losses": lambda b: b.ce() * b.per_token.mean(),
    "a divisor of a tensor subclass": lambda b: b.masked_sum / torch.tensor(13.0).as_subclass(Labelled),
    "a reciprocal": lambda b: torch.tensor(13.0) / b.ce(),
    "a divisor with a gradient": lambda b: b.masked_sum / b.probability.sum(),
    "divided by zero": lambda b: b.masked_sum / 0,
    "no label": lambda b: F.cross_entropy(b.flat[0], torch.full_like(b.flat[1], IGNORED)),
    "the constant branch": lambda b: torch.where(torch.tensor(False), b.ce(), 0.0),
}


@pytest.mark.smoke
@pytest.mark.parametrize("build", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_says_so(build: Callable[[Losses], torch.Tensor], losses: Losses) -> None:
    """No denominator, no terms and no exception."""
    head = read_head(build(losses))
    assert (head.denominator, head.terms) == (None, 0)


def test_compiled_loss_is_unreadable_and_a_compiled_model_is_not(losses: Losses) -> None:
    """Only the head has to be outside the compiled function: a compiled sum divided outside shows its divisor."""
    labels = losses.flat[1]
    compiled_sum = torch.compile(
        lambda features: F.cross_entropy(losses.linear(features).flatten(0, 1), labels, reduction="sum"),
        backend="aot_eager",
    )
    assert read_head(compiled_sum(losses.features)).terms == 0
    assert read_head(compiled_sum(losses.features) / losses.labelled).denominator == losses.labelled
    model = torch.compile(losses.linear, backend="aot_eager")
    assert read_head(F.cross_entropy(model(losses.features).flatten(0, 1), labels)).denominator == losses.labelled


@pytest.mark.smoke
@pytest.mark.parametrize("factor", [1.0, 0.5], ids=["additions only", "scaled between"])
def test_endless_sharing_ends(factor: float, losses: Losses) -> None:
    """A graph with 2^100 paths is given up, quickly."""
    loss = losses.ce()
    for _ in range(100):
        loss = loss + loss if factor == 1 else (loss + loss) * factor
    assert read_head(loss).denominator is None


@pytest.mark.smoke
def test_sum_of_means_is_left_open(losses: Losses) -> None:
    """`l.mean(0).sum()` may be a mean over examples or a sum over them: one term, no denominator."""
    head = read_head(losses.per_token.mean(0).sum())
    assert (head.denominator, head.terms) == (None, 1)
    assert head.form == "sum over 6 elements that are means over 4"


# --- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="this torch does not show saved-tensor hooks"
)
@pytest.mark.parametrize("hooks", ["checkpoint", "save_on_cpu"])
def test_saved_tensor_hooks_are_not_run(hooks: str, losses: Losses) -> None:
    """The checkpointed section is not run again to read its divisor."""
    runs = []

    def section(per_token: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (per_token * losses.mask).sum() / losses.mask.sum()

    if hooks == "checkpoint":
        loss = checkpoint(section, losses.per_token, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            loss = section(losses.per_token)
    assert read_head(loss).terms == 0
    assert len(runs) == 1


@pytest.mark.smoke
def test_reading_changes_nothing() -> None:
    """Gradients after reading are bitwise those without, and no random number is drawn."""

    def gradient(read: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        losses = Losses()
        loss = losses.ce(label_smoothing=0.1) + losses.masked_sum / losses.mask.sum() + losses.penalty
        if read:
            read_head(loss)
        loss.backward()
        return losses.linear.weight.grad, torch.get_rng_state()

    for found, expected in zip(gradient(read=True), gradient(read=False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.smoke
def test_nothing_is_kept_alive(losses: Losses) -> None:
    """What was read holds no tensor of the graph."""
    per_token = losses.linear(losses.features).logsumexp(-1)
    alive = weakref.ref(per_token)
    head = read_head(per_token.sum() / 13)
    del per_token
    gc.collect()
    assert head.denominator == 13
    assert alive() is None


# --- words and suggestions --------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("build", "form"),
    [
        (lambda b: b.ce(), "mean of cross-entropy over 13"),
        (
            lambda b: F.cross_entropy(b.flat[0], torch.zeros(TOKENS).long(), torch.full((CLASSES,), 0.75)),
            "mean of cross-entropy over 18 (class weights included)",
        ),
        (lambda b: b.per_token.mean(), "mean over 24 elements"),
        (lambda b: 0.5 * F.mse_loss(b.per_token, b.target), "0.5 × mean of squared error over 24"),
        (lambda b: -b.per_token.mean(), "minus mean over 24 elements"),
        (lambda b: b.ce(reduction="sum") / 13, "sum of cross-entropy divided by 13"),
        (lambda b: b.masked_sum / 6.5, "sum over 24 elements divided by 6.5"),
        (lambda b: b.masked_sum * 0.125, "sum over 24 elements times 0.125, that is divided by 8"),
        (lambda b: b.per_token.mean() * TOKENS / 99, "mean over 24 elements times 24 divided by 99"),
        (lambda b: -b.per_token.mean() * TOKENS / 99, "minus mean over 24 elements times 24 divided by 99"),
        (lambda b: sum(b.of_rows()) / ROWS, "mean over 4 added terms"),
        (lambda b: sum(row.mean() for row in b.per_token) / ROWS, "mean over 4 added terms, each over 6"),
        (
            lambda b: b.ce(label_smoothing=0.1),
            "mean of cross-entropy over 13, in two parts as with label smoothing",
        ),
        (lambda b: b.ce() + 1.0, "mean of cross-entropy over 13 (a constant added)"),
        (
            lambda b: b.ce() + 0.5 * b.linear.weight.square().sum(),
            "sum of 2 terms: mean of cross-entropy over 13; 0.5 × sum over 15 elements",
        ),
        (
            lambda b: torch.add(b.ce(), b.linear.weight.square().sum(), alpha=0.5),
            "sum of 2 terms: mean of cross-entropy over 13; 0.5 × sum over 15 elements",
        ),
        (
            lambda b: torch.sub(b.ce(), b.linear.weight.square().sum(), alpha=0.5),
            "sum of 2 terms: mean of cross-entropy over 13; minus 0.5 × sum over 15 elements",
        ),
        (
            lambda b: torch.rsub(b.linear.weight.square().sum(), b.ce(), alpha=0.5),
            "sum of 2 terms: minus 0.5 × sum over 15 elements; mean of cross-entropy over 13",
        ),
        (
            lambda b: sum(row.mean() for row in b.per_token) + b.penalty,
            "sum of 5 terms: mean over 6 elements; mean over 6 elements; mean over 6 elements; 2 more",
        ),
        (
            lambda b: b.masked_sum,
            "plain sum over 24 elements (no division in sight; weights that were normalised beforehand would look "
            "the same)",
        ),
        (lambda b: opaque(b.per_token), "something that cannot be read (MeanBackward)"),
        (lambda b: b.per_token, "a tensor of shape (4, 6) without a readable graph"),
    ],
)
def test_form_says_it_in_words(build: Callable[[Losses], torch.Tensor], form: str, losses: Losses) -> None:
    assert read_head(build(losses)).form == form


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("denominator", "name"),
    [
        (13.0, "tokens"),
        (12.0, "tokens after the shift"),
        (1.0, "sum"),
        (4.0, None),  # examples and labels alike
        (13.001, None),
        (99.0, None),
        (None, None),
        (1 / (1 / 13 * (1 + 6e-8)), "tokens"),  # a reciprocal in float32
    ],
)
def test_the_one_count_that_fits_is_suggested(denominator: float | None, name: str | None) -> None:
    """No name where none fits, or where several do."""
    candidates = {"sum": 1, "examples": 4, "labels": 4, "tokens": 13, "tokens after the shift": 12}
    assert suggest_count(LossHead(denominator, 1, ""), candidates) == name


@pytest.mark.smoke
def test_neighbouring_counts_of_long_text_are_told_apart(losses: Losses) -> None:
    """Labels before and after the shift differ by 4e-4 at 2,500 tokens."""
    loss = losses.masked_sum * torch.tensor(1 / 2500)
    head = read_head(loss)
    assert head.denominator is not None
    assert not math.isclose(head.denominator, 2499, rel_tol=1e-5)
    assert suggest_count(head, {"tokens": 2500, "tokens after the shift": 2499}) == "tokens"
