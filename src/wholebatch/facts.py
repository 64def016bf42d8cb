"""The facts that all rooms speak of: what a loss is, how a batch is laid out, what a step reports.

Frozen dataclasses without behaviour. Everything in `wholebatch` may import this file; it imports none of it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

Number: TypeAlias = int | float | torch.Tensor
"""A Python number, or a 0-d tensor."""


IGNORED_LABEL = -100
"""The label that torch's and Hugging Face's losses leave out of their mean."""

LABEL_FIELDS = ("labels", "label", "targets", "target", "label_ids")
"""What the labels of a batch are called."""


@dataclass(frozen=True, eq=False)
class LossSum:
    """A loss as its parts: the sum over its units, and how many units there were.

    Return it from `loss_fn` where a mean would lose information: masked or weighted losses, several terms.
    The batch's loss is then the sum of all sums over the sum of all counts. A mapping of names to `LossSum`
    is a loss of several terms, each with its own count; the batch's loss is the sum of their means.

    Example:
        >>> import torch
        >>> per_token, mask = torch.tensor([3.0, 1.0, 8.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> LossSum((per_token * mask).sum(), mask.sum()).count
        tensor(2.)
    """

    sum: torch.Tensor
    """0-d, floating point, with the graph that leads to the parameters."""

    count: Number
    """What the sum is over: examples, labelled tokens, or a sum of weights. 0 where the micro-batch holds none."""

    metrics: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    """Further figures to report, each as `(sum, count)`: `{"accuracy": (num_right, num_tokens)}`."""


@dataclass(frozen=True)
class BatchLayout:
    """Where the examples lie in a batch whose fields do not all have the examples in dimension 0.

    Fields are named by their path: `"labels"`, `"inputs.pixel_values"`, `"0"` for the first item of a tuple.

    Example:
        >>> layout = BatchLayout(shared_fields=("class_weights",), batch_dims={"position_ids": 1})
    """

    shared_fields: Collection[str] = ()
    """Fields that belong to the batch as a whole (a vector of class weights): every micro-batch gets them uncut."""

    batch_dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension that counts the examples, for fields where it is not 0: `{"position_ids": 1}` for `(3, B, L)`."""

    select: Mapping[str, Callable[[Any, Sequence[int]], Any]] = field(default_factory=dict)
    """For fields without a dimension of examples (image patches of all examples in a row): a function of the whole
    batch and the examples' indices that returns the field's value for these examples."""


@dataclass(frozen=True, eq=False)
class StepReport:
    """What `GradientAccumulator.backward` did with one batch. Holds no graph and keeps nothing of the batch alive."""

    loss: torch.Tensor
    """The whole batch's loss, what one pass over it would have returned: detached, 0-d, on the model's device.
    Reading it never communicates. With `count="sum"` it is the sum. `nan` where the batch has no label."""

    metrics: Mapping[str, torch.Tensor]
    """Detached 0-d means over the batch, from `LossSum.metrics`."""

    count: Number | Mapping[str, Number]
    """What the loss is a mean over, in the units stated by `count=` (examples, labelled tokens, weights); by term
    where the loss has several terms. With `count="sum"` the number of examples, by which nothing is divided."""

    num_examples: int
    """Examples in the batch."""

    micro_batch_sizes: tuple[int, ...]
    """Examples in each micro-batch, in the order of the cut. Micro-batches without a label are cut but not run."""

    should_step: bool
    """False if the batch has no label or a non-finite loss: `.grad` is then as it was before the call. It speaks
    of the batch; whether fp16 gradients overflow stays the GradScaler's business."""

    reason: str | None
    """Why `should_step` is False, in a sentence; None where it is True."""

    bad_examples: tuple[int, ...]
    """Positions in the batch of the examples that are the reason; empty where `should_step` is True."""

    peak_memory_bytes: int | None
    """The most memory in use during the call: allocated bytes on an accelerator, resident bytes of the process on
    a CPU. None where it cannot be known."""

    seconds: float
    """Wall-clock time of the call on the host. With `on_bad_batch="ignore"` an accelerator may still be at work."""

    restarts: int
    """How often work was done again because memory had run out."""

    real_tokens: int | None = None
    """Tokens of the batch that are no padding, by its attention mask or by the lengths of its examples; None where
    neither says."""

    padded_tokens: int | None = None
    """Tokens of its micro-batches, padding included: `padded_tokens / real_tokens` is what padding costs."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in this step."""
        return len(self.micro_batch_sizes)


@dataclass(frozen=True, eq=False)
class EvaluationReport:
    """What `GradientAccumulator.evaluate` measured: summed numerators over summed counts, over everything it saw."""

    loss: float
    """The mean over all units in all batches (the sum with `count="sum"`; with several terms the sum of their means):
    what one pass over all the data would give."""

    metrics: Mapping[str, float]
    """Means over all the data, from `LossSum.metrics`."""

    count: float | Mapping[str, float]
    """What `loss` is a mean over; by term where the loss has several terms."""

    num_examples: int
    """Examples seen."""
