"""What could be counted in a batch, and how it is stated."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from wholebatch.candidates import CLASSES, candidates

pytestmark = pytest.mark.smoke

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
LABELS = torch.tensor([[3, 1, 0, -100], [2, -100, -100, -100], [-100, 4, -100, -100]])


def found(batch: Any, shifted: bool = False) -> dict[str, tuple[tuple[float, ...], str | None]]:
    return {name: (one.rows, one.code) for name, one in candidates(batch, 3, shifted).items()}


def test_examples_and_labels() -> None:
    unshifted, shifted = found({"labels": LABELS}), found({"labels": LABELS}, shifted=True)
    assert unshifted["examples"] == ((1, 1, 1), 'count="examples"')
    assert unshifted["tokens"] == ((3, 1, 1), 'count="tokens"')
    after = 'count=lambda micro_batch: (micro_batch["labels"][..., 1:] != -100).sum()'
    assert unshifted["tokens after the shift"] == ((2, 0, 1), after)
    assert shifted["tokens"] == ((3, 1, 1), 'count=lambda micro_batch: (micro_batch["labels"] != -100).sum()')
    assert shifted["tokens after the shift"] == ((2, 0, 1), 'count="tokens"')


def test_masks_and_weights_are_summed() -> None:
    weight = torch.tensor([0.5, 2.0, 1.0])
    batch = {"mask": MASK.float(), "kept": MASK.bool(), "w": weight, "lengths": torch.tensor([3, 1, 2])}
    rows = {code: rows for rows, code in found(batch).values()}
    for name in ("mask", "kept"):
        assert rows[f'count=lambda micro_batch: micro_batch["{name}"].sum()'] == (3, 1, 2)
        assert rows[f'count=lambda micro_batch: micro_batch["{name}"][:, 1:].sum()'] == (2, 0, 1)
    assert rows['count=lambda micro_batch: micro_batch["w"].sum()'] == (0.5, 2.0, 1.0)
    assert rows['count=lambda micro_batch: micro_batch["lengths"].sum()'] == (3, 1, 2)


def test_other_whole_numbers_are_counted_where_they_are_positive() -> None:
    """Neither the padding of a tokenizer nor the label that is left out is."""
    rows = {code: rows for rows, code in found({"ids": MASK * 7, "labels": LABELS}).values()}
    assert rows['count=lambda micro_batch: (micro_batch["ids"] > 0).sum()'] == (3, 1, 2)
    assert rows['count=lambda micro_batch: (micro_batch["labels"] > 0).sum()'] == (2, 1, 1)


def test_classes() -> None:
    """Labels of examples: those with one are counted; the classes tell only whether examples differ."""
    one, *others = (found({"labels": torch.tensor(labels)}) for labels in ([1, -100, 2], [2, 2, 2]))
    assert one["labelled examples"][0] == (1, 0, 1)
    assert one[CLASSES][1] is None
    assert len(set(one[CLASSES][0])) == 3
    assert not candidates({"labels": torch.tensor([2, 2, 2])}, 3, False)[CLASSES].varies
    assert others[0]["labelled examples"][0] == (1, 1, 1)


@dataclass
class Container:
    mask: torch.Tensor
    inner: dict[str, torch.Tensor]


def test_fields_are_read_as_a_user_would() -> None:
    """Of mappings, tuples, dataclasses, and what is in them."""
    codes = {code for _, code in found((MASK, LABELS)).values()}
    assert "count=lambda micro_batch: micro_batch[0].sum()" in codes
    assert 'count="tokens"' in codes
    nested = {code for _, code in found(Container(MASK, {"w": MASK, 5: MASK})).values()}
    assert "count=lambda micro_batch: micro_batch.mask.sum()" in nested
    assert 'count=lambda micro_batch: micro_batch.inner["w"].sum()' in nested
    assert "count=lambda micro_batch: micro_batch.inner[5].sum()" in nested


def test_what_holds_no_units_is_left_out() -> None:
    """Features, negative numbers, scalars, and fields of another length."""
    batch = {
        "x": torch.randn(3, 4),
        "image": torch.rand(3, 2, 4, 4),
        "target": torch.tensor([1.0, -1.0, 0.5]),
        "step": torch.tensor(3),
        "class_weight": torch.ones(5),
        "text": ["a", "b", "c"],
    }
    assert list(found(batch)) == ["examples"]


def test_only_fields_that_are_asked_for_are_looked_at() -> None:
    batch = {"mask": MASK, "other": MASK}
    asked = candidates(batch, 3, False, only=['micro_batch["mask"].sum()'])
    assert [name for name in asked if "other" in name] == []
    assert any("mask" in name for name in asked)
