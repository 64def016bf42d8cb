"""The user's text, read from .txt, .jsonl and .parquet. Imports no torch.

A file that is wrong as a whole is refused. What is wrong in a part of it is left out and counted, and the rest is used.
"""

import glob
import importlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from wholebatch.errors import ConfigurationError

Unit: TypeAlias = Literal["paragraph", "line", "file"]
Row: TypeAlias = Mapping[str, Any]

_KINDS = (".txt", ".jsonl", ".parquet")
_ROWS_AT_ONCE = 1_000
"""Rows of a .parquet file that are Python objects at a time; `datasets` holds their row group besides."""
_SHOWN = 20
"""Columns, or reasons, that a message names at most."""
_REMEMBERED = 1_000
"""Columns of a .jsonl file, after which only the wanted ones are looked for: each row may have others."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that is learned from as a whole, or not at all."""

    text: str

    label: str | None = None
    """Its class, where one is asked for; the number 3 is the class "3"."""


class Documents:
    """The documents of files. Each iteration reads the files anew, in the same order.

    One document is held at a time; of a .parquet file a row group, as large as whoever wrote it chose.
    Texts of a .txt file are stripped; those of a row are as they stand there. Nothing is deduplicated.

    Args:
        data: Paths, each of a file, of a folder (all files that can be read below it, hidden ones left out), or a glob
            (`**`: also folders in folders).
        unit: What one document is in a .txt file. A paragraph ends at an empty line.
        text_column: Where the text is in a row of .jsonl or .parquet.
        label_column: Where its class is; None: no class is asked for.

    Raises:
        ConfigurationError: A path that matches nothing that can be read, or .txt where a class is asked for. While
            iterating: a file that cannot be read or has vanished, a column that no row has, a damaged .parquet file,
            and, at the end of a pass, nothing that could be used.
        ModuleNotFoundError: While iterating: a .parquet file, and `datasets` is not installed.
    """

    files: tuple[Path, ...]
    """The files, sorted, each once."""

    left_out: Counter[str]
    """What the last pass left out (so far, if it is under way), by reason and file."""

    def __init__(self, data: Sequence[str], *, unit: Unit, text_column: str, label_column: str | None) -> None:
        self.files = _files(data)
        self.left_out = Counter()
        self._unit, self._columns = unit, _Columns(text_column, label_column)
        plain = [file for file in self.files if _kind(file) == ".txt"]
        if plain and label_column is not None:
            raise ConfigurationError(
                f"label_column={label_column!r}: {_listed(plain, 3)} is plain text, which has no columns and so no "
                "classes; use .jsonl or .parquet"
            )

    def __iter__(self) -> Iterator[Document]:
        left_out = self.left_out = Counter()
        nothing = True
        for file in self.files:
            for document in self._read(file, left_out):
                nothing = False
                yield document
        if nothing:
            reasons = [f"{number:,} × {reason}" for reason, number in left_out.most_common()]
            raise ConfigurationError(
                f"nothing in the data can be used. Left out: {_listed(reasons, _SHOWN)}. Name other files with data"
            )

    def _read(self, file: Path, left_out: Counter[str]) -> Iterator[Document]:
        if _kind(file) == ".txt":
            return map(Document, _texts(file, self._unit, left_out))
        rows = _jsonl_rows if _kind(file) == ".jsonl" else _parquet_rows
        return self._columns.documents(rows(file, self._columns, left_out), file, left_out)


# ---- Which files ----


def _files(data: Sequence[str]) -> tuple[Path, ...]:
    if not data:
        raise ConfigurationError("data names no file; name at least one")
    once: dict[Path, Path] = {}
    for file in sorted({file for given in data for file in _matches(given)}):
        once.setdefault(file.resolve(), file)
    return tuple(once.values())


def _matches(given: str) -> list[Path]:
    """The files meant by one item of `data`; what cannot be read is not meant as long as something can."""
    try:
        found = list(_found(given))
    except OSError as error:
        raise ConfigurationError(f"data {given!r}: {error.filename} cannot be read: {error.strerror}") from error
    if not found:
        raise ConfigurationError(f"data {given!r} matches no file; it is the path of a file or of a folder, or a glob")
    readable = [file for file in found if _kind(file) in _KINDS]
    if not readable:
        raise ConfigurationError(f"data {given!r}: {_listed(found, 3)} cannot be read; use {', '.join(_KINDS)}")
    return readable


def _found(given: str) -> Iterator[Path]:
    """All files, of whatever kind. A name that exists is that file, even if it could be a glob too."""
    places = [Path(given)] if given and Path(given).exists() else map(Path, glob.glob(given, recursive=True))
    seen: set[Path] = set()
    for place in places:
        if place.is_dir():
            yield from _below(place, seen)
        elif place.is_file():
            yield place


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Files in a folder and its folders, through links too; `seen`, because links may lead around in a circle."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _below(entry, seen)
        elif entry.is_file():
            yield entry


def _kind(file: Path) -> str:
    return file.suffix.lower()


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as content:
            yield content
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{file} was there when the run began, and is gone; put it back, or begin anew without it"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read: {error.strerror or error}; see who may read it, or leave it out"
        ) from error


# ---- .txt ----


class _NotUtf8Error(Exception):
    """Holds the number of the line, from 1 on."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def _texts(file: Path, unit: Unit, left_out: Counter[str]) -> Iterator[str]:
    empty = True
    with _opened(file) as content:
        try:
            for text in _units(_lines(content), unit):
                empty = False
                yield text
        except _NotUtf8Error as error:
            since = f" from line {error.line} on" if unit != "file" and error.line > 1 else ""
            left_out[f"not UTF-8{since} ({file})"] += 1
            return
    if empty:
        left_out[f"empty ({file})"] += 1


def _lines(content: BinaryIO) -> Iterator[str]:
    """Decoded one by one: Python's own text files decode ahead, and would lose good lines before a bad one."""
    for number, line in enumerate(content, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise _NotUtf8Error(number) from error


def _units(lines: Iterable[str], unit: Unit) -> Iterator[str]:
    """Each stripped, none of them blank."""
    whole = {"file": lambda: iter(["".join(lines)]), "line": lambda: iter(lines), "paragraph": lambda: _blocks(lines)}
    return filter(None, map(str.strip, whole[unit]()))


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line)
        else:
            yield "".join(block)
            block.clear()
    yield "".join(block)


# ---- Rows ----


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the text and, if asked for, its class are in a row."""

    text: str
    label: str | None

    def check(self, present: Iterable[str], file: Path) -> None:
        """Refuses a file that lacks one of the columns, `present` being those that it has."""
        present = list(present)
        for option, name in (("text_column", self.text), ("label_column", self.label)):
            if name is not None and name not in present:
                there = _listed(sorted(present), _SHOWN) or "none"
                raise ConfigurationError(f"{option}={name!r}: {file} has no such column; its columns are: {there}")

    def documents(self, rows: Iterable[Row], file: Path, left_out: Counter[str]) -> Iterator[Document]:
        """Those of the rows that can be used."""
        for row in rows:
            reason = self._unusable(row)
            if reason is not None:
                left_out[f"{reason} ({file})"] += 1
            else:
                yield Document(row[self.text], None if self.label is None else str(row[self.label]))

    def _unusable(self, row: Row) -> str | None:
        text = row.get(self.text)
        if text is not None and not isinstance(text, str):
            return f"{self.text} that is not a string"
        if not (text or "").strip():
            return f"{self.text} missing or blank"
        label = None if self.label is None else row.get(self.label)
        if isinstance(label, (list, dict, bytes)):
            return f"{self.label} that is not one value"
        if self.label is not None and (label is None or label != label or not str(label).strip()):  # nan != nan
            return f"{self.label} missing or blank"
        return None if _is_unicode(f"{text}{label}") else "half of a character"


def _is_unicode(text: str) -> bool:
    """JSON can hold half of a surrogate pair, such as an emoji cut in two: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _jsonl_rows(file: Path, columns: _Columns, left_out: Counter[str]) -> Iterator[Row]:
    """By the standard library, line by line: so a broken line costs a line. `datasets` would give up the file."""
    present: set[str] = set()
    rows = broken = first_broken = 0
    with _opened(file) as content:
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            row = _json_object(line)
            if row is None:
                broken, first_broken = broken + 1, first_broken or number
                left_out[f"line that is not a JSON object, first line {first_broken} ({file})"] += 1
                continue
            rows += 1
            present |= row.keys() if len(present) < _REMEMBERED else row.keys() & {columns.text, columns.label}
            yield row
    if rows:
        columns.check(present, file)
    elif not broken:
        left_out[f"empty ({file})"] += 1


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # not UTF-8 and numbers of thousands of digits are ValueErrors, too
        return None
    return row if isinstance(row, dict) else None


def _parquet_rows(file: Path, columns: _Columns, left_out: Counter[str]) -> Iterator[Row]:
    datasets = importlib.import_module("datasets")  # here, because it takes seconds and 200 MB
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    damage = (arrow.ArrowException, OSError, ValueError, NotImplementedError)
    with _opened(file) as content:
        try:
            facts = parquet.ParquetFile(content)
        except damage as error:
            raise _damaged(file, error) from error
    columns.check(facts.schema_arrow.names, file)
    if facts.metadata.num_rows == 0:
        left_out[f"empty ({file})"] += 1
        return
    wanted = [name for name in dict.fromkeys((columns.text, columns.label)) if name is not None]
    with tempfile.TemporaryDirectory(prefix="wholebatch-") as folder:
        # The library writes a lock into its cache even to stream: not into the home, which may be read-only. And it
        # takes a path for a glob, or for an address: through the link, every name is a name.
        link = Path(folder, "data.parquet")
        link.symlink_to(file.resolve())
        try:
            # Not load_dataset, which reports each use to its makers' server. As tables: three times as fast.
            rows = datasets.IterableDataset.from_parquet(
                str(link), columns=wanted, batch_size=_ROWS_AT_ONCE, cache_dir=folder
            )
            for table in rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
                yield from table.to_pylist()
        except damage as error:
            raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{file} is damaged or half-written, not a .parquet file to read: {error}; write it anew")


def _listed(items: Sequence[object], most: int) -> str:
    rest = f" and {len(items) - most} more" * (len(items) > most)
    return ", ".join(map(str, items[:most])) + rest
