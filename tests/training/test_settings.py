"""What can be set about a training run."""

from typing import Any

import pytest

from wholebatch.errors import ConfigurationError
from wholebatch.training.settings import TrainingSettings


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0: use a whole number from 1 up"),
        ({"max_steps": -3}, "max_steps=-3: use a whole number from 1 up"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0: use a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan: use a number above 0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf: use a number above 0"),
        ({"seed": -1}, "seed=-1: use a whole number from 0"),
    ],
)
def test_a_number_that_cannot_be_right_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrainingSettings(**setting)
