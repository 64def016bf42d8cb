"""What is said of a count that does not hold: the size of the error, the count that fits, and the way out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import wholebatch as wb
from verification import refusal, suggestion

IGNORED = -100

Batch = dict[str, torch.Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).tanh())


@pytest.fixture
def model() -> Tagger:
    return Tagger().double()


@pytest.fixture
def batch() -> Batch:
    """1, 2, 3 and 4 tokens with labels."""
    mask = torch.arange(4) <= torch.arange(4)[:, None]
    ids = torch.randint(1, 9, mask.shape) * mask
    return {"ids": ids, "labels": (ids % 3).masked_fill(~mask, IGNORED), "mask": mask.double()}


def losses(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="none").view_as(batch["labels"])


def token_mean(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def coupled(model: Any, batch: Batch) -> torch.Tensor:
    features = model(batch["ids"]).mean(dim=1)
    return F.cross_entropy(features @ features.T, torch.arange(len(features)))


def test_the_error_is_measured(model: Tagger, batch: Batch) -> None:
    """In percent of the loss, and of the gradient where it is most, on the examples that were looked at."""
    one, other = ({name: value[row : row + 1] for name, value in batch.items()} for row in (0, 3))
    both = {name: torch.cat([one[name], other[name]]) for name in batch}
    message = refusal(model, token_mean, both, "examples", micro_batch_size=1)
    found = re.search(r"\((.*) examples\).*the loss is off by (.*) % and the gradient by ([\d,]+) %", message)
    assert found is not None
    whole, *parts = (token_mean(model, data).item() for data in (both, one, other))
    right = 100 * abs(sum(parts) / 2 - whole) / max(whole, *(part / 2 for part in parts))
    assert found[1] == "1 + 1"
    assert float(found[2]) == pytest.approx(right, rel=0.06)
    assert 10 <= float(found[3]) <= 200


@pytest.mark.parametrize(
    ("loss_fn", "count", "says"),
    [
        (token_mean, "examples", ['under count="examples"', r'a mean over \d+ labelled tokens: pass count="tokens"\.']),
        (token_mean, lambda b: b["labels"].shape[0], ["under your count function", 'pass count="tokens"']),
        (lambda m, b: losses(m, b).sum(), "tokens", ['under count="tokens"', r'a plain sum: pass count="sum"\.']),
        (lambda m, b: losses(m, b).sum(1).mean(), "tokens", [r'a mean over 3 examples: pass count="examples"\.']),
        (
            lambda m, b: losses(m, b)[:, 1:].sum() / (b["labels"][:, 1:] != IGNORED).sum(), "tokens",
            [r"labelled tokens after the shift: pass count=lambda micro_batch: "
             r'\(micro_batch\["labels"\]\[\.\.\., 1:\] != -100\)\.sum\(\)'],
        ),
        (
            lambda m, b: (losses(m, b) * (b["mask"] + 1)).sum() / (b["mask"] + 1).sum(), "tokens",
            ["Its graph shows a .* divided by", "and that fits", r"wb\.LossSum\(sum, count\)"],
        ),
        (
            lambda m, b: F.cross_entropy(
                m(b["ids"]).flatten(0, 1), b["labels"].flatten(), torch.tensor([1.0, 2, 5]).double()
            ), "tokens",
            ["class weights included", r'class_weights\[micro_batch\["labels"\]\]\.sum\(\)'],
        ),
        (coupled, "examples", ["compared with each other", "micro_batch_size of at least the batch"]),
        (
            lambda m, b: token_mean(m, b) + losses(m, b).mean(), "tokens",
            ["2 terms", r"count=\{term: \.\.\.\}", "output_router_logits=False"],
        ),
        (
            lambda m, b: wb.LossSum(token_mean(m, b), (b["labels"] != IGNORED).sum()), None,
            ["under what loss_fn returned", r"LossSum\.sum must be a plain sum over the units"],
        ),
        (
            lambda m, b: {"a": wb.LossSum(token_mean(m, b), len(b["ids"]))}, {"a": "examples"},
            ["One of the terms is no plain sum"],
        ),
        (
            lambda m, b: F.cross_entropy(
                m(b["ids"]).mean(1) @ m(b["ids"]).mean(1).T, torch.arange(len(b["ids"])), reduction="none"
            ), None,
            ["The loss of an example must not depend on which others are there"],
        ),
    ],
)  # fmt: skip
def test_the_way_out(model: Tagger, batch: Batch, loss_fn: Callable[..., Any], count: Any, says: list[str]) -> None:
    """What fits, where something does; otherwise what the graph shows and what could be the matter."""
    message = refusal(model, loss_fn, batch, count)
    assert [part for part in says if not re.search(part, message)] == [], message
    assert message.endswith("Nothing was changed.")


def test_a_suggestion_names_the_number(model: Tagger, batch: Batch) -> None:
    """So that a user can tell whether it is what they meant."""
    message = suggestion(model, token_mean, batch)
    found = re.search(
        r"On 3 examples of this batch it looks like a mean over (\d+) labelled tokens: pass (.*)\.$", message
    )
    assert found is not None
    assert int(found[1]) in (6, 7, 8, 9)
    assert found[2] == 'count="tokens"'


def test_a_count_that_is_not_additive(model: Tagger, batch: Batch) -> None:
    message = refusal(model, token_mean, batch, lambda b: b["mask"].mean(), micro_batch_size=2)
    assert re.search(r"not additive: [\d.]+ \+ [\d.]+ in the parts of a few examples, but [\d.]+ in all", message)
