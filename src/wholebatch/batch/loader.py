"""A loader's batches regrouped into whole batches, and micro-batches moved to the device one ahead."""

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, default_collate

from wholebatch.batch.containers import map_tensors
from wholebatch.batch.joining import join
from wholebatch.batch.layout import BatchPieces, Piece
from wholebatch.errors import BatchLayoutError, ConfigurationError

T = TypeVar("T")


def whole_batches(
    loader: Iterable[Any], global_batch_size: int, loader_yields: Literal["batches", "examples"] = "batches"
) -> Iterable[Any]:
    """Whole batches of `global_batch_size` examples, from a loader that yields less, or other, at a time.

    With `loader_yields="batches"` the loader's collated batches are cut and put together: into one batch with the same
    containers where they fit, into a `BatchPieces` where they do not because each is padded to its own longest. With
    `"examples"` the whole batches are lists of examples, to be collated micro-batch by micro-batch with `collate_fn`.

    Every example is kept, in the loader's order; the last whole batch holds what is left. At most one whole batch and
    one of the loader's are held at a time. The result can be iterated as often as `loader` can. It has a length only
    where the number of examples is known beforehand: `len` raises `TypeError` elsewhere.

    Raises `ConfigurationError` for arguments that cannot be right, and `BatchLayoutError` for batches that cannot be
    cut safely.

    Example:
        >>> import torch
        >>> loader = [torch.arange(4), torch.arange(4, 8), torch.arange(8, 10)]
        >>> list(whole_batches(loader, global_batch_size=6))
        [tensor([0, 1, 2, 3, 4, 5]), tensor([6, 7, 8, 9])]
    """
    if not isinstance(global_batch_size, int) or isinstance(global_batch_size, bool) or global_batch_size < 1:
        raise ConfigurationError(f"global_batch_size={global_batch_size!r}; it is the number of examples, at least 1.")
    if loader_yields not in ("batches", "examples"):
        raise ConfigurationError(f'loader_yields={loader_yields!r}; it is "batches" or "examples".')
    if not hasattr(loader, "__iter__") and not _is_map_style(loader):
        raise ConfigurationError(f"loader is a {type(loader).__name__}, which cannot be iterated. Pass a DataLoader.")
    return _WholeBatches(loader, global_batch_size, loader_yields)


class _WholeBatches:
    """Iterates the loader anew each time."""

    def __init__(self, loader: Iterable[Any], global_batch_size: int, loader_yields: str) -> None:
        self.loader = loader
        self.global_batch_size = global_batch_size
        self.loader_yields = loader_yields

    def __iter__(self) -> Iterator[Any]:
        elements = iter(self.loader) if hasattr(self.loader, "__iter__") else _by_position(self.loader)
        if self.loader_yields == "examples":
            return _lists(elements, self.global_batch_size)
        return _regrouped(elements, self.global_batch_size)

    def __len__(self) -> int:
        known = _length(self.loader) if self.loader_yields == "examples" else _examples_in(self.loader)
        if known is None:
            raise TypeError(
                f"the number of examples that this {type(self.loader).__name__} yields is not known before it is "
                f"iterated; if you know it, the number of whole batches is "
                f"math.ceil(num_examples / {self.global_batch_size})"
            )
        return math.ceil(known / self.global_batch_size)


def _lists(examples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(examples, size)):
        yield batch
        del batch  # not held while the next one is gathered


def _regrouped(batches: Iterator[Any], size: int) -> Iterator[Any]:
    gathered: list[tuple[Piece, range]] = []
    missing = size
    for piece in map(_piece, batches):
        start = 0
        while start < piece.num_examples:
            stop = min(start + missing, piece.num_examples)
            gathered.append((piece, range(start, stop)))
            missing -= stop - start
            start = stop
            if missing == 0:
                yield _whole(gathered)
                missing = size
        del piece  # not held while the loader makes its next one
    if gathered:
        yield _whole(gathered)


def _piece(batch: Any) -> Piece:
    try:
        return Piece(batch)
    except BatchLayoutError as error:
        raise BatchLayoutError(
            f"{error} whole_batches takes no layout: let loss_fn hold what belongs to no example, or regroup examples, "
            'with loader_yields="examples", and collate them with collate_fn.'
        ) from error


def _whole(gathered: list[tuple[Piece, range]]) -> Any:
    """Puts together what has been gathered, and empties it: the loader's batches are held no longer than needed."""
    pieces = [piece for piece, _ in gathered]
    parts = [piece.take(rows) for piece, rows in gathered]
    gathered.clear()
    whole = join(pieces, parts)
    return BatchPieces(parts) if whole is None else whole


def _is_map_style(loader: object) -> bool:
    return hasattr(loader, "__getitem__") and hasattr(loader, "__len__")


def _by_position(dataset: Any) -> Iterator[Any]:
    """A map-style dataset's examples; by its length, as many such datasets never raise `IndexError`."""
    return (dataset[position] for position in range(len(dataset)))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _examples_in(loader: object) -> int | None:
    """How many examples a loader of batches yields in all; None where its own collate function may change that."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.collate_fn is not default_collate:
        return None
    drawn = _length(loader.sampler)
    left_out = drawn % loader.batch_size if drawn is not None and loader.drop_last else 0
    return None if drawn is None else drawn - left_out


def moved_ahead(micro_batches: Iterable[T], device: torch.device) -> Iterator[T]:
    """Each micro-batch on `device`, the next one's copy already on its way: from pinned memory it overlaps the work.

    At most two are on the device, if the caller lets go of one before it asks for the next (`del micro_batch` at the
    end of the loop's body). What is on the device already is not copied; a micro-batch without anything to copy is
    passed on as it is.
    """
    copies = map(partial(_moved, device), micro_batches)
    waiting = list(itertools.islice(copies, 1))
    while waiting:
        waiting.extend(itertools.islice(copies, 1))
        yield waiting.pop(0)  # from here on only the caller holds it


def _moved(device: torch.device, micro_batch: T) -> T:
    moved: T = map_tensors(partial(_tensor_moved, device), micro_batch)
    return moved


def _tensor_moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    plain = tensor.layout == torch.strided and not tensor.is_nested
    if plain and device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # a copy on the host, so that the one to the device is not waited for
    return tensor.to(device, non_blocking=plain and tensor.is_pinned())
