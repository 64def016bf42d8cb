"""Checkpoints of a training run that a kill cannot harm, whenever it comes, also in the middle of saving.

A folder is written aside, brought to disk and only then renamed: what has its final name is complete. Nothing is
unpickled that could run code: the model is read as safetensors, the state by torch's loader of plain values.
"""

import importlib
import json
import os
import pickle
import random
import re
import shutil
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from wholebatch.errors import ConfigurationError, WholeBatchError

_MODEL, _STATE, _SUMS = "model.safetensors", "state.pt", "checksums.json"
_NAME = re.compile(r"update-(\d{8,})")
_ASIDE = re.compile(r"\.(.+)\.wholebatch-(?:new|old|gone)")
_PLAIN = (bool, int, float, str, type(None), torch.Tensor, nn.Parameter)


class CheckpointError(WholeBatchError):
    """A checkpoint could not be written: the disk is full, say. Those before it are as they were."""


def save(run: Path, update: int, model: nn.Module, state: Mapping[str, Any], keep: int) -> Path:
    """Save `run/checkpoints/update-00000120` with `model.safetensors` and `state.pt`.

    Of the same update, it takes the place of the one there is. Afterwards the `keep` newest up to this update stay;
    later ones are of a course that the run has left by resuming before them, and are removed too.

    Args:
        run: Folder of the run.
        update: Updates made so far.
        model: Saved with its buffers, each number as it is; shared parameters once.
        state: Whatever else the run needs to go on: dicts, lists, tuples, tensors, numbers and text.
        keep: Checkpoints to keep, this one included; at least 1.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: It could not be written. What had been begun is removed, the others are as they were.
        ConfigurationError: `update` or `keep` is too small, or `state` holds what could not be read back.
    """
    if update < 0 or keep < 1:
        raise ConfigurationError(f"update={update}, keep={keep}: use an update from 0 and keep from 1 up")
    _refuse_what_cannot_be_read_back(dict(state), "state")
    folder = run / "checkpoints" / f"update-{update:08d}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _to_disk(run)
        with replaced(folder) as new:
            safetensors.torch.save_model(model, str(new / _MODEL))
            with (new / _STATE).open("wb") as file:
                torch.save(dict(state), file)
            sums = {name: _checksum(new / name) for name in (_MODEL, _STATE)}
            (new / _SUMS).write_text(json.dumps(sums))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} could not be written: {_reason(error)}; the checkpoints before it are as they "
            "were. Make room there, or make the folder writable, and save again"
        ) from error
    _remove_others(run, update, keep)
    return folder


def incomplete(run: Path) -> list[str]:
    """The names of checkpoints of which files are missing; no kill leaves such, something else has taken them."""
    folder = run / "checkpoints"
    named = [name for name in os.listdir(folder) if _NAME.fullmatch(name)] if folder.is_dir() else []
    return sorted(name for name in named if not _is_complete(folder / name))


def newest(run: Path) -> Path | None:
    """The checkpoint of the latest update in the folder of a run; None if there is no complete one."""
    return next(iter(_complete(run)), None)


def load(folder: Path, model: nn.Module, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Fill the model and return the state; see `load_state` and `load_model`."""
    state = load_state(folder, device)
    load_model(folder, model)
    return state


def load_state(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state that was saved with a model.

    Args:
        folder: As `save` and `newest` return it.
        device: Takes the tensors that lay on an accelerator. The others stay on the CPU.

    Raises:
        ConfigurationError: The checkpoint is damaged.
    """

    def placed(storage: Any, where: str) -> Any:
        place = "cpu" if where == "cpu" else str(device)
        return torch.serialization.default_restore_location(storage, place)  # type: ignore[no-untyped-call]

    try:
        _check(folder, _STATE)
        with (folder / _STATE).open("rb") as file:
            state: dict[str, Any] = torch.load(file, map_location=placed, weights_only=True)
    except (OSError, EOFError, LookupError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        if isinstance(error, RuntimeError) and type(error) is not RuntimeError:  # no memory, which is not its fault
            raise
        raise _damaged(folder, error) from error
    return state


def load_model(folder: Path, model: nn.Module) -> None:
    """Fill a model of the kind that was saved, wherever it lies; numbers of another type are converted to its own.

    Raises:
        ConfigurationError: The checkpoint is damaged, or of another model, which may then be filled in part.
    """
    try:
        _check(folder, _MODEL)
        safetensors.torch.load_model(model, folder / _MODEL)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(folder, error) from error
    except RuntimeError as error:
        raise ConfigurationError(
            f"checkpoint {str(folder)!r} is of another model: {error}. Resume with the settings it was saved under"
        ) from error


def write_text(file: Path, text: str) -> None:
    """Write a small file; whenever the process is killed, the old or the new one is there, whole.

    Raises:
        CheckpointError: It could not be written. The one before is as it was.
    """
    new = _aside(file)[0]
    try:
        new.write_text(text, encoding="utf-8")
        _to_disk(new)
        os.replace(new, file)
        _to_disk(file.parent)
    except OSError as error:
        with suppress(OSError):
            _delete(new)
        raise CheckpointError(
            f"{str(file)!r} could not be written: {_reason(error)}; make room, or another folder"
        ) from error


def tidy(run: Path) -> None:
    """Remove what interrupted saves have left in the folder of a run, and end a replacement that was cut short.

    It looks at what lies in `run` and in `run/checkpoints`, and only at what `save` and `replaced` write there.
    Nothing else may be writing to the run.

    Raises:
        CheckpointError: Something cannot be removed or renamed.
    """
    try:
        for parent in (run, run / "checkpoints"):
            aside = [_ASIDE.fullmatch(name) for name in os.listdir(parent)] if parent.is_dir() else []
            for name in sorted({match[1] for match in aside if match}):
                _settle(parent / name)
    except OSError as error:
        raise CheckpointError(
            f"{str(run)!r}: what an interrupted save left there cannot be cleared away: {_reason(error)}; make the "
            "folder writable"
        ) from error


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of `folder` at the end of the block.

    `folder` may exist or not. Whenever the process is killed, the old or the new one is there, whole, after `tidy`
    of the folder above it. If the block raises, or the new one cannot be put in place, the old one stays and nothing
    is left over.

    Raises:
        OSError: The disk refuses; also where torch or safetensors, in the block, say so with an error of their own.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _settle(folder)
    new, old, gone = _aside(folder)
    new.mkdir()
    placing = False
    try:
        yield new
        _all_to_disk(new)
        if os.path.lexists(folder):
            os.rename(folder, old)  # without `folder`, an `old` says from here on that `new` is whole
        placing = True
        os.rename(new, folder)
        _to_disk(folder.parent)
    except BaseException as error:
        with suppress(OSError):  # what the disk refuses now, `tidy` does later
            _put_back(folder, placing)
        if (refused := _refused(error)) is not None:
            raise refused from error
        raise
    with suppress(OSError):  # likewise
        _discard(old, gone)


def random_state(device: torch.device | str) -> dict[str, Any]:
    """Where the random numbers of torch, Python and, if loaded, numpy stand, in plain values for `save`.

    Args:
        device: Its generator is included if it is an accelerator.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (accelerator := _generator_of(device)) is not None:
        state["accelerator"] = accelerator[0]()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, numbers, *rest = numpy.random.get_state()
        state["numpy"] = (kind, numbers.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device | str) -> None:
    """Go on drawing where `random_state` was asked; a generator that it did not know is left alone."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    accelerator = _generator_of(device)
    if accelerator is not None and "accelerator" in state:
        accelerator[1](state["accelerator"])
    if "numpy" in state:
        with suppress(ModuleNotFoundError):  # then nothing here draws from it
            importlib.import_module("numpy").random.set_state(state["numpy"])


# ---- Reading and writing ----


def _damaged(folder: Path, error: Exception) -> ConfigurationError:
    others = [other.name for other in _complete(folder.parent.parent) if _update(other) < _update(folder)]
    older = f"to go on from {others[0]}" if others else "to begin anew, since there is no older one"
    way_out = f"remove it {older}"
    return ConfigurationError(f"checkpoint {str(folder)!r} is damaged: {_reason(error)}; {way_out}")


def _check(folder: Path, name: str) -> None:
    """Raise `ValueError` if a file of a checkpoint does not hold the bytes that were written."""
    if _checksum(folder / name) != json.loads((folder / _SUMS).read_text())[name]:
        raise ValueError(f"{name} does not hold the bytes that were written")


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as content:
        while piece := content.read(2**20):
            value = zlib.crc32(piece, value)
    return value


def _refuse_what_cannot_be_read_back(value: Any, where: str) -> None:
    """Found out when resuming, it would be too late."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_what_cannot_be_read_back(key, f"a key of {where}")
            _refuse_what_cannot_be_read_back(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _refuse_what_cannot_be_read_back(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        raise ConfigurationError(
            f"{where} is a {type(value).__name__}: a checkpoint holds dicts, lists, tuples, tensors, numbers and text; "
            "convert it"
        )


def _refused(error: BaseException) -> OSError | None:
    """What the system said, where torch or safetensors hide it behind an error of their own."""
    if isinstance(error, Exception) and (code := re.search(r"\(os error (\d+)\)", str(error))):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if type(error) is RuntimeError and isinstance(error.__context__, OSError):
        return error.__context__
    return None


def _reason(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) else str(error)
    return (words or str(error) or type(error).__name__).splitlines()[0]


def _generator_of(device: torch.device | str) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What gets and sets the state of an accelerator's generator."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if device.type == "mps":  # there is one only
        return module.get_rng_state, module.set_rng_state
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


# ---- Which there are ----


def _complete(run: Path) -> list[Path]:
    """The complete checkpoints, the newest first."""
    folder = run / "checkpoints"
    named = [folder / name for name in os.listdir(folder) if _NAME.fullmatch(name)] if folder.is_dir() else []
    return sorted((one for one in named if _is_complete(one)), key=_update, reverse=True)


def _is_complete(checkpoint: Path) -> bool:
    return all((checkpoint / name).is_file() for name in (_MODEL, _STATE, _SUMS))


def _update(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else sys.maxsize  # under another name, any is as good as an older one


def _remove_others(run: Path, update: int, keep: int) -> None:
    """Keep those of the last `keep` updates up to `update`."""
    checkpoints = _complete(run)
    kept = [one for one in checkpoints if _update(one) <= update][:keep]
    for other in checkpoints:
        if other not in kept:
            with suppress(OSError):  # the next save tries again
                _discard(other, _aside(other)[2])


# ---- Folders ----


def _aside(folder: Path) -> tuple[Path, Path, Path]:
    """Beside a folder: what is to replace it, what it replaces, and what is being deleted."""
    new, old, gone = (folder.with_name(f".{folder.name}.wholebatch-{what}") for what in ("new", "old", "gone"))
    return new, old, gone


def _settle(folder: Path) -> None:
    """End what a kill cut short. An `old` without `folder` is left only between two renames, when `new` is whole."""
    new, old, gone = _aside(folder)
    if old.exists() and not os.path.lexists(folder):
        os.rename(new if new.exists() else old, folder)
    _discard(old, gone)
    _delete(new)


def _put_back(folder: Path, placing: bool) -> None:
    """As it was before, whichever step failed; `placing`: `new` may have become `folder`."""
    new, old, _ = _aside(folder)
    if placing and not new.exists() and os.path.lexists(folder):
        os.rename(folder, new)
    if os.path.lexists(old):
        os.rename(old, folder)
    _delete(new)


def _discard(folder: Path, gone: Path) -> None:
    """Renamed, then deleted: cut short in between, nothing is left that looks complete."""
    if os.path.lexists(folder):
        _delete(gone)
        os.rename(folder, gone)
    _delete(gone)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _all_to_disk(folder: Path) -> None:
    for where, _, files in os.walk(folder, topdown=False):
        for name in files:
            _to_disk(Path(where, name))
        _to_disk(Path(where))


def _to_disk(path: Path) -> None:
    """The content of a file, or the names in a folder, survive a power failure from here on."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
