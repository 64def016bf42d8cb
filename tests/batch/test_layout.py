"""Every field gets its role: cut like the rows, shared, or refused by name."""

import collections
import dataclasses
import enum
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_sameness import Pair, X, refused, roles, same
from wholebatch.batch import containers
from wholebatch.batch.containers import is_plain, map_tensors
from wholebatch.batch.layout import BatchPieces, Piece
from wholebatch.facts import BatchLayout


class Colour(enum.Enum):
    RED = 1


# ---- Lists and tuples ----


@pytest.mark.parametrize(
    "items",
    [
        ["a", "b", "c", "d"],
        [1, 2, 3, 4],
        [None, 1, "x", 2.5],
        [[1], [2, 3], [], [4, 5, 6]],
        [{"boxes": torch.rand(n, 4)} for n in (2, 0, 1, 5)],
        [torch.rand(3, size) for size in (8, 9, 8, 7)],
        [torch.rand(()) for _ in range(4)],
        [torch.rand(n, 2) for n in (1, 2, 3, 4)],
        [object(), object(), object(), object()],
    ],
    ids=["text", "ints", "mixed", "ragged", "dicts", "images", "scalars", "boxes", "objects"],
)
def test_lists_with_one_item_per_example_are_cut_like_the_rows(items: list[Any]) -> None:
    piece = Piece({"x": X, "items": items})
    for rows in (range(1, 3), [3, 0]):
        taken = piece.take(rows)["items"]
        assert type(taken) is list
        assert all(got is items[row] for got, row in zip(taken, rows, strict=True))


def test_lists_alone_say_how_many_examples_there_are() -> None:
    """A batch of raw text and unpadded images has no tensor with a dimension of examples, and is clear all the same."""
    batch = {"text": ["a", "b", "c"], "images": [torch.rand(3, n, n) for n in (4, 5, 6)]}
    refused(batch, "'images'", "is it one tensor per example")
    assert Piece({**batch, "images": [torch.rand(n, 4) for n in (4, 5, 6)]}).num_examples == 3


def test_a_list_subclass_stays_one() -> None:
    class Names(list[str]):
        pass

    piece = Piece({"x": X, "names": Names("abcd")})
    assert [same(piece.take(rows)["names"], Names("bc")) for rows in (range(1, 3), [1, 2])] == [True, True]


@pytest.mark.parametrize("items", [["a", "b", "c"], [1, 2, 3, 4, 5], [[1, 2], [3]]])
def test_lists_of_another_length_are_refused_by_name(items: list[Any]) -> None:
    refused({"x": X, "items": items}, "'items'", f"list of {len(items)}", "'x': (4, 3)")


def test_lists_of_tensors_with_all_rows_are_cut_inside() -> None:
    """Hidden states of three layers, and a list of pairs."""
    layers = [X, X + 1, X + 2]
    pairs = [(X, X + 1), (X + 2, X + 3), (X, X)]
    part = Piece({"x": X, "layers": layers, "pairs": pairs}).take(range(1, 3))
    assert same(part["layers"], [layer[1:3] for layer in layers])
    assert same(part["pairs"], [(key[1:3], value[1:3]) for key, value in pairs])


def test_a_list_of_broadcast_tensors_is_shared() -> None:
    layers = [torch.rand(1, 3), torch.rand(1, 5)]
    assert same(Piece({"x": X, "layers": layers}).take([1])["layers"], layers)


def test_a_list_of_tensors_with_two_readings_is_refused() -> None:
    """Four tensors of four rows, inside a batch of four: one per example, or all in each?"""
    batch = {"x": X, "maps": [X, X, X, X]}
    refused(batch, "'maps'", "leading sizes 4, 4, 4, 4", "tuple", "batch_dims={'maps': 0}", "shared_fields=('maps',)")
    per_example = Piece(batch, BatchLayout(batch_dims={"maps": 0})).take([1])
    assert same(per_example, {"x": X[[1]], "maps": [X]})
    assert same(Piece({"x": X, "maps": (X, X, X, X)}).take([1])["maps"], (X[[1]],) * 4)
    assert same(Piece(batch, BatchLayout(shared_fields=("maps",))).take([1])["maps"], [X, X, X, X])
    refused({"maps": [torch.rand(4, 3), torch.rand(4, 3)]}, "no batch dimension", "'maps'")


def test_a_list_whose_tensors_have_other_rows_is_refused() -> None:
    refused({"x": X, "maps": [torch.rand(5, 2), torch.rand(5, 2)]}, "'maps'", "leading sizes 5, 5")


def test_at_top_level_a_list_of_tensors_is_what_a_loader_yields() -> None:
    """`[x, y]` is two fields, with two examples as with any other number; a list of text in it is per example."""
    batch = [X[:2], X[:2] + 1, ["a", "b"]]
    assert same(Piece(batch).take([1]), [X[[1]], X[[1]] + 1, ["b"]])
    assert same(Piece([X[:2], X[:2]]).take(range(1)), [X[:1], X[:1]])


@pytest.mark.parametrize(
    "batch",
    [
        [{"ids": X[0], "label": 1}, {"ids": X[1], "label": 0}],
        [(X[0], 1), (X[1], 0), (X[2], 1)],
        [[X[0], 1], [X[1], 0]],
        [{"ids": [1, 2, 3]}],
    ],
)
def test_a_list_of_examples_is_not_taken_for_a_collated_batch(batch: Any) -> None:
    """Cut along its tensors, each example of 3 tokens would be cut into 3 examples."""
    refused(batch, f"list of {len(batch)}", "collate_fn", "tuple")


def test_a_tuple_of_mappings_is_one_collated_batch() -> None:
    batch = ({"ids": X}, {"ids": X + 1})
    assert same(Piece(batch).take([2]), ({"ids": X[[2]]}, {"ids": X[[2]] + 1}))


def test_tuples_of_strings_are_per_example_and_other_tuples_shared() -> None:
    """A loader's default collation makes a tuple of strings; a pair of numbers is a setting."""
    batch = {"x": X, "names": ("a", "b", "c", "d"), "size": (224, 224), "classes": ("cat", "dog"), "none": (None,) * 4}
    part = Piece(batch).take([2, 0])
    assert same(part, {**batch, "x": X[[2, 0]], "names": ("c", "a")})


def test_a_tuple_of_as_many_numbers_as_examples_is_refused() -> None:
    batch = {"x": X, "box": (0, 0, 10, 10)}
    refused(batch, "'box'", "tuple of 4", "batch_dims={'box': 0}", "shared_fields=('box',)")
    refused({"x": X, "mixed": ("a", 1, None, 2)}, "'mixed'")
    assert Piece(batch, BatchLayout(batch_dims={"box": 0})).take([2])["box"] == (10,)
    assert Piece(batch, BatchLayout(shared_fields=["box"])).take([2])["box"] == (0, 0, 10, 10)
    assert Piece({"x": X, "box": [0, 1, 2, 3]}).take([2])["box"] == [2]


def test_a_named_tuple_of_as_many_settings_as_examples_is_shared() -> None:
    """Its items have names, so they are fields, whatever their number."""

    class Size(NamedTuple):
        height: int
        width: int

    batch = {"x": X[:2], "size": Size(3, 4), "shape": torch.Size([3, 4])}
    assert same(Piece(batch).take([1]), {**batch, "x": X[[1]]})


def test_long_lists_are_analysed_without_a_look_at_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpadded examples hold millions of numbers, and a walk over each in Python would take seconds."""
    looks: list[object] = []
    monkeypatch.setattr(containers, "is_plain", lambda value: looks.append(value) or is_plain(value))
    batch = {"ids": [[7] * 10_000 for _ in range(4)]}
    assert Piece(batch).num_examples == 4
    assert map_tensors(torch.clone, batch) is batch
    assert len(looks) < 100


# ---- Single things ----


@pytest.mark.parametrize(
    "value",
    [
        3,
        2.5,
        1j,
        True,
        None,
        "text",
        b"bytes",
        Colour.RED,
        torch.float32,
        torch.device("cpu"),
        torch.strided,
        len,
        dict,
    ],
    ids=repr,
)
def test_single_things_are_shared(value: Any) -> None:
    assert Piece({"x": X, "value": value}).take([0, 1])["value"] is value
    assert roles({"x": X, "value": value})["value"] == "shared"


@pytest.mark.parametrize("value", [object(), {1, 2}, range(4), iter([]), collections.deque([1, 2, 3, 4])], ids=repr)
def test_unknown_types_are_refused_by_name(value: Any) -> None:
    batch = {"x": X, "inner": {"odd": value}}
    name = type(value).__qualname__
    refused(batch, "'inner.odd'", name, "select={'inner.odd': rows_of}", "shared_fields=('inner.odd',)")
    assert Piece(batch, BatchLayout(shared_fields=["inner.odd"])).take([0])["inner"]["odd"] is value


# ---- Names that warn ----


@pytest.mark.parametrize(
    "name", ["class_weights", "pos_weight", "inner.label_weights", "ce_class_weight", "Class_Weights"]
)
@pytest.mark.parametrize("size", [4, 5])
def test_a_vector_that_speaks_of_classes_is_refused(name: str, size: int) -> None:
    """With as many classes as examples it would be cut; refused at every other number too, it is never a surprise."""
    vector = torch.rand(size)
    outer, _, inner = name.rpartition(".")
    batch = {"x": X, outer: {inner: vector}} if outer else {"x": X, inner: vector}
    refused(batch, repr(name), f"({size},)", f"shared_fields=({name!r},)", f"batch_dims={{{name!r}: 0}}")
    assert roles(batch, BatchLayout(shared_fields=[name]))[name] == "shared"


def test_a_vector_that_speaks_of_classes_may_be_said_to_hold_one_value_per_example() -> None:
    batch = {"x": X, "class_weights": torch.arange(4.0)}
    assert Piece(batch, BatchLayout(batch_dims={"class_weights": 0})).take([2])["class_weights"].tolist() == [2.0]
    for values in ([1.0, 2.0, 3.0, 4.0], [1.0]):
        refused({"x": X, "class_weights": values}, "'class_weights'", f"list of {len(values)}")
    np = pytest.importorskip("numpy")
    refused({"x": X, "pos_weight": np.ones(4)}, "'pos_weight'", "(4,)")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("weight", torch.ones(4)),
        ("sample_weights", torch.ones(4)),
        ("class_labels", torch.ones(4)),
        ("class_weights", X),
    ],
)
def test_other_weights_are_per_example(name: str, field: torch.Tensor) -> None:
    """A weight per example, a label, and a matrix of weights are none of the names."""
    assert roles({"x": X, name: field})[name] == "per example"


def test_rotary_positions_need_their_dimension() -> None:
    """(3, B, L) with B = 3 could be cut along either dimension; with another B it does not agree with the rest."""
    for batch_size in (3, 2):
        batch = {
            "ids": torch.zeros(batch_size, 7),
            "position_ids": torch.arange(3 * batch_size * 7).view(3, batch_size, 7),
        }
        refused(batch, "'position_ids'", f"(3, {batch_size}, 7)", "batch_dims={'position_ids': 1}")
        part = Piece(batch, BatchLayout(batch_dims={"position_ids": 1})).take(range(1, 2))
        assert torch.equal(part["position_ids"], batch["position_ids"][:, 1:2])
        assert part["position_ids"].data_ptr() == batch["position_ids"][:, 1:].data_ptr()
    refused({"ids": torch.zeros(1, 7), "position_ids": torch.zeros(3, 1, 7)}, "'position_ids'")
    assert roles({"ids": torch.zeros(4, 7), "position_ids": torch.zeros(4, 3, 7)})["position_ids"] == "per example"
    for first, positions in (((4, 7), (4, 7)), ((4, 4), (4, 4)), ((1, 7), (1, 1, 7))):
        batch = {"ids": torch.zeros(first), "position_ids": torch.zeros(positions)}
        assert roles(batch)["position_ids"] == "per example"
    assert Piece({"position_ids": torch.zeros(4, 7)}).num_examples == 4


# ---- The layout ----


def test_select_computes_a_field_from_the_whole_batch() -> None:
    """Image patches of all examples in a row: the function finds those of the rows, for ranges and lists."""
    counts, patches = [2, 1, 3, 1], torch.arange(7)
    starts = [0, 2, 3, 6]

    def patches_of(batch: dict[str, Any], rows: Any) -> torch.Tensor:
        assert batch["counts"] is counts
        return torch.cat([batch["patches"][starts[row] : starts[row] + counts[row]] for row in rows])

    piece = Piece({"x": X, "counts": counts, "patches": patches}, BatchLayout(select={"patches": patches_of}))
    assert piece.take(range(1, 3))["patches"].tolist() == [2, 3, 4, 5]
    assert piece.take([3, 0])["patches"].tolist() == [6, 0, 1]
    refused({"x": X, "counts": counts, "patches": patches}, "'patches': (7,)", "select={'patches': rows_of}")


def test_dimensions_may_be_counted_from_the_end() -> None:
    piece = Piece({"x": X, "t": X.T}, BatchLayout(batch_dims={"t": -1}))
    for rows in ([2], range(1, 3)):
        assert torch.equal(piece.take(rows)["t"], X.T[:, list(rows)])


def test_a_tuple_of_unpadded_tensors_may_be_said_to_be_per_example() -> None:
    """`tuple(zip(*examples))` is what detection pipelines collate to."""
    batch = ((torch.rand(3, 5), torch.rand(3, 6)), ({"boxes": torch.rand(1, 4)}, {"boxes": torch.rand(2, 4)}))
    refused(batch, "disagree")
    refused({"p": Pair(X, 1)}, "a Pair, which has no dimensions", layout=BatchLayout(batch_dims={"p": 0}))
    part = Piece(batch, BatchLayout(batch_dims={"0": 0, "1": 0})).take([1])
    assert same(part, (batch[0][1:], batch[1][1:]))


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (BatchLayout(shared_fields=["y", "z"]), ("'y', 'z'", "does not have", "'x'")),
        (BatchLayout(batch_dims={"y": 1}), ("'y'", "does not have")),
        (BatchLayout(select={"y": len}), ("'y'", "does not have")),
        (BatchLayout(shared_fields="mask"), ("shared_fields is the text 'mask'", "('mask',)")),
        (BatchLayout(batch_dims={"x": 2}), ("batch_dims['x'] is 2", "(4, 3)")),
        (BatchLayout(batch_dims={"x": -3}), ("batch_dims['x'] is -3", "(4, 3)")),
        (BatchLayout(batch_dims={"scalar": 0}), ("batch_dims['scalar'] is 0", "()")),
        (BatchLayout(batch_dims={"inner": 0}), ("'inner' is a dict", "'inner.mask'")),
        (BatchLayout(batch_dims={"inner.mask": 1}), ("disagree",)),
        (BatchLayout(batch_dims={"x": True}), ("batch_dims['x'] is True", "an int")),
        (BatchLayout(batch_dims={"x": "0"}), ("batch_dims['x'] is '0'", "an int")),  # type: ignore[dict-item]
        (BatchLayout(select={"x": 1}), ("select['x'] is 1", "function")),  # type: ignore[dict-item]
        (BatchLayout(shared_fields=["x"], batch_dims={"x": 0}), ("'x' two roles",)),
        (BatchLayout(shared_fields=["inner", "inner.mask"]), ("'inner.mask', inside a field",)),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: BatchLayout, parts: tuple[str, ...]) -> None:
    batch = {"x": X, "scalar": torch.tensor(1.0), "inner": {"mask": X}}
    refused(batch, *parts, layout=layout)


def test_dimensions_stated_inside_a_list_are_checked() -> None:
    batch = {"x": X, "maps": [X, X, X]}
    refused(batch, "'maps.1'", "dimension 1", layout=BatchLayout(batch_dims={"maps.1": 1}))


# ---- BatchPieces ----


def test_batch_pieces_are_a_sequence_of_the_batches() -> None:
    pieces = BatchPieces([X[:2], X[2:], X])
    assert len(pieces) == 3
    assert pieces[1] is list(pieces)[1]
    assert pieces[-1] is X
    assert isinstance(pieces[1:], BatchPieces)
    assert len(pieces[1:]) == 2
    assert repr(BatchPieces(["a", "b"])) == "BatchPieces('a', 'b')"
    refused(pieces, "BatchPieces of 3", "piece by piece")


# ---- Any batch at all ----

Rows = list[int]
Made = tuple[Any, Callable[[Rows], Any]]
"""A field, and what plain indexing takes from it."""


@dataclasses.dataclass
class Holder:
    first: Any
    second: Any


def per_example(num_examples: int) -> st.SearchStrategy[Made]:
    def tensor(tail: list[int], dtype: torch.dtype) -> Made:
        value = torch.randint(0, 100, (num_examples, *tail)).to(dtype)
        return value, lambda rows: torch.stack([value[row] for row in rows])

    def items(values: list[Any]) -> Made:
        return values, lambda rows: [values[row] for row in rows]

    def strings(values: list[str]) -> Made:
        return tuple(values), lambda rows: tuple(values[row] for row in rows)

    def layers(tail: int) -> Made:
        values = [torch.rand(num_examples, tail) for _ in range(num_examples + 1)]
        return values, lambda rows: [torch.stack([value[row] for row in rows]) for value in values]

    size = {"min_size": num_examples, "max_size": num_examples}
    return st.one_of(
        st.builds(
            tensor, st.lists(st.integers(1, 3), max_size=2), st.sampled_from([torch.int64, torch.float32, torch.bool])
        ),
        st.builds(items, st.lists(st.integers() | st.text(max_size=2) | st.lists(st.integers(), max_size=3), **size)),
        st.builds(layers, st.integers(1, 3)),
        st.builds(strings, st.lists(st.text(max_size=2), **size)),
    )


def shared() -> st.SearchStrategy[Made]:
    values = st.sampled_from([None, 3, "text", (), {}, [], torch.tensor(5), torch.arange(6).view(1, 2, 3)])
    return values.map(lambda value: (value, lambda rows: value))


def nested_in(made: st.SearchStrategy[Made]) -> st.SearchStrategy[Made]:
    def together(build: Callable[..., Any], *parts: Made) -> Made:
        return build(*(value for value, _ in parts)), lambda rows: build(*(expected(rows) for _, expected in parts))

    def keyed(kind: Callable[..., Any], parts: dict[str, Made]) -> Made:
        value = kind({key: value for key, (value, _) in parts.items()})
        return value, lambda rows: kind({key: expected(rows) for key, (_, expected) in parts.items()})

    kinds = st.sampled_from([dict, collections.OrderedDict, collections.UserDict, types.MappingProxyType])
    return st.one_of(
        st.builds(keyed, kinds, st.dictionaries(st.sampled_from("abcd"), made, min_size=1, max_size=3)),
        st.builds(together, st.sampled_from([Pair, Holder]), made, made),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Made, int]:
    num_examples = draw(st.integers(2, 7))
    made = st.recursive(per_example(num_examples) | shared(), nested_in, max_leaves=6)
    extra, expected = draw(made)
    ids = list(range(num_examples))
    return (
        {"id": ids, "extra": extra},
        lambda rows: {"id": [ids[r] for r in rows], "extra": expected(rows)},
    ), num_examples


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_any_rows_of_any_batch_are_those_of_plain_indexing(made: tuple[Made, int], data: st.DataObject) -> None:
    """Rows in any order, and neighbouring ranges that cover the batch: each part has its rows, field by field."""
    (batch, expected), num_examples = made
    piece = Piece(batch)
    assert piece.num_examples == num_examples
    rows = data.draw(st.lists(st.integers(0, num_examples - 1), min_size=1, max_size=9))
    assert same(piece.take(rows), expected(rows))
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, num_examples - 1)))), num_examples]
    for start, stop in itertools.pairwise(bounds):
        assert same(piece.take(range(start, stop)), expected(list(range(start, stop))))
