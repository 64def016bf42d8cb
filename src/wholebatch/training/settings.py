"""What can be set about a training run. Imports no torch, so that `wholebatch --help` answers at once."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wholebatch.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """A training run as the user states it.

    Raises:
        ConfigurationError: A number that cannot be right. The micro-batch size and the memory budget are judged by
            `GradientAccumulator`.
    """

    global_batch_size: int = 64
    """Examples of one update."""

    micro_batch_size: int | Literal["auto"] = "auto"
    """At most this many examples in one forward and backward pass; auto: measured, so that runs differ in rounding."""

    memory_budget: int | float | str = "1GiB"
    """Memory that the process (on a GPU: the device) may use: bytes, a size such as 6GiB, a fraction such as 0.9, or
    auto."""

    max_steps: int = 150
    """Updates."""

    learning_rate: float = 6e-3
    """AdamW's, at its peak: warmed up over the first tenth of the updates, then lowered to a tenth along a cosine."""

    output_dir: Path = Path("runs/first")
    """Folder for the model, the tokenizer and the report."""

    seed: int = 0
    """Decides the initial parameters and the order of the examples."""

    def __post_init__(self) -> None:
        """Refuse the numbers that cannot be right before any work is done."""
        for name in ("global_batch_size", "max_steps"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: use a whole number from 1 up")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigurationError(f"learning_rate={self.learning_rate}: use a number above 0, such as 0.003")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"seed={self.seed}: use a whole number from 0 to 2**63 - 1")
