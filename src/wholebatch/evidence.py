"""Evaluates a loss on a few examples, together and in parts, and leaves no trace."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from wholebatch.batch.containers import map_tensors
from wholebatch.candidates import Candidate, candidates
from wholebatch.gradients.hooks import without_hooks
from wholebatch.gradients.precision import NoAutocast, one_autocast
from wholebatch.gradients.set_aside import SetAside, gradients_aside
from wholebatch.loss.counting import ONLY, as_numbers
from wholebatch.loss.measured import Measured, Measurer, graph_nodes
from wholebatch.loss.stated import MicroBatchLoss, StatedLoss
from wholebatch.loss.verified import PIECE_SEEDS, UNION_SEED, Evidence, Rival
from wholebatch.sample import Sample
from wholebatch.suitability import parameters_untouched
from wholebatch.undisturbed import draw_once, last_bits_flipped, undisturbed


class Witness:
    """Measures a loss on a sample, under the conditions that show most.

    Args:
        model: Whose state is to be left as it was.
        loss: Stated or, to look for a count, read as a sum (`StatedLoss.as_sum`).
        device: The model's.
        parameters: The trainable ones.
        shifted: As for `candidates`.
        evaluation: Whether the model is in evaluation mode: without dropout. Some models have no loss then.
        autocast: Whether the caller's autocast is on: without it rounding hides less. Some models cannot do without.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: StatedLoss,
        device: torch.device,
        parameters: Sequence[nn.Parameter],
        shifted: bool,
        evaluation: bool = True,
        autocast: bool = False,
    ) -> None:
        self._model, self._loss, self._device, self._parameters = model, loss, device, parameters
        self._shifted, self._evaluation, self._autocast = shifted, evaluation, autocast
        self._measurer = Measurer(self._evaluate, self._differentiate, parameters)
        self._fixed = {ONLY: 1.0} if loss.counter.summed else None

    def evidence(self, sample: Sample) -> Evidence:
        """The sample together and in parts."""
        with self._conditions():
            union = self._measure(sample.union, sample.num_examples, self._fixed, UNION_SEED)
            over = self._fixed or union.counts
            shares = zip(sample.parts, sample.sizes, PIECE_SEEDS, strict=False)
            pieces = [self._measure(part, size, over, seed) for part, size, seed in shares]
        whole = candidates(sample.union, sample.num_examples, self._shifted)
        parts = [candidates(part, size, self._shifted) for part, size in zip(sample.parts, sample.sizes, strict=True)]
        return Evidence(union, pieces, self._rivals(parts, whole))

    def apart(self, sample: Sample) -> tuple[list[Measured], dict[str, Rival]]:
        """The parts alone, where there is no union."""
        with self._conditions():
            pairs = list(zip(sample.parts, sample.sizes, strict=True))
            pieces = [self._measure(part, size, self._fixed, UNION_SEED) for part, size in pairs]
        return pieces, self._rivals([candidates(part, size, self._shifted) for part, size in pairs])

    def metrics(self, data: Any, size: int) -> dict[str, tuple[float, float]]:
        """What the loss reports beside itself, for `size` examples."""
        with self._conditions(), torch.no_grad():
            loss = self._evaluate(data, as_numbers([self._loss.counter(data, size)])[0], size)
        return {name: (float(total), float(count)) for name, (total, count) in loss.metrics.items()}

    def again(self, sample: Sample, seed: float = UNION_SEED) -> Measured:
        """The sample together once more, with other random numbers, and perhaps from another seed."""
        with self._conditions():
            draw_once(self._device)
            return self._measure(sample.union, sample.num_examples, self._fixed, seed)

    def disturbed(self, sample: Sample, bits: int) -> Measured:
        """The sample together, with the last of `bits` fraction bits of each parameter flipped."""
        every = {id(parameter): parameter for parameter in (*self._model.parameters(), *self._parameters)}.values()
        with self._conditions(), last_bits_flipped(every, bits):
            return self._measure(sample.union, sample.num_examples, self._fixed, UNION_SEED)

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        precise = nullcontext() if self._autocast else NoAutocast(self._device)
        with undisturbed(self._model, self._device, self._evaluation), SetAside(self._parameters) as aside:
            aside.discard()
            quiet = warnings.catch_warnings(action="ignore")  # of odd sizes, say; training gives those that matter
            with parameters_untouched(aside, [], thorough=False), torch.enable_grad(), precise, quiet:
                yield

    def _measure(self, data: Any, size: int, divisors: Mapping[str, float] | None, seed: float) -> Measured:
        counts = as_numbers([self._loss.counter(data, size)])[0]
        return self._measurer(data, counts, size, divisors, seed)

    def _evaluate(self, data: Any, counts: Mapping[str, float], size: int) -> MicroBatchLoss:
        # Copies, because some losses mask labels or inputs in place.
        moved = map_tensors(lambda tensor: tensor.to(self._device, copy=True), data)
        with one_autocast(self._device):
            return self._loss(self._model, moved, counts, size)

    def _differentiate(self, total: torch.Tensor, wanted: Sequence[nn.Parameter]) -> Sequence[torch.Tensor | None]:
        with NoAutocast(self._device):
            # torch.autograd.grad does not see, or refuses, what is recomputed in a backward inside the backward.
            if any(name.startswith("CheckpointFunctionBackward") for name in graph_nodes(total)):
                return gradients_aside(total, wanted, self._parameters)
            with without_hooks(self._parameters):
                return torch.autograd.grad(total, wanted, allow_unused=True)

    def _rivals(
        self, parts: Sequence[Mapping[str, Candidate]], whole: Mapping[str, Candidate] | None = None
    ) -> dict[str, Rival]:
        """The candidates that every part has, and that are additive over the parts."""
        rivals = {}
        for name, one in (whole or parts[0]).items():
            counts = [part[name].total for part in parts if name in part]
            additive = whole is None or abs(sum(counts) - one.total) <= 1e-6 * abs(one.total)
            if len(counts) == len(parts) and additive:
                rivals[name] = Rival(counts, one.varies, one.words, one.code)
        return rivals
