"""Finds out on a few examples whether a language model's head can be computed in chunks: is the loss the same?"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wholebatch.batch.containers import map_tensors
from wholebatch.cut import CutBatch, Knife
from wholebatch.evidence import Witness
from wholebatch.facts import IGNORED_LABEL, BatchLayout
from wholebatch.gradients.precision import one_autocast
from wholebatch.loss.head import ChunkedHead, Head, HeadProbe, chunked_loss
from wholebatch.loss.hugging_face import forward_loss
from wholebatch.loss.measured import Measured
from wholebatch.loss.stated import StatedLoss
from wholebatch.memory.device import is_out_of_memory
from wholebatch.sample import Sample
from wholebatch.undisturbed import undisturbed

EXAMPLES = 2
"""In the check; its logits are whole."""

MOST_LOGITS = 2**26
"""In the check, where its examples can be shortened."""

TRIES = 3
"""Batches that may leave it undecided."""


class HeadCheck:
    """Compares a model's own loss with the one in chunks, and tells the loss which it may use.

    Nothing is changed by it: no `.grad`, no random state, no buffer or flag of the model.
    """

    def __init__(self, model: nn.Module, loss: StatedLoss, knife: Knife, device: torch.device) -> None:
        self._model, self._loss, self._knife, self._device = model, loss, knife, device
        self._undecided = 0

    def check(self, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> None:
        """Check with examples of this batch, if that is still to be done and its micro-batches are large enough.

        Never raises: where it cannot be told, the model computes its loss itself.
        """
        chunked = self._loss.head
        if chunked is None or chunked.reason:
            return
        by_size = sorted(cut.micro_batches, key=lambda micro_batch: micro_batch.num_examples)
        largest = {id(part.piece): part for part in by_size if not part.unlabelled}  # of those that are padded alike
        for micro_batch in largest.values():
            if head := chunked.due(self._model, micro_batch.data()):
                few = next(part for part in self._knife.split(micro_batch, EXAMPLES) if not part.unlabelled)
                self._compare(chunked, head, _shortened(few.data(), head), list(parameters))
                return

    def _compare(self, chunked: ChunkedHead, head: Head, data: Any, parameters: list[nn.Parameter]) -> None:
        """In the mode of training, and in evaluation mode, each with the same dropout."""
        try:
            with warnings.catch_warnings(action="ignore"):  # of odd sizes, say; training gives those that matter
                chunked.reason = (
                    self._probed(head, data, parameters, evaluation=False)
                    or self._probed(head, data, parameters, evaluation=True)
                    or self._end_to_end(head, data, parameters)
                )
            chunked.found_same(data, {False, self._model.training})
        except _UndecidedError:  # another batch will tell
            self._undecided += 1
            if self._undecided >= TRIES:
                chunked.reason = f"{TRIES} batches with losses or hidden states that are not finite left it undecided"
        except Exception as error:  # noqa: BLE001  then the model computes its loss itself, as it always could
            chunked.reason = f"the check of it failed with {type(error).__name__}: {str(error)[:200]}"
            if is_out_of_memory(error):
                chunked.reason = "there was too little memory to compare it with the model's own loss"

    def _end_to_end(self, head: Head, data: Any, parameters: list[nn.Parameter]) -> str:
        """Loss and gradient of some parameters, from data to loss."""
        size = len(data["labels"])
        sample = Sample(data, BatchLayout(), [range(size)], collated=(data, data))
        in_chunks = self._loss.computed_by(lambda model, micro_batch: chunked_loss(model, head, micro_batch))
        own, ours = (
            Witness(self._model, loss, self._device, parameters, head.shifted, evaluation=False, autocast=True).again(
                sample
            )
            for loss in (self._loss.computed_by(forward_loss), in_chunks)
        )
        if not own.finite:
            raise _UndecidedError
        return "" if _same(own, ours) else "its loss or gradient differs from the model's own by more than rounding"

    def _probed(self, head: Head, data: Any, parameters: list[nn.Parameter], evaluation: bool) -> str:
        """With the same random numbers in both runs, so that dropout is the same."""
        moved = map_tensors(lambda tensor: tensor.to(self._device, copy=True), data)
        probe = HeadProbe(self._model, head, moved)
        with undisturbed(self._model, self._device, evaluation), torch.enable_grad(), one_autocast(self._device):
            own = probe.own(parameters)
        if isinstance(own, str):
            return own
        if not bool(torch.isfinite(own).all()):
            raise _UndecidedError
        with undisturbed(self._model, self._device, evaluation), torch.no_grad(), one_autocast(self._device):
            return probe.without_labels(own)


class _UndecidedError(Exception):
    """The examples say nothing: no labels among them, or a loss that is not finite."""


def _same(own: Measured, ours: Measured) -> bool:
    """Up to rounding; each parameter's gradient relative to its own norm, or to a tenth of the whole one."""
    tolerance = max(own.tolerance, ours.tolerance)
    if any(not math.isclose(own.losses[term], ours.losses[term], rel_tol=tolerance) for term in own.losses):
        return False
    floor = 0.1 * own.gradient.norm()
    for place in range(int(own.places.max()) + 1):
        right, found = own.gradient[own.places == place], ours.gradient[own.places == place]
        if not bool((found - right).norm() <= tolerance * torch.maximum(right.norm(), floor)):
            return False
    return True


def _shortened(data: Any, head: Head) -> Any:
    """The first positions of long examples, where every field is one of tokens; their logits are made whole here."""
    labels = data["labels"]
    most = MOST_LOGITS // (len(labels) * head.linear.out_features)
    tokens = all(isinstance(field, torch.Tensor) and field.shape == labels.shape for field in data.values())
    if labels.ndim != 2 or labels.shape[1] <= most or not tokens:
        return data
    short = {name: field[:, :most] for name, field in data.items()}
    return short if bool((head.targets(short["labels"]) != IGNORED_LABEL).any()) else data
