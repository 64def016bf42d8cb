"""The loss over any amount of data, from summed numerators and counts, with the cut of training and no gradients."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from wholebatch.batch.containers import map_tensors
from wholebatch.batch.layout import BatchPieces
from wholebatch.cut import CutBatch
from wholebatch.errors import BatchLayoutError, CountError
from wholebatch.facts import EvaluationReport
from wholebatch.gradients.precision import one_autocast
from wholebatch.loss.stated import StatedLoss
from wholebatch.totals import Totals
from wholebatch.undisturbed import evaluation_mode


class Evaluator:
    """Sums a loss and its metrics over batches, in evaluation mode and without gradients."""

    def __init__(self, model: nn.Module, loss: StatedLoss, device: torch.device) -> None:
        self._model, self._loss, self._device = model, loss, device
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._metrics: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._num_examples = 0

    def add(self, cut: CutBatch) -> None:
        """Add a batch; one host sync."""
        self._num_examples += cut.num_examples
        labelled = [micro_batch for micro_batch in cut.micro_batches if not micro_batch.unlabelled]
        if not labelled:
            return
        totals = Totals(self._device)
        with evaluation_mode(self._model), torch.no_grad(), one_autocast(self._device):
            for micro_batch in labelled:
                data = map_tensors(lambda tensor: tensor.to(self._device), micro_batch.data())
                totals.add(self._loss(self._model, data, micro_batch.counts, micro_batch.num_examples))
        for term, total in totals.sums().items():
            self._sums[term] += float(total)
        for term, count in totals.counts().items():
            self._counts[term] += float(count)
        for name, (total, count) in totals.metric_sums().items():
            self._metrics[name] = (self._metrics[name][0] + float(total), self._metrics[name][1] + float(count))

    def report(self) -> EvaluationReport:
        """The means over all that was added.

        Raises:
            CountError: There was nothing with a label.
        """
        if not any(self._counts.values()):
            raise CountError(
                f"nothing to evaluate: none of the {self._num_examples} examples has a label (the count is 0)"
            )
        summed = self._loss.counter.summed
        loss = sum(total / (1.0 if summed else self._counts[term] or 1.0) for term, total in self._sums.items())
        counts = dict(self._counts)
        return EvaluationReport(
            loss=loss,
            metrics={name: total / count if count else float("nan") for name, (total, count) in self._metrics.items()},
            count=next(iter(counts.values())) if len(counts) == 1 else counts,
            num_examples=self._num_examples,
        )


def batches_of(batch_or_batches: Any, collated: bool) -> Iterable[Any]:
    """One batch, or each of several.

    Args:
        batch_or_batches: With a `collate_fn`, a list is one batch (of examples). Without, a mapping, a tensor, a
            dataclass, and a tuple or list of tensors are one batch; a list of batches, a loader and a generator are
            several.
        collated: Whether batches are collated already (no `collate_fn`).

    Raises:
        BatchLayoutError: It is neither.
    """
    one = batch_or_batches
    if isinstance(one, (Mapping, torch.Tensor, BatchPieces)) or hasattr(one, "__dataclass_fields__"):
        return [one]
    if isinstance(one, (list, tuple)):
        nested = (Mapping, BatchPieces, list, tuple)
        several = collated and all(isinstance(item, nested) for item in one)
        return one if several and not hasattr(one, "_fields") else [one]
    if isinstance(one, Iterable):
        return one
    raise BatchLayoutError(f"evaluate takes a batch or an iterable of batches, not a {type(one).__name__}")
