"""wholebatch: you choose the batch, it makes it fit in the memory you have, and the update is the whole batch's."""

from wholebatch.accumulation import GradientAccumulator
from wholebatch.batch.loader import whole_batches
from wholebatch.errors import WholeBatchError
from wholebatch.facts import BatchLayout, EvaluationReport, LossSum, StepReport

__all__ = [
    "BatchLayout",
    "EvaluationReport",
    "GradientAccumulator",
    "LossSum",
    "StepReport",
    "WholeBatchError",
    "whole_batches",
]
