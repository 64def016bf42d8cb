"""What a training run writes while it goes: figures for each update, where people and their tools look for them.

Each line is one write at the end of a file that is opened for it: a kill leaves whole lines but for the last one, and
nothing depends on a thread that a full disk could stop.
"""

import importlib
import json
import math
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from wholebatch.errors import ConfigurationError

Figure: TypeAlias = float | int | str | None

_MOST_WAITING = 2**20  # bytes
_EVENTS = "events.out.tfevents."


class _Place(Protocol):
    """Where figures go. Each method may raise whatever it likes."""

    def write(self, update: int, figures: Mapping[str, Figure], part: str) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes `metrics.jsonl`, TensorBoard events, and to wandb or trackio if asked to.

    After construction nothing raises: what cannot be written is counted in `problems`. Lines that a full disk refuses
    are held, up to 1 MiB, and written with the next one that it takes.

    Args:
        run: Folder of the run, made if it is not there.
        settings: Of the run, for the trackers.
        trackers: Modules to log to as well: "wandb", "trackio".
        resumed_at: Updates made where the run goes on: what was written of later ones is dropped. None: a new run,
            and the log of an earlier one in the same folder is dropped.
        evaluated: Whether what was measured after that very update is known; if not, it is dropped too.

    Raises:
        ConfigurationError: The folder cannot be written to, or a tracker is not installed or does not start.
    """

    def __init__(
        self,
        run: Path,
        settings: Mapping[str, Any],
        trackers: Sequence[str] = (),
        resumed_at: int | None = None,
        evaluated: bool = True,
    ) -> None:
        self.problems: Counter[str] = Counter()
        """How often something could not be written, by reason."""
        modules = {name: _tracker(name) for name in trackers}
        self._places: dict[str, _Place] = {}
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._places["metrics.jsonl"] = _Lines(run / "metrics.jsonl", resumed_at, evaluated)
            self._open_events(run / "tensorboard", resumed_at)
        except OSError as error:
            raise ConfigurationError(
                f"folder {str(run)!r} of the run cannot be written to: {error.strerror}; choose another output_dir"
            ) from error
        for name, module in modules.items():
            self._start(name, module, run, settings)

    def write(self, update: int, figures: Mapping[str, Figure], part: str = "train") -> None:
        """Write the figures of a part of the run, such as "train" or "validation", after an update."""
        for name, place in self._places.items():
            self._attempt(name, partial(place.write, update, figures, part))

    def close(self) -> None:
        """Write what was held, and end the trackers' runs."""
        places, self._places = self._places, {}
        for name, place in places.items():
            self._attempt(name, place.close)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001  a log must not stop a training
            self.problems[f"{name}: {_words(error)}"] += 1

    def _open_events(self, folder: Path, resumed_at: int | None) -> None:
        try:
            self._places["tensorboard"] = _Events(folder, resumed_at)
        except ModuleNotFoundError as error:
            self.problems[f"tensorboard: {error.name} is not installed; pip install tensorboardX"] += 1
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  such as of a protobuf that does not go with it
            self.problems[f"tensorboard: {_words(error)}"] += 1

    def _start(self, name: str, module: Any, run: Path, settings: Mapping[str, Any]) -> None:
        try:
            module.init(project="wholebatch", name=run.name, config=dict(settings))
        except Exception as error:
            self.close()
            raise ConfigurationError(f"{name} does not start: {_words(error)}; leave it out of track") from error
        self._places[name] = _Tracker(module)


# ---- The places ----


class _Lines:
    """A JSON object per line, each update once."""

    def __init__(self, file: Path, resumed_at: int | None, evaluated: bool) -> None:
        kept = b"" if resumed_at is None else b"".join(_lines_up_to(file, resumed_at, evaluated))
        aside = file.with_name(f".{file.name}.wholebatch-new")
        with aside.open("wb") as opened:
            opened.write(kept)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(aside, file)
        self._end = _EndOfFile(file)

    def write(self, update: int, figures: Mapping[str, Figure], part: str) -> None:
        line = {"update": update, "part": part} | {name: _finite(value) for name, value in figures.items()}
        self._end.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        self._end.write(b"")


class _Events:
    """A file of TensorBoard events, with tensorboardX's messages and checksums.

    Its writer is not used: it hands over to a thread, and waits for ever once a full disk has ended that.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        messages = importlib.import_module("tensorboardX.proto.event_pb2")
        self._event: Any = messages.Event
        self._checksum: Callable[[bytes], int] = importlib.import_module("tensorboardX.record_writer").masked_crc32c
        folder.mkdir(exist_ok=True)
        there = sorted(folder.glob(f"{_EVENTS}*"))
        if resumed_at is None:
            for file in there:
                file.unlink()
        # TensorBoard reads the files in the order of their names. Whatever the clock says, this one is the last.
        times = [file.name.removeprefix(_EVENTS)[:10] for file in there]
        seconds = max([int(time.time()), *(int(one) + 1 for one in times if one.isdecimal())])
        file = folder / f"{_EVENTS}{seconds:010d}.{socket.gethostname()}"
        file.touch(exist_ok=False)
        self._end = _EndOfFile(file)
        start = [self._event(file_version="brain.Event:2")]
        if resumed_at is not None:  # says that whatever came at this step or later is not valid any more
            start.append(
                self._event(step=resumed_at + 1, session_log=messages.SessionLog(status=messages.SessionLog.START))
            )
        with suppress(OSError):  # written with the first figures
            self._end.write(b"".join(map(self._record, start)))

    def write(self, update: int, figures: Mapping[str, Figure], part: str) -> None:
        event = self._event(step=update)
        for name, value in figures.items():
            if value is not None and not isinstance(value, str):
                event.summary.value.add(tag=f"{part}/{name}", simple_value=value)
        self._end.write(self._record(event) if event.summary.value else b"")

    def close(self) -> None:
        self._end.write(b"")

    def _record(self, event: Any) -> bytes:
        """Its length, the content, and a checksum of each."""
        event.wall_time = time.time()
        content: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        return b"".join(
            (length, struct.pack("<I", self._checksum(length)), content, struct.pack("<I", self._checksum(content)))
        )


class _Tracker:
    """A started wandb or trackio."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def write(self, update: int, figures: Mapping[str, Figure], part: str) -> None:
        known = {f"{part}/{name}": value for name, value in figures.items() if value is not None}
        self._module.log(known, step=update)

    def close(self) -> None:
        self._module.finish()


class _EndOfFile:
    """Adds whole pieces to a file; those that it does not take are held and tried again."""

    def __init__(self, file: Path) -> None:
        self._file, self._waiting = file, b""

    def write(self, piece: bytes) -> None:
        """Add a piece, after those held.

        Raises:
            OSError: It could not be added; it is held, unless 1 MiB is held already.
        """
        content = self._waiting + piece
        try:
            if content:
                _append(self._file, content)
        except OSError:
            if len(content) <= _MOST_WAITING:
                self._waiting = content
            raise
        self._waiting = b""


def _append(file: Path, content: bytes) -> None:
    """All of it, at once unless the system cuts it in pieces, or nothing.

    Raises:
        OSError: It does not fit.
    """
    opened = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        before = os.fstat(opened).st_size
        try:
            while content:
                content = content[os.write(opened, content) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(opened, before)
            raise
    finally:
        os.close(opened)


def _lines_up_to(file: Path, update: int, evaluated: bool) -> list[bytes]:
    """The whole lines of updates up to this one; of what was measured after it only if `evaluated`."""
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [line for line in lines if line.endswith(b"\n") and _is_kept(line, update, evaluated)]


def _is_kept(line: bytes, update: int, evaluated: bool) -> bool:
    try:
        figures = json.loads(line)
        return figures["update"] < update or (figures["update"] == update and (evaluated or figures["part"] == "train"))
    except (ValueError, LookupError, TypeError):  # not a line of ours
        return False


def _finite(value: Figure) -> Figure:
    """JSON has no word for inf and nan."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tracker(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigurationError(f"{name} cannot be imported: {error}; pip install {error.name}") from error
        raise ConfigurationError(f"{name} is not installed; pip install {name}, or leave it out of track") from error


def _words(error: Exception) -> str:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (words or type(error).__name__).splitlines()[0]
