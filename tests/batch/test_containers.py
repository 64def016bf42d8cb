"""Containers are opened and built again as what they were."""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from batch_sameness import Pair, X, refused, same
from wholebatch.batch.containers import copied, map_tensors, tensors
from wholebatch.batch.layout import Piece


@dataclasses.dataclass(frozen=True)
class Sample:
    """With a field that its constructor does not take, and one more attribute that is none of its fields."""

    ids: torch.Tensor
    name: str = "sample"
    mask: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self.ids > 3)

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.ids * 2


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be written to."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Padlocked(Frozen):
    """A mapping that only its owner can build."""

    def __init__(self, items: Mapping[str, Any], key: str) -> None:
        super().__init__(items)


def test_a_bare_tensor_is_a_batch() -> None:
    piece = Piece(X)
    assert piece.num_examples == 4
    assert torch.equal(piece.take(range(1, 3)), torch.tensor([[3, 4, 5], [6, 7, 8]]))
    assert [(field.path, field.role, field.what) for field in piece.fields] == [("", "per example", "(4, 3)")]


@pytest.mark.parametrize(
    ("container", "rebuilt"),
    [
        ({"x": X, "n": None}, lambda x: {"x": x, "n": None}),
        ((X, X), lambda x: (x, x)),
        ([X, X], lambda x: [x, x]),
        (Pair(X, X), lambda x: Pair(x, x)),
        ({"a": {"b": (X, [])}}, lambda x: {"a": {"b": (x, [])}}),
        (collections.OrderedDict(x=X), lambda x: collections.OrderedDict(x=x)),
        (collections.UserDict(x=X), lambda x: collections.UserDict(x=x)),
        (types.MappingProxyType({"x": X}), lambda x: types.MappingProxyType({"x": x})),
        (Frozen({"x": X}), lambda x: Frozen({"x": x})),
        ({0: X, ("a", 1): X}, lambda x: {0: x, ("a", 1): x}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_type(container: Any, rebuilt: Callable[[Any], Any]) -> None:
    """Every container is cut inside and comes back as what it was; neighbours are views, other rows copies."""
    piece = Piece(container)
    assert same(piece.take(range(1, 3)), rebuilt(X[1:3]))
    assert same(piece.take([3, 0, 3]), rebuilt(X[[3, 0, 3]]))
    assert [leaf.untyped_storage().data_ptr() for leaf in tensors(piece.take(range(1, 3)))] == [
        X.untyped_storage().data_ptr() for _ in tensors(container)
    ]
    assert same(container, rebuilt(X)), "the batch itself has not changed"


def test_what_else_a_mapping_holds_is_kept() -> None:
    """A defaultdict keeps its factory, a subclass its attributes, without a call of its constructor."""

    class Tagged(dict[str, Any]):
        def __init__(self, tag: str, items: Mapping[str, Any]) -> None:
            super().__init__(items)
            self.tag = tag

    batch = {"d": collections.defaultdict(list, x=X), "t": Tagged("train", {"x": X})}
    part = Piece(batch).take(range(2))
    assert part["d"]["new"] == []
    assert (type(part["t"]), part["t"].tag) == (Tagged, "train")
    assert torch.equal(part["t"]["x"], X[:2])


def test_dataclasses_are_cut_in_every_attribute() -> None:
    """Fields that the constructor does not take, frozen ones and cached properties are all of the same rows."""
    sample = Sample(torch.arange(8))
    assert torch.equal(sample.doubled, 2 * torch.arange(8))
    part = Piece(sample).take(range(3, 6))
    assert type(part) is Sample
    assert part.name == "sample"
    assert part.ids.tolist() == [3, 4, 5]
    assert part.mask.tolist() == [False, True, True]
    assert part.doubled.tolist() == [6, 8, 10]
    assert sample.ids.numel() == 8


def test_a_container_that_cannot_be_built_again_is_refused_at_once() -> None:
    refused({"x": X, "odd": Padlocked({"y": X}, key="k")}, "'odd'", "Padlocked", "dict")


def test_empty_containers_and_none_are_kept() -> None:
    batch = {"x": X, "none": None, "list": [], "tuple": (), "dict": {}, "pair": Pair(X, None)}
    assert same(Piece(batch).take(range(1)), {**batch, "x": X[:1], "pair": Pair(X[:1], None)})


def test_shared_containers_are_the_batch_s_own() -> None:
    """A container without rows is not built again for each micro-batch."""
    config = {"size": 224, "names": ("a", "b")}
    assert Piece({"x": X, "config": config}).take(range(2))["config"] is config


def test_batch_encodings_are_cut_with_their_encodings() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    batch = fast(["a b", "c", "b a c"], padding=True, return_tensors="pt")
    for rows in (range(1, 3), [2, 0]):
        part = Piece(batch).take(rows)
        assert type(part) is transformers.BatchEncoding
        assert torch.equal(part["input_ids"], batch["input_ids"][list(rows)])
        assert [part.tokens(i) for i in range(2)] == [batch.tokens(row) for row in rows]
        assert (part.is_fast, part.n_sequences) == (True, batch.n_sequences)
    assert map_tensors(lambda tensor: tensor + 1, batch).tokens(1) == batch.tokens(1)
    batch["input_ids"], batch["attention_mask"] = batch["input_ids"].repeat(2, 1), batch["attention_mask"].repeat(2, 1)
    assert len(Piece(batch).take([5]).encodings) == 3, "encodings that no longer fit the rows stay as they are"


def test_model_outputs_are_cut() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.SequenceClassifierOutput(logits=X.float(), hidden_states=(X, X + 1))
    part = Piece({"teacher": output, "y": X}).take([1, 3])["teacher"]
    assert type(part) is type(output)
    assert list(part) == ["logits", "hidden_states"]
    assert torch.equal(part.logits, X[[1, 3]].float())
    assert torch.equal(part[1][1], X[[1, 3]] + 1)
    assert part.loss is None
    assert output.logits.shape == (4, 3)


def test_slow_batch_encodings_and_features_are_cut() -> None:
    """Without encodings, and the kind that image processors return."""
    transformers = pytest.importorskip("transformers")
    for kind in (transformers.BatchEncoding, transformers.BatchFeature):
        part = Piece(kind({"x": X, "text": ["a", "b", "c", "d"]})).take([3])
        assert type(part) is kind
        assert (part["x"].tolist(), part["text"]) == ([[9, 10, 11]], ["d"])


def test_map_tensors_reaches_every_tensor_and_keeps_the_rest() -> None:
    batch = {"x": X, "list": [{"boxes": X}, "text"], "pair": Pair(X, {"y": (X, None)}), "sample": Sample(X[:, 0])}
    mapped = map_tensors(lambda tensor: tensor.to("meta"), batch)
    assert type(mapped["pair"]) is Pair
    assert [tensor.device.type for tensor in tensors(mapped)] == ["meta"] * 6
    assert len(list(tensors(batch))) == 6
    assert mapped["list"][1] == "text"
    assert mapped["pair"].target["y"][1] is None


def test_map_tensors_builds_nothing_where_nothing_changes() -> None:
    batch = {"x": X, "inner": (X, [X])}
    assert map_tensors(lambda tensor: tensor, batch) is batch
    mapped = map_tensors(lambda tensor: tensor if tensor.ndim == 2 else tensor + 1, {"a": batch, "b": X[0]})
    assert mapped["a"] is batch


def test_a_piece_is_freed_with_its_last_reference() -> None:
    """No reference cycle keeps the batch until the garbage collector comes by."""
    import gc
    import weakref

    gc.disable()
    try:
        field = torch.rand(4, 3)
        alive = weakref.ref(field)
        piece = Piece({"x": field, "inner": (field, Sample(torch.arange(4)))})
        part = piece.take(range(2))
        del piece, part, field
        assert alive() is None
    finally:
        gc.enable()


def test_copies_share_nothing_that_can_be_changed_and_hold_no_more_than_the_example() -> None:
    """A row of a large tensor is copied as a row."""
    numpy = pytest.importorskip("numpy")
    large = torch.zeros(1000, 4)
    example = {"row": large[3], "ids": [1, 2], "nested": ({"more": [torch.ones(2)]}, "text"), "array": numpy.ones(3)}
    copy = copied(example)
    copy["row"].add_(1)
    copy["ids"].append(3)
    copy["nested"][0]["more"][0].add_(1)
    copy["nested"][0]["new"] = 1
    copy["array"] += 1
    assert not large.any()
    assert example["ids"] == [1, 2]
    assert example["nested"][0].keys() == {"more"}
    assert example["nested"][0]["more"][0].tolist() == [1, 1]
    assert example["array"].tolist() == [1, 1, 1]
    assert copy["row"].untyped_storage().nbytes() == 16
