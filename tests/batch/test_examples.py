"""The number of examples is what the fields agree on, and a disagreement is told in full."""

from typing import Any

import pytest
import torch

from batch_sameness import refused


def test_disagreement_lists_every_field_and_names_the_odd_one() -> None:
    batch = {
        "ids": torch.zeros(8, 5),
        "mask": torch.zeros(8, 5),
        "inner": {"labels": torch.zeros(7)},
        "names": ["a"] * 8,
    }
    shapes = ("'ids': (8, 5)", "'mask': (8, 5)", "'inner.labels': (7,)", "'names': list of 8")
    ways = ("shared_fields=('inner.labels',)", "batch_dims={'inner.labels': 1}", "select={'inner.labels': rows_of}")
    refused(batch, "most have 8; not so 'inner.labels'.", *shapes, *ways)


def test_a_tie_names_both_numbers() -> None:
    refused({"x": torch.zeros(8, 5), "y": torch.zeros(7)}, "7 or 8 examples", "'x': (8, 5)", "'y': (7,)")


@pytest.mark.parametrize(
    "batch", [{}, {"a": 1}, torch.tensor(1.0), 5, None, "text", (), [], {"class_weights": torch.ones(3)}]
)
def test_without_a_dimension_of_examples_there_is_no_batch(batch: Any) -> None:
    refused(batch, "no batch dimension")


@pytest.mark.parametrize("batch", [{"x": torch.zeros(0, 3)}, (torch.zeros(0), torch.zeros(1))])
def test_a_batch_of_no_examples_is_refused(batch: Any) -> None:
    refused(batch, "0 examples")
