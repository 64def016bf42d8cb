"""Known faults with micro-batches and batches that have no label, or a loss that is not finite."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from lin import AB, EXACT, FORMS, Batch, Lin, accumulator, collated, examples, mask_of, rows
from wholebatch.errors import (
    BadBatchWarning,
    LossNotAdditiveError,
    NoLabelsError,
    NonFiniteLossError,
    TooManySkippedBatchesError,
    WholeBatchError,
)

pytestmark = [
    pytest.mark.smoke,
    # Batches in which a single row is left to compare with; not what these tests are about.
    pytest.mark.filterwarnings("ignore:the count of this loss could not be verified"),
]

NAN, INF = math.nan, math.inf
NO_LABELS = rows([], [], [])


@dataclass
class Loop:
    """The loop that the README shows, and what came of it."""

    model: Lin
    accumulator: wb.GradientAccumulator
    optimizer: torch.optim.Optimizer
    heeds_should_step: bool = True
    """Or the user steps after every batch."""

    reports: list[wb.StepReport] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    """That were stepped on."""

    def __post_init__(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def run(self, batches: Iterable[Batch]) -> "Loop":
        for batch in batches:
            report = self.accumulator.backward(batch)
            self.reports.append(report)
            if report.should_step or not self.heeds_should_step:
                if self.model.w.grad is not None:
                    self.gradients.append(self.model.w.grad.item())
                nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)
                self.optimizer.step()
                if report.should_step:
                    self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    @property
    def skipped(self) -> list[bool]:
        return [not report.should_step for report in self.reports]

    def state(self) -> tuple[float, Any, int]:
        return self.model.w.item(), copy.deepcopy(self.optimizer.state_dict()["state"]), self.scheduler.last_epoch


def loop(form: str = "masked mean", size: Any = 1, heeds_should_step: bool = True, **options: Any) -> Loop:
    model = Lin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    whole = accumulator(model, form, size, optimizer=optimizer, **options)
    return Loop(model, whole, optimizer, heeds_should_step)


# ---- ZT1 ----


@pytest.mark.parametrize("batch", [rows([1, 2, 3], []), rows([], [1, 2, 3])], ids=["last", "first"])
@pytest.mark.parametrize("size", [1, 2, "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_zt1_micro_batch_without_labels(form: str, size: Any, batch: Batch) -> None:
    """A row without a label, whose own mean is 0/0, adds nothing: gradient and loss 2.0, and all is finite."""
    model = Lin()
    report = accumulator(model, form, size).backward(batch)
    assert (report.should_step, report.bad_examples, float(report.count)) == (True, (), 3.0)
    assert model.w.grad.item() == pytest.approx(2.0, rel=EXACT)
    assert report.loss.item() == pytest.approx(2.0, rel=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_zt1_for_examples_that_are_collated(form: str) -> None:
    model = Lin()
    report = accumulator(model, form, collate_fn=collated).backward(examples(rows([], [1, 2], [], [3])))
    assert model.w.grad.item() == pytest.approx(2.0, rel=EXACT)
    assert report.loss.item() == pytest.approx(2.0, rel=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_zt1_in_evaluation(form: str) -> None:
    """A batch and micro-batches without a label leave the mean over the others alone."""
    model = Lin()
    report = accumulator(model, form).evaluate([rows([1, 2, 3], []), rows([], []), rows([], [6])])
    assert (report.loss, report.count) == (pytest.approx(3.0, rel=EXACT), 4)


def test_zt1_one_of_two_terms_has_no_unit() -> None:
    """A row without tokens still counts in the term of the examples; a batch without tokens leaves that term alone."""

    def two_terms(model: nn.Module, batch: Batch) -> dict[str, wb.LossSum]:
        mask = mask_of(batch)
        tokens = wb.LossSum((model(batch["x"]) * mask).sum(), mask.sum())
        return {"tokens": tokens, "examples": wb.LossSum(model(batch["score"]).sum(), len(batch["score"]))}

    scores = {"score": torch.tensor([5.0, 7.0], dtype=torch.float64)}
    for batch, right in ((rows([1, 2, 3], []), 2.0 + 6.0), (rows([], []), 6.0)):
        model = Lin()
        stated = (two_terms, {"tokens": "tokens", "examples": "examples"})
        report = accumulator(model, stated).backward(batch | scores)
        assert report.should_step
        assert model.w.grad.item() == pytest.approx(right, rel=EXACT)
        assert report.loss.item() == pytest.approx(right, rel=EXACT)


# ---- ZT3 ----


@pytest.mark.parametrize("heeds_should_step", [True, False])
@pytest.mark.parametrize("size", [1, 2, "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_zt3_batch_without_labels(form: str, size: Any, heeds_should_step: bool) -> None:
    """AdamW with weight decay: nothing moves, whether or not the loop heeds `should_step`; the batch is reported."""
    run = loop(form, size, heeds_should_step).run([AB])
    before = run.state()
    run.run([NO_LABELS])
    assert run.state() == before
    report = run.reports[-1]
    assert (report.should_step, report.num_examples, report.bad_examples) == (False, 3, (0, 1, 2))
    assert "label" in (report.reason or "")
    assert run.model.w.grad is None


@pytest.mark.parametrize("form", FORMS)
def test_zt3_the_first_batch_has_no_labels(form: str) -> None:
    """The optimizer keeps no state at all, and the batches after it train as if it had not been there."""
    run, clean = loop(form).run([NO_LABELS]), loop(form)
    assert (run.model.w.item(), len(run.optimizer.state), run.skipped) == (1.0, 0, [True])
    run.run([AB, rows([1], [5, 6])])
    clean.run([AB, rows([1], [5, 6])])
    assert run.state() == clean.state()
    assert run.gradients == clean.gradients


def coupled(model: nn.Module, batch: Batch) -> wb.LossSum:
    """No sum over tokens: each is compared with the batch's mean."""
    losses = model(batch["x"])[mask_of(batch)]
    return wb.LossSum((losses - losses.mean()).square().sum(), len(losses))


@pytest.mark.parametrize("first", [NO_LABELS, rows([1, 2], [NAN], [INF])], ids=["no labels", "not finite"])
def test_zt3_a_first_batch_that_says_nothing_verifies_nothing(first: Batch) -> None:
    """A loss that cannot be accumulated is still refused, on the first batch that shows it."""
    model = Lin()
    whole = accumulator(model, (coupled, None))
    assert not whole.backward(first).should_step
    with pytest.raises(LossNotAdditiveError):
        whole.backward(AB)
    assert model.w.grad is None


@pytest.mark.parametrize("form", FORMS)
def test_zt3_gradients_that_were_there_stay(form: str) -> None:
    model = Lin()
    before = model.w.grad = torch.tensor(0.25, dtype=torch.float64)
    assert not accumulator(model, form).backward(NO_LABELS).should_step
    assert model.w.grad is before
    assert before.item() == 0.25


@pytest.mark.parametrize("form", FORMS)
def test_zt3_raised_if_wanted(form: str) -> None:
    model = Lin()
    with pytest.raises(NoLabelsError, match="none of the 3 examples has a label"):
        accumulator(model, form, on_bad_batch="raise").backward(NO_LABELS)
    assert model.w.grad is None


@pytest.mark.parametrize("form", FORMS)
def test_zt3_never_silent_where_nothing_is_read(form: str) -> None:
    """With "ignore" it is left out where the count is known beforehand, and said with the next batch elsewhere."""
    run = loop(form, on_bad_batch="ignore", max_skipped_batches=2).run([AB, NO_LABELS])
    if not run.reports[-1].should_step:
        return
    with pytest.warns(BadBatchWarning, match="no label"):
        run.run([NO_LABELS])
    with pytest.raises(TooManySkippedBatchesError, match="2 batches in a row"):
        run.run([AB])


@pytest.mark.parametrize("form", FORMS)
def test_zt3_too_many_in_a_row(form: str) -> None:
    run = loop(form, max_skipped_batches=3).run([NO_LABELS, NO_LABELS, AB, NO_LABELS, NO_LABELS])
    with pytest.raises(TooManySkippedBatchesError, match="3 batches in a row"):
        run.run([NO_LABELS])


# ---- ZT5 ----

GOOD = [rows([1, 2, 3], [10]), rows([4], [5, 6]), rows([2, 2], [8])]


def bad(first: float, second: float) -> list[Batch]:
    """Batches of two micro-batches: a good and a bad one, a bad and a good one, two bad ones."""
    return [rows([1, 2], [3, first]), rows([second], [4, 5]), rows([first, 1], [2, second])]


@pytest.mark.parametrize("figures", [(NAN, NAN), (-INF, INF)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_zt5_bad_batches_leave_the_good_ones_alone(form: str, size: int, figures: tuple[float, float]) -> None:
    """After three bad batches, at the start or in the middle, good ones give the updates of a clean run."""
    for start in (0, 1):
        run, clean = loop(form, size), loop(form, size)
        run.run([*GOOD[:start], *bad(*figures), *GOOD[start:]])
        clean.run(GOOD)
        assert run.skipped == [False] * start + [True] * 3 + [False] * (3 - start)
        assert run.gradients == clean.gradients
        assert run.state() == clean.state()
        assert run.scheduler.last_epoch == len(run.gradients) == 3
        assert [report.bad_examples for report in run.reports if not report.should_step] == [(1,), (0,), (0, 1)]


@pytest.mark.parametrize("heeds_should_step", [True, False])
def test_zt5_a_loop_that_steps_all_the_same(heeds_should_step: bool) -> None:
    """`.grad` stays None for a bad batch, so stepping changes neither parameters nor the optimizer's state."""
    run, clean = loop(heeds_should_step=heeds_should_step), loop()
    assert run.run([*bad(NAN, INF), *GOOD, *bad(NAN, NAN)]).state() == clean.run(GOOD).state()


@pytest.mark.parametrize("places", [(0,), (4,), (0, 1), (1, 4), (2, 3), (0, 2, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("size", [1, 2, 3, 5, "auto"])
@pytest.mark.parametrize("form", ["masked mean", "sum and count"])
def test_zt5_bad_examples_are_exactly_the_bad_ones(form: str, size: Any, places: tuple[int, ...]) -> None:
    """The positions in the batch, however it is cut, also in an accumulator that has been at work before."""
    lines = [[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0], [7.0]]
    for place in places:
        lines[place] = [1.0, INF if place % 2 else NAN]
    run = loop(form, size).run([AB, rows(*lines), AB])
    assert [report.bad_examples for report in run.reports] == [(), places, ()]
    assert run.skipped == [False, True, False]
    assert "not finite" in (run.reports[1].reason or "")
    assert all(str(place) in (run.reports[1].reason or "") for place in places)


def test_zt5_bad_examples_among_those_that_are_collated() -> None:
    run = loop(size=2, collate_fn=collated)
    [batch] = [examples(rows([1], [2, 3], [4], [NAN, 5], [6], [INF]))]
    assert run.run([examples(AB), batch]).reports[-1].bad_examples == (3, 5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("figure", [NAN, INF])
def test_zt5_too_many_in_a_row_raise(figure: float, size: int) -> None:
    """A run whose loss is gone ends in an error with the numbers; a good batch in between starts the count anew."""
    run = loop(size=size, max_skipped_batches=4).run([AB, *bad(figure, figure), AB, *bad(figure, figure)])
    before = run.state()
    with pytest.raises(TooManySkippedBatchesError, match=r"4 batches in a row .*max_skipped_batches=4.*\[1\]"):
        run.run(bad(figure, figure))
    assert len(run.reports) == 8
    assert run.state() == before
    assert run.model.w.grad is None
    assert issubclass(TooManySkippedBatchesError, WholeBatchError)  # so that a script ends with an exit code


def test_zt5_bad_batches_and_those_without_labels_count_together() -> None:
    run = loop(max_skipped_batches=3).run([AB, NO_LABELS, bad(NAN, NAN)[0]])
    with pytest.raises(TooManySkippedBatchesError):
        run.run([NO_LABELS])


def test_zt5_let_through_if_wanted() -> None:
    """With "ignore" the bad batch is seen when the next one comes; too many in a row raise then."""
    run = loop(on_bad_batch="ignore", max_skipped_batches=2).run([AB, bad(NAN, NAN)[0]])
    with pytest.warns(BadBatchWarning, match="not finite|non-finite"):
        run.run([bad(NAN, NAN)[1]])
    with pytest.raises(TooManySkippedBatchesError, match="2 batches in a row"):
        run.run([AB])


# ---- ZT6 ----


@pytest.mark.parametrize("clear", ["to None", "to zero", "not at all"])
@pytest.mark.parametrize("figure", [INF, -INF, NAN])
@pytest.mark.parametrize("form", ["masked mean", "count function", "sum and count", "term", "output"])
def test_zt6_gradients_of_a_skipped_batch_stay(form: str, figure: float, clear: str) -> None:
    """A batch with inf and then AB: exactly 4.0, even in a loop that clears gradients only after a step."""
    model = Lin()
    whole = accumulator(model, form)
    assert not whole.backward(rows([1, 2], [figure, 3])).should_step
    if clear != "not at all":
        model.zero_grad(set_to_none=clear == "to None")
    assert whole.backward(AB).should_step
    assert model.w.grad.item() == 4.0


@pytest.mark.parametrize("figure", [INF, NAN])
def test_zt6_after_an_error(figure: float) -> None:
    """The same where the bad batch raises, and with a gradient that was there before."""
    model = Lin()
    whole = accumulator(model, on_bad_batch="raise")
    before = model.w.grad = torch.tensor(0.5, dtype=torch.float64)
    with pytest.raises(NonFiniteLossError):
        whole.backward(rows([1, 2], [figure, 3]))
    assert model.w.grad is before
    whole.backward(AB)
    assert model.w.grad.item() == 4.5


# ---- ZT8 ----


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.15, momentum=0.9)


@pytest.mark.parametrize("heeds_should_step", [True, False])
@pytest.mark.parametrize("batch", [rows([1], [NAN]), rows([INF], [1]), rows([NAN], [NAN]), rows([], [])])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_zt8_zeros_are_stepped_on(
    optimizer: Callable[[Any], torch.optim.Optimizer], batch: Batch, heeds_should_step: bool
) -> None:
    """One normal step from 1.0 to 0.85; a bad batch leaves it there: zeros would give 0.7405 and move the state."""
    model = Lin()
    stepping = optimizer(model.parameters())
    run = Loop(model, accumulator(model, optimizer=stepping), stepping, heeds_should_step).run([rows([1], [1])])
    assert model.w.item() == pytest.approx(0.85, rel=1e-7)
    before = run.state()
    run.run([batch])
    assert run.state() == before
    assert run.skipped == [False, True]
    assert run.scheduler.last_epoch == 1
