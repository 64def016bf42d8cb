"""The loss as its user states it: reads what `loss_fn` returned into one form.

A micro-batch's loss becomes one or several `Term`s: a value to differentiate, and the weight that turns it into the
sum over the micro-batch's units. The batch's loss is, for each term, the sum over micro-batches of `value * weight`
divided by the batch's denominator; so the backward of a micro-batch starts with `weight / denominator`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from wholebatch.errors import CountRequiredError, LossFormError, ScalarWithoutCountError
from wholebatch.facts import LossSum, Number
from wholebatch.loss.counting import ONLY, Count, Counter
from wholebatch.loss.head import ChunkedHead
from wholebatch.loss.hugging_face import forward_loss, hugging_face_model, own_count
from wholebatch.loss.shown import shown_denominator


@dataclass(frozen=True)
class Term:
    """One term of a micro-batch's loss."""

    value: torch.Tensor
    """0-d, float32 or wider, with its graph."""

    weight: float
    """`value * weight` is the sum over the micro-batch's units."""

    count: Number
    """The units in this micro-batch."""

    shown: torch.Tensor | None = None
    """The denominator that the loss's own graph shows, 0-d and not read (`shown_denominator`)."""


@dataclass(frozen=True)
class MicroBatchLoss:
    """What `loss_fn` returned for a micro-batch, in one form."""

    terms: Mapping[str, Term]
    metrics: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    form: str = "scalar"
    """`"scalar"`, `"per example"`, `"sum and count"` or `"terms"`: whether the count is known before the forward."""


class StatedLoss:
    """`loss_fn` and `count=` together.

    Raises:
        LossFormError: `loss_fn` is missing, not callable, or a criterion such as `nn.CrossEntropyLoss()`.
        ConfigurationError: `count` is unknown.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, count: Count | None, chunked: bool = False
    ) -> None:
        self._function = _loss_function(model, loss_fn)
        self.head = ChunkedHead(model) if chunked and loss_fn is None else None
        """What computes the loss in place of the model where its head may be in chunks; None where it may not."""

        if self.head is not None:
            self._function = self.head
        host = hugging_face_model(model)
        own = None if host is None else own_count(host)
        # The model's word is taken for the loss the model computes itself; under a loss_fn it tells no more than
        # whether "tokens" are counted after a shift.
        self.counter = Counter(count, own if loss_fn is None else None, shifted=own == "tokens after the shift")

    def as_sum(self) -> "StatedLoss":
        """The same loss read as a plain sum, to look at its values without a count."""
        other = copy.copy(self)
        other.counter = Counter("sum")
        return other

    def computed_by(self, function: Callable[[nn.Module, Any], Any]) -> "StatedLoss":
        """The same loss computed in another way."""
        other = copy.copy(self)
        other._function = function
        return other

    def __call__(
        self, model: nn.Module, micro_batch: Any, counts: Mapping[str, float], num_examples: int
    ) -> MicroBatchLoss:
        """The loss of `micro_batch`, forward only.

        Raises:
            LossFormError: What `loss_fn` returned has no known form.
            CountRequiredError: It is a scalar, or has several terms, and `count` does not say what of.
        """
        loss = _without_extras(self._function(model, micro_batch))
        if isinstance(loss, LossSum):
            return self._read_sum(loss, counts)
        if isinstance(loss, Mapping):
            return self._read_terms(loss, counts)
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            raise LossFormError(_unknown_form(loss))
        if loss.ndim == 0:
            return self._read_scalar(loss, counts, num_examples)
        if loss.shape == (num_examples,):
            return self._read_per_example(loss)
        raise LossFormError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)} for a micro-batch of {num_examples} examples. "
            "Return a 0-d mean with count=, one loss per example, or, for one loss per token, "
            "wb.LossSum((loss * mask).sum(), mask.sum())."
        )

    def _read_scalar(self, loss: torch.Tensor, counts: Mapping[str, float], num_examples: int) -> MicroBatchLoss:
        if not self.counter.known:
            raise ScalarWithoutCountError(loss, num_examples)
        if counts.keys() != {ONLY}:
            raise LossFormError(f"count= names the terms {sorted(counts)}, but loss_fn returned one scalar")
        weight = 1.0 if self.counter.summed else counts[ONLY]
        return MicroBatchLoss({ONLY: Term(_wide(loss), weight, counts[ONLY], shown_denominator(loss))})

    def _read_per_example(self, loss: torch.Tensor) -> MicroBatchLoss:
        if self.counter.stated not in (None, "examples"):
            raise LossFormError(
                f"loss_fn returned one loss per example, which is a mean over examples, but count="
                f"{self.counter.stated!r} says otherwise. Leave count out, or return wb.LossSum(sum, count)."
            )
        return MicroBatchLoss({ONLY: Term(_wide(loss).sum(), 1.0, float(loss.shape[0]))}, form="per example")

    def _read_sum(self, loss: LossSum, counts: Mapping[str, float]) -> MicroBatchLoss:
        if self.counter.summed:
            raise LossFormError('loss_fn returned a LossSum, which brings its own count: leave count="sum" out')
        if counts and counts.keys() != {ONLY}:
            raise LossFormError(f"count= names the terms {sorted(counts)}, but loss_fn returned a single LossSum")
        return MicroBatchLoss({ONLY: _sum_term(loss, ONLY)}, loss.metrics, form="sum and count")

    def _read_terms(self, losses: Mapping[str, Any], counts: Mapping[str, float]) -> MicroBatchLoss:
        if not losses or not all(isinstance(loss, LossSum) for loss in losses.values()):
            kinds = {str(name): type(loss).__name__ for name, loss in losses.items()}
            raise LossFormError(f"loss_fn returned a mapping {kinds}: give it a `loss`, or make every value a LossSum")
        if counts.keys() != losses.keys():
            raise CountRequiredError(
                f"loss_fn returned the terms {sorted(losses)}, and count= states {sorted(counts) or 'none of them'}. "
                "Each term's count must be known before the first backward: pass count={"
                + ", ".join(f'"{name}": lambda micro_batch: ...' for name in losses)
                + "}"
            )
        terms = {name: _sum_term(loss, name) for name, loss in losses.items()}
        metrics = {name: pair for loss in losses.values() for name, pair in loss.metrics.items()}
        return MicroBatchLoss(terms, metrics, form="terms")


def _loss_function(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Callable[[nn.Module, Any], Any]:
    criterion = f"nn.{type(loss_fn).__name__}()" if isinstance(loss_fn, nn.modules.loss._Loss) else None
    if getattr(loss_fn, "__module__", "") == "torch.nn.functional":
        criterion = f"F.{getattr(loss_fn, '__name__', '...')}"
    if criterion is not None:
        raise LossFormError(
            f"loss_fn={criterion} is a criterion: it knows neither the model nor the batch. Write\n"
            "    def loss_fn(model, batch):\n"
            f'        return {criterion}(model(batch["inputs"]), batch["labels"])\n'
            'and say what it is a mean over: count="examples", or "tokens" where there is one label per token.'
        )
    if loss_fn is None:
        if hugging_face_model(model) is None:
            raise LossFormError(
                f"loss_fn is missing: only a Hugging Face model computes its own loss, and this is a "
                f"{type(model).__name__}. Pass loss_fn(model, micro_batch), and count= for what it is a mean over."
            )
        return forward_loss
    if not callable(loss_fn):
        raise LossFormError(f"loss_fn={loss_fn!r} is not callable; it must be loss_fn(model, micro_batch)")
    return loss_fn


def _without_extras(output: Any) -> Any:
    """The loss in `(loss, extras)`, in a Hugging Face output, and in any mapping or object with a `loss`."""
    if isinstance(output, tuple) and output and not hasattr(output, "loss"):
        output = output[0]
    if isinstance(output, Mapping) and "loss" in output and not isinstance(output["loss"], LossSum):
        return output["loss"]
    if not isinstance(output, (torch.Tensor, Mapping, LossSum)) and hasattr(output, "loss"):
        return output.loss
    return output


def _sum_term(loss: LossSum, name: str) -> Term:
    if not isinstance(loss.sum, torch.Tensor) or loss.sum.ndim != 0 or not loss.sum.is_floating_point():
        got = tuple(loss.sum.shape) if isinstance(loss.sum, torch.Tensor) else type(loss.sum).__name__
        raise LossFormError(f"LossSum.sum of {name!r} must be a 0-d floating-point tensor, got {got}")
    count = loss.count
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise LossFormError(f"LossSum.count of {name!r} must be one number, got shape {tuple(count.shape)}")
        count = count.detach().reshape(())
    return Term(_wide(loss.sum), 1.0, count)


def _wide(loss: torch.Tensor) -> torch.Tensor:
    """In float32 at least: a half-precision seed of scale / count would overflow or vanish."""
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()


def _unknown_form(loss: Any) -> str:
    if isinstance(loss, (int, float)):
        return f"loss_fn returned the Python number {loss!r}, which has no gradient: return the tensor, without .item()"
    kind = f"a tensor of {loss.dtype}" if isinstance(loss, torch.Tensor) else f"{type(loss).__name__}"
    return (
        f"loss_fn returned {kind}, which is no loss. Return a 0-d mean with count=, wb.LossSum(sum, count), a mapping "
        "of LossSum, one loss per example, a Hugging Face output, or (loss, extras)."
    )
