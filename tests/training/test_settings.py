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
        ({"seed": 2**63}, r"seed=9223372036854775808: use a whole number from 0 to 2\*\*63 - 1"),
        ({"epochs": 0}, "epochs=0: use a whole number from 1 up"),
        ({"epochs": 2, "max_steps": 3}, "max_steps=3 and epochs=2: set one of them"),
        ({"streaming": True, "data": ("x",)}, "streaming: .* set max_steps"),
        ({"streaming": True, "max_steps": 3}, "streaming: .* name the files with data"),
        (
            {"streaming": True, "max_steps": 3, "data": ("x",), "schedule_unit": "tokens"},
            'streaming: .* schedule_unit="tokens" needs to know all of it',
        ),
        ({"packing": "on", "objective": "classify"}, 'packing="on" with objective=\'classify\': .* use "off" or'),
        ({"context_length": 1}, "context_length=1: use a whole number from 2 up"),
        ({"validation_fraction": 0.0}, r"validation_fraction=0\.0: use a number above 0 to 0\.9"),
        ({"validation_fraction": 0.95}, r"validation_fraction=0\.95: use a number above 0 to 0\.9"),
        ({"vocabulary_size": 10}, "vocabulary_size=10: use a whole number from 260 up"),
        ({"micro_batch_size": 0}, 'micro_batch_size=0: use "auto", or a whole number from 1 up'),
        ({"data": ("caf\udce9.txt",)}, "a path that is not UTF-8 cannot be recorded"),
        ({"dropout": 1.5}, r"dropout=1\.5: use a number from 0 to 1"),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0: use a number from 0 up"),
        ({"warm_up": float("nan")}, "warm_up=nan: use a number from 0 up"),
        ({"save_every": -1}, "save_every=-1: use a whole number from 0 up"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: use a whole number from 1 up"),
    ],
)
def test_a_number_that_cannot_be_right_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrainingSettings(**setting)
