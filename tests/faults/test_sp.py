"""Splitting batches: known faults SP1, SP3 and SP5, as far as cutting goes."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

import wholebatch as wb
from lin import EXACT, Lin, accumulator, rows
from wholebatch.batch.layout import Piece
from wholebatch.batch.sizing import FixedSize
from wholebatch.cut import Knife
from wholebatch.errors import BatchLayoutError
from wholebatch.loss.counting import Counter


def parts(batch: Any, num_rows: int) -> list[Any]:
    """The batch in arrival order, `num_rows` rows at a time."""
    piece = Piece(batch)
    starts = range(0, piece.num_examples, num_rows)
    return [piece.take(range(start, min(start + num_rows, piece.num_examples))) for start in starts]


@pytest.mark.parametrize("bounds", [(0, 4, 7, 10), (0, 3, 6, 10), (0, 1, 2, 10)])
def test_sp1_tensors_and_lists_are_cut_at_the_same_places(bounds: tuple[int, ...]) -> None:
    """Ids in a list stay beside their rows in three parts of any sizes, which together hold all ten."""
    piece = Piece({"x": torch.arange(10), "id": list(range(10))})
    cut = [piece.take(range(bounds[i], bounds[i + 1])) for i in range(3)]
    assert [part["x"].tolist() for part in cut] == [list(range(bounds[i], bounds[i + 1])) for i in range(3)]
    assert all(part["id"] == part["x"].tolist() for part in cut)
    assert sum(len(part["id"]) for part in cut) == 10


def test_sp1_four_rows_are_cut_into_three_parts() -> None:
    """`torch.chunk` makes two parts of them."""
    piece = Piece({"x": torch.arange(4), "id": list(range(4))})
    cut = [piece.take(rows) for rows in (range(2), range(2, 3), range(3, 4))]
    assert [part["x"].tolist() for part in cut] == [[0, 1], [2], [3]] == [part["id"] for part in cut]
    assert len(torch.chunk(torch.arange(4), 3)) == 2


class Pair(NamedTuple):
    image: torch.Tensor
    target: torch.Tensor


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    target: torch.Tensor


IMAGE, TARGET = torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3)


@pytest.mark.parametrize(
    ("batch", "fields_of"),
    [
        ((IMAGE, TARGET), tuple),
        ([IMAGE, TARGET], tuple),
        (Pair(IMAGE, TARGET), tuple),
        (Sample(IMAGE, TARGET), lambda part: (part.image, part.target)),
        ({"image": IMAGE, "target": TARGET}, lambda part: tuple(part.values())),
        (collections.OrderedDict(image=IMAGE, target=TARGET), lambda part: tuple(part.values())),
        ({"inner": {"pair": (IMAGE, TARGET)}}, lambda part: part["inner"]["pair"]),
    ],
    ids=["tuple", "list", "named tuple", "dataclass", "dict", "ordered dict", "nested"],
)
def test_sp3_two_fields_are_not_two_examples(batch: Any, fields_of: Any) -> None:
    """With two fields and two examples, the rows of the tensors are cut, and the container stays what it is."""
    cut = parts(batch, 1)
    assert len(cut) == 2
    for row, part in enumerate(cut):
        assert type(part) is type(batch)
        image, target = fields_of(part)
        assert (image.tolist(), target.tolist()) == ([IMAGE[row].tolist()], [TARGET[row].tolist()])


def test_sp3_hugging_face_containers_are_not_examples() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=IMAGE, hidden_states=(IMAGE, TARGET))
    encoding = transformers.BatchEncoding({"input_ids": IMAGE, "labels": TARGET})
    for row in range(2):
        part = parts({"output": output, "encoding": encoding}, 1)[row]
        assert (type(part["output"]), type(part["encoding"])) == (type(output), type(encoding))
        assert part["output"].last_hidden_state.tolist() == [IMAGE[row].tolist()]
        assert [state.tolist() for state in part["output"].hidden_states] == [
            [IMAGE[row].tolist()],
            [TARGET[row].tolist()],
        ]
        assert part["encoding"]["labels"].tolist() == [TARGET[row].tolist()]


def test_sp5_five_jagged_rows_are_cut_two_at_a_time() -> None:
    rows = [torch.arange(float(length)) for length in (3, 1, 4, 1, 5)]
    cut = parts({"ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}, 2)
    assert [part["ids"].size(0) for part in cut] == [2, 2, 1]
    assert [row.tolist() for part in cut for row in part["ids"].unbind()] == [row.tolist() for row in rows]


def test_sp5_sizes_need_not_divide() -> None:
    """146 rows, 4 at a time, in a subclass of dict: 36 parts of 4 and one of 2, with every row once."""

    class Features(dict[str, Any]):
        pass

    cut = parts(Features(x=torch.arange(146)), 4)
    assert [len(part["x"]) for part in cut] == [4] * 36 + [2]
    assert torch.cat([part["x"] for part in cut]).tolist() == list(range(146))
    assert all(type(part) is Features for part in cut)


def test_sp5_uneven_parts_give_the_exact_gradient() -> None:
    """146 rows of one or two tokens, 4 at a time: 36 micro-batches of 4 and one of 2, and the mean of all tokens."""
    lines = [[float(row)] * (1 + row % 2) for row in range(146)]
    model = Lin()
    report = accumulator(model, size=4, regroup=False).backward(rows(*lines))
    assert report.micro_batch_sizes == (4,) * 36 + (2,)
    assert model.w.grad.item() == pytest.approx(sum(map(sum, lines)) / 219, rel=EXACT)


def test_sp5_jagged_rows_give_the_exact_gradient() -> None:
    """5 rows of 3, 1, 4, 1 and 5 tokens, 2 at a time, never padded: the mean of all 14."""

    def loss_fn(model: Lin, batch: dict[str, torch.Tensor]) -> wb.LossSum:
        lines = batch["x"].unbind()
        return wb.LossSum(torch.stack([model(line).sum() for line in lines]).sum(), sum(map(len, lines)))

    lines = [torch.arange(float(length), dtype=torch.float64) for length in (3, 1, 4, 1, 5)]
    model = Lin()
    batch = {"x": torch.nested.nested_tensor(lines, layout=torch.jagged)}
    report = accumulator(model, (loss_fn, None), size=2, regroup=False).backward(batch)
    assert report.micro_batch_sizes == (2, 2, 1)
    assert model.w.grad.item() == pytest.approx((3 + 0 + 6 + 0 + 10) / 14, rel=EXACT)


def test_sp5_a_type_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(BatchLayoutError, match=r"'inputs\.boxes' is a .*deque"):
        Piece({"x": torch.zeros(3), "inputs": {"boxes": collections.deque([1, 2, 3])}})


# ---- Put in order of length and trimmed ----

LENGTHS = [3, 9, 1, 7, 7, 2, 5, 12, 4, 6]


def regrouped(batch: Any, size: int) -> list[Any]:
    """The micro-batches that a batch is cut into once its padding may be left out."""
    knife = Knife(Counter("examples"))
    [(_, padding)] = knife.cut(batch, FixedSize(size), in_order=False).untried
    knife.trims.allowed.add(padding.kind)
    return [part.data() for part in knife.cut(batch, FixedSize(size), in_order=False).micro_batches]


def padded() -> dict[str, Any]:
    mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    return {"x": mask * torch.arange(1, 11)[:, None], "attention_mask": mask}


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sp1_regrouped_fields_stay_together(size: int) -> None:
    """Every field of an example moves with it, and every example comes out once."""
    batch = padded() | {"id": list(range(1, 11)), "text": [str(i) for i in range(1, 11)], "y": torch.arange(1, 11)}
    parts = regrouped(batch, size)
    assert sorted(i for part in parts for i in part["id"]) == list(range(1, 11))
    for part in parts:
        assert part["x"][:, 0].tolist() == part["id"] == part["y"].tolist() == [int(text) for text in part["text"]]
        assert part["x"].shape == part["attention_mask"].shape
        assert part["attention_mask"].sum(1).tolist() == [LENGTHS[i - 1] for i in part["id"]]
        assert part["x"].shape[1] == max(LENGTHS[i - 1] for i in part["id"])


def test_sp3_regrouped_containers_keep_their_types() -> None:
    """A tokenizer's mapping and a named tuple in a dict: the mask is found inside, and each comes back as it was."""
    transformers = pytest.importorskip("transformers")
    inner = transformers.BatchEncoding(padded())
    parts = regrouped({"inputs": inner, "rest": Pair(torch.arange(10), torch.zeros(10, 12))}, 3)
    for part in parts:
        assert type(part["inputs"]) is transformers.BatchEncoding
        assert type(part["rest"]) is Pair
        assert part["rest"].target.shape[1] == part["inputs"]["x"].shape[1]
        assert part["rest"].image.tolist() == [i - 1 for i in part["inputs"]["x"][:, 0].tolist()]


def test_sp5_jagged_fields_are_regrouped_with_the_others() -> None:
    rows_of = [torch.full((length,), float(i)) for i, length in enumerate(LENGTHS, 1)]
    batch = padded() | {"jagged": torch.nested.nested_tensor(rows_of, layout=torch.jagged)}
    for part in regrouped(batch, 3):
        assert [int(row[0]) for row in part["jagged"].unbind()] == part["x"][:, 0].tolist()
