"""Which files are meant, what each kind of file yields, what is left out, and what is refused."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wholebatch.errors import ConfigurationError
from wholebatch.training.documents import Document, Documents, Unit


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a current folder of its own, so that names are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reader(*data: str, unit: Unit = "line", text: str = "text", label: str | None = None) -> Documents:
    return Documents(data, unit=unit, text_column=text, label_column=label)


def texts(documents: Documents) -> list[str]:
    return [document.text for document in documents]


def write(name: str, content: str | bytes = "text\n") -> str:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def write_rows(name: str, *rows: Any) -> str:
    return write(name, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(name: str, columns: dict[str, Any], **options: Any) -> str:
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    with open(name, "wb") as file:  # a path would be read as an address if it has a colon
        pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return name


def names(documents: Documents) -> list[str]:
    return [file.as_posix() for file in documents.files]


# ---- Which files ----


def test_files_are_sorted_and_each_is_read_once() -> None:
    """Named twice, matched by a glob too, below a folder too, under another spelling, or through a link."""
    for name in ("b.txt", "a.txt", "in/c.txt"):
        write(name, name)
    Path("z.txt").symlink_to("a.txt")
    documents = reader("b.txt", "./b.txt", "in/../b.txt", "*.txt", "in", "in/c.txt", "z.txt")
    assert names(documents) == ["a.txt", "b.txt", "in/c.txt"]
    assert texts(documents) == ["a.txt", "b.txt", "in/c.txt"]


@pytest.mark.parametrize("given", ["in", "in/", "in/**", "in/**/*", "in/**/*.*", "in/*"])
def test_a_folder_and_a_deep_glob_mean_what_can_be_read_below(given: str) -> None:
    """Files of other kinds are passed over, and so are hidden ones; the suffix may be in capitals."""
    for name in ("in/b.TXT", "in/deep/er/a.jsonl", "in/deep/x.parquet", "in/notes.md", "in/.git/c.txt", "in/.d.txt"):
        write(name)
    assert names(reader(given)) == ["in/b.TXT", "in/deep/er/a.jsonl", "in/deep/x.parquet"]


def test_a_glob_without_stars_for_folders_stays_in_its_folder() -> None:
    for name in ("in/b.txt", "in/deep/a.txt"):
        write(name)
    assert names(reader("in/*.txt")) == ["in/b.txt"]


def test_links_are_followed_but_not_in_circles(monkeypatch: pytest.MonkeyPatch) -> None:
    write("else/where.txt")
    write("in/a.txt")
    Path("in/out").symlink_to("../else")
    Path("in/round").symlink_to("../in")
    listed: list[str] = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [listed.append(path.as_posix()), *iterdir(path)][1:])
    assert names(reader("in")) == ["in/a.txt", "in/out/where.txt"]
    assert listed == ["in", "in/out"]


def test_a_name_that_looks_like_a_glob_is_the_file_of_that_name() -> None:
    write("a[1].txt", "brackets")
    write("a1.txt", "one")
    assert texts(reader("a[1].txt")) == ["brackets"]


@pytest.mark.parametrize("given", ["gone.txt", "*.txt", "empty", "broken.txt", ""])
def test_what_matches_nothing_is_named(given: str) -> None:
    Path("empty").mkdir()
    Path("broken.txt").symlink_to("nowhere")
    write("here/a.txt")
    with pytest.raises(ConfigurationError, match=rf"data '{re.escape(given)}' matches no file; .* or a glob"):
        reader("here", given)


def test_no_data_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="name at least one"):
        reader()


@pytest.mark.parametrize("given", ["in", "in/*", "in/a.md"])
def test_a_kind_of_file_that_cannot_be_read_is_named(given: str) -> None:
    write("in/a.md")
    with pytest.raises(ConfigurationError, match=rf"'{given[:4]}.*in/a\.md cannot be read; use \.txt, \.jsonl, \.parq"):
        reader(given)


def test_of_many_files_that_cannot_be_read_three_are_named() -> None:
    for number in range(5):
        write(f"in/{number}.md")
    with pytest.raises(ConfigurationError, match=r"in/0\.md, in/1\.md, in/2\.md and 2 more cannot be read"):
        reader("in")


def test_plain_text_has_no_classes() -> None:
    write("b.txt")
    write_rows("a.jsonl", {"text": "a", "label": "x"})
    with pytest.raises(ConfigurationError, match=r"label_column='label': b\.txt is plain text.*use \.jsonl"):
        reader("*", label="label")


# ---- Passes ----


def test_each_pass_reads_the_files_anew_in_the_same_order() -> None:
    write("b.txt", "1\n2\n")
    write_rows("a.jsonl", {"text": "3"}, {"text": "3"})
    documents = reader("b.txt", "a.jsonl")
    assert [texts(documents), texts(documents)] == [["3", "3", "1", "2"]] * 2
    write("b.txt", "4\n")
    assert texts(documents) == ["3", "3", "4"]


def test_what_is_left_out_is_counted_anew_in_each_pass() -> None:
    write("a.jsonl", '{"text": "a"}\nbroken\n')
    documents = reader("a.jsonl")
    assert documents.left_out == Counter()
    for _ in range(2):
        texts(documents)
        assert documents.left_out == {"line that is not a JSON object, first line 2 (a.jsonl)": 1}
    write("a.jsonl", '{"text": "a"}\n')
    texts(documents)
    assert documents.left_out == Counter()


def test_two_passes_at_a_time_do_not_disturb_each_other() -> None:
    write("a.txt", "1\n2\n")
    documents = reader("a.txt")
    assert list(zip(documents, documents, strict=True)) == [(Document("1"),) * 2, (Document("2"),) * 2]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_file_that_vanishes_between_two_passes_is_named(kind: str) -> None:
    write("a.txt", "1\n")
    write("b.txt", "1\n")
    write_rows("b.jsonl", {"text": "1"})
    if kind == "parquet":
        write_parquet("b.parquet", {"text": ["1"]})
    documents = reader("a.txt", f"b.{kind}")
    assert texts(documents) == ["1", "1"]
    Path(f"b.{kind}").unlink()
    started = iter(documents)
    assert next(started) == Document("1")
    with pytest.raises(ConfigurationError, match=rf"^b\.{kind} was there when the run began, and is gone; put it back"):
        next(started)


def test_a_file_without_permission_is_named() -> None:
    Path(write("a.txt")).chmod(0)
    if os.access("a.txt", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ConfigurationError, match=r"^a\.txt cannot be read: Permission denied; see who may read it"):
        texts(reader("a.txt"))


def test_a_folder_without_permission_is_named() -> None:
    write("in/deep/a.txt")
    Path("in/deep").chmod(0)
    try:
        if os.access("in/deep", os.R_OK):
            pytest.skip("this user may read everything")
        with pytest.raises(ConfigurationError, match=r"^data 'in': in/deep cannot be read: Permission denied"):
            reader("in")
    finally:
        Path("in/deep").chmod(0o700)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_whatever_the_system_says_of_a_file_is_said(kind: str) -> None:
    """As without permission, but also seen by a user who may read everything: a folder took the file's place."""
    if kind == "parquet":
        pytest.importorskip("datasets")
    documents = reader(write(f"a.{kind}"))
    Path(f"a.{kind}").unlink()
    Path(f"a.{kind}").mkdir()
    with pytest.raises(ConfigurationError, match=rf"^a\.{kind} cannot be read: Is a directory; .*or leave it out"):
        texts(documents)


def test_a_pass_with_nothing_to_use_gives_the_reasons_with_their_numbers() -> None:
    write("a.txt", b"\xff")
    write("b.jsonl", "x\ny\n" + json.dumps({"text": " "}))
    documents = reader("*")
    with pytest.raises(ConfigurationError) as raised:
        list(documents)
    assert str(raised.value) == (
        "nothing in the data can be used. Left out: 2 × line that is not a JSON object, first line 1 (b.jsonl), "
        "1 × not UTF-8 (a.txt), 1 × text missing or blank (b.jsonl). Name other files with data"
    )


def test_of_many_reasons_twenty_are_named() -> None:
    for number in range(23):
        write(f"{number:02}.txt", "")
    with pytest.raises(ConfigurationError, match=r"1 × empty \(19\.txt\) and 3 more\. Name other files"):
        list(reader("*"))


# ---- .txt ----

CONTENT = "\n\n  one\r\n two \n\n \t \nthree\x0c\n\r\n\r\nfour"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("paragraph", ["one\n two", "three", "four"]),
        ("line", ["one", "two", "three", "four"]),
        ("file", ["one\n two \n\n \t \nthree\x0c\n\n\nfour"]),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_plain_text_is_cut_into_what_is_asked_for(unit: Unit, expected: list[str], mark: bytes) -> None:
    write("a.txt", mark + CONTENT.encode())
    documents = reader("a.txt", unit=unit)
    assert list(documents) == [Document(text, None) for text in expected]
    assert documents.left_out == Counter()


ONE_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1).filter(str.strip)
PARAGRAPH = st.lists(ONE_LINE, min_size=1, max_size=4).map("\n".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), end=st.sampled_from(["\n", "\r\n"]), unit=st.sampled_from(["paragraph", "line"]))
def test_what_was_written_comes_back(data: st.DataObject, end: str, unit: Unit) -> None:
    """Any lines, joined by the end of a line, and any paragraphs, joined by one or more empty lines."""
    parts = data.draw(st.lists(ONE_LINE if unit == "line" else PARAGRAPH, min_size=1, max_size=6))
    gap = "\n" * (data.draw(st.integers(2, 4)) if unit == "paragraph" else 1)
    write("a.txt", b"\xef\xbb\xbf" + (gap.join(parts) + "\n").replace("\n", end).encode())
    assert texts(reader("a.txt", unit=unit)) == [part.strip() for part in parts]


BROKEN = b"one\ntwo\n\nthree\nfour \xe9\nfive\n\nsix\n"


@pytest.mark.parametrize(
    ("unit", "expected", "reason"),
    [
        ("line", ["good", "one", "two", "three"], "not UTF-8 from line 5 on (b.txt)"),
        ("paragraph", ["good", "one\ntwo"], "not UTF-8 from line 5 on (b.txt)"),
        ("file", ["good"], "not UTF-8 (b.txt)"),
    ],
)
def test_from_a_decoding_error_on_a_file_is_left_out(unit: Unit, expected: list[str], reason: str) -> None:
    """No half of a paragraph, and no half of a file; the files after it are read."""
    write("a.txt", "good")
    write("b.txt", BROKEN)
    write("c.txt", "after")
    documents = reader("*", unit=unit)
    assert texts(documents) == [*expected, "after"]
    assert documents.left_out == {reason: 1}


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
def test_a_file_that_is_not_utf8_from_its_beginning_is_left_out(unit: Unit) -> None:
    write("a.txt", "good")
    write("b.txt", "utf-16\nlines\n".encode("utf-16"))
    documents = reader("*", unit=unit)
    assert texts(documents) == ["good"]
    assert documents.left_out == {"not UTF-8 (b.txt)": 1}


@pytest.mark.parametrize("unit", ["line", "paragraph", "file"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b" \r\n\t\n"])
def test_an_empty_file_is_left_out(unit: Unit, content: bytes) -> None:
    write("a.txt", "good")
    write("b.txt", content)
    documents = reader("*", unit=unit)
    assert texts(documents) == ["good"]
    assert documents.left_out == {"empty (b.txt)": 1}


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_a_long_file_is_not_held_whole(unit: Unit) -> None:
    """Twenty megabytes of documents, in less than one."""
    import tracemalloc

    write("a.txt", ("x" * 998 + "\n\n") * 20_000)
    documents = reader("a.txt", unit=unit)
    tracemalloc.start()
    try:
        assert sum(1 for _ in documents) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# ---- Rows ----


def write_either(kind: str, texts: list[Any], labels: list[Any] | None = None) -> str:
    """The same rows in a .jsonl or a .parquet file."""
    columns = {"id": list(range(len(texts))), "text": texts} | ({} if labels is None else {"label": labels})
    if kind == "parquet":
        return write_parquet("rows.parquet", columns)
    rows = zip(*columns.values(), strict=True)
    return write_rows("rows.jsonl", *(dict(zip(columns, row, strict=True)) for row in rows))


BOTH = pytest.mark.parametrize("kind", ["jsonl", "parquet"])


@BOTH
def test_texts_of_rows_come_as_they_are(kind: str) -> None:
    documents = reader(write_either(kind, [" é\r\n\n🙂 ", "b", "b"], ["x", "y", "y"]), unit="file")
    assert list(documents) == [Document(" é\r\n\n🙂 ", None), Document("b", None), Document("b", None)]
    assert documents.left_out == Counter()


@BOTH
@pytest.mark.parametrize("values", [["x", " y"], [0, 7], [True, False], [0.5, 2.0]])
def test_a_class_is_its_value_in_words(kind: str, values: list[Any]) -> None:
    documents = reader(write_either(kind, ["a", "b"], values), label="label")
    assert [document.label for document in documents] == [str(value) for value in values]


@BOTH
def test_a_row_without_text_is_left_out(kind: str) -> None:
    documents = reader(write_either(kind, ["a", None, "", " \n", "b"]))
    assert texts(documents) == ["a", "b"]
    assert documents.left_out == {f"text missing or blank (rows.{kind})": 3}


@BOTH
def test_a_text_that_is_not_a_string_is_left_out(kind: str) -> None:
    write("a.txt", "good")
    documents = reader("a.txt", write_either(kind, [1, 0]))
    assert texts(documents) == ["good"]
    assert documents.left_out == {f"text that is not a string (rows.{kind})": 2}


@BOTH
def test_a_row_without_a_class_is_left_out_where_one_is_asked_for(kind: str) -> None:
    name = write_either(kind, ["a", "b", "c", "d"], ["x", None, " ", ""])
    documents = reader(name, label="label")
    assert list(documents) == [Document("a", "x")]
    assert documents.left_out == {f"label missing or blank (rows.{kind})": 3}
    assert texts(reader(name)) == ["a", "b", "c", "d"]


@BOTH
def test_not_a_number_is_no_class(kind: str) -> None:
    documents = reader(write_either(kind, ["a", "b"], [1.0, float("nan")]), label="label")
    assert list(documents) == [Document("a", "1.0")]
    assert documents.left_out == {f"label missing or blank (rows.{kind})": 1}


@BOTH
def test_several_classes_are_no_class(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"2 × label that is not one value \(rows\.{kind}\)"):
        list(reader(write_either(kind, ["a", "b"], [["x"], ["x", "y"]]), label="label"))


@BOTH
def test_text_and_class_may_be_one_column(kind: str) -> None:
    assert list(reader(write_either(kind, ["a"]), label="text")) == [Document("a", "a")]


@BOTH
@pytest.mark.parametrize(("option", "text", "label"), [("text", "body", "label"), ("label", "text", "body")])
def test_a_column_that_no_row_has_is_refused_with_those_that_there_are(
    kind: str, option: str, text: str, label: str
) -> None:
    name = write_either(kind, ["a"], ["x"])
    message = rf"^{option}_column='body': rows\.{kind} has no such column; its columns are: id, label, text$"
    with pytest.raises(ConfigurationError, match=message):
        list(reader(name, text=text, label=label))


def test_a_column_that_some_rows_have_is_enough() -> None:
    write_rows("a.jsonl", {"id": 1}, {"text": "a"}, {"label": "x", "id": 2}, {"text": "b", "label": "y"})
    documents = reader("a.jsonl", label="label")
    assert list(documents) == [Document("b", "y")]
    assert documents.left_out == {"text missing or blank (a.jsonl)": 2, "label missing or blank (a.jsonl)": 1}


def test_a_column_is_found_after_a_thousand_others() -> None:
    write_rows("a.jsonl", *({f"{number}": 0} for number in range(1_500)), {"text": "a"}, {"text": "b"})
    documents = reader("a.jsonl")
    assert texts(documents) == ["a", "b"]
    assert documents.left_out == {"text missing or blank (a.jsonl)": 1_500}
    with pytest.raises(ConfigurationError, match=r" and 980 more$"):  # of a thousand remembered
        list(reader("a.jsonl", text="body"))


def test_of_many_columns_twenty_are_named() -> None:
    write_rows("a.jsonl", {f"{number:03}": 0 for number in range(100)} | {"text": "a"})
    assert texts(reader("a.jsonl")) == ["a"]
    with pytest.raises(ConfigurationError, match=r"its columns are: 000, 001, .*, 019 and 81 more$"):
        list(reader("a.jsonl", text="body"))


# ---- .jsonl ----


def test_a_broken_line_costs_a_line() -> None:
    """Not JSON, not an object, not UTF-8, nested too deep, a number too long, half-written at the end."""
    good = b'{"text": "%d"}'
    lines = [
        *(b"\xef\xbb\xbf" + good % 0, b"", b"{", b"[1]", b'"a"', b"null", b'{"text": "\xff"}', good % 1),
        *(b"[" * 100_000, b'{"text": %s}' % (b"1" * 5_000), good % 2 + b"\r", b" ", b'{"text": "ha'),
    ]
    write("a.jsonl", b"\n".join(lines))
    documents = reader("a.jsonl")
    assert texts(documents) == ["0", "1", "2"]
    assert documents.left_out == {"line that is not a JSON object, first line 3 (a.jsonl)": 8}


def test_a_file_of_broken_lines_is_broken_and_not_empty() -> None:
    write("a.txt", "good")
    write("b.jsonl", '{"text": "ha')
    documents = reader("*")
    assert texts(documents) == ["good"]
    assert documents.left_out == {"line that is not a JSON object, first line 1 (b.jsonl)": 1}


def test_half_of_a_character_is_no_text() -> None:
    """JSON can say it, but it has no UTF-8, and tokenizers and hashes refuse it."""
    write("a.jsonl", '{"text": "cut \\ud83d", "label": 1}\n{"text": "\\ud83d\\ude42", "label": "\\ud83d\\ude42"}\n')
    documents = reader("a.jsonl", label="label")
    assert list(documents) == [Document("🙂", "🙂")]
    assert documents.left_out == {"half of a character (a.jsonl)": 1}


@pytest.mark.parametrize("content", ["", "\n \r\n"])
def test_an_empty_jsonl_file_is_left_out(content: str) -> None:
    write("a.txt", "good")
    write("b.jsonl", content)
    documents = reader("*")
    assert texts(documents) == ["good"]
    assert documents.left_out == {"empty (b.jsonl)": 1}


# ---- .parquet ----


def test_a_parquet_file_without_rows_is_left_out() -> None:
    import_arrow = pytest.importorskip("pyarrow")
    write("a.txt", "good")
    write_parquet("b.parquet", {"text": import_arrow.array([], import_arrow.string())})
    documents = reader("*")
    assert texts(documents) == ["good"]
    assert documents.left_out == {"empty (b.parquet)": 1}


def test_rows_of_several_row_groups_come_in_order() -> None:
    write_parquet("a.parquet", {"text": [str(number) for number in range(5_000)]}, row_group_size=1_700)
    assert texts(reader("a.parquet")) == [str(number) for number in range(5_000)]


def test_classes_stored_as_categories_are_read() -> None:
    arrow = pytest.importorskip("pyarrow")
    write_parquet("a.parquet", {"text": ["a", "b"], "label": arrow.array(["x", "y"]).dictionary_encode()})
    assert [document.label for document in reader("a.parquet", label="label")] == ["x", "y"]


@pytest.mark.parametrize("name", ["a[1].parquet", "a*.parquet", "x::y.parquet", "{q} #?.parquet", "A.PARQUET"])
def test_a_parquet_file_may_have_any_name(name: str) -> None:
    """Given to `datasets`, `a*.parquet` would be all files that begin with a."""
    write_parquet("a1.parquet", {"text": ["other"]})
    write_parquet(name, {"text": ["this"]})
    assert texts(reader(name)) == ["this"]


@pytest.mark.parametrize("damage", [lambda whole: b"", lambda whole: whole[: len(whole) // 2], lambda whole: b"{}" * 9])
def test_a_damaged_parquet_file_is_named(damage: Any) -> None:
    file = Path(write_parquet("a.parquet", {"text": ["a", "b"]}))
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"^a\.parquet is damaged or half-written, .*; write it anew$"):
        list(reader("a.parquet"))


def test_damage_in_the_middle_of_a_parquet_file_is_found_on_the_way() -> None:
    values = [f"{number} " * 40 for number in range(4_000)]
    file = Path(write_parquet("a.parquet", {"text": values}, row_group_size=2_000, use_dictionary=False))
    whole = bytearray(file.read_bytes())
    middle = len(whole) * 3 // 4  # of the second row group
    whole[middle : middle + 2_000] = b"\xff" * 2_000
    file.write_bytes(whole)
    seen: list[str] = []
    with pytest.raises(ConfigurationError, match=r"^a\.parquet is damaged or half-written, .*; write it anew$"):
        seen.extend(document.text for document in reader("a.parquet"))
    assert 0 < len(seen) <= 2_000
    assert seen == values[: len(seen)]


def test_without_datasets_a_parquet_file_asks_for_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    write("a.txt", "good")
    write("b.parquet")
    assert texts(reader("a.txt")) == ["good"]
    with pytest.raises(ModuleNotFoundError) as raised:
        texts(reader("b.parquet"))
    assert raised.value.name == "datasets"


SCRIPT = """
import socket, sys
from wholebatch.training.documents import Documents

def refuse(*args, **kwargs):
    print("network", args)
    raise OSError("no network")

socket.getaddrinfo = socket.socket.connect = refuse
documents = lambda name: list(Documents([name], unit="line", text_column="text", label_column=None))
assert len(documents("a.txt")) == 1
print("datasets" in sys.modules)
assert len(documents("a.parquet")) == 2
print("datasets" in sys.modules)
"""


@pytest.mark.parametrize("offline", ["0", "1"])
def test_parquet_is_read_without_network_and_without_a_home(folder: Path, offline: str) -> None:
    """No address is looked up, nothing stays behind in the home or the temporary folder; `datasets` only if needed."""
    write("a.txt")
    write_parquet("a.parquet", {"text": ["a", "b"]})
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "HF_HUB_OFFLINE": offline}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    result = subprocess.run(command, env=kept | own, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "False\nTrue\n", "")
    assert [*(folder / "home").rglob("*"), *(folder / "tmp").rglob("*")] == []
