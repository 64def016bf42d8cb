"""wholebatch: you choose the batch, it makes it fit in the memory you have, and the update is the whole batch's."""

import importlib
import typing

if typing.TYPE_CHECKING:
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

_HOMES = {
    "BatchLayout": "facts",
    "EvaluationReport": "facts",
    "GradientAccumulator": "accumulation",
    "LossSum": "facts",
    "StepReport": "facts",
    "WholeBatchError": "errors",
    "whole_batches": "batch.loader",
}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> typing.Any:
    """Import an exported name when it is first asked for: so `wholebatch --help` does without torch."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
