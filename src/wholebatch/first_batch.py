"""What is checked on the first batch: the form of the loss, its count, and modules with batch statistics.

Picks a few examples of the batch, evaluates the loss on them without leaving a trace, and lets `loss.verified` judge.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from wholebatch.batch.containers import map_tensors
from wholebatch.cut import CutBatch, Knife, MicroBatch
from wholebatch.errors import (
    BatchLayoutError,
    CountRequiredError,
    LossNotVerifiedWarning,
    ScalarWithoutCountError,
    WholeBatchError,
)
from wholebatch.gradients.precision import no_autocast, one_autocast
from wholebatch.gradients.set_aside import gradients_aside
from wholebatch.loss.counting import ONLY, as_numbers, label_counts
from wholebatch.loss.stated import MicroBatchLoss, StatedLoss
from wholebatch.loss.verified import (
    PIECE_SEEDS,
    UNION_SEED,
    Evidence,
    Measured,
    Measurer,
    alternatives,
    each_sees_all,
    gap,
    suggest,
    verify,
    way_out,
)
from wholebatch.memory.device import is_out_of_memory
from wholebatch.sample import LOOKED_AT, Sample, choose
from wholebatch.suitability import refuse_unknown_parameters, warn_of_batch_statistics
from wholebatch.undisturbed import random_states, undisturbed


class FirstBatch:
    """Learns the loss's form from the first batch, and verifies its count on the first that is cut.

    Where all examples of that batch weigh the same under every count, the check is repeated on the first batch whose
    examples differ.
    """

    def __init__(self, model: nn.Module, loss: StatedLoss, knife: Knife, device: torch.device) -> None:
        self._model, self._loss, self._knife, self._device = model, loss, knife, device
        self.form = ""
        """As `MicroBatchLoss.form`; empty until the first batch."""

        self.verified = False
        self._waits_for_unequal = False
        self._warned = False

    def check(self, batch: Any, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> None:
        """Check before a batch is run, as far as that is still to be done."""
        if self.verified or cut.unlabelled:
            return
        many = len(cut.micro_batches) > 1
        if many and not self._warned:
            warn_of_batch_statistics(self._model)
            self._warned = True
        if not self.form or (many and not (self._waits_for_unequal and _alike(cut))):
            with undisturbed(self._model, self._device), torch.enable_grad():
                self._check(choose(batch, cut, self._knife), parameters, many)
    def _check(self, sample: Sample, parameters: Sequence[nn.Parameter], many: bool) -> None:
        try:
            self.form = self._learned_form(sample, parameters)
        except ScalarWithoutCountError as error:
            raise CountRequiredError(f"{error}. {self._suggestion(sample, parameters)}") from None
        if not many or len(sample.parts) < 2:
            return
        try:
            self._verify(sample, parameters)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._give_up("there was too little memory to evaluate a few examples at once")

    def _learned_form(self, sample: Sample, parameters: Sequence[nn.Parameter]) -> str:
        data, counts = sample.first, self._counts(sample.first, 1)
        loss = self._forward(self._loss, data, counts, 1)
        refuse_unknown_parameters([term.value for term in loss.terms.values()], parameters)
        return loss.form

    def _verify(self, sample: Sample, parameters: Sequence[nn.Parameter]) -> None:
        name = self._loss.counter.name
        try:
            evidence = self._evidence(self._loss, sample, parameters)
            if evidence is None:
                return self._give_up("it draws random numbers of its own, so two evaluations differ")
            if not evidence.conclusive:
                return None  # the batch will be skipped; the next one is looked at
            distinct = verify(evidence, name)
        except (WholeBatchError, RuntimeError, IndexError, ValueError) as error:
            if not is_out_of_memory(error):
                self._blame_layout(sample, parameters, error)
            raise
        self.verified, self._waits_for_unequal = distinct, not distinct
        return None

    def _evidence(self, loss: StatedLoss, sample: Sample, parameters: Sequence[nn.Parameter]) -> Evidence | None:
        """Measure; None if the loss is random although dropout is off."""
        measure = Measurer(partial(self._forward, loss), partial(self._gradients, parameters), parameters)
        fixed = {ONLY: 1.0} if loss.counter.summed else None

        def measured(data: Any, size: int, divisors: Mapping[str, float] | None, seed: float) -> Measured:
            return measure(data, as_numbers([loss.counter(data, size)])[0], size, divisors, seed)

        before = random_states(self._device)
        union = measured(sample.union, sample.num_examples, fixed, UNION_SEED)
        if random_states(self._device) != before:
            again = measured(sample.union, sample.num_examples, fixed, UNION_SEED)
            if not math.isclose(sum(union.losses.values()), sum(again.losses.values()), rel_tol=union.tolerance):
                return None
        parts = [
            measured(part, size, fixed or union.counts, seed)
            for part, size, seed in zip(sample.parts, sample.sizes, PIECE_SEEDS, strict=True)
        ]
        permuted = measured(sample.permuted, sample.num_examples, fixed, UNION_SEED)
        others = [alternatives(part, size) for part, size in zip(sample.parts, sample.sizes, strict=True)]
        return Evidence(union, permuted, parts, others)

    def _forward(self, loss: StatedLoss, data: Any, counts: Mapping[str, float], size: int) -> MicroBatchLoss:
        with one_autocast(self._device):
            return loss(self._model, self._moved(data), counts, size)

    def _gradients(
        self, parameters: Sequence[nn.Parameter], total: torch.Tensor, wanted: Sequence[nn.Parameter]
    ) -> Sequence[torch.Tensor | None]:
        with no_autocast(self._device):
            try:
                return torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True)
            except RuntimeError as error:
                if ".grad()" not in str(error):
                    raise
                return gradients_aside(total, wanted, parameters)

    def _moved(self, data: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self._device), data)

    def _counts(self, data: Any, size: int) -> dict[str, float]:
        return as_numbers([self._loss.counter(data, size)])[0]

    def _suggestion(self, sample: Sample, parameters: Sequence[nn.Parameter]) -> str:
        """What a scalar loss without a count looks like."""
        evidence = self._evidence(self._loss.as_sum(), sample, parameters)
        if evidence is None:
            return "It draws random numbers of its own, so nothing can be suggested."
        head, name = evidence.union.head, suggest(evidence)
        if name is None:
            return f"Its graph shows: {head.form}."
        units = {"sum": "a plain sum", "examples": f"a mean over {sample.num_examples} examples"}
        total = sum(part.get(name, 0) for part in evidence.alternatives)
        looks = units.get(name, f"a mean over {total:g} labelled {name}")
        return f"On {sample.num_examples} examples it looks like {looks}: {way_out(name)}."

    def _blame_layout(self, sample: Sample, parameters: Sequence[nn.Parameter], error: Exception) -> None:
        """Raise `BatchLayoutError` if the trouble goes away when one field is given whole to every part."""
        for path, what in sample.suspects():
            try:
                evidence = self._evidence(self._loss, sample.with_shared(path), parameters)
                holds = evidence is not None and gap(evidence).holds and not each_sees_all(evidence)
            except Exception:  # any failure means that this field is not the one
                continue
            if holds:
                raise BatchLayoutError(
                    f"the field {path!r} {what} has as many rows as the batch has examples, but it does not hold one per "
                    f"example: the loss is right only if every micro-batch gets it whole. Say so: "
                    f"layout=wb.BatchLayout(shared_fields=({path!r},))."
                ) from error

    def _give_up(self, why: str) -> None:
        self.verified = True
        warnings.warn(
            f"the count of this loss could not be verified: {why}. What count= states is used as it is.",
            LossNotVerifiedWarning,
            stacklevel=8,
        )

    def not_finite_examples(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, ...]:
        """The positions in the batch of the examples whose loss alone is not finite; all of a micro-batch where the
        examples one by one do not show it.
        """
        with undisturbed(self._model, self._device):
            return tuple(place for micro_batch in micro_batches for place in self._bad_in(micro_batch))

    def _bad_in(self, micro_batch: MicroBatch) -> Sequence[int]:
        try:
            losses = [self._alone(micro_batch, row) for row in micro_batch.rows]
        except Exception:  # a model that cannot take a single example
            return micro_batch.examples
        return [micro_batch.examples[i] for i, loss in enumerate(losses) if not loss] or micro_batch.examples

    def _alone(self, micro_batch: MicroBatch, row: int) -> bool:
        """Whether the loss of one example is finite, or there is none."""
        data = micro_batch.piece.take(range(row, row + 1))
        counts = self._counts(data, 1)
        if counts and not any(counts.values()):
            return True
        terms = self._forward(self._loss, data, counts, 1).terms.values()
        return all(bool(torch.isfinite(term.value)) for term in terms)

    def state_dict(self) -> dict[str, Any]:
        """What was learned and verified."""
        return {"form": self.form, "verified": self.verified, "waits_for_unequal": self._waits_for_unequal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier run learned and verified, of the same loss."""
        self.form = str(state["form"])
        self.verified, self._waits_for_unequal = bool(state["verified"]), bool(state["waits_for_unequal"])


def _alike(cut: CutBatch) -> bool:
    """Whether all examples of a batch have as many labels as each other."""
    first = cut.micro_batches[0]
    rows = first.piece.take(range(min(first.piece.num_examples, LOOKED_AT)))
    counts = label_counts(rows)
    others = [label_counts(m.piece.take(range(1))) for m in cut.micro_batches if m.piece is not first.piece]
    return len({number for one in (counts, *others) for number in one}) <= 1
