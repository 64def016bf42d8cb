"""Candidate cuts of the user's own model and data, side by side: how fast each is, and how much memory it needs."""

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from wholebatch.accumulation import GradientAccumulator
from wholebatch.batch.lengths import padded_units
from wholebatch.batch.sizing import MARGIN, TOLERANCE
from wholebatch.errors import ConfigurationError, MemoryBudgetError
from wholebatch.facts import StepReport
from wholebatch.gradients.set_aside import SetAside
from wholebatch.memory.device import MIB, give_back_unused, is_out_of_memory, peak_meter, synchronize
from wholebatch.options import trainable_parameters
from wholebatch.undisturbed import modules_kept, same_random_state

MOST_SETTLING = 20
"""Batches after which a candidate whose size is still being chosen is given up."""


@dataclass(frozen=True)
class Candidate:
    """A way to cut batches, in the words of `GradientAccumulator`."""

    name: str
    """As it is shown."""

    micro_batch_size: int | Literal["auto"]
    """Examples at once at most."""

    regroup: bool = True
    """Whether examples of like length are put together; else they keep the order in which they arrive."""


@dataclass(frozen=True)
class Spread:
    """A quantity measured once per batch."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of a candidate: of all batches but the one that warms up; the memory, of that one."""

    num_micro_batches: float
    """Micro-batches per batch, the mean."""

    largest_examples: int
    """Examples in the largest micro-batch."""

    largest_tokens: int | None
    """Padded tokens in the largest micro-batch, as the model was given them; None where tokens are not known."""

    real_tokens: int | None
    """Tokens of all batches that are no padding; None where that is not known."""

    padded_tokens: int | None
    """Tokens of all batches as they were cut, padding included."""

    seconds: Spread
    """Wall-clock time of one `backward(batch)`."""

    examples_per_second: float
    """The median over the batches."""

    tokens_per_second: float | None
    """The same for tokens that are no padding."""

    steadiness: float
    """The slowest batch's rate by that of the fastest: 1 where the machine did nothing else."""

    peak_bytes: int | None
    """The most memory in the batch that warms up, above what was in use before it: the gradients and one micro-batch.
    Resident memory of the process on a CPU, allocated bytes on an accelerator; None where it cannot be known."""

    @property
    def padding(self) -> float | None:
        """Padded by real tokens: 1 where nothing is padded."""
        return None if not self.real_tokens or self.padded_tokens is None else self.padded_tokens / self.real_tokens

    @property
    def speed(self) -> float:
        """Real tokens per second; examples per second where tokens are not known."""
        return self.examples_per_second if self.tokens_per_second is None else self.tokens_per_second


@dataclass(frozen=True)
class Result:
    """A candidate with its figures, or with the reason why there are none."""

    candidate: Candidate
    figures: Figures | None = None
    problem: str | None = None
    """Why it was not measured: it did not fit in memory, or was not tried because it would not."""

    predicted_bytes: int | None = None
    """Of one that was not tried: the peak to expect, above what was in use before."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    results: tuple[Result, ...]
    """One for each candidate, in the order in which they were given."""

    recommended: Result | None
    """The one to use; None where none fits."""

    reason: str
    """Why, in words."""

    @property
    def steadiness(self) -> float:
        """The median of the candidates': far below 1, the machine was busy, and close figures say little."""
        return statistics.median([one.figures.steadiness for one in self.results if one.figures is not None] or [1.0])


def candidates_for(batch_size: int) -> tuple[Candidate, ...]:
    """Sizes 1, 2, 4, ... up to the batch in order of arrival and by length, and `"auto"`.

    The last in order of arrival is the whole batch at once.

    Example:
        >>> [candidate.name for candidate in candidates_for(3)]
        ['1 in order', '2 in order', 'whole batch', '1 by length', '2 by length', '3 by length', 'auto']
    """
    doublings = [2**power for power in range((batch_size - 1).bit_length())]
    return (
        *(Candidate(f"{size} in order", size, regroup=False) for size in doublings),
        Candidate("whole batch", batch_size, regroup=False),
        *(Candidate(f"{size} by length", size) for size in [*doublings, batch_size]),
        Candidate("auto", "auto"),
    )


def compare(
    build: Callable[[Candidate], GradientAccumulator],
    batches: Sequence[Any],
    candidates: Sequence[Candidate],
    *,
    budget_bytes: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure candidates on the same batches, interleaved in random order; nothing is trained by it.

    Parameters, buffers, `.grad` and random state end as they were. Each candidate warms up on the first batch, smaller
    sizes first: one that would exceed the budget, by the line through the two sizes before it, is not tried. Memory is
    measured then, from an emptied allocator, which takes time of its own.

    Args:
        build: Makes a new accumulator for a candidate; all of the same model, loss function and collator.
        batches: Whole batches as for `backward`, two at least. The first is the one to warm up with, and to measure
            memory with: best the one with the longest examples.
        candidates: What to measure; sizes of one kind in ascending order.
        budget_bytes: What the process (CPU) or the device may hold, as `GradientAccumulator` has it; None: no limit.
        optimizer: Read only: the `.grad` of its parameters ends as it was too.
        within: Makes a context that is entered around each call, such as autocast.
        seed: Decides the order.
        say: Told what is done next.

    Raises:
        ConfigurationError: There are fewer than two batches, or one has no usable loss.
        WholeBatchError: As `GradientAccumulator` and its `backward`, but for memory: that is a result.

    Example:
        >>> import torch, wholebatch as wb
        >>> model = torch.nn.Linear(3, 1)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        >>> def build(candidate):
        ...     size = candidate.micro_batch_size
        ...     return wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=size)
        >>> batches = [{"x": torch.randn(4, 3), "y": torch.randn(4, 1)} for _ in range(3)]
        >>> comparison = compare(build, batches, [Candidate("2", 2), Candidate("4", 4)])
        >>> [result.figures.num_micro_batches for result in comparison.results]
        [2.0, 1.0]
    """
    if len(batches) < 2:
        raise ConfigurationError(f"batches: {len(batches)}, and two are needed at least: the first one warms up")
    course = _Course(build, batches, optimizer, within, budget_bytes)
    entrants = [_Entrant(candidate) for candidate in candidates]
    for entrant in entrants:
        say(f"{entrant.candidate.name}: warming up")
        course.warm_up(entrant, [one for one in entrants if _same_kind(one.candidate, entrant.candidate)])
    order = random.Random(seed)
    for number, batch in enumerate(batches[1:], 1):
        for entrant in order.sample(entrants, len(entrants)):
            if entrant.problem is None:
                say(f"{entrant.candidate.name}: batch {number} of {len(batches) - 1}")
                course.run(entrant, batch)
    results = tuple(entrant.result() for entrant in entrants)
    return Comparison(results, *recommended(results))


def recommended(results: Sequence[Result]) -> tuple[Result | None, str]:
    """The smallest peak among those within 2 % of the fastest, and why.

    Peaks within 2 % of the smallest count as equal; of these, one that regroups goes first, as that is the default, and
    then the faster one. Where peaks are not known, the fastest.
    """
    measured = {result: result.figures for result in results if result.figures is not None}
    if not measured:
        return None, "none of them fits in memory"
    fastest, best = max(measured.items(), key=lambda pair: pair[1].speed)
    fast = {one: it for one, it in measured.items() if it.speed >= (1 - TOLERANCE) * best.speed}
    peaks = [it.peak_bytes for it in fast.values() if it.peak_bytes is not None]
    if len(peaks) < len(fast):
        return fastest, "the fastest"
    small = {one: it for one, it in fast.items() if it.peak_bytes <= (1 + TOLERANCE) * min(peaks)}  # type: ignore[operator]
    chosen = max(small, key=lambda one: (one.candidate.regroup, small[one].speed))
    if chosen is fastest:
        return chosen, "the fastest" + (", with the smallest peak of those as fast" if len(fast) > 1 else "")
    return chosen, f"within {TOLERANCE:.0%} of the fastest ({fastest.candidate.name}), with the smallest peak"


def extrapolated(peaks: Sequence[tuple[int, int]], size: int) -> int | None:
    """The peak to expect at `size`, by the line through the last two of `peaks`, pairs of size and bytes.

    Of one alone: in proportion, which is no less than what comes. None of none.

    Example:
        >>> extrapolated([(1, 100), (2, 150)], 4)
        250
    """
    if not peaks:
        return None
    last, high = peaks[-1]
    if len(peaks) == 1:
        return high * size // last
    before, low = peaks[-2]
    return max(high, high + (high - low) * (size - last) // (last - before))


@dataclass(frozen=True)
class _Call:
    """One `backward` as it was measured."""

    report: StepReport
    seconds: float
    base_bytes: int | None
    largest_tokens: int | None

    @property
    def over_bytes(self) -> int | None:
        """The peak above what was in use before."""
        peak = self.report.peak_memory_bytes
        return None if peak is None or self.base_bytes is None else max(0, peak - self.base_bytes)


@dataclass(eq=False)
class _Entrant:
    """A candidate under way."""

    candidate: Candidate
    accumulator: GradientAccumulator | None = None
    warm: _Call | None = None
    calls: list[_Call] = field(default_factory=list)
    problem: str | None = None
    predicted_bytes: int | None = None

    def result(self) -> Result:
        """What came of it."""
        if self.problem is not None:
            return Result(self.candidate, problem=self.problem, predicted_bytes=self.predicted_bytes)
        return Result(self.candidate, _figures(self.calls, None if self.warm is None else self.warm.over_bytes))


def _figures(calls: Sequence[_Call], peak_bytes: int | None) -> Figures:
    reports, seconds = [call.report for call in calls], [call.seconds for call in calls]
    real, padded = ([getattr(one, name) for one in reports] for name in ("real_tokens", "padded_tokens"))
    known = None not in real
    by_example = [one.num_examples / time for one, time in zip(reports, seconds, strict=True)]
    rates = [tokens / time for tokens, time in zip(real, seconds, strict=True)] if known else by_example
    return Figures(
        num_micro_batches=statistics.fmean(one.gradient_accumulation_steps for one in reports),
        largest_examples=max(max(one.micro_batch_sizes) for one in reports),
        largest_tokens=max((call.largest_tokens or 0 for call in calls), default=0) or None if known else None,
        real_tokens=sum(real) if known else None,
        padded_tokens=sum(padded) if known else None,
        seconds=Spread(statistics.median(seconds), min(seconds), max(seconds)),
        examples_per_second=statistics.median(by_example),
        tokens_per_second=statistics.median(rates) if known else None,
        steadiness=min(rates) / max(rates),
        peak_bytes=peak_bytes,
    )


def _same_kind(one: Candidate, other: Candidate) -> bool:
    """Whether they differ in nothing but the size, so that the memory of one tells that of the other."""
    return one.regroup == other.regroup and "auto" not in (one.micro_batch_size, other.micro_batch_size)


class _Course:
    """Runs candidates, one batch at a time, and leaves no trace in the model."""

    def __init__(
        self,
        build: Callable[[Candidate], GradientAccumulator],
        batches: Sequence[Any],
        optimizer: torch.optim.Optimizer | None,
        within: Callable[[], AbstractContextManager[Any]],
        budget_bytes: int | None,
    ) -> None:
        self._build, self._batches, self._optimizer, self._within = build, batches, optimizer, within
        self._budget = budget_bytes
        self._learned: dict[str, Any] | None = None

    def warm_up(self, entrant: _Entrant, kind: Sequence[_Entrant]) -> None:
        """Check, settle and measure once a candidate, unless those of its `kind` say that it would not fit."""
        entrant.problem = self._foreseen(entrant, kind)
        if entrant.problem is not None:
            return
        accumulator = entrant.accumulator = self._build(entrant.candidate)
        if self._learned is not None:  # the loss is the same, and has been verified
            accumulator.load_state_dict(self._learned)
        if not kind or all(one.warm is None for one in kind):
            self._tried(entrant, self._batches[0])  # what is checked then takes memory of its own
        self._settle(entrant, accumulator)
        entrant.warm = self._weighed(entrant, self._batches[0])
        if entrant.problem is None:
            self._learned = accumulator.state_dict()

    def run(self, entrant: _Entrant, batch: Any) -> None:
        """Measure one batch."""
        if (call := self._tried(entrant, batch)) is not None:
            entrant.calls.append(call)

    def _foreseen(self, entrant: _Entrant, kind: Sequence[_Entrant]) -> str | None:
        """Why a candidate is not to be tried, if so."""
        size = entrant.candidate.micro_batch_size
        if isinstance(size, str):
            return None
        calls = [(int(one.candidate.micro_batch_size), one.warm) for one in kind if one.warm is not None]
        known = [(of, call.over_bytes) for of, call in calls if call.over_bytes is not None]
        expected = entrant.predicted_bytes = extrapolated(known, size)
        failed = any(one.problem is not None for one in kind)
        if not failed and (expected is None or self._budget is None or expected <= self._free_bytes(calls[-1][1])):
            return None
        return "not tried: " + ("a smaller one did not fit" if expected is None else f"about {_mebibytes(expected)}")

    def _free_bytes(self, last: _Call) -> float:
        """What may be planned with above what is in use before a batch."""
        return (1 - MARGIN) * ((self._budget or 0) - (last.base_bytes or 0))

    def _settle(self, entrant: _Entrant, accumulator: GradientAccumulator) -> None:
        """Let `"auto"` choose: until as many batches in a row as there are have left the choice as it was."""
        quiet = 0
        for number, batch in enumerate(itertools.cycle(self._batches)):
            if entrant.problem is not None or _settled(accumulator) is None or quiet == len(self._batches):
                return
            if number == MOST_SETTLING:
                entrant.problem = f"not settled after {number} batches"
                return
            before = _settled(accumulator)
            self._tried(entrant, batch)
            quiet = quiet + 1 if before and _settled(accumulator) else 0

    def _weighed(self, entrant: _Entrant, batch: Any) -> _Call | None:
        """One batch for its memory; over the budget is the candidate's problem."""
        if entrant.accumulator is not None:
            give_back_unused(_device(entrant.accumulator))
        call = self._tried(entrant, batch)
        peak = None if call is None else call.report.peak_memory_bytes
        if self._budget is not None and peak is not None and peak > self._budget:
            entrant.problem = f"does not fit: {peak / MIB:,.0f} of {_mebibytes(self._budget)}"
        return call

    def _tried(self, entrant: _Entrant, batch: Any) -> _Call | None:
        """One batch; running out of memory is the candidate's problem."""
        if entrant.problem is not None or entrant.accumulator is None:
            return None
        try:
            call = self._call(entrant.accumulator, batch)
        except Exception as error:
            if not is_out_of_memory(error) and not isinstance(error, MemoryBudgetError):
                raise
            entrant.problem = f"does not fit: {str(error).partition(chr(10))[0] or type(error).__name__}"
        else:
            if call.report.should_step:
                return call
            raise ConfigurationError(f"a batch to measure with came to nothing ({call.report.reason}); use others")
        gc.collect()  # out of the except block, which keeps alive what the error refers to
        return None

    def _call(self, accumulator: GradientAccumulator, batch: Any) -> _Call:
        model, device, widths = accumulator.model, _device(accumulator), list[int]()
        parameters = trainable_parameters(model, self._optimizer)
        with _traceless(model, parameters, device), _widths_noted(model, widths):
            base = peak_meter(device).current_bytes()
            started = time.perf_counter()
            with self._within():
                report = accumulator.backward(batch)
            synchronize(device)
            seconds = time.perf_counter() - started
        return _Call(report, seconds, base, max(widths, default=None))


def _device(accumulator: GradientAccumulator) -> torch.device:
    return next((one.device for one in accumulator.model.parameters()), torch.device("cpu"))


@contextmanager
def _traceless(model: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Afterwards `.grad`, buffers, attributes and random state are as before; inside, no parameter has a `.grad`."""
    with modules_kept(model), same_random_state(device), SetAside(parameters) as aside:
        aside.discard()
        yield


@contextmanager
def _widths_noted(model: nn.Module, widths: list[int]) -> Iterator[None]:
    """Note the padded tokens of all that the model is given."""

    def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        widths.append(padded_units((arguments, named)))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _settled(accumulator: GradientAccumulator) -> bool | None:
    """Whether the sizes are chosen; None where there is nothing to choose."""
    sizing = accumulator.state_dict()["sizing"]
    return None if "choice" not in sizing else sizing["choice"] is not None


def _mebibytes(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
