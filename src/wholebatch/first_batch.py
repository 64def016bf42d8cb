"""What is checked before batches are run: the form of the loss, its count, and modules with batch statistics.

The count is verified on a few examples of the first batch that is cut (`sample`, `evidence`, `loss.verified`), and
again on later ones where the examples of the first were too much alike, or its figures said too little.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from wholebatch.bad_examples import not_finite_examples
from wholebatch.batch.containers import map_tensors
from wholebatch.candidates import candidates
from wholebatch.cut import CutBatch, Knife, MicroBatch
from wholebatch.errors import (
    BatchLayoutError,
    CountRequiredError,
    LossNotAdditiveError,
    LossNotVerifiedWarning,
    ScalarWithoutCountError,
)
from wholebatch.evidence import Witness
from wholebatch.gradients.precision import one_autocast
from wholebatch.head_check import HeadCheck
from wholebatch.loss.advice import (
    bent,
    padding_matters,
    refusal,
    refusal_apart,
    seed_ignored,
    suggestion,
    suggestion_apart,
)
from wholebatch.loss.counting import ONLY
from wholebatch.loss.hugging_face import hugging_face_model, own_count
from wholebatch.loss.measured import FRACTION_BITS
from wholebatch.loss.stated import StatedLoss
from wholebatch.loss.suggested import read_head
from wholebatch.loss.verified import (
    OTHER_SEED,
    Evidence,
    Judgement,
    counts_shown,
    fitting_counts,
    ignores_its_seed,
    judge,
    loss_differs,
    not_linear,
    proportional,
)
from wholebatch.memory.device import is_out_of_memory
from wholebatch.sample import LOOKED_AT, MOST_EXAMPLES, CannotCollateAgainError, Sample, choose
from wholebatch.suitability import refuse_unknown_parameters, warn_of_batch_statistics
from wholebatch.trim_check import TrimCheck
from wholebatch.undisturbed import undisturbed

T = TypeVar("T")

TRIES = 5
"""How often figures that fit several counts are looked at, in the 1st, 2nd, 4th, 8th and 16th batch that is cut."""


class FirstBatch:
    """Learns the loss's form from the first batch, and verifies its count on the first that is cut.

    Nothing is changed by it: no `.grad`, no random state, no buffer or flag of the model. At most three examples are
    evaluated at once, two where a micro-batch holds one.
    """

    def __init__(self, model: nn.Module, loss: StatedLoss, knife: Knife, device: torch.device) -> None:
        self._model, self._loss, self._knife, self._device = model, loss, knife, device
        self._head = HeadCheck(model, loss, knife, device)
        host = hugging_face_model(model)
        self._shifted = host is not None and own_count(host) == "tokens after the shift"
        self.form = ""
        """As `MicroBatchLoss.form`; empty until the first batch."""

        self.verified = False
        """Whether there is nothing left to verify."""

        self._untold: frozenset[str] = frozenset()
        self._undecided = False
        self._batches, self._tries, self._next_try = 0, 0, 0
        self._statistics_warned, self._apart_seen = False, False
        self._trims = TrimCheck(knife, self._shifted)

    def check(self, batch: Any, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> None:
        """Check before a batch is run, as far as that is still to be done."""
        if cut.unlabelled:
            return
        self._head.check(cut, parameters)
        if self.verified and self.form:
            return
        if not self.form:
            self.form = self._learned_form(batch, cut, parameters)
        if len(cut.micro_batches) > 1:
            self._batches += 1
            if not self._statistics_warned:
                warn_of_batch_statistics(self._model)
                self._statistics_warned = True
            if not self.verified and self._due(cut):
                self._verify(batch, cut, parameters)

    def may_trim(self, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether more, or less, padding of this batch may be left out than before, so that it is to be cut again.

        Raises:
            LossNotAdditiveError: The loss is divided by the padded length.
        """
        if cut.unlabelled or len(cut.micro_batches) == 1:
            return False
        most = MOST_EXAMPLES if max(cut.sizes) > 1 else 2

        def witnessed(sample: Sample, training: bool = False) -> tuple[Evidence, Witness]:
            if not training:
                return self._witnessed(sample, parameters, self._loss)
            witness = Witness(self._model, self._loss, self._device, parameters, self._shifted, False, autocast=True)
            return witness.evidence(sample), witness

        return self._trims.check(cut, most, witnessed)

    # ---- The form ----

    def _learned_form(self, batch: Any, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> str:
        """From a few examples with anything to learn from, forward only.

        In the mode of training first, so that no more memory is needed than for training: checkpoints are off in
        evaluation mode, as a rule.
        """
        most = MOST_EXAMPLES if len(cut.micro_batches) > 1 else None  # a batch that is not cut is not cut here either
        parts = (part for m in cut.micro_batches for part in self._knife.split(m, most))
        few = next(part for part in parts if not part.unlabelled)

        def looked_at(evaluation: bool) -> tuple[str, int]:
            """The form, and the number of terms, 0 where it cannot be read; the graph is let go of."""
            data = map_tensors(lambda tensor: tensor.to(self._device, copy=True), few.data())
            with undisturbed(self._model, self._device, evaluation), torch.enable_grad(), one_autocast(self._device):
                loss = self._loss(self._model, data, few.counts, few.num_examples)
            refuse_unknown_parameters([term.value for term in loss.terms.values()], parameters)
            head = read_head(next(iter(loss.terms.values())).value)
            return loss.form, head.terms and max(head.terms, len(loss.terms))

        try:
            form, terms = looked_at(False)
        except ScalarWithoutCountError as error:
            advice = self._suggestion(batch, cut, parameters)
            raise CountRequiredError(f"{error}. {advice}".rstrip()) from None
        except Exception as error:
            if len(cut.micro_batches) > 1 and not is_out_of_memory(error):
                self._blame_layout(self._chosen(batch, cut, MOST_EXAMPLES), parameters, error)
            raise
        if self._model.training and len(cut.micro_batches) > 1:
            self._warn_of_training_terms(terms, looked_at)
        return form

    def _warn_of_training_terms(self, terms: int, looked_at: Callable[[bool], tuple[str, int]]) -> None:
        """Warn if the loss has terms in training mode that it lacks in evaluation mode, where it is verified."""
        with suppress(Exception):  # some models have no loss in evaluation mode
            _, fewer = looked_at(True)
            if 0 < fewer < terms:
                self._warn(
                    f"it has {terms} terms in training mode, and {fewer} in evaluation mode, where it is verified "
                    "since dropout is off there. What only training adds is exact if it is a mean over the same "
                    "units, and wrong if not (a balance term)"
                )

    def _suggestion(self, batch: Any, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> str:
        """What a scalar loss without a count looks like; nothing where its parts cannot be compared."""
        try:
            sample = self._chosen(batch, cut, MOST_EXAMPLES)
            if sample.apart or len(sample.parts) < 2:
                summed = self._loss.as_sum()
                witness = Witness(self._model, summed, self._device, parameters, self._shifted, autocast=True)
                return suggestion_apart(*witness.apart(sample))
            evidence, witness = self._witnessed(sample, parameters, self._loss.as_sum())
            if evidence.conclusive and loss_differs(evidence, witness.again(sample)):
                return "It draws random numbers of its own, so nothing can be suggested."
            if not fitting_counts(evidence):
                noisy = (witness.disturbed(sample, evidence.bits), witness.again(sample, OTHER_SEED))
                evidence = replace(evidence, noisy=noisy)
        except Exception:  # noqa: BLE001  advice that cannot be given must not hide the error
            return ""
        return suggestion(evidence)

    # ---- The count ----

    def _due(self, cut: CutBatch) -> bool:
        """Whether this batch may show what those before did not; ever more seldom if they have turned out not to."""
        if self._batches < self._next_try:
            return False
        return self._tries == 0 or self._undecided or self._differs_in(cut)

    def _differs_in(self, cut: CutBatch) -> bool:
        """Whether examples differ in a candidate in which they did not so far, or in what is stated."""
        averages = {tuple(n / m.num_examples for n in m.counts.values()) for m in cut.micro_batches}
        if len(averages) > 1:
            return True
        piece = cut.micro_batches[0].piece
        size = min(piece.num_examples, LOOKED_AT)
        found = candidates(piece.take(range(size)), size, self._shifted, only=self._untold)
        return any(found[name].varies for name in self._untold if name in found)

    def _verify(self, batch: Any, cut: CutBatch, parameters: Sequence[nn.Parameter]) -> None:
        for most in (MOST_EXAMPLES, 2):
            try:
                sample = self._chosen(batch, cut, most)
                self._verify_with(sample, parameters)
                if sample.num_examples == 2 and not sample.apart:
                    self._verify_with(self._chosen(batch, cut, most, alike=True), parameters, also=True)
            except CannotCollateAgainError as error:
                return self._give_up(f"collate_fn cannot be called again on the same examples: {error}")
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return None
        return self._give_up("there was too little memory to evaluate two examples at once")

    def _chosen(self, batch: Any, cut: CutBatch, most: int, alike: bool = False) -> Sample:
        with undisturbed(self._model, self._device):  # collators draw random numbers
            return choose(batch, cut, self._knife, self._shifted, most, alike)

    def _verify_with(self, sample: Sample, parameters: Sequence[nn.Parameter], also: bool = False) -> None:
        """Raise if the count does not hold; note what is left to tell, unless another sample has been looked at."""
        if len(sample.parts) < 2:
            return None
        if sample.apart:
            return self._verify_apart(sample, parameters)
        try:
            evidence, judgement = self._judged(sample, parameters)
        except Exception as error:
            if not is_out_of_memory(error):
                self._blame_layout(sample, parameters, error)
            raise
        if judgement is None:
            return None
        if not judgement.holds:
            refused = LossNotAdditiveError(refusal(evidence, judgement, self._loss.counter.name))
            if not judgement.explained:
                self._blame_layout(sample, parameters, refused)
            raise refused
        return None if also else self._note(judgement)

    def _judged(self, sample: Sample, parameters: Sequence[nn.Parameter]) -> tuple[Evidence, Judgement | None]:
        """The evidence, and what it says; None if it cannot say anything, now or ever."""
        evidence, witness = self._witnessed(sample, parameters, self._loss)
        if not evidence.conclusive:
            return evidence, None
        judgement = judge(evidence)
        if judgement.holds:
            return evidence, judgement
        if loss_differs(evidence, witness.again(sample)):
            self._give_up("it draws random numbers of its own, so that two evaluations differ")
            return evidence, None
        other = witness.again(sample, OTHER_SEED)
        if ignores_its_seed(evidence, other):
            raise LossNotAdditiveError(seed_ignored())
        evidence = replace(evidence, noisy=(witness.disturbed(sample, evidence.bits),))
        if not_linear(evidence, other):
            raise LossNotAdditiveError(bent())
        evidence = replace(evidence, noisy=(*evidence.noisy, other))
        return evidence, judge(evidence)

    def _witnessed(
        self, sample: Sample, parameters: Sequence[nn.Parameter], loss: StatedLoss
    ) -> tuple[Evidence, Witness]:
        """Evidence in evaluation mode and without autocast where the model allows that."""

        def witnessed(evaluation: bool, autocast: bool) -> tuple[Evidence, Witness]:
            witness = Witness(self._model, loss, self._device, parameters, self._shifted, evaluation, autocast)
            return witness.evidence(sample), witness

        if torch.is_autocast_enabled(self._device.type):
            try:
                evidence, witness = witnessed(True, False)
                if evidence.union.bits >= FRACTION_BITS[torch.float32]:
                    return evidence, witness
            except Exception:  # noqa: BLE001  then as in training
                pass
        return _in_either_mode(lambda evaluation: witnessed(evaluation, True))

    def _note(self, judgement: Judgement) -> None:
        untold = judgement.untold - {self._loss.counter.name}
        if self._tries and (judgement.undecided or untold >= self._untold):
            self._next_try = 2 * self._batches
        else:
            self._next_try = self._batches + 1
        self._tries, self._untold, self._undecided = self._tries + 1, untold, judgement.undecided
        self.verified = not untold and not judgement.undecided
        if judgement.undecided and self._tries >= TRIES:
            self._give_up("its figures fit several counts (low precision, or a loss of zero), its graph shows none")

    def _verify_apart(self, sample: Sample, parameters: Sequence[nn.Parameter]) -> None:
        """By the denominators in the graphs alone, where no two examples can be put together.

        A sum with its own count has then nothing that it could fail to add up to.
        """
        if self.form != "scalar" or self._apart_seen:
            return
        self._apart_seen = True
        witness = Witness(self._model, self._loss, self._device, parameters, self._shifted, autocast=True)
        pieces, rivals = witness.apart(sample)
        shown, name = counts_shown(pieces, rivals), self._loss.counter.name
        counts = [1.0 if self._loss.counter.summed else piece.counts[ONLY] for piece in pieces]
        if shown is None:
            self._warn("no two examples of this batch can be put together, and its graph shows no denominator")
        elif shown and name not in shown and not proportional(counts, [p.head.denominator or 0.0 for p in pieces]):
            raise LossNotAdditiveError(refusal_apart(pieces, rivals, shown[0], name))

    def _blame_layout(self, sample: Sample, parameters: Sequence[nn.Parameter], error: Exception) -> None:
        """Raise what says so if the trouble goes away with the padding, or when one field is read in another way."""
        if sample.collated and self._adds_up(replace(sample, collated=()), parameters):
            if isinstance(error, LossNotAdditiveError):
                raise LossNotAdditiveError(padding_matters(error)) from error
            return  # padded alike, the parts add up: it is the padding, not a field
        for path, what, layout, other in sample.other_layouts():
            if self._adds_up(other, parameters):
                raise BatchLayoutError(
                    f"the field {path!r} {what} was cut as if it held one row per example, and the loss is wrong then: "
                    f"{type(error).__name__}, {str(error)[:200]!r}. It is right with layout=wb.BatchLayout({layout})."
                ) from error

    def _adds_up(self, sample: Sample, parameters: Sequence[nn.Parameter]) -> bool:
        try:
            with warnings.catch_warnings(action="ignore"):  # of shapes that do not fit, say
                evidence, _ = self._witnessed(sample, parameters, self._loss)
            # Parts that are given the whole batch add up whatever the loss.
            return evidence.conclusive and judge(evidence).holds and not evidence.uncut
        except Exception:  # noqa: BLE001  any failure means that this reading is not the right one
            return False

    def _give_up(self, why: str) -> None:
        self.verified = True
        self._warn(why)

    def _warn(self, why: str) -> None:
        warnings.warn(
            f"the count of this loss could not be verified: {why}. It is used as stated.",
            LossNotVerifiedWarning,
            stacklevel=6,
        )

    def not_finite_examples(self, micro_batches: Sequence[MicroBatch]) -> tuple[int, ...]:
        """As `bad_examples.not_finite_examples`."""
        return not_finite_examples(self._model, self._loss, self._device, micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """What was learned and verified."""
        return {
            "form": self.form,
            "verified": self.verified,
            "untold": sorted(self._untold),
            "undecided": self._undecided,
            "tries": self._tries,
            "batches": self._batches,
            "next_try": self._next_try,
            "trim_batches": self._trims.batches,
            "trim_next_try": dict(self._trims.next_try),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier run learned and verified, of the same loss."""
        self.form, self.verified = str(state["form"]), bool(state["verified"])
        self._untold, self._undecided = frozenset(state["untold"]), bool(state["undecided"])
        self._tries, self._batches = int(state["tries"]), int(state["batches"])
        self._next_try = int(state["next_try"])
        self._trims.batches = int(state["trim_batches"])
        self._trims.next_try = {str(kind): int(batch) for kind, batch in state["trim_next_try"].items()}


def _in_either_mode(evaluate: Callable[[bool], T]) -> T:
    """In evaluation mode, or in training mode for models that have no loss otherwise."""
    try:
        return evaluate(True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
    return evaluate(False)
