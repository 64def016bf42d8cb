"""LIN, the model of the known faults: one parameter, so that every right value can be worked out by hand.

Its loss per token is `w * x`, each token's gradient is its `x`, and the batch's gradient is the mean of `x` over its
labelled tokens. AB is its usual batch: right 4.0, while the mean of its rows' means is 6.0.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb
from wholebatch.loss.chunked import linear_cross_entropy

Batch = dict[str, torch.Tensor]
Form = tuple[Callable[[nn.Module, Any], Any], Any]
"""`loss_fn` and `count=`."""

IGNORED = -100
PADDING = 7.0
"""What stands in the places without a token: a figure that shows wherever it is not left out."""

EXACT = 1e-12


class Lin(nn.Module):
    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def rows(*lines: Sequence[float], length: int | None = None) -> Batch:
    """A padded batch, a row for each sequence of tokens; an empty sequence is a row without a label."""
    length = length or max(1, *map(len, lines))
    x = torch.full((len(lines), length), PADDING, dtype=torch.float64)
    labels = torch.full((len(lines), length), IGNORED)
    for row, tokens in enumerate(lines):
        x[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.float64)
        labels[row, : len(tokens)] = 0
    return {"x": x, "labels": labels}


AB = rows([1, 2, 3], [10])


def mask_of(batch: Batch) -> torch.Tensor:
    return batch["labels"] != IGNORED


def num_tokens(batch: Batch) -> torch.Tensor:
    return mask_of(batch).sum()


def masked_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) * mask_of(batch)).sum()


def masked_mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    """0/0 where nothing has a label."""
    return masked_sum(model, batch) / num_tokens(batch)


def as_cross_entropy(model: nn.Module, batch: Batch, reduction: str = "mean") -> torch.Tensor:
    """PyTorch's own loss, on scores of two classes whose cross-entropy with class 0 is `w * x` for `w * x > 0`."""
    other = model(batch["x"]).expm1().log()
    scores = torch.stack([torch.zeros_like(other), other], dim=-1)
    return cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def sum_and_count(model: nn.Module, batch: Batch) -> wb.LossSum:
    return wb.LossSum(masked_sum(model, batch), num_tokens(batch))


def in_chunks(model: nn.Module, batch: Batch) -> wb.LossSum:
    """As `as_cross_entropy`, its scores made by a head that is not trained, two rows at a time."""
    other = model(batch["x"]).expm1().log()
    head = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return linear_cross_entropy(other[..., None], head, batch["labels"], chunk_rows=2)


FORMS: dict[str, Form] = {
    "masked mean": (masked_mean, "tokens"),
    "mean of the chosen": (lambda model, batch: model(batch["x"])[mask_of(batch)].mean(), "tokens"),
    "count function": (masked_mean, num_tokens),
    "cross-entropy, mean": (as_cross_entropy, "tokens"),
    "cross-entropy, sum": (
        lambda model, batch: wb.LossSum(as_cross_entropy(model, batch, "sum"), num_tokens(batch)),
        None,
    ),
    "cross-entropy, in chunks": (in_chunks, None),
    "sum and count": (sum_and_count, None),
    "sum and stated count": (sum_and_count, "tokens"),
    "sum and count as int": (lambda model, batch: wb.LossSum(masked_sum(model, batch), int(num_tokens(batch))), None),
    "term": (lambda model, batch: {"term": sum_and_count(model, batch)}, {"term": "tokens"}),
    "with extras": (lambda model, batch: (masked_mean(model, batch), {"logits": batch["x"]}), "tokens"),
    "output": (lambda model, batch: SimpleNamespace(loss=masked_mean(model, batch), logits=None), "tokens"),
}
"""The mean over the labelled tokens, in every form in which it can be stated."""


def accumulator(
    model: nn.Module, form: str | Form = "masked mean", size: Any = 1, **options: Any
) -> wb.GradientAccumulator:
    loss_fn, count = FORMS[form] if isinstance(form, str) else form
    return wb.GradientAccumulator(model, loss_fn, count=count, micro_batch_size=size, **options)


def examples(batch: Batch) -> list[Batch]:
    """Row by row, without the padding."""
    lengths = mask_of(batch).sum(dim=1).tolist()
    return [{name: field[row][:length] for name, field in batch.items()} for row, length in enumerate(lengths)]


def collated(lines: list[Batch]) -> Batch:
    """Pads to the longest of these examples."""
    return rows(*(example["x"].tolist() for example in lines))


def batches(xs: Sequence[float], size: int) -> Iterator[Batch]:
    """One token in each row."""
    for start in range(0, len(xs), size):
        yield rows(*([x] for x in xs[start : start + size]))
