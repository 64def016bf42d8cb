"""Rows are taken from tensors, arrays and nested tensors as plain indexing takes them."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batch_sameness import X, refused, roles, same
from wholebatch.batch.layout import Piece
from wholebatch.facts import BatchLayout

NESTED_IS_NEW = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.mark.parametrize(
    "field",
    [
        torch.tensor([True, False, True, True]),
        torch.arange(8, dtype=torch.uint8).reshape(4, 2),
        torch.arange(4).to(torch.complex64) * 1j,
        torch.arange(4.0, dtype=torch.bfloat16),
        torch.arange(4.0, requires_grad=True),
        torch.tensor([[7.0]]).expand(4, 3),
        torch.arange(20).reshape(5, 4).T,
        torch.zeros(4, 0),
        torch.nn.Parameter(torch.arange(4.0)),
    ],
    ids=["bool", "uint8", "complex", "bf16", "grad", "expanded", "strided", "empty", "parameter"],
)
def test_tensors_of_every_kind_are_cut(field: torch.Tensor) -> None:
    """The rows are those of plain indexing, by range and by list, also where the batch has no second copy of them."""
    piece = Piece({"x": X, "field": field})
    for rows in (range(1, 4), range(0), [2, 0], range(3, 0, -2), range(0, 4, 2)):
        assert torch.equal(piece.take(rows)["field"], field[list(rows)])
    assert piece.take(range(1, 4))["field"].untyped_storage().data_ptr() == field.untyped_storage().data_ptr()


class Operators(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_range_costs_one_view_per_tensor_and_nothing_else() -> None:
    piece = Piece({"x": X, "inner": (X, {"y": X}), "scale": torch.tensor(2.0), "ids": [1, 2, 3, 4]})
    with Operators() as operators:
        piece.take(range(1, 3))
    assert operators.names == ["aten.slice.Tensor"] * 3


def test_gradients_flow_back_through_a_cut() -> None:
    field = torch.zeros(4, requires_grad=True)
    piece = Piece({"x": X, "field": field})
    (piece.take(range(2))["field"].sum() + 10 * piece.take([3, 3])["field"].sum()).backward()
    assert field.grad is not None
    assert field.grad.tolist() == [1.0, 1.0, 0.0, 20.0]


def test_tensors_without_rows_are_shared() -> None:
    """0-d tensors and tensors of leading dimension 1 are every micro-batch's, as the same objects."""
    batch = {
        "x": X,
        "y": X,
        "temperature": torch.tensor(2.0),
        "positions": torch.arange(3)[None],
        "scale": torch.ones(1),
    }
    part = Piece(batch).take([1, 2])
    assert [part[name] is batch[name] for name in batch] == [False, False, True, True, True]
    assert roles(batch)["positions"] == "shared"


def test_one_broadcast_vector_beside_one_field_is_shared() -> None:
    batch = {"x": X, "scale": torch.ones(1)}
    assert roles(batch) == {"x": "per example", "scale": "shared"}


def test_broadcast_tensors_beside_a_list_are_shared() -> None:
    """A list has one item per example, whatever the tensors are."""
    batch = {"id": ["a", "b", "c"], "positions": torch.arange(3)[None], "mask": torch.ones(1, 3)}
    assert roles(batch) == {"id": "per example", "positions": "shared", "mask": "shared"}


def test_a_batch_of_one_is_not_taken_for_a_broadcast_one() -> None:
    """One example beside an unnamed vector of five: cutting the vector would run the example five times."""
    vector = torch.rand(5)
    refused({"x": torch.rand(1, 3), "prior": vector}, "1 example or 5", "'x': (1, 3)", "'prior': (5,)", "shared_fields")
    refused({"x": torch.rand(1, 3), "y": torch.rand(1), "prior": torch.rand(5, 2)}, "1 example or 5")
    layout = BatchLayout(shared_fields=["prior"])
    assert Piece({"x": torch.rand(1, 3), "prior": vector}, layout).num_examples == 1
    assert Piece({"x": torch.rand(1, 3), "id": ["a"]}).num_examples == 1
    refused({"x": torch.rand(1, 3), "id": ["a"], "prior": vector}, "disagree")


def test_a_batch_of_one_example() -> None:
    """Nothing is ambiguous where there is nothing to cut apart."""
    batch = {"x": X[:1], "ids": [7], "size": (224,), "class_weights": torch.ones(1), "maps": [X[:1]], "names": ("a",)}
    piece = Piece(batch)
    assert piece.num_examples == 1
    assert [Piece({"x": X[:1], name: field}).one_reading for name, field in batch.items()] == [
        True, True, False, True, False, True
    ]  # fmt: skip
    assert same(piece.take(range(1)), batch)
    assert same(piece.take([0]), batch)
    assert Piece({"x": X, "ids": [1, 2, 3, 4]}).one_reading


# ---- numpy ----


def test_numpy_arrays_are_cut_and_stay_numpy() -> None:
    np = pytest.importorskip("numpy")
    batch = {
        "x": np.arange(12).reshape(4, 3),
        "text": np.array(["a", "bb", "c", "d"]),
        "k": np.float32(3),
        "z": np.array(1),
    }
    piece = Piece(batch)
    assert roles(batch) == {"x": "per example", "text": "per example", "k": "shared", "z": "shared"}
    assert same(piece.take(range(1, 3)), {**batch, "x": batch["x"][1:3], "text": batch["text"][1:3]})
    assert same(piece.take([3, 1]), {**batch, "x": batch["x"][[3, 1]], "text": batch["text"][[3, 1]]})
    assert np.shares_memory(piece.take(range(1, 3))["x"], batch["x"])
    layout = BatchLayout(batch_dims={"x": 1})
    assert same(Piece({"x": batch["x"]}, layout).take(range(1, 3)), {"x": batch["x"][:, 1:3]})
    assert same(Piece({"x": batch["x"]}, layout).take([2]), {"x": batch["x"][:, [2]]})


# ---- Nested and sparse tensors ----


def jagged(*lengths: int) -> torch.Tensor:
    rows = [torch.arange(float(n)) + 10 * i for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("rows", [range(1, 4), range(5), [4, 0], [2], range(3, 0, -1)])
def test_jagged_tensors_are_cut_into_jagged_tensors(rows: Any) -> None:
    field = jagged(3, 1, 4, 2, 5)
    part = Piece({"field": field}).take(rows)["field"]
    assert part.layout is torch.jagged
    assert [row.tolist() for row in part.unbind()] == [field.unbind()[row].tolist() for row in rows]


def test_a_range_of_a_jagged_tensor_is_a_view() -> None:
    field = jagged(3, 1, 4, 2, 5)
    part = Piece(field).take(range(1, 3))
    assert part.values().data_ptr() == field.values()[3:].data_ptr()


@pytest.mark.parametrize("rows", [range(1, 3), [2, 0]])
def test_jagged_tensors_of_common_lengths_stay_compatible(rows: Any) -> None:
    """What could be multiplied before the cut can be after it; a second pair of lengths is kept apart."""
    ids = jagged(3, 1, 4)
    batch = {"ids": ids, "mask": ids * 0 + 2, "other": jagged(1, 2, 3)}
    part = Piece(batch).take(rows)
    assert (part["ids"] * part["mask"]).values().tolist() == (2 * part["ids"].values()).tolist()
    assert [row.tolist() for row in part["other"].unbind()] == [batch["other"].unbind()[row].tolist() for row in rows]


def test_jagged_tensors_with_gaps_between_rows() -> None:
    """Rows narrowed out of a padded tensor leave gaps in its storage, which do not come along."""
    padded, starts, lengths = torch.arange(18).reshape(3, 6), torch.tensor([0, 1, 2]), torch.tensor([2, 3, 4])
    field = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    for rows in (range(1, 3), [2, 0]):
        part = Piece({"field": field}).take(rows)["field"]
        assert [row.tolist() for row in part.unbind()] == [
            padded[row, int(starts[row]) : int(starts[row] + lengths[row])].tolist() for row in rows
        ]


@NESTED_IS_NEW
def test_strided_nested_tensors_are_cut() -> None:
    rows = [torch.rand(2, 3), torch.rand(4, 3), torch.rand(1, 3)]
    field = torch.nested.nested_tensor(rows, layout=torch.strided)
    piece = Piece({"field": field})
    for taken in (range(1, 3), [2, 0]):
        part = piece.take(taken)["field"]
        assert (part.is_nested, part.layout) == (True, torch.strided)
        assert all(torch.equal(got, rows[row]) for got, row in zip(part.unbind(), taken, strict=True))


def test_sparse_coo_tensors_are_cut() -> None:
    dense = torch.tensor([[0, 1], [2, 0], [0, 0], [3, 4]])
    piece = Piece({"x": X, "s": dense.to_sparse()})
    for rows in (range(1, 4), [3, 0]):
        assert piece.take(rows)["s"].layout is torch.sparse_coo
        assert torch.equal(piece.take(rows)["s"].to_dense(), dense[list(rows)])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_layouts_without_rows_are_refused_by_name() -> None:
    """Other sparse layouts, ragged dimensions further in, and nested tensors along another dimension."""
    refused({"x": X, "s": torch.eye(4).to_sparse_csr()}, "'s'", "torch.sparse_csr", "select")
    refused({"t": torch.nested.nested_tensor([torch.rand(2, 3)] * 4, layout=torch.jagged).transpose(1, 2)}, "'t'")
    batch = {"x": X, "t": torch.nested.nested_tensor([torch.rand(2, 4)], layout=torch.jagged)}
    refused(batch, "'t'", "nested, 1 rows", layout=BatchLayout(batch_dims={"t": 2}))
    refused(batch, "disagree", "'t': nested, 1 rows")


def test_packed_sequences_are_refused_by_name() -> None:
    """Their rows lie one time step after the other: dimension 0 is not the examples."""
    packed = torch.nn.utils.rnn.pack_padded_sequence(X.float(), torch.tensor([3, 2, 1, 1]), batch_first=True)
    refused({"x": X, "packed": packed}, "'packed'", "PackedSequence", "pack it in loss_fn")


# ---- Rows ----


@pytest.mark.parametrize("rows", [range(3, 5), [0, 4], [-1], range(-1, 2)])
def test_rows_that_are_not_there_are_an_error(rows: Any) -> None:
    """Slicing a list would pass over them in silence."""
    with pytest.raises(IndexError, match="batch of 4 examples"):
        Piece({"x": X, "ids": [0, 1, 2, 3]}).take(rows)
