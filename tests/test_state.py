"""The accumulator's state: what a later run needs to go on in the same way."""

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb

Batch = dict[str, torch.Tensor]
EVALUATIONS: list[int] = []


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mean over examples that counts how often it is called."""
    EVALUATIONS.append(len(batch["x"]))
    return F.mse_loss(model(batch["x"]), batch["y"])


def made(**options: Any) -> wb.GradientAccumulator:
    """An accumulator of a small model."""
    torch.manual_seed(0)
    return wb.GradientAccumulator(nn.Linear(3, 2), loss_fn, count="examples", **options)


def batch(examples: int) -> Batch:
    """Random rows."""
    return {"x": torch.randn(examples, 3), "y": torch.randn(examples, 2)}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Saved, and read back without unpickling anything but plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_verified_loss_is_not_verified_again() -> None:
    """Without the state the first batch costs extra evaluations; with it, one per micro-batch."""
    first, later, fresh = made(micro_batch_size=2), made(micro_batch_size=2), made(micro_batch_size=2)
    first.backward(batch(6))
    later.load_state_dict(through_a_file(first.state_dict()))
    EVALUATIONS.clear()
    later.backward(batch(6))
    assert EVALUATIONS == [2, 2, 2]
    EVALUATIONS.clear()
    fresh.backward(batch(6))
    assert len(EVALUATIONS) > 3


def test_a_chosen_size_is_kept() -> None:
    first = made()
    for _ in range(30):
        first.backward(batch(64))
        if first.state_dict()["sizing"]["choice"] is not None:
            break
    state = through_a_file(first.state_dict())
    assert state["sizing"]["choice"] is not None
    later = made()
    later.load_state_dict(state)
    sizes = later.backward(batch(64)).micro_batch_sizes
    assert sizes == first.backward(batch(64)).micro_batch_sizes
    assert max(sizes) == min(state["sizing"]["choice"], 64)


def test_deterministic_sizes_depend_on_shapes_only() -> None:
    """The same cut from the first batch on, in every run; `None` follows torch's own switch."""
    runs = [made(deterministic=True).backward(batch(3000)).micro_batch_sizes for _ in range(2)]
    assert runs[0] == runs[1]
    assert max(runs[0]) == 500  # 3,000 rows of one unit in six parts of at most 512
    torch.use_deterministic_algorithms(True)
    try:
        followed = made().backward(batch(3000)).micro_batch_sizes
    finally:
        torch.use_deterministic_algorithms(False)
    assert followed == runs[0]


def test_skips_in_a_row_are_counted_on() -> None:
    first = made(micro_batch_size=2, max_skipped_batches=3)
    bad = {"x": torch.full((4, 3), torch.nan), "y": torch.zeros(4, 2)}
    first.backward(batch(4))
    assert not first.backward(bad).should_step
    assert not first.backward(bad).should_step
    later = made(micro_batch_size=2, max_skipped_batches=3)
    later.load_state_dict(through_a_file(first.state_dict()))
    with pytest.raises(wb.WholeBatchError, match="3 batches in a row"):
        later.backward(bad)


def test_a_choice_under_other_options_is_not_taken() -> None:
    stated = made(micro_batch_size=2)
    stated.backward(batch(6))
    automatic = made()
    automatic.load_state_dict(through_a_file(stated.state_dict()))
    assert automatic.state_dict()["sizing"]["choice"] is None
