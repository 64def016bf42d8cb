"""GradientAccumulator: the whole batch's gradient, one micro-batch at a time."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from wholebatch.batch.loader import moved_ahead
from wholebatch.batch.sizing import FixedSize
from wholebatch.buffers import MovingBuffers
from wholebatch.cut import CutBatch, Knife, MicroBatch
from wholebatch.divisor import Divisor, Divisors, check_shown
from wholebatch.errors import ConfigurationError, LossFormError, UnsupportedModelError
from wholebatch.evaluation import Evaluator, batches_of
from wholebatch.facts import BatchLayout, EvaluationReport, Number, StepReport
from wholebatch.first_batch import FirstBatch
from wholebatch.gradients.embeddings import EmbeddingRows
from wholebatch.gradients.hooks import BendingHooks, ChangingHooks, hooks_on
from wholebatch.gradients.in_progress import InProgress
from wholebatch.gradients.precision import Fp32Sums, NoAutocast, Scaler, one_autocast, scale_of, share
from wholebatch.gradients.set_aside import SetAside
from wholebatch.judgement import Judge, Verdict
from wholebatch.loss.counting import Count
from wholebatch.loss.stated import MicroBatchLoss, StatedLoss
from wholebatch.memory.device import peak_meter
from wholebatch.options import (
    OnBadBatch,
    Options,
    check_objects,
    future_state_bytes,
    shape_multiple,
    trainable_parameters,
)
from wholebatch.parallel.ranks import refuse_several_ranks
from wholebatch.suitability import (
    accumulation_hooks,
    order_matters,
    parameters_untouched,
    refuse_stepping_hooks,
    refuse_wrappers,
)
from wholebatch.totals import Totals
from wholebatch.trials import on_trial

STATE_VERSION = 2

UNSETTLED_EVALUATION_SIZE = 4
"""Examples per micro-batch when `evaluate` is called before training has chosen a size."""


class GradientAccumulator:
    """Gives a model the gradient of a whole batch while holding one micro-batch in memory at a time.

    `backward(batch)` replaces `loss.backward()`: it cuts the batch into micro-batches and adds to `.grad` what one
    pass over the whole batch would have added, up to floating-point rounding. Clipping, the scheduler and the
    optimizer step stay where they were, once per batch.

    Args:
        model: Any `nn.Module`.
        loss_fn: `loss_fn(model, micro_batch)` returns a scalar mean (with `count`), `wb.LossSum(sum, count)`, a mapping
            of these, one loss per example, a Hugging Face output, or `(loss, extras)` of any of these. Not needed for a
            Hugging Face model that computes its own loss.
        count: What a scalar loss is a mean over: `"examples"`, `"tokens"` (labels other than -100, after the shift for
            causal language models of Hugging Face), a function of the micro-batch whose value is additive over
            micro-batches, or `"sum"` for a loss that is no mean. Several terms: a mapping from term to count. It is
            verified on the first batch that is cut.
        optimizer: Read only, to count its state in the memory plan and to know parameters outside the model.
        micro_batch_size: At most so many examples at once (exactly so many, in arrival order, with `regroup=False`),
            or `"auto"`: measured on the training's own first micro-batches.
        memory_budget: What `"auto"` keeps within: `"auto"`, bytes, `"6GiB"`, or a fraction of the device. On a CPU it
            means the resident memory of the process.
        regroup: Whether examples of like length are put together, so that little is padded: the batch's examples
            are the same, in another order. Off, they keep their order, in full micro-batches and a rest. Modules to
            which the order matters (BatchNorm) switch it off, and a warning names them.
        collate_fn: Makes a micro-batch of a list of examples; the batch is then such a list. Called once per
            micro-batch, all before the first forward.
        layout: Where the examples lie in batches that do not have them in dimension 0 of every field.
        on_bad_batch: What to do with a batch that has no label or a non-finite loss: `"skip"` it, `"raise"`, or
            `"ignore"` non-finite losses: no host sync then, the flags are read with the next batch.
        max_skipped_batches: So many bad batches in a row raise `TooManySkippedBatchesError`.
        accumulate_in_fp32: Sum the gradients of bf16 and fp16 parameters in fp32 over the batch.
        deterministic: Choose `"auto"` sizes from shapes only, never from timings. None follows
            `torch.are_deterministic_algorithms_enabled()`.
        loss_chunking: Whether a Hugging Face language model that computes its own loss may have its head computed in
            chunks, so that its logits never exist as a whole; done where a check finds it to be the same loss.

    Raises:
        WholeBatchError: An option, the model or the loss function cannot be right.

    Example:
        >>> import torch, wholebatch as wb
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
        >>> accumulator.backward({"x": torch.randn(5, 3), "y": torch.randn(5, 1)}).micro_batch_sizes
        (2, 2, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        count: Count | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        micro_batch_size: int | Literal["auto"] = "auto",
        memory_budget: str | int | float = "auto",
        regroup: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        layout: BatchLayout | None = None,
        on_bad_batch: OnBadBatch = "skip",
        max_skipped_batches: int = 10,
        accumulate_in_fp32: bool = False,
        deterministic: bool | None = None,
        loss_chunking: bool = True,
    ) -> None:
        self._options = Options(
            micro_batch_size=micro_batch_size,
            memory_budget=memory_budget,
            regroup=regroup,
            collate_fn=collate_fn,
            layout=layout,
            on_bad_batch=on_bad_batch,
            max_skipped_batches=max_skipped_batches,
            accumulate_in_fp32=accumulate_in_fp32,
            deterministic=deterministic,
            loss_chunking=loss_chunking,
        )
        check_objects(model, optimizer)
        refuse_wrappers(model)
        refuse_several_ranks()
        self.model, self._optimizer = model, optimizer
        parameters = trainable_parameters(model, optimizer)
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self._loss = StatedLoss(model, loss_fn, count, chunked=loss_chunking)
        self._knife = Knife(self._loss.counter, collate_fn, layout, shape_multiple(model, collate_fn))
        self._sizing = self._options.sizing(self._device, future_state_bytes(optimizer, parameters))
        self._first_batch = FirstBatch(model, self._loss, self._knife, self._device)
        self._divisors = Divisors(self._loss.counter)
        self._judge = Judge(on_bad_batch, max_skipped_batches)
        self._meter, self._buffers = peak_meter(self._device), MovingBuffers(model)
        self._watched_hooks: frozenset[int] = frozenset()
        # Whatever is compiled may be run by CUDA graphs; a loss_fn may be compiled without showing it.
        self._replayed = self._device.type == "cuda" or hasattr(model, "_orig_mod")

    def backward(self, batch: Any, grad_scaler: Scaler | None = None) -> StepReport:
        """Add the whole batch's gradient to `.grad`.

        If it raises, or returns `should_step == False`, `.grad` is as it was before the call.

        Args:
            batch: The whole batch, best on the host: a mapping, tuple or other nest of tensors with the examples in
                dimension 0, or a list of examples if there is a `collate_fn`.
            grad_scaler: Its scale is applied, as `grad_scaler.scale(loss).backward()` does.

        Returns:
            What was done; `report.should_step` says whether `.grad` is to be used.

        Raises:
            WholeBatchError: The batch, its counts or its loss cannot be right.
        """
        started = time.perf_counter()
        self._meter.start()
        parameters = self._ready()
        in_order = not self._options.regroup or order_matters(self.model)
        cut = self._knife.cut(batch, self._sizing, in_order)
        if cut.unlabelled:
            return self._report(cut, [], self._judge.unlabelled(cut.num_examples), started)
        with SetAside(parameters) as aside, self._buffers as buffers:
            aside.discard()
            if self._first_batch.may_trim(cut, parameters):
                cut = self._knife.cut(batch, self._sizing, in_order)
            self._first_batch.check(batch, cut, parameters)
            aside.discard()  # what a loss_fn that calls backward itself has left there
            report = self._accumulate(cut, parameters, aside, scale_of(grad_scaler, self._device), started)
            if report.should_step:
                buffers.keep(report.gradient_accumulation_steps)
                aside.keep()  # the last thing that can fail or be interrupted
        return report

    def _accumulate(
        self,
        cut: CutBatch,
        parameters: list[nn.Parameter],
        aside: SetAside,
        scale: torch.Tensor | None,
        started: float,
    ) -> StepReport:
        ran, totals, divisor = [], Totals(self._device, self._replayed), self._divisors.of(cut, self._first_batch.form)
        fp32 = Fp32Sums(parameters if self._options.accumulate_in_fp32 else ())
        rows = EmbeddingRows(self.model, wanted=len(cut.micro_batches) > 1)
        in_progress, hooks = InProgress(parameters), accumulation_hooks(parameters) | hooks_on(parameters)
        thorough = not hooks <= self._watched_hooks
        watched = parameters if thorough else ()
        untouched = parameters_untouched(aside, parameters, thorough)
        with one_autocast(self._device), untouched, BendingHooks(watched), ChangingHooks(watched), rows:
            outside_autocast = NoAutocast(self._device)
            for micro_batch, data in self._stream(cut):
                loss = self._loss(self.model, data, micro_batch.counts, micro_batch.num_examples)
                with in_progress, outside_autocast:
                    self._differentiate(loss, divisor, scale)
                    fp32.add()
                    rows.add()
                totals.add(loss)
                ran.append(micro_batch)
                del data, loss  # before the next but one moves to the device
        if len(ran) > 1:
            self._watched_hooks = hooks
        self._refuse_constant(totals)
        verdict, divisor = self._judged(cut, ran, totals, divisor)
        report = self._report(cut, ran, verdict, started, totals, divisor)
        if verdict.should_step:
            if divisor.provisional:
                aside.multiply(divisor.correction)
                fp32.multiply(divisor.correction)
                rows.multiply(divisor.correction)
            fp32.finish()
            rows.finish()
        return report

    def _stream(self, cut: CutBatch) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches to run, each with its data on the device and the next one's on the way."""
        labelled = [micro_batch for micro_batch in cut.micro_batches if not micro_batch.unlabelled]
        if not self._sizing.settled:
            yield from on_trial(labelled, self._knife, self._sizing, self._meter, self._device)
            return
        data = (micro_batch.data() for micro_batch in labelled)
        moved = data if cut.lies_on(self._device) else moved_ahead(data, self._device)
        for micro_batch in labelled:
            yield micro_batch, next(moved)

    def _differentiate(self, loss: MicroBatchLoss, divisor: Divisor, scale: torch.Tensor | None) -> None:
        shares = [
            share(term.value, term.weight / divisor.by_term[name], scale)
            for name, term in loss.terms.items()
            if term.value.requires_grad  # a micro-batch may touch no trainable parameter
        ]
        if shares:
            torch.autograd.backward(shares)

    def _judged(
        self, cut: CutBatch, ran: list[MicroBatch], totals: Totals, divisor: Divisor
    ) -> tuple[Verdict, Divisor]:
        """Whether the gradient is to be used; the one host sync of a batch (none with `on_bad_batch="ignore"`)."""
        if self._judge.on_bad_batch == "ignore":
            return self._judge.read_later(totals.usable()), divisor.corrected(totals.counts())
        reading = totals.read()
        divisor = divisor.corrected(reading.counts)
        bad = {place: loss for place, loss in enumerate(reading.losses) if not math.isfinite(loss)}
        if bad:
            examples = self._first_batch.not_finite_examples([ran[place] for place in bad])
            return self._judge.not_finite(list(bad.values()), examples), divisor
        self._divisors.check(cut, reading.counts)
        check_shown(reading.shown, reading.weights)
        if not any(reading.counts.values()):
            return self._judge.unlabelled(cut.num_examples), divisor
        return self._judge.good(), divisor

    def _ready(self) -> list[nn.Parameter]:
        """The parameters that get a gradient, after the checks that cost next to nothing."""
        if not torch.is_grad_enabled():
            raise UnsupportedModelError("backward was called where gradients are switched off (torch.no_grad)")
        self._judge.read_now()
        parameters = trainable_parameters(self.model, self._optimizer)
        if not parameters:
            raise UnsupportedModelError("the model has no trainable parameter: requires_grad is False everywhere")
        if (device := parameters[0].device) != self._device:
            raise ConfigurationError(
                f"the model was on {self._device} when the accumulator was made, and is on {device} now: "
                "move the model first, then make the accumulator (and the optimizer)"
            )
        refuse_stepping_hooks(parameters)
        return parameters

    @staticmethod
    def _refuse_constant(totals: Totals) -> None:
        if not totals.differentiable:
            raise LossFormError(
                "the loss of no micro-batch depends on a trainable parameter: it has no graph. Return the loss tensor "
                "itself, computed from the model's output without .detach(), .item() or torch.no_grad()."
            )

    def _report(
        self,
        cut: CutBatch,
        ran: Sequence[MicroBatch],
        verdict: Verdict,
        started: float,
        totals: Totals | None = None,
        divisor: Divisor | None = None,
    ) -> StepReport:
        counts: Mapping[str, Number] = cut.counts if divisor is None else divisor.counts
        parts = sorted([*ran, *(m for m in cut.micro_batches if m.unlabelled)], key=lambda m: m.start)
        return StepReport(
            loss=torch.tensor(math.nan) if totals is None or divisor is None else totals.loss(divisor.true),
            metrics={} if totals is None else totals.metrics(),
            count=next(iter(counts.values())) if len(counts) == 1 else dict(counts),
            num_examples=cut.num_examples,
            micro_batch_sizes=tuple(part.num_examples for part in parts),
            should_step=verdict.should_step,
            reason=verdict.reason,
            bad_examples=verdict.bad_examples,
            peak_memory_bytes=self._meter.peak_bytes(),
            seconds=time.perf_counter() - started,
            restarts=0,
            real_tokens=cut.real_tokens,
            padded_tokens=cut.padded_tokens,
        )

    def evaluate(self, batch_or_batches: Any) -> EvaluationReport:
        """The loss over a batch, or over all batches of an iterable: summed numerators over summed counts.

        Runs in evaluation mode (each module's own flag is put back) and without gradients.

        Args:
            batch_or_batches: One batch as for `backward`, or a loader, generator or list of batches. With a
                `collate_fn` a list is one batch of examples; wrap several in a generator or a loader.

        Raises:
            CountError: Nothing in it has a label.
            WholeBatchError: As for `backward`.
        """
        evaluator = Evaluator(self.model, self._loss, self._device)
        sizing = self._sizing if self._sizing.settled else FixedSize(UNSETTLED_EVALUATION_SIZE)
        for batch in batches_of(batch_or_batches, collated=self._options.collate_fn is None):
            cut = self._knife.cut(batch, sizing, in_order=not self._options.regroup)
            parameters = trainable_parameters(self.model, self._optimizer)
            if self._first_batch.may_trim(cut, parameters):
                cut = self._knife.cut(batch, sizing, in_order=False)
            self._first_batch.check(batch, cut, parameters)
            evaluator.add(cut)
        return evaluator.report()

    @property
    def loss_chunking(self) -> str:
        """Whether the head of a language model is computed in chunks: "on", "not yet: ..." or "off: ..." and why."""
        if self._loss.head is not None:
            return str(self._loss.head)
        return f"off: {'loss_fn computes the loss' if self._options.loss_chunking else 'loss_chunking=False'}"

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on in the same way: the sizes chosen, what was verified, skips in a row.

        Plain numbers, strings and dicts, so that `torch.load(..., weights_only=True)` reads it.
        """
        return {
            "version": STATE_VERSION,
            "sizing": {"kind": type(self._sizing).__name__, **self._sizing.state_dict()},
            "first_batch": self._first_batch.state_dict(),
            "padded_lengths": self._knife.padded.state_dict(),
            "trims": self._knife.trims.state_dict(),
            "units_per_example": self._divisors.units_per_example,
            "skipped_in_a_row": self._judge.skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of an accumulator of the same model, loss and options.

        A choice of micro-batch size made under other options (a size stated there and "auto" here, say) is not taken.

        Raises:
            ConfigurationError: It is not such a state; nothing is changed then.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version is not None and version != STATE_VERSION:
            raise ConfigurationError(
                f"this is the state of a GradientAccumulator of version {version}, which version {STATE_VERSION} does "
                "not read"
            )
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigurationError(f"this is not the state of a GradientAccumulator: it holds {got}")
        before = self.state_dict()
        try:
            self._take(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._take(before)
            raise ConfigurationError(
                f"this is not the state of a GradientAccumulator: {type(error).__name__}: {error}"
            ) from error

    def _take(self, state: Mapping[str, Any]) -> None:
        sizing = dict(state["sizing"])
        if sizing.pop("kind") == type(self._sizing).__name__:
            self._sizing.load_state_dict(sizing)
        self._first_batch.load_state_dict(state["first_batch"])
        self._knife.padded.load_state_dict(state["padded_lengths"])
        self._knife.trims.load_state_dict(state["trims"])
        self._divisors.units_per_example = float(state["units_per_example"])
        self._judge.skipped_in_a_row = int(state["skipped_in_a_row"])
