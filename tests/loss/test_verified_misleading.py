"""Losses whose figures mislead: equal values under every rule, gradients of zero, rounding noise, hidden coupling."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from verification import accepted, accumulator, gradient, nothing_changed, refusal, suggestion
from wholebatch.errors import BatchStatisticsWarning, LossNotAdditiveError, LossNotVerifiedWarning
from wholebatch.facts import LossSum

ROWS, LENGTH, VOCABULARY, CLASSES, IGNORED = 6, 7, 17, 4, -100
LENGTHS = torch.tensor([[3], [7], [2], [5], [4], [6]])

Batch = dict[str, torch.Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hidden(self.embedding(ids)).tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(ids))


@pytest.fixture
def model() -> Tagger:
    return Tagger()


@pytest.fixture
def batch() -> Batch:
    mask = torch.arange(LENGTH) < LENGTHS
    ids = torch.randint(1, VOCABULARY, mask.shape) * mask
    labels = torch.randint(CLASSES, mask.shape).masked_fill(~mask, IGNORED)
    return {"ids": ids, "mask": mask.float(), "labels": labels}


def token_mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def token_losses(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="none").view_as(batch["labels"])


def pooled(model: Any, batch: Batch) -> torch.Tensor:
    return model.features(batch["ids"]).mean(dim=1)


COUNTS = ("examples", "tokens", "sum")


def only(right: str, model: nn.Module, loss_fn: Any, batch: Any, **options: Any) -> None:
    """Assert that of the common counts one passes and the others are refused."""
    accepted(model, loss_fn, batch, right, one_pass=False, **options)
    for count in COUNTS:
        if count != right:
            refusal(model, loss_fn, batch, count, **options)


# ---- Equal values under every rule ----


@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
def test_a_head_of_zeros(model: Tagger, batch: Batch, precision: str) -> None:
    """Every token's loss is log(classes); only the head's gradient, and the graph, tell the counts apart."""
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    only("tokens", model, token_mean, batch, precision=precision)


def test_two_layers_of_zeros(model: Tagger, batch: Batch) -> None:
    """All gradients but the head's bias are zero."""
    for layer in (model.hidden, model.head):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    only("tokens", model, token_mean, batch)


@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
def test_preferences_before_the_first_step(model: Tagger, batch: Batch, precision: str) -> None:
    """DPO: policy and reference are the same, each pair's loss is log 2, whatever is counted."""
    reference = copy.deepcopy(model).requires_grad_(False)
    pairs = {**batch, "rejected": batch["ids"].roll(1, 0)}

    def likelihood(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(ids).log_softmax(-1)[..., 0].sum(dim=1)

    def dpo(model: nn.Module, batch: Batch) -> torch.Tensor:
        margins = [likelihood(model, batch[n]) - likelihood(reference, batch[n]) for n in ("ids", "rejected")]
        return -F.logsigmoid(0.1 * (margins[0] - margins[1])).mean()

    only("examples", model, dpo, pairs, precision=precision)


def test_adapters_before_the_first_step(model: Tagger, batch: Batch) -> None:
    """LoRA on a frozen model: B is zero, so that only B has a gradient."""
    model.requires_grad_(False)
    model.hidden = Adapter(model.hidden)
    only("tokens", model, token_mean, batch)


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(rank, inner.in_features))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype)).float() + x.float() @ self.a.T @ self.b.T


def test_adapters_on_a_frozen_model_in_bf16(model: Tagger, batch: Batch) -> None:
    """What is trained is float32, what it is computed from is not: the tolerance is bf16's."""
    model.to(torch.bfloat16).requires_grad_(False)
    model.hidden = Adapter(model.hidden)
    model.head.float()
    only("tokens", model, token_mean, batch)


def test_parameters_of_several_types(model: Tagger, batch: Batch) -> None:
    model.embedding.to(torch.bfloat16)
    model.hidden = Adapter(model.hidden.to(torch.bfloat16))
    model.head.double()
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
    only("tokens", model, token_mean, batch)


def test_a_teacher_in_bf16(model: Tagger, batch: Batch) -> None:
    """The teacher has no gradient, and rounds all the same."""
    teacher = Tagger().to(torch.bfloat16).requires_grad_(False)

    def distilled(model: nn.Module, batch: Batch) -> torch.Tensor:
        target = teacher(batch["ids"]).float().softmax(-1)
        losses = F.kl_div(model(batch["ids"]).log_softmax(-1), target, reduction="none").sum(-1)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    only("tokens", model, distilled, batch)


# ---- Nothing but noise, and nothing at all ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_noise_is_not_taken_for_a_difference(model: Tagger, batch: Batch, dtype: torch.dtype) -> None:
    """A student that still is its teacher: value and gradient are noise; wrong counts are refused once it has moved."""
    model.to(dtype)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def distilled(model: nn.Module, batch: Batch) -> torch.Tensor:
        target = teacher(batch["ids"]).log_softmax(-1)
        return F.kl_div(model(batch["ids"]).log_softmax(-1), target, reduction="batchmean", log_target=True)

    right, wrong = accumulator(model, distilled, "examples"), accumulator(model, opaque(distilled), "tokens")
    for _ in range(3):
        right.backward(batch)
    wrong.backward(batch)
    with torch.no_grad():
        model.head.weight.add_(torch.randn_like(model.head.weight))
    gradient(model)
    right.backward(batch)
    gradient(model)
    with nothing_changed(model), pytest.raises(LossNotAdditiveError, match='pass count="examples"'):
        wrong.backward(batch)


def test_a_loss_of_zero_is_verified_once_it_is_not(model: Tagger, batch: Batch) -> None:
    """A hinge that no token reaches yet has neither loss nor gradient; nothing is said of it until it has."""

    def hinge(model: Any, batch: Batch) -> torch.Tensor:
        losses = (model(batch["ids"]).amax(dim=-1) - model.threshold).relu()
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    model.threshold = 1e3
    wrong, right = accumulator(model, opaque(hinge), "examples"), accumulator(model, opaque(hinge), "tokens")
    wrong.backward(batch)
    right.backward(batch)
    model.threshold = 0.0
    right.backward(batch)
    with pytest.raises(LossNotAdditiveError, match='pass count="tokens"'):
        wrong.backward(batch)


def test_a_loss_of_zero_is_refused_by_its_graph(model: Tagger, batch: Batch) -> None:
    """Where it can be read, it tells the count although there is nothing else to go by."""
    for count in ("examples", "sum"):
        assert 'pass count="tokens"' in refusal(model, lambda m, b: 0.0 * token_mean(m, b), batch, count)


def test_a_loss_that_stays_zero_ends_in_one_warning(model: Tagger, batch: Batch) -> None:
    engine = accumulator(model, lambda model, batch: 0.0 * masked_mean(model, batch), "tokens")
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(40):
            engine.backward(batch)
    assert [warning.category for warning in caught] == [LossNotVerifiedWarning]
    assert "a loss of zero" in str(caught[0].message)


def opaque(loss_fn: Callable[[Any, Batch], torch.Tensor]) -> Callable[[Any, Batch], torch.Tensor]:
    return lambda model, batch: Opaque.apply(loss_fn(model, batch))


def masked_mean(model: Any, batch: Batch) -> torch.Tensor:
    return Opaque.apply((token_losses(model, batch) * batch["mask"]).sum() / batch["mask"].sum())


class Opaque(torch.autograd.Function):
    """The identity, of which the graph shows nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> torch.Tensor:
        return seed.clone()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
def test_a_graph_that_cannot_be_read(model: Tagger, batch: Batch, precision: str, size: int) -> None:
    only("tokens", model, masked_mean, batch, precision=precision, micro_batch_size=size)
    message = suggestion(model, masked_mean, batch, precision=precision, micro_batch_size=size)
    assert 'labelled tokens: pass count="tokens"' in message


@pytest.mark.parametrize("scale", [1e-12, 1e-30, 1e15])
def test_size_does_not_matter(model: Tagger, batch: Batch, scale: float) -> None:
    model.double()
    only(
        "tokens", model, lambda model, batch: scale * token_mean(model, batch), batch | {"mask": batch["mask"].double()}
    )


def test_positive_and_negative_losses_that_cancel(model: Tagger, batch: Batch) -> None:
    """Advantages of a policy gradient sum to zero over the batch: the loss is zero, its gradient is not."""
    model.double()
    advantages = torch.randn(ROWS, dtype=torch.float64)
    batch["advantages"] = advantages - advantages.mean()

    def policy(model: nn.Module, batch: Batch) -> torch.Tensor:
        chosen = model(batch["ids"]).log_softmax(-1)[:, 0, 0]
        return -(batch["advantages"] * (chosen - chosen.detach()).exp()).mean()

    only("examples", model, policy, batch)


# ---- Losses that no count makes additive ----


def contrastive(model: Any, batch: Batch) -> torch.Tensor:
    """InfoNCE: each example against all others as negatives."""
    features = F.normalize(pooled(model, batch), dim=1)
    positives = F.normalize(model.features(batch["ids"].flip(1)).mean(dim=1), dim=1)
    return F.cross_entropy(features @ positives.T * 5, torch.arange(len(features)))


def contrastive_each(model: Any, batch: Batch) -> torch.Tensor:
    features = F.normalize(pooled(model, batch), dim=1)
    return F.cross_entropy(features @ features.T * 5, torch.arange(len(features)), reduction="none")


def alike_in_class(model: Any, batch: Batch) -> torch.Tensor:
    """Pulls examples of one class together: coupled only where the examples share a class."""
    features, classes = pooled(model, batch), batch["labels"] if batch["labels"].ndim == 1 else batch["labels"][:, 0]
    together = (classes[:, None] == classes).float().triu(1)
    distances = (features[:, None] - features).square().sum(-1)
    return F.cross_entropy(model.head(features), classes) + (together * distances).sum() / len(classes)


def neighbours(model: Any, batch: Batch) -> torch.Tensor:
    """Depends on the order: another order must not pass for noise."""
    features = pooled(model, batch)
    return (features * features.roll(1, 0)).sum(dim=1).mean() + 2.0


def standardised(model: Any, batch: Batch) -> torch.Tensor:
    """Divided by the batch's own deviation: not finite for one example alone."""
    values = pooled(model, batch).sum(dim=1)
    return ((values - values.mean()) / values.std()).exp().mean()


COUPLED: dict[str, Callable[[Any, Batch], Any]] = {
    "InfoNCE": contrastive,
    "InfoNCE, one loss per example": contrastive_each,
    "InfoNCE, LossSum": lambda m, b: LossSum(contrastive_each(m, b).sum(), len(b["ids"])),
    "InfoNCE, a term": lambda m, b: {"loss": LossSum(contrastive_each(m, b).sum(), len(b["ids"]))},
    "neighbours": neighbours,
    "standardised by the batch": standardised,
    "root of the mean square": lambda m, b: pooled(m, b).square().mean().sqrt(),
    "log of the mean": lambda m, b: token_mean(m, b).exp().mean().log1p(),
    "LossSum of a mean": lambda m, b: LossSum(token_mean(m, b), len(b["ids"])),
    "LossSum of the wrong units": lambda m, b: LossSum(token_mean(m, b) * len(b["ids"]), len(b["ids"])),
}


@pytest.mark.filterwarnings("ignore:std\\(\\)")
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", COUPLED)
def test_no_count_fits(model: Tagger, batch: Batch, name: str, size: int) -> None:
    """Refused in every form, with micro-batches of one too, and with nothing to suggest."""
    loss_fn = COUPLED[name]
    own_count = "LossSum" in name or "per example" in name
    counts = [None] if own_count else [{"loss": "examples"}] if "term" in name else list(COUNTS)
    for count in counts:
        message = refusal(model, loss_fn, batch, count, micro_batch_size=size)
        assert "looks like" not in message
    if len(counts) > 1:
        assert "looks like" not in suggestion(model, loss_fn, batch, micro_batch_size=size)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 1, 0], [0, 0, 0, 1, 1, 1], [3, 1, 0, 2, 0, 0]])
def test_examples_of_one_class_that_attract_each_other(
    model: Tagger, batch: Batch, labels: list[int], size: int
) -> None:
    """Two examples of one class are among those that are looked at, in different parts; and of another class too."""
    batch["labels"] = torch.tensor(labels)
    for count in ("examples", "sum"):
        refusal(model, alike_in_class, batch, count, micro_batch_size=size)
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    loss_fn = lambda m, b: F.cross_entropy(m.head(pooled(m, b)), b["labels"], weights)  # noqa: E731
    accepted(model, loss_fn, batch, lambda b: weights[b["labels"]].sum(), micro_batch_size=size, precision="float32")
    for count in ("examples", "sum"):
        refusal(model, loss_fn, batch, count, micro_batch_size=size)


@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
def test_a_small_second_term_is_not_absorbed(model: Tagger, batch: Batch, precision: str) -> None:
    """A balance of 1 % of the loss, far below what bf16 rounds: the check leaves the caller's autocast."""

    def balanced(model: Any, batch: Batch) -> torch.Tensor:
        shares = model(batch["ids"]).softmax(-1).mean(dim=(0, 1))
        return token_mean(model, batch) + 0.05 * (shares * shares).sum()

    for count in COUNTS:
        assert "2 terms" in refusal(model, balanced, batch, count, precision=precision)


def test_in_one_micro_batch_any_loss_is_exact(model: Tagger, batch: Batch) -> None:
    """A coupled loss is refused only when the batch is first cut."""
    engine = accumulator(model, contrastive, "examples", micro_batch_size=4)
    small = {name: value[:4] for name, value in batch.items()}
    engine.backward(small)
    found = gradient(model)
    contrastive(model, small).backward()
    assert torch.allclose(found, gradient(model), rtol=1e-5, atol=1e-9)
    with nothing_changed(model), pytest.raises(Exception, match="compared with each other"):
        engine.backward(batch)


# ---- Custom Functions, compiled code, checkpoints ----


class SquareHeedsSeed(torch.autograd.Function):
    """A sum of squares that computes its gradient in forward, and scales it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(2 * x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0] * seed


class SquareIgnoresSeed(SquareHeedsSeed):
    @staticmethod
    def backward(ctx: Any, seed: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].clone()


@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
def test_a_function_that_heeds_its_seed(model: Tagger, batch: Batch, precision: str) -> None:
    loss = lambda model, batch: SquareHeedsSeed.apply(pooled(model, batch)) / len(batch["ids"])  # noqa: E731
    only("examples", model, loss, batch, precision=precision)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
def test_a_function_that_ignores_its_seed(model: Tagger, batch: Batch, count: str, precision: str) -> None:
    """Right values and gradients that no count can scale."""
    message = refusal(
        model,
        lambda model, batch: SquareIgnoresSeed.apply(pooled(model, batch)) / len(batch["ids"]),
        batch,
        count,
        precision=precision,
    )
    assert "ignores grad_output" in message


def test_a_compiled_loss(model: Tagger, batch: Batch) -> None:
    """Compiled code shows no denominator; it runs uncompiled in the check."""
    compiled = torch.compile(token_mean, backend="eager")
    only("tokens", model, compiled, batch)
    assert 'pass count="tokens"' in suggestion(model, compiled, batch)
    torch.compiler.reset()


class Checkpointed(Tagger):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(ids)
        return checkpoint(lambda x: self.hidden(x).tanh(), embedded, use_reentrant=self.reentrant)


class AllCheckpointed(Tagger):
    """Everything but the head is recomputed: `torch.autograd.grad` would find gradients of the head alone."""

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        start = torch.zeros((), requires_grad=True)
        return checkpoint(
            lambda ids, zero: super(AllCheckpointed, self).features(ids) + zero, ids, start, use_reentrant=True
        )


@pytest.mark.parametrize("precision", ["float32", "bf16 autocast"])
@pytest.mark.parametrize(
    "made", [lambda: Checkpointed(True), lambda: Checkpointed(False), AllCheckpointed], ids=["reentrant", "not", "all"]
)
def test_checkpointed_models(made: Callable[[], Tagger], batch: Batch, precision: str) -> None:
    only("tokens", made(), token_mean, batch, precision=precision)


def test_a_fault_inside_a_reentrant_checkpoint_shows(batch: Batch) -> None:
    """Values alone would pass: the gradient inside the checkpoint is seen too."""

    class Wrong(AllCheckpointed):
        def features(self, ids: torch.Tensor) -> torch.Tensor:
            start = torch.zeros((), requires_grad=True)
            return checkpoint(self.inside, ids, start, use_reentrant=True)

        def inside(self, ids: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
            hidden = self.hidden(self.embedding(ids)) + zero
            return (hidden - hidden.detach()) / len(ids) + hidden.detach()

    assert "off by" in refusal(Wrong(), token_mean, batch, "tokens")


# ---- Randomness and statistics ----


def denoising(model: Any, batch: Batch) -> torch.Tensor:
    noisy = model.features(batch["ids"]) + torch.randn(*batch["ids"].shape, 8)
    return (noisy.square().mean(-1) * batch["mask"]).sum() / batch["mask"].sum()


def test_a_loss_with_its_own_randomness_cannot_be_verified(model: Tagger, batch: Batch) -> None:
    """One warning, and the count is used as it is, however many batches follow."""
    engine = accumulator(model, denoising, "tokens")
    with pytest.warns(LossNotVerifiedWarning, match="random numbers of its own") as caught:
        engine.backward(batch)
    assert len(caught) == 1
    for _ in range(4):  # warnings are errors
        assert engine.backward(batch).should_step


def test_dropout_is_off_in_the_check(model: Tagger, batch: Batch) -> None:
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    only("tokens", model, token_mean, batch)


def test_batch_norm_is_warned_of_and_the_count_verified(batch: Batch) -> None:
    """In evaluation mode its examples are independent; that they are not in training, the warning says."""

    class Normed(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def features(self, ids: torch.Tensor) -> torch.Tensor:
            return self.norm(super().features(ids).transpose(1, 2)).transpose(1, 2)

    for count in COUNTS:
        call = accepted if count == "tokens" else refusal
        model = Normed()
        with pytest.warns(BatchStatisticsWarning, match=r"norm \(BatchNorm1d\)"):
            call(model, token_mean, batch, count)
