"""A loader's batches become whole batches without a lost example, and micro-batches arrive on the device one ahead."""

import gc
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from wholebatch.batch.layout import BatchPieces
from wholebatch.batch.loader import moved_ahead, whole_batches
from wholebatch.errors import BatchLayoutError, ConfigurationError


def batches_of(*sizes: int, length: int = 2) -> list[dict[str, Any]]:
    """Collated batches of these sizes, whose rows are numbered through."""
    starts = itertools.accumulate(sizes, initial=0)
    rows = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return [{"x": row[:, None].expand(-1, length), "id": row.tolist(), "scale": 2.0} for row in rows]


def ids_in(whole: Any) -> list[int]:
    """The rows of a whole batch, after a look whether its fields still agree."""
    if isinstance(whole, BatchPieces):
        return [row for piece in whole for row in ids_in(piece)]
    assert whole["x"][:, 0].tolist() == whole["id"]
    assert whole["scale"] == 2.0
    return whole["id"]


class Numbers(Dataset[int]):
    """A map-style dataset that, as many do, never raises `IndexError`."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> int:
        return position


# ---- Regrouping batches ----


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 10, 11, 100])
@pytest.mark.parametrize("sizes", [(4, 4, 2), (1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (10,), (1, 9)])
def test_whole_batches_hold_every_example_in_order(size: int, sizes: tuple[int, ...]) -> None:
    """All whole batches but the last are of the stated size, the last holds the rest, no field falls out of step."""
    wholes = list(whole_batches(batches_of(*sizes), size))
    ids = [ids_in(whole) for whole in wholes]
    assert list(itertools.chain.from_iterable(ids)) == list(range(10))
    assert [len(whole) for whole in ids] == [size] * (10 // size) + [10 % size] * (10 % size > 0)
    assert all(type(whole) is dict for whole in wholes)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=8), st.integers(1, 12))
def test_batches_of_any_sizes_and_lengths_keep_every_example(shapes: list[tuple[int, int]], size: int) -> None:
    """Batches padded to one length come out as one, others as pieces of their own length; no value is added."""
    sizes = [rows for rows, _ in shapes]
    loader = [
        {**batch, "x": batch["x"][:, :1].expand(-1, length)}
        for batch, (_, length) in zip(batches_of(*sizes), shapes, strict=True)
    ]
    lengths = [length for rows, length in shapes for _ in range(rows)]
    seen = 0
    for whole in whole_batches(loader, size):
        ids = ids_in(whole)
        assert ids == list(range(seen, min(seen + size, sum(sizes))))
        pieces = whole if isinstance(whole, BatchPieces) else [whole]
        assert [piece["x"].shape[1] for piece in pieces for _ in piece["id"]] == [lengths[row] for row in ids]
        assert (len({lengths[row] for row in ids}) == 1) is not isinstance(whole, BatchPieces)
        seen += len(ids)
    assert seen == sum(sizes)


def test_batches_padded_to_different_lengths_become_pieces() -> None:
    """The pieces are the loader's batches, cut where the whole batch ends."""
    loader = [torch.ones(3, 7), torch.ones(3, 5), torch.ones(2, 5)]
    first, second = whole_batches(loader, 5)
    assert isinstance(first, BatchPieces)
    assert [tuple(piece.shape) for piece in first] == [(3, 7), (2, 5)]
    assert isinstance(second, torch.Tensor)
    assert second.shape == (3, 5)


def test_a_part_of_one_loader_batch_is_not_copied() -> None:
    batch = torch.arange(6)
    first, second = whole_batches([batch], 4)
    assert first.data_ptr() == batch.data_ptr()
    assert second.data_ptr() == batch[4:].data_ptr()


@pytest.mark.parametrize(
    "others",
    [
        {"scale": 3.0},
        {"scale": 2},
        {"t": torch.tensor(3)},
        {"p": torch.arange(3)[None] + 1},
        {"x": torch.ones(2, 2, dtype=torch.float64)},
        {"x": torch.ones(2, 2).to_sparse()},
        {"n": (torch.ones(2), None)},
        {"n": [torch.ones(2)] * 3},
        {"n": ()},
        {"extra": None},
        {"f": max},
    ],
    ids=lambda others: next(iter(others)),
)
def test_what_does_not_fit_together_becomes_pieces(others: dict[str, Any]) -> None:
    """Other shared values, dtypes, layouts or containers are kept as they are, never coerced."""
    batch = {
        "x": torch.ones(2, 2), "t": torch.tensor(2), "p": torch.arange(3)[None], "n": (torch.ones(2), torch.ones(2)),
        "scale": 2.0, "f": min,
    }  # fmt: skip
    [fitting] = whole_batches([batch, dict(batch)], 4)
    assert (fitting["x"].shape, fitting["p"].shape, fitting["n"][1].shape) == ((4, 2), (1, 3), (4,))
    [whole] = whole_batches([batch, {**batch, **others}], 4)
    assert isinstance(whole, BatchPieces)
    assert whole[0].keys() == batch.keys()
    [name] = others
    assert type(whole[1][name]) is type(others[name])


def test_shared_things_that_cannot_be_compared_become_pieces() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise TypeError("no")

        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    [whole] = whole_batches([{"x": torch.ones(2), "f": Incomparable()} for _ in range(2)], 4)
    assert isinstance(whole, BatchPieces)


def test_containers_of_every_kind_are_put_together() -> None:
    np = pytest.importorskip("numpy")

    def batch(*ids: int) -> Any:
        rows = torch.tensor(ids)
        names = tuple(map(str, ids))
        return [rows, {"names": names, "a": np.array(ids), "s": rows[:, None].to_sparse()}, [str(row) for row in ids]]

    [whole] = whole_batches([batch(1, 2), batch(3, 4), batch(5, 6)], 6)
    rows, inner, text = whole
    assert rows.tolist() == [1, 2, 3, 4, 5, 6]
    assert inner["names"] == ("1", "2", "3", "4", "5", "6")
    assert (type(inner["a"]), inner["a"].tolist()) == (np.ndarray, [1, 2, 3, 4, 5, 6])
    assert inner["s"].to_dense()[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert text == list("123456")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_batches_stay_pieces(layout: torch.layout) -> None:
    loader = [torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=layout) for _ in range(2)]
    [whole] = whole_batches(loader, 4)
    assert isinstance(whole, BatchPieces)
    assert [piece.size(0) for piece in whole] == [2, 2]


def test_batch_encodings_are_put_together_with_their_encodings() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    [whole] = whole_batches([fast(["a", "b"], return_tensors="pt"), fast(["b"], return_tensors="pt")], 3)
    assert type(whole) is transformers.BatchEncoding
    assert whole["input_ids"].tolist() == [[0], [1], [1]]
    assert [whole.tokens(row) for row in range(3)] == [["a"], ["b"], ["b"]]


def test_positions_broadcast_over_a_batch_are_not_rows_of_a_batch_of_one() -> None:
    """In the last loader batch, of one example, `(1, L)` could be either; beside the others it is what they say."""
    loader = [{"x": torch.ones(n, 3), "y": torch.ones(n), "positions": torch.arange(3)[None]} for n in (4, 1)]
    [whole] = whole_batches(loader, 5)
    assert (whole["x"].shape, whole["positions"].shape) == ((5, 3), (1, 3))


def test_what_is_ambiguous_in_a_batch_of_one_is_not_put_together() -> None:
    """One image per example in a list, from a loader of single examples, must not become one image of two channels."""
    loader = [{"x": torch.ones(1, 3), "maps": [torch.ones(1, 5, 5)]} for _ in range(2)]
    [whole] = whole_batches(loader, 2)
    assert isinstance(whole, BatchPieces)


def test_a_batch_that_cannot_be_cut_is_refused_with_a_way_out_that_exists() -> None:
    loader = [{"x": torch.ones(4, 3), "class_weights": torch.ones(5)}]
    with pytest.raises(BatchLayoutError, match=r"'class_weights'.*whole_batches takes no layout.*\"examples\""):
        list(whole_batches(loader, 4))


# ---- Examples ----


@pytest.mark.parametrize("size", [1, 3, 5, 10, 11])
def test_examples_are_gathered_into_lists(size: int) -> None:
    wholes = list(whole_batches(range(10), size, loader_yields="examples"))
    assert wholes == [list(range(start, min(start + size, 10))) for start in range(0, 10, size)]


def test_a_list_of_examples_is_let_go_before_the_next_is_gathered() -> None:
    gc.disable()
    try:
        alive: list[weakref.ref[torch.Tensor]] = []

        def examples() -> Iterator[torch.Tensor]:
            for _ in range(6):
                assert sum(ref() is not None for ref in alive) <= 1, "what has been gathered of the list so far"
                example = torch.zeros(1)
                alive.append(weakref.ref(example))
                yield example
                del example

        for whole in whole_batches(examples(), 2, loader_yields="examples"):
            del whole
        assert len(alive) == 6
    finally:
        gc.enable()


def test_a_dataset_that_never_ends_by_itself_ends_with_its_length() -> None:
    """Indexing past its end, as Python's own iteration over it does, would never stop."""
    wholes = whole_batches(Numbers(), 4, loader_yields="examples")
    assert list(itertools.islice(wholes, 9)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(wholes) == 3  # type: ignore[arg-type]


# ---- As an iterable ----


def test_it_can_be_iterated_every_epoch() -> None:
    wholes = whole_batches(DataLoader(TensorDataset(torch.arange(10)), batch_size=4), 6)
    for _ in range(2):
        assert [whole[0].tolist() for whole in wholes] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_an_empty_loader_gives_no_batch() -> None:
    assert list(whole_batches([], 4)) == list(whole_batches([], 4, loader_yields="examples")) == []


def test_a_generator_is_read_no_further_than_needed() -> None:
    """A whole batch comes as soon as its last example has been read."""
    read = 0

    def counted(elements: Any) -> Iterator[Any]:
        nonlocal read
        for element in elements:
            read += 1
            yield element

    wholes = iter(whole_batches(counted(batches_of(*[2] * 6)), 4))
    assert read == 0
    for expected in (2, 4, 6):
        assert len(ids_in(next(wholes))) == 4
        assert read == expected
    read = 0
    lists = iter(whole_batches(counted(range(100)), 8, loader_yields="examples"))
    next(lists)
    assert read == 8


@pytest.mark.parametrize("length", [1, 2], ids=["one batch", "pieces"])
def test_nothing_is_held_beyond_one_whole_batch_and_one_of_the_loader_s(length: int) -> None:
    """With the whole batch let go, no more than the loader's last batch is alive; the last leaves nothing."""
    gc.disable()
    try:
        alive: list[weakref.ref[torch.Tensor]] = []

        def loader() -> Iterator[torch.Tensor]:
            for number in range(6):
                gathered = number % 2
                assert sum(ref() is not None for ref in alive) == gathered, "asked for the next one"
                batch = torch.zeros(2, 1 + number % length)
                alive.append(weakref.ref(batch.untyped_storage()))
                yield batch
                del batch

        wholes = iter(whole_batches(loader(), 4))
        for _ in range(3):
            whole = next(wholes)
            del whole
            assert sum(ref() is not None for ref in alive) <= 1
        assert next(wholes, None) is None
        assert [ref() for ref in alive] == [None] * 6
    finally:
        gc.enable()


# ---- Its length ----


def test_the_length_is_known_where_the_number_of_examples_is() -> None:
    data = TensorDataset(torch.arange(10))
    subset = DataLoader(data, batch_size=3, sampler=SubsetRandomSampler(range(7)))
    known = [
        (DataLoader(data, batch_size=3), "batches"),
        (DataLoader(data, batch_size=3, drop_last=True), "batches"),
        (subset, "batches"),
        (DataLoader(data, batch_size=None), "examples"),
        (list(range(10)), "examples"),
        (data, "examples"),
    ]
    for loader, yields in known:
        for size in (1, 3, 4, 10, 20):
            wholes: Any = whole_batches(loader, size, loader_yields=yields)  # type: ignore[arg-type]
            assert len(wholes) == len(list(wholes))
    assert len(whole_batches(subset, 2)) == math.ceil(7 / 2)  # type: ignore[arg-type]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(4))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("loader", "yields"),
    [
        ([torch.ones(2)], "batches"),
        (DataLoader(TensorDataset(torch.arange(4)), batch_size=2, collate_fn=lambda rows: rows[0]), "batches"),
        (DataLoader(TensorDataset(torch.arange(4)), batch_sampler=BatchSampler([0, 1], 2, False)), "batches"),
        (DataLoader(Stream(), batch_size=2), "batches"),
        ((number for number in range(3)), "examples"),
    ],
    ids=["list", "own collate_fn", "own batch_sampler", "stream", "generator"],
)
def test_a_length_that_is_not_known_is_not_guessed(loader: Any, yields: Any) -> None:
    wholes: Any = whole_batches(loader, 3, loader_yields=yields)
    with pytest.raises(TypeError, match=r"not known before .* math\.ceil\(num_examples / 3\)"):
        len(wholes)


# ---- Arguments ----


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8", None])
def test_a_batch_size_that_is_no_positive_int_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"global_batch_size=.*at least 1"):
        whole_batches([], size)


def test_other_arguments_are_checked_at_once() -> None:
    """The error comes from the call, not from the first batch an epoch later."""
    with pytest.raises(ConfigurationError, match='loader_yields=\'rows\'; it is "batches" or "examples"'):
        whole_batches([], 4, loader_yields="rows")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="loader is a int, which cannot be iterated"):
        whole_batches(5, 4)  # type: ignore[arg-type]


# ---- Moving ahead ----

META = torch.device("meta")
CPU = torch.device("cpu")


def test_each_micro_batch_arrives_on_the_device_in_order() -> None:
    micro_batches = [{"x": torch.ones(n), "n": n} for n in (3, 1, 2)]
    moved = list(moved_ahead(iter(micro_batches), META))
    assert [(batch["x"].device, batch["x"].shape[0], batch["n"]) for batch in moved] == [
        (META, 3, 3),
        (META, 1, 1),
        (META, 2, 2),
    ]
    assert list(moved_ahead([], META)) == []


def test_what_is_on_the_device_is_passed_on_as_it_is() -> None:
    micro_batches = [{"x": torch.ones(3), "inner": (torch.ones(1), ["a"])}, {"x": torch.ones(2)}]
    assert all(map(lambda a, b: a is b, moved_ahead(micro_batches, CPU), micro_batches))
    mixed = {"x": torch.ones(3, device="meta"), "y": torch.ones(3)}
    [moved] = moved_ahead([mixed], META)
    assert moved["x"] is mixed["x"]
    assert moved["y"].device == META


def test_the_next_copy_is_issued_before_the_current_one_is_handed_out() -> None:
    drawn = []

    def micro_batches() -> Iterator[torch.Tensor]:
        for number in range(4):
            drawn.append(number)
            yield torch.ones(number + 1)

    moved = moved_ahead(micro_batches(), META)
    assert drawn == []
    ahead = []
    for batch in moved:
        ahead.append(len(drawn) - batch.shape[0])
        del batch
    assert ahead == [1, 1, 1, 0]


def test_at_most_two_micro_batches_are_on_the_device() -> None:
    """Counted while each copy is made, with a caller that lets go of one before it asks for the next."""
    gc.disable()
    try:
        on_device: list[weakref.ref[torch.Tensor]] = []
        most = 0

        class Counted(torch.Tensor):
            def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                nonlocal most
                moved = torch.empty(self.shape, device=args[0])
                on_device.append(weakref.ref(moved))
                most = max(most, sum(ref() is not None for ref in on_device))
                return moved

        host = (torch.ones(2).as_subclass(Counted) for _ in range(6))
        for batch in moved_ahead(host, META):
            handed_out = weakref.ref(batch)
            del batch
            assert handed_out() is None, "only the caller holds what it was given"
        assert len(on_device) == 6
        assert most == 2
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinned_batches_stay_pinned_when_put_together() -> None:
    [whole] = whole_batches([torch.arange(2).pin_memory(), torch.arange(2, 4).pin_memory()], 4)
    assert whole.is_pinned()
    assert [batch.tolist() for batch in moved_ahead([whole], torch.device("cuda"))] == [[0, 1, 2, 3]]


def test_what_goes_to_a_gpu_is_pinned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the copy is not waited for; what is pinned already, or goes elsewhere, is left as it is."""
    pinned, sent = [], []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is one for one in pinned))
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, non_blocking=False: sent.append((str(device), non_blocking))
    )
    tensor = torch.ones(3)
    list(moved_ahead([tensor], torch.device("cuda", 0)))
    list(moved_ahead([tensor], torch.device("cuda", 0)))
    list(moved_ahead([torch.ones(2)], torch.device("meta")))
    assert len(pinned) == 1
    assert sent == [("cuda:0", True), ("cuda:0", True), ("meta", False)]
