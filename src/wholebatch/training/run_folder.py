"""The folder of a run: which it is, whether it is free, and that no other process trains there."""

import itertools
import os
import shlex
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from wholebatch.errors import ConfigurationError
from wholebatch.training import checkpoint

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. The system lets go of the lock when this one ends, however it ends.

    Raises:
        ConfigurationError: Another process trains there.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context((folder / ".lock").open("w"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"{str(folder)!r}: another process is training there") from None
        except OSError as error:
            raise ConfigurationError(f"{str(folder)!r} cannot be written to: {error.strerror}") from error
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if os.listdir(folder) == [".lock"]:  # refused before anything was written: no trace is left
                    shutil.rmtree(folder)
            raise


def new_run_folder(named: Path | None) -> Path:
    """The folder for a new run, the next free one if none is named.

    Found out before the training, not after it, whether its result can be kept.

    Raises:
        ConfigurationError: It cannot be written to, or holds a run.
    """
    folder = named or _free_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output_dir={str(folder)!r}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(folder)!r}: not writable; name another folder")
    if _holds_a_run(folder):
        raise ConfigurationError(
            f"output_dir={str(folder)!r} holds a run: go on with it (--resume {shlex.quote(str(folder))}), or name "
            "another folder"
        )
    return folder


def free_folder(named: Path | None, prefix: str, results: Collection[str]) -> Path:
    """The folder for new results, the next free one (`runs/bench-1`, say) if none is named. Nothing is made yet.

    Raises:
        ConfigurationError: It cannot be written to, or holds such results, or a run.
    """
    folder = named or _free_folder(prefix)
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"output={str(folder)!r}: {str(there)!r} is no folder to write to; name another folder"
        )
    held = [name for name in results if (folder / name).exists()]
    if held or _holds_a_run(folder):
        raise ConfigurationError(f"output={str(folder)!r} holds {held[0] if held else 'a run'}; name another folder")
    return folder


def _holds_a_run(folder: Path) -> bool:
    """Whether something would be lost; a run that was refused, or stopped before its first update, left nothing."""
    if checkpoint.newest(folder) is not None or (folder / "last").exists():
        return True
    try:
        return '"part": "train"' in (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return False


def _free_folder(prefix: str = "") -> Path:
    numbered = (Path("runs", f"{prefix}{number}") for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())
