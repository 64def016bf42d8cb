"""Which examples a non-finite loss comes from."""

from collections.abc import Sequence

import torch
from torch import nn

from wholebatch.batch.containers import map_tensors
from wholebatch.cut import MicroBatch
from wholebatch.gradients.precision import one_autocast
from wholebatch.loss.counting import as_numbers
from wholebatch.loss.stated import StatedLoss
from wholebatch.undisturbed import undisturbed


def not_finite_examples(
    model: nn.Module, loss: StatedLoss, device: torch.device, micro_batches: Sequence[MicroBatch]
) -> tuple[int, ...]:
    """The positions in the batch of the examples whose loss alone is not finite.

    All of a micro-batch where the examples one by one do not show it.
    """
    with undisturbed(model, device), one_autocast(device):  # with gradients, which a loss may itself compute
        return tuple(place for part in micro_batches for place in _bad_in(part, model, loss, device))


def _bad_in(micro_batch: MicroBatch, model: nn.Module, loss: StatedLoss, device: torch.device) -> Sequence[int]:
    try:
        fine = [_is_fine(micro_batch, row, model, loss, device) for row in micro_batch.rows]
    except Exception:  # noqa: BLE001  a model that cannot take a single example
        return micro_batch.examples
    return [place for place, good in zip(micro_batch.examples, fine, strict=True) if not good] or micro_batch.examples


def _is_fine(micro_batch: MicroBatch, row: int, model: nn.Module, loss: StatedLoss, device: torch.device) -> bool:
    """Whether the loss of one example is finite, or there is none."""
    data = micro_batch.piece.take(range(row, row + 1))
    counts = as_numbers([loss.counter(data, 1)])[0]
    if counts and not any(counts.values()):
        return True
    moved = map_tensors(lambda tensor: tensor.to(device, copy=True), data)
    return all(bool(torch.isfinite(term.value)) for term in loss(model, moved, counts, 1).terms.values())
