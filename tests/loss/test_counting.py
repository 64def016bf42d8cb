"""Counts by row are those of the micro-batches, or not given."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.batch.sizing import FixedSize
from wholebatch.cut import Knife
from wholebatch.errors import CountError
from wholebatch.facts import BatchLayout
from wholebatch.loss.counting import IGNORED_LABEL, Counter
from wholebatch.loss.hugging_face import OwnCount


def _labels(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    labels = torch.randint(0, 5, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, IGNORED_LABEL)


@pytest.mark.parametrize("shape", [(7,), (7, 5), (7, 3, 4)])
@pytest.mark.parametrize("own", ["tokens", "tokens after the shift", "labelled examples"])
@given(limit=st.integers(1, 8))
def test_a_cut_counts_what_each_micro_batch_holds(own: OwnCount, shape: tuple[int, ...], limit: int) -> None:
    batch = {"input_ids": torch.zeros(7, 5, dtype=torch.long), "labels": _labels(*shape)}
    counter = Counter(None, own)
    for micro_batch in Knife(counter).cut(batch, FixedSize(limit)).micro_batches:
        expected = counter(micro_batch.data(), micro_batch.num_examples)
        assert micro_batch.counts == {term: float(number) for term, number in expected.items()}


def test_rows_are_counted_once_whatever_the_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.zeros(64, 2), "labels": _labels(64, 4)}
    looked_at: list[Any] = []
    by_row = Counter.by_row
    monkeypatch.setattr(Counter, "by_row", lambda self, *of: looked_at.append(of) or by_row(self, *of))
    cut = Knife(Counter("tokens")).cut(batch, FixedSize(1))
    assert len(looked_at) == 1
    assert sum(cut.counts.values()) == int((batch["labels"] != IGNORED_LABEL).sum())


@pytest.mark.parametrize(
    ("count", "labels", "num_examples"),
    [
        ("examples", _labels(4, 3), 4),
        ("sum", _labels(4, 3), 4),
        (lambda micro_batch: 1, _labels(4, 3), 4),
        ({"one": "tokens", "two": "tokens"}, _labels(4, 3), 4),
        ("tokens", _labels(4), 4),
        ("tokens", _labels(1, 3), 4),
        ("tokens", torch.zeros(4, 3, dtype=torch.long, device="meta"), 4),
        ("tokens", _labels(4, 3).to_sparse(), 4),
        ("tokens", torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), 2),
    ],
)
def test_rows_are_not_counted_where_a_micro_batch_may_hold_something_else(
    count: Any, labels: torch.Tensor, num_examples: int
) -> None:
    assert Counter(count).by_row({"labels": labels}, num_examples) is None


def test_labels_that_a_layout_speaks_of_are_counted_as_they_are_cut() -> None:
    labels = _labels(4, 4)  # positions first, as many as there are examples
    knife = Knife(Counter("tokens"), layout=BatchLayout(batch_dims={"labels": 1}))
    cut = knife.cut({"x": torch.zeros(4, 2), "labels": labels}, FixedSize(1))
    expected = [float((labels[:, i] != IGNORED_LABEL).sum()) for i in range(4)]
    assert [micro_batch.counts["loss"] for micro_batch in cut.micro_batches] == expected


def test_missing_labels_are_named() -> None:
    with pytest.raises(CountError, match="labels to count were not found"):
        Counter("tokens").by_row({"x": torch.zeros(4, 3)}, 4)


def test_what_lies_on_the_device_is_not_looked_at_again() -> None:
    knife, there = Knife(Counter("examples")), torch.device("meta")
    host = knife.cut({"x": torch.zeros(4, 5)}, FixedSize(2))
    mixed = knife.cut({"x": torch.zeros(4, 5), "y": torch.zeros(4, device="meta")}, FixedSize(2))
    assert host.lies_on(torch.device("cpu"))
    assert not host.lies_on(there)
    assert not mixed.lies_on(torch.device("cpu"))
    assert not mixed.lies_on(there)
