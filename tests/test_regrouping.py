"""Examples of like length are put together, padding is left out, and the update is that of one pass all the same."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from oracle.one_pass import adamw, copied_gradients, distance, one_pass, trained
from wholebatch.batch.layout import Piece
from wholebatch.batch.lengths import PaddedLengths, example_length, holds_tokens
from wholebatch.batch.sizing import FixedSize
from wholebatch.batch.trimming import padding_of
from wholebatch.cut import Knife
from wholebatch.errors import (
    BatchStatisticsWarning,
    ConfigurationError,
    CountRequiredError,
    LossNotAdditiveError,
    LossNotVerifiedWarning,
    PaddingKeptWarning,
)
from wholebatch.loss.counting import Counter

pytestmark = pytest.mark.smoke

Batch = dict[str, torch.Tensor]
LENGTHS = [9, 2, 14, 5, 5, 3, 14, 8, 1, 6, 11, 2]
VOCABULARY, WIDTH = 23, 8


class Reader(nn.Module):
    """A small Transformer by hand: an embedding, attention that heeds the mask, a head for tokens."""

    def __init__(self, positions: str = "none") -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), positions
        self.position = nn.Embedding(64, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        if self.positions == "from the left edge":
            hidden = hidden + self.position(torch.arange(input_ids.shape[1]))
        elif self.positions == "from the mask":
            hidden = hidden + self.position((attention_mask.cumsum(1) - 1).clamp(min=0))
        q, k, v = self.qkv(hidden).chunk(3, dim=-1)
        if self.positions != "blind":
            mask = attention_mask[:, None, :].bool()
            return self.head(hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return self.head(hidden + F.scaled_dot_product_attention(q, k, v))


def built(positions: str = "none") -> Reader:
    torch.manual_seed(0)
    return Reader(positions).double()


def token_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
    losses = F.cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return wb.LossSum(losses, (batch["labels"] != -100).sum())


def token_mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["labels"].flatten())


def examples(seed: int = 0, lengths: list[int] = LENGTHS) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        labels = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100, *labels[1:]]})
    return rows


def collate(rows: list[dict[str, Any]], left: bool = False, to: int = 0) -> Batch:
    width = max(to, *(len(row["input_ids"]) for row in rows))

    def padded(values: list[int], filler: int) -> list[int]:
        filling = [filler] * (width - len(values))
        return filling + values if left else values + filling

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
    }


BATCHES = [examples(seed) for seed in range(3)]


def whole(collated: Callable[[list[dict[str, Any]]], Batch], positions: str = "none") -> Any:
    model = built(positions)
    return trained(model, adamw(model), [collated(rows) for rows in BATCHES], one_pass(token_mean))


def in_groups(batches: list[Any], positions: str = "none", **options: Any) -> tuple[Any, list[wb.StepReport]]:
    model, reports = built(positions), []
    optimizer = adamw(model)
    accumulator = wb.GradientAccumulator(model, token_loss, optimizer=optimizer, **options)

    def backward(_: nn.Module, batch: Any) -> torch.Tensor:
        reports.append(accumulator.backward(batch))
        return reports[-1].loss

    return trained(model, optimizer, batches, backward), reports


def same(found: Any, right: Any) -> None:
    assert found.losses == pytest.approx(right.losses, rel=1e-12)
    for one, other in zip(found.gradients, right.gradients, strict=True):
        assert distance(one, other) < 1e-12
    assert distance(found.parameters, right.parameters) < 1e-10
    for one, other in zip(found.state, right.state, strict=True):
        assert all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-15) for name in one)


SIZES = (1, 2, 3, 5, len(LENGTHS), "auto")


@pytest.mark.parametrize("size", SIZES)
def test_lists_of_examples_are_regrouped_and_exact(size: int | str) -> None:
    """Losses, gradients, parameters and optimizer state of three updates, in float64."""
    found, reports = in_groups(BATCHES, collate_fn=collate, micro_batch_size=size)
    same(found, whole(collate))
    assert reports[-1].real_tokens == sum(LENGTHS)
    assert reports[-1].padded_tokens is not None
    assert sum(reports[-1].micro_batch_sizes) == len(LENGTHS)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_padded_batches_are_regrouped_trimmed_and_exact(size: int | str, left: bool) -> None:
    """On both sides; positions come from the mask, so that padding on the left may be left out too."""

    def collated(rows: list[dict[str, Any]]) -> Batch:
        return collate(rows, left, to=20)

    found, reports = in_groups([collated(rows) for rows in BATCHES], positions="from the mask", micro_batch_size=size)
    same(found, whole(collated, "from the mask"))
    assert reports[-1].real_tokens == sum(LENGTHS)
    if size not in (len(LENGTHS), "auto"):  # a batch in one piece stays as it is, so that nothing need be checked
        assert reports[-1].padded_tokens < len(LENGTHS) * 14


@pytest.mark.parametrize("size", [2, 3, 5])
def test_regrouping_leaves_out_most_of_the_padding(size: int) -> None:
    """Against full micro-batches in arrival order."""
    _, sorted_reports = in_groups(BATCHES, collate_fn=collate, micro_batch_size=size)
    _, plain_reports = in_groups(BATCHES, collate_fn=collate, micro_batch_size=size, regroup=False)
    assert plain_reports[-1].micro_batch_sizes[:-1] == (size,) * (len(plain_reports[-1].micro_batch_sizes) - 1)
    saved = [report.padded_tokens - report.real_tokens for report in (sorted_reports[-1], plain_reports[-1])]
    assert saved[0] < 0.5 * saved[1]


def test_off_with_a_word() -> None:
    """The examples keep their order: `loss_fn` sees them as they came."""
    seen: list[int] = []

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        seen.extend(batch["attention_mask"].sum(dim=1).tolist())
        return token_loss(model, batch)

    accumulator = wb.GradientAccumulator(built(), loss_fn, collate_fn=collate, micro_batch_size=3, regroup=False)
    accumulator.backward(BATCHES[0])
    seen.clear()
    accumulator.backward(BATCHES[1])
    assert seen == LENGTHS


def test_the_longest_come_first_and_each_once() -> None:
    seen: list[int] = []

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        seen.extend(batch["attention_mask"].sum(dim=1).tolist())
        return token_loss(model, batch)

    accumulator = wb.GradientAccumulator(built(), loss_fn, collate_fn=collate, micro_batch_size=3)
    accumulator.backward(BATCHES[0])
    seen.clear()
    accumulator.backward(BATCHES[1])
    assert seen == sorted(LENGTHS, reverse=True)


# ---- Per example, in the caller's order ----


@pytest.mark.parametrize("as_list", [True, False])
def test_bad_examples_are_named_by_their_place_in_the_batch(as_list: bool) -> None:
    """Example 5 of the batch, not the one that is fifth in order of length."""

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        loss = token_loss(model, batch)
        bad = (batch["input_ids"] == VOCABULARY - 1).any()
        return wb.LossSum(torch.where(bad, loss.sum * float("nan"), loss.sum), loss.count)

    rows = [{**row, "input_ids": [min(i, VOCABULARY - 2) for i in row["input_ids"]]} for row in BATCHES[0]]
    good, bad = rows, [dict(row) for row in rows]
    bad[5] = {**bad[5], "input_ids": [VOCABULARY - 1] * LENGTHS[5]}
    options = {"collate_fn": collate} if as_list else {}
    model = built("from the mask")
    accumulator = wb.GradientAccumulator(model, loss_fn, micro_batch_size=4, **options)
    accumulator.backward(good if as_list else collate(good))
    model.zero_grad()
    report = accumulator.backward(bad if as_list else collate(bad))
    assert report.bad_examples == (5,)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("as_list", [True, False])
def test_one_loss_per_example_in_any_order(as_list: bool) -> None:
    def per_example(model: nn.Module, batch: Batch) -> torch.Tensor:
        hidden = model(**batch)
        kept = batch["attention_mask"]
        return (hidden.logsumexp(-1) * kept).sum(1) / kept.sum(1)

    batch = collate(BATCHES[0])
    model = built()
    per_example(model, batch).mean().backward()
    right = copied_gradients(model)
    model.zero_grad()
    options = {"collate_fn": collate} if as_list else {}
    wb.GradientAccumulator(model, per_example, micro_batch_size=3, **options).backward(BATCHES[0] if as_list else batch)
    assert distance(copied_gradients(model), right) < 1e-12


# ---- Where the order matters ----


class WithBatchNorm(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = super().forward(input_ids, attention_mask)
        return self.norm(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])


def test_batch_norm_keeps_the_order_and_says_why() -> None:
    torch.manual_seed(0)
    model, seen = WithBatchNorm(), []

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        seen.extend(batch["attention_mask"].sum(dim=1).tolist())
        return token_loss(model, batch)

    accumulator = wb.GradientAccumulator(model, loss_fn, collate_fn=collate, micro_batch_size=4)
    with pytest.warns(BatchStatisticsWarning, match="not regrouped by length"):
        accumulator.backward(BATCHES[0])
    seen.clear()
    accumulator.backward(BATCHES[1])
    assert seen == LENGTHS
    model.eval()  # its statistics do not move now, and the order does not matter
    seen.clear()
    accumulator.backward(BATCHES[2])
    assert seen == sorted(LENGTHS, reverse=True)


# ---- What is checked before padding is left out ----


def widths_seen(positions: str, left: bool, updates: int = 3, loss: Any = token_loss) -> list[int]:
    seen: list[int] = []

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        seen.append(batch["input_ids"].shape[1])
        return loss(model, batch)

    accumulator = wb.GradientAccumulator(built(positions), loss_fn, micro_batch_size=3)
    for rows in BATCHES[:updates]:
        seen.clear()
        accumulator.backward(collate(rows, left, to=20))
    return seen


@pytest.mark.parametrize(
    ("positions", "left"),
    [("none", False), ("none", True), ("from the left edge", False), ("from the mask", True), ("from the mask", False)],
)
def test_padding_that_changes_nothing_is_left_out(positions: str, left: bool) -> None:
    """Also on the left, where there are no positions, or the model takes them from the mask."""
    assert max(widths_seen(positions, left)) < 20


@pytest.mark.parametrize(("positions", "left"), [("from the left edge", True), ("blind", False), ("blind", True)])
def test_padding_that_changes_something_is_kept_and_a_warning_says_so(positions: str, left: bool) -> None:
    """Positions that count from the left edge, and attention that sees the padding."""
    with pytest.warns(PaddingKeptWarning, match="numbers positions from the edge"):
        assert widths_seen(positions, left) == [20] * 4


def test_the_first_micro_batch_ever_has_been_checked() -> None:
    """No micro-batch that counts is trimmed before the check has passed: widths of the check's own calls come first."""
    seen: list[tuple[int, int, bool]] = []

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        seen.append((*batch["input_ids"].shape, model.training))
        return token_loss(model, batch)

    wb.GradientAccumulator(built(), loss_fn, micro_batch_size=3).backward(collate(BATCHES[0], to=20))
    rows, width, training = seen[0]
    assert (rows, width, training) == (3, 20, False)
    assert [width for _, width, training in seen if training][-1] < 20


def test_with_regroup_off_nothing_is_tried() -> None:
    accumulator = wb.GradientAccumulator(built("blind"), token_loss, micro_batch_size=3, regroup=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = accumulator.backward(collate(BATCHES[0], to=20))
    assert report.padded_tokens == 20 * len(LENGTHS)


def test_a_denominator_with_the_padded_length_in_it_is_refused_by_name() -> None:
    """`(l * mask).mean()`: right as long as nothing is trimmed, and then off by the ratio of the widths."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses = F.cross_entropy(model(**batch).transpose(1, 2), batch["labels"].clamp(min=0), reduction="none")
        return (losses * batch["attention_mask"]).mean()

    model = built()
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=3)
    with pytest.raises(LossNotAdditiveError, match=r"divided by the padded length.*regroup=False"):
        accumulator.backward(collate(BATCHES[0], to=20))
    assert all(parameter.grad is None for parameter in model.parameters())

    batch = collate(BATCHES[0], to=20)
    loss_fn(model, batch).backward()
    right = copied_gradients(model)
    model.zero_grad()
    kept = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=3, regroup=False)
    kept.backward(batch)
    assert distance(copied_gradients(model), right) < 1e-12


def test_a_zero_initialised_head_does_not_hide_that_padding_is_seen() -> None:
    """Every loss is log(23) then, trimmed or not; the gradients are not the same."""
    model = built("blind")
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    accumulator = wb.GradientAccumulator(model, token_loss, micro_batch_size=3)
    with pytest.warns(PaddingKeptWarning):
        report = accumulator.backward(collate(BATCHES[0], to=20))
    assert report.padded_tokens == 20 * len(LENGTHS)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == -100, 0)},
        lambda batch: {**batch, "square": torch.ones(len(LENGTHS), 20, 20)},
        lambda batch: {**batch, "weights": torch.rand(len(LENGTHS), 20)},
        lambda batch: {**batch, "table": torch.ones(1, 3, 20)},
        lambda batch: {**batch, "attention_mask": batch["attention_mask"].double()},
    ],
    ids=["labels in the padding", "a square mask", "numbers in the padding", "a shared table", "a float mask"],
)
def test_what_is_not_plainly_padding_stays(change: Callable[[Batch], Batch]) -> None:
    model = built()

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        logits = model(batch["input_ids"], batch["attention_mask"].long())
        return wb.LossSum(
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"),
            (batch["labels"] != -100).sum(),
        )

    widths: list[int] = []

    def watched(model: nn.Module, batch: Batch) -> wb.LossSum:
        widths.append(batch["input_ids"].shape[1])
        return loss_fn(model, batch)

    batch = change(collate(BATCHES[0], to=20))
    wb.GradientAccumulator(model, watched, micro_batch_size=3).backward(batch)
    assert set(widths) == {20}
    found = copied_gradients(model)
    model.zero_grad()
    loss = loss_fn(model, batch)
    (loss.sum / loss.count).backward()
    assert distance(found, copied_gradients(model)) < 1e-12


def test_positions_that_all_examples_share_are_trimmed_too() -> None:
    def loss_fn(model: Reader, batch: Batch) -> wb.LossSum:
        logits = model(batch["input_ids"], batch["attention_mask"]) + batch["position_ids"][..., None]
        return wb.LossSum((logits.logsumexp(-1) * batch["attention_mask"]).sum(), batch["attention_mask"].sum())

    batch = collate(BATCHES[0], to=20) | {"position_ids": torch.arange(20.0)[None].double()}
    model = built()
    report = wb.GradientAccumulator(model, loss_fn, micro_batch_size=3).backward(batch)
    assert report.padded_tokens < 14 * len(LENGTHS)
    found = copied_gradients(model)
    model.zero_grad()
    loss = loss_fn(model, batch)
    (loss.sum / loss.count).backward()
    assert distance(found, copied_gradients(model)) < 1e-12


# ---- What is right in one batch, and not in a later one ----


def exact_in_each(
    loss_fn: Callable[[nn.Module, Batch], wb.LossSum], batches: list[Batch], positions: str = "none", size: int = 3
) -> tuple[list[int], list[type[Warning]]]:
    """Each batch's gradient is that of one pass; returns the padded tokens of each, and the warnings."""
    model = built(positions)
    accumulator = wb.GradientAccumulator(model, loss_fn, micro_batch_size=size)
    tokens, given = [], []
    for batch in batches:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokens.append(accumulator.backward(batch).padded_tokens)
        given += [warning.category for warning in caught]
        found = copied_gradients(model)
        model.zero_grad()
        loss = loss_fn(model, batch)
        (loss.sum / loss.count).backward()
        assert distance(found, copied_gradients(model)) < 1e-12
        model.zero_grad()
    return tokens, given


def shifted_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
    logits, labels = model(batch["input_ids"], batch["attention_mask"])[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return wb.LossSum(loss, (labels != -100).sum())


def test_a_first_token_that_is_predicted_from_the_padding_keeps_it() -> None:
    """On the left, after the shift: in one pass it is predicted, and trimmed to its own width it would not be."""
    masked, bare = (collate(rows, left=True, to=20) for rows in BATCHES[:2])
    first = torch.tensor([20 - length for length in LENGTHS])
    bare["labels"][torch.arange(len(LENGTHS)), first] = 7
    tokens, _ = exact_in_each(shifted_loss, [masked, bare], "from the mask")
    assert tokens[0] < 14 * len(LENGTHS)
    assert tokens[1] == 20 * len(LENGTHS)


def weighted(model: nn.Module, batch: Batch) -> wb.LossSum:
    """Weights in the padding count too; so do features."""
    logits = model(batch["input_ids"], batch["attention_mask"])
    extra = batch.get("features", torch.zeros(*logits.shape[:2], 1)).double().sum(-1)
    scores = logits.logsumexp(-1) * batch["weights"] + extra * logits[..., 0].mean(1, keepdim=True)
    return wb.LossSum(scores.sum(), batch["weights"].sum())


@pytest.mark.parametrize("field", ["weights", "features"])
def test_padding_that_holds_something_else_later_is_checked_anew(field: str) -> None:
    batches = []
    for rows, value in zip(BATCHES[:2], (0.0, 1.0), strict=True):
        batch = collate(rows, to=20)
        real = batch["attention_mask"].double()
        batch |= {"weights": real, "features": torch.zeros(len(LENGTHS), 20, 2).double()}
        padding = (1 - real) * value
        batch[field] = batch[field] + (padding if field == "weights" else padding[..., None])
        batches.append(batch)
    tokens, given = exact_in_each(weighted, batches)
    assert tokens[0] < 14 * len(LENGTHS)
    assert tokens[1] == 20 * len(LENGTHS)
    assert PaddingKeptWarning in given


def test_a_model_that_begins_to_see_the_padding_is_found_out_in_the_2nd_4th_8th_batch() -> None:
    model = built("none")
    accumulator = wb.GradientAccumulator(model, token_loss, micro_batch_size=3)
    padded = [collate(rows, to=20) for rows in BATCHES]
    assert accumulator.backward(padded[0]).padded_tokens < 20 * len(LENGTHS)
    model.positions = "blind"
    with pytest.warns(PaddingKeptWarning):
        assert accumulator.backward(padded[1]).padded_tokens == 20 * len(LENGTHS)


def test_a_model_that_sees_padding_in_training_only_is_found_out() -> None:
    class InTraining(Reader):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            logits = super().forward(input_ids, attention_mask)
            return logits + logits.mean(1, keepdim=True) if self.training else logits

    torch.manual_seed(0)
    accumulator = wb.GradientAccumulator(InTraining().double(), token_loss, micro_batch_size=3)
    with pytest.warns(PaddingKeptWarning):
        assert accumulator.backward(collate(BATCHES[0], to=20)).padded_tokens == 20 * len(LENGTHS)


def test_a_metric_that_counts_columns_keeps_the_padding() -> None:
    """Loss and gradient are right without it, and the metric is not."""

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        loss, ids = token_loss(model, batch), batch["input_ids"]
        return wb.LossSum(loss.sum, loss.count, metrics={"zeros": ((ids == 0).sum(), ids.numel())})

    batch = collate(BATCHES[0], to=20)
    accumulator = wb.GradientAccumulator(built(), loss_fn, micro_batch_size=3)
    with pytest.warns(PaddingKeptWarning, match="a metric"):
        report = accumulator.backward(batch)
    assert float(report.metrics["zeros"]) == pytest.approx(float((batch["input_ids"] == 0).double().mean()))


def test_a_loss_that_fails_anyway_is_not_blamed_on_the_padding() -> None:
    accumulator = wb.GradientAccumulator(built(), token_mean, micro_batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CountRequiredError, match='count="tokens"'):
            accumulator.backward(collate(BATCHES[0], to=20))


def test_dropout_does_not_stand_in_the_way() -> None:
    class WithDropout(Reader):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
            return F.dropout(super().forward(input_ids, attention_mask), 0.1, self.training)

    torch.manual_seed(0)
    accumulator = wb.GradientAccumulator(WithDropout().double(), token_loss, micro_batch_size=3)
    assert accumulator.backward(collate(BATCHES[0], to=20)).padded_tokens < 20 * len(LENGTHS)


def test_the_checks_go_on_where_they_stood_in_a_later_run() -> None:
    """So that a run that is resumed makes the cut that it would have made."""
    padded = [collate(examples(seed), to=20) for seed in range(6)]

    def sizes(resumed_at: int | None) -> list[tuple[int, ...]]:
        made, found = wb.GradientAccumulator(built(), token_loss, deterministic=True, micro_batch_size=3), []
        for number, batch in enumerate(padded):
            if number == resumed_at:
                state = made.state_dict()
                made = wb.GradientAccumulator(built(), token_loss, deterministic=True, micro_batch_size=3)
                made.load_state_dict(state)
            found.append(made.backward(batch).micro_batch_sizes)
        return found

    assert sizes(3) == sizes(1) == sizes(None)


# ---- Collators that are not well-behaved ----


@pytest.mark.parametrize("kind", ["pops with a default", "appends"])
def test_a_collator_that_changes_its_examples_does_so_once(kind: str) -> None:
    """What is collated for a check are copies."""

    def changing(rows: list[dict[str, Any]]) -> Batch:
        for row in rows:
            if kind == "appends":
                row["input_ids"].append(1)
                row["labels"].append(2)
        weights = torch.tensor([row.pop("weight", 1.0) for row in rows]).double()
        return collate(rows) | {"weight": weights}

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        logits = model(batch["input_ids"], batch["attention_mask"])
        scores = (logits.logsumexp(-1) * batch["attention_mask"]).sum(1)
        return wb.LossSum((scores * batch["weight"]).sum(), batch["weight"].sum())

    def fresh() -> list[dict[str, Any]]:
        return [{**row, "weight": 1.0 + i} for i, row in enumerate(examples(0))]

    model = built()
    wb.GradientAccumulator(model, loss_fn, collate_fn=changing, micro_batch_size=3).backward(fresh())
    found = copied_gradients(model)
    model.zero_grad()
    loss = loss_fn(model, changing(fresh()))
    (loss.sum / loss.count).backward()
    assert distance(found, copied_gradients(model)) < 1e-12


def test_a_collator_that_cannot_be_called_again_is_not_verified_and_says_so() -> None:
    def popping(rows: list[dict[str, Any]]) -> Batch:
        return collate([{"input_ids": row.pop("input_ids"), "labels": row.pop("labels")} for row in rows])

    model = built()
    accumulator = wb.GradientAccumulator(model, token_loss, collate_fn=popping, micro_batch_size=3)
    with pytest.warns(LossNotVerifiedWarning, match="cannot be called again"):
        accumulator.backward(examples(0))
    found = copied_gradients(model)
    model.zero_grad()
    token_mean(model, collate(examples(0))).backward()
    assert distance(found, copied_gradients(model)) < 1e-12


# ---- Lengths ----


def test_a_collator_that_pads_to_one_length_leaves_the_order_alone() -> None:
    """Nothing is to be gained, and memory is counted by what the collator makes, not by what it is given."""
    seen: list[int] = []

    def fixed(rows: list[dict[str, Any]]) -> Batch:
        return collate(rows, to=20)

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        seen.extend(batch["attention_mask"].sum(dim=1).tolist())
        return token_loss(model, batch)

    accumulator = wb.GradientAccumulator(built(), loss_fn, collate_fn=fixed, deterministic=True)
    many = examples(0, LENGTHS * 20)
    accumulator.backward(many)
    seen.clear()
    report = accumulator.backward(many)
    assert seen == LENGTHS * 20
    assert max(report.micro_batch_sizes) == 512 // 20 - 1  # 240 in ten micro-batches of 24, as 25 hold 500 tokens


def test_texts_are_put_together_by_their_characters() -> None:
    """What the collator tokenises has no length in tokens yet."""

    def tokenised(texts: list[str]) -> Batch:
        return collate([{"input_ids": [1 + ord(c) % 22 for c in text], "labels": [3] * len(text)} for text in texts])

    texts = ["a" * length for length in LENGTHS]
    model = built()
    report = wb.GradientAccumulator(model, token_loss, collate_fn=tokenised, micro_batch_size=3).backward(texts)
    found = copied_gradients(model)
    model.zero_grad()
    token_mean(model, tokenised(texts)).backward()
    assert distance(found, copied_gradients(model)) < 1e-12
    assert report.padded_tokens - report.real_tokens < 12


def test_what_was_learned_of_lengths_and_padding_goes_on_in_a_later_run() -> None:
    made = [
        wb.GradientAccumulator(built(), token_loss, collate_fn=collate, micro_batch_size=3),
        wb.GradientAccumulator(built(), token_loss, micro_batch_size=3),
    ]
    made[0].backward(BATCHES[0])
    made[1].backward(collate(BATCHES[0], to=20))
    for accumulator, options in zip(made, ({"collate_fn": collate}, {}), strict=True):
        later = wb.GradientAccumulator(built(), token_loss, micro_batch_size=3, **options)
        later.load_state_dict(accumulator.state_dict())
        assert later.state_dict() == accumulator.state_dict()
    assert made[0].state_dict()["padded_lengths"]
    assert made[1].state_dict()["trims"]["allowed"] == [
        "right padding of attention_mask (0), input_ids (0), labels (-100)"
    ]


def test_evaluation_is_regrouped_too() -> None:
    model = built()
    accumulator = wb.GradientAccumulator(model, token_loss, micro_batch_size=3)
    report = accumulator.evaluate(collate(BATCHES[0], to=20))
    assert report.loss == pytest.approx(float(token_mean(model, collate(BATCHES[0])).detach()), rel=1e-12)


def test_compiled_models_get_few_widths() -> None:
    """Multiples of 64, or the batch's own width."""
    from wholebatch.options import shape_multiple

    model = built()
    assert shape_multiple(torch.compile(model), None) == 64
    assert shape_multiple(model, None) == 1

    class Collator:
        pad_to_multiple_of = 8

        def __call__(self, rows: list[Any]) -> Any:
            return rows

    assert shape_multiple(model, Collator()) == 8


@pytest.mark.parametrize(
    ("example", "length", "tokens"),
    [
        ({"input_ids": [1, 2, 3], "vector": torch.zeros(768)}, 3, True),
        ({"ids": torch.arange(4), "vector": torch.zeros(768)}, 4, True),
        ((torch.arange(5), torch.tensor(1)), 5, True),
        (((1, 2, 3, 4, 5, 6), 0), 6, True),
        ({"text": "seven !"}, 7, False),
        ({"sound": torch.zeros(8)}, 8, True),
        (torch.tensor(1.0), 1, False),
    ],
)
def test_what_the_length_of_an_example_is(example: Any, length: int, tokens: bool) -> None:
    assert (example_length(example), holds_tokens(example)) == (length, tokens)


def test_numpy_rows_have_a_length_too() -> None:
    numpy = pytest.importorskip("numpy")
    assert example_length({"ids": numpy.arange(5), "vector": numpy.zeros(9)}) == 5


def test_what_turns_out_longer_than_expected_is_split() -> None:
    """The first example of each batch is one whose collated length nothing has told: 10 characters, 400 tokens."""

    def made(texts: list[str]) -> Batch:
        rows = [{"input_ids": [3] * (400 if "!" in t else len(t))} for t in texts]
        return collate([{**row, "labels": row["input_ids"]} for row in rows])

    model = built()
    accumulator = wb.GradientAccumulator(model, token_loss, collate_fn=made, deterministic=True)
    accumulator.backward(["a" * 10] * 40)
    model.zero_grad()
    texts = ["a" * 10] * 39 + ["a" * 9 + "!"]
    report = accumulator.backward(texts)
    assert max(report.micro_batch_sizes) == 1
    found = copied_gradients(model)
    model.zero_grad()
    token_mean(model, made(texts)).backward()
    assert distance(found, copied_gradients(model)) < 1e-12


def test_a_state_that_is_none_changes_nothing() -> None:
    accumulator = wb.GradientAccumulator(built(), token_loss, micro_batch_size=3)
    accumulator.backward(collate(BATCHES[0], to=20))
    state = accumulator.state_dict()
    for name, wrong in (("trims", {}), ("padded_lengths", [[1]]), ("first_batch", {})):
        broken = {**state, "skipped_in_a_row": 7, name: wrong}
        with pytest.raises(ConfigurationError, match="not the state"):
            accumulator.load_state_dict(broken)
        assert accumulator.state_dict() == state


def test_examples_of_several_pieces_are_named_by_their_place_in_the_batch() -> None:
    """As a loader's batches of other widths come, one after another."""
    from wholebatch.batch.layout import BatchPieces

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        loss = token_loss(model, batch)
        bad = (batch["input_ids"] == VOCABULARY - 1).any()
        return wb.LossSum(torch.where(bad, loss.sum * float("nan"), loss.sum), loss.count)

    rows = [{**row, "input_ids": [min(i, VOCABULARY - 2) for i in row["input_ids"]]} for row in BATCHES[0]]
    accumulator = wb.GradientAccumulator(built(), loss_fn, micro_batch_size=2)
    accumulator.backward(BatchPieces([collate(rows[:5], to=15), collate(rows[5:], to=20)]))
    rows[8] = {**rows[8], "input_ids": [VOCABULARY - 1] * LENGTHS[8]}
    report = accumulator.backward(BatchPieces([collate(rows[:5], to=15), collate(rows[5:], to=20)]))
    assert report.bad_examples == (8,)


# ---- Details that a change could break without a word ----


def test_widths_are_rounded_up_within_the_batch_and_the_update_stays() -> None:
    """In multiples of 4, or the batch's own 18 columns."""
    widths: list[int] = []

    def watched(model: nn.Module, batch: Batch) -> wb.LossSum:
        if model.training:
            widths.append(batch["input_ids"].shape[1])
        return token_loss(model, batch)

    model = built("from the mask")
    accumulator = wb.GradientAccumulator(model, watched, micro_batch_size=2)
    object.__setattr__(accumulator._knife, "multiple", 4)
    for left in (False, True):
        batch = collate(BATCHES[0], left, to=18)
        accumulator.backward(batch)
        model.zero_grad()
        widths.clear()
        accumulator.backward(batch)
        assert {width % 4 for width in widths if width != 18} == {0}
        assert len(set(widths)) > 2
        found = copied_gradients(model)
        model.zero_grad()
        token_mean(model, batch).backward()
        assert distance(found, copied_gradients(model)) < 1e-12
        model.zero_grad()


def test_lists_are_counted_in_the_multiples_that_the_collator_pads_to() -> None:
    """100 tokens padded to 128 are 4 in 512, not 5: nothing has to be split afterwards."""

    class Collator:
        pad_to_multiple_of = 64

        def __call__(self, rows: list[dict[str, Any]]) -> Batch:
            return collate(rows, to=-(-max(len(row["input_ids"]) for row in rows) // 64) * 64)

    rows = examples(0, [100] * 12 + [20] * 12 + [70] * 12)
    accumulator = wb.GradientAccumulator(built(), token_loss, collate_fn=Collator(), deterministic=True)
    accumulator.backward(rows)
    assert accumulator.backward(rows).micro_batch_sizes == (4, 4, 4, 4, 4, 4, 6, 6)


def test_two_masks_leave_a_batch_as_it_is() -> None:
    """Which of them says how long the examples are is not known."""

    def loss_fn(model: nn.Module, batch: Any) -> wb.LossSum:
        return token_loss(model, batch["one"])

    batch = {"one": collate(BATCHES[0], to=20), "other": collate(BATCHES[1][::-1], to=20)}
    report = wb.GradientAccumulator(built(), loss_fn, micro_batch_size=3).backward(batch)
    assert (report.real_tokens, report.padded_tokens) == (None, None)


def test_a_stated_layout_is_left_as_it_is() -> None:
    layout = wb.BatchLayout(batch_dims={"extra": 1})
    batch = {**collate(BATCHES[0], to=20), "extra": torch.zeros(3, len(LENGTHS), 20)}

    def loss_fn(model: nn.Module, batch: Batch) -> wb.LossSum:
        assert batch["extra"].shape[2] == batch["input_ids"].shape[1] == 20
        return token_loss(model, batch)

    report = wb.GradientAccumulator(built(), loss_fn, micro_batch_size=3, layout=layout).backward(batch)
    assert report.padded_tokens == 20 * len(LENGTHS)


def test_an_example_that_is_all_padding_leaves_a_batch_as_it_is() -> None:
    batch = collate(BATCHES[0], to=20)
    batch["attention_mask"][4] = 0
    batch["labels"][4], batch["input_ids"][4] = -100, 0
    assert padding_of(Piece(batch)) is None
    batch["attention_mask"][4, 0] = 1
    assert padding_of(Piece(batch)) is not None


def test_trimmed_fields_can_be_viewed_as_losses_do() -> None:
    """`labels.view(-1)` needs rows without gaps between them, also where they are neighbours in the batch."""

    def viewing(model: nn.Module, batch: Batch) -> wb.LossSum:
        labels = batch["labels"].view(-1)
        logits = model(batch["input_ids"], batch["attention_mask"])
        return wb.LossSum(F.cross_entropy(logits.view(-1, VOCABULARY), labels, reduction="sum"), (labels != -100).sum())

    same_length = collate(examples(0, [7] * 12), to=20)
    report = wb.GradientAccumulator(built(), viewing, micro_batch_size=3).backward(same_length)
    assert report.padded_tokens == 7 * 12


def test_modules_that_track_what_they_see_keep_the_order() -> None:
    from wholebatch.suitability import order_matters

    assert order_matters(nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)))
    assert not order_matters(nn.Sequential(nn.InstanceNorm1d(3), nn.LayerNorm(3)))
    assert not order_matters(nn.Sequential(nn.BatchNorm1d(3)).eval())


def test_a_new_kind_of_padding_is_tried_when_it_comes() -> None:
    """Whatever was tried before it: the third batch has its padding on the other side."""
    accumulator = wb.GradientAccumulator(built("from the mask"), token_loss, micro_batch_size=3)
    tokens = [
        accumulator.backward(collate(rows, left, to=20)).padded_tokens
        for rows, left in zip(BATCHES, (False, False, True), strict=True)
    ]
    assert max(tokens) < 14 * len(LENGTHS)


def test_a_batch_that_says_nothing_is_followed_by_one_that_does() -> None:
    """A model that gives zero whatever it sees says nothing of the padding; a trained one does."""
    model = built()
    accumulator = wb.GradientAccumulator(model, lambda m, b: scaled(m, b), micro_batch_size=3)
    scale = 0.0

    def scaled(model: nn.Module, batch: Batch) -> wb.LossSum:
        loss = token_loss(model, batch)
        return wb.LossSum(loss.sum * scale, loss.count)

    padded = [collate(rows, to=20) for rows in BATCHES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert accumulator.backward(padded[0]).padded_tokens == 20 * len(LENGTHS)
        scale = 1.0
        assert accumulator.backward(padded[1]).padded_tokens < 14 * len(LENGTHS)


def test_what_is_split_keeps_its_tokens_and_its_places() -> None:
    rows = collate(BATCHES[0], to=20)
    knife = Knife(Counter("tokens"))
    [whole] = knife.cut(rows, FixedSize(12)).micro_batches
    parts = list(knife.split(whole, 5))
    assert [part.num_examples for part in parts] == [4, 4, 4]
    assert [part.start for part in parts] == [0, 4, 8]
    assert [part.tokens for part in parts] == [80, 80, 80]
    assert [place for part in parts for place in part.examples] == list(range(12))
    assert sum(part.counts["loss"] for part in parts) == whole.counts["loss"]


def test_lengths_are_learned_from_what_was_made_and_never_shrink() -> None:
    learned = PaddedLengths()
    learned.learn_first(10, 12)
    learned.learn_first(100, 102)
    assert learned.of([10, 55, 100, 200]) == [12, 57, 102, 202]
    learned.learn(60, 90)  # longer than expected
    assert learned.of([55, 60, 70, 100])[1] == 90
    assert learned.of([60, 80, 100]) == sorted(learned.of([60, 80, 100]))
    learned.learn(60, 80)  # shorter than once made of the same: the worst counts
    assert learned(60) == 90
    later = PaddedLengths()
    later.load_state_dict(learned.state_dict())
    assert later.of(range(1, 300)) == learned.of(range(1, 300))
