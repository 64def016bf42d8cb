"""The house keeps its own rules: what is exported, what an import loads, how long things are, what is written where."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import wholebatch
from wholebatch import errors

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "wholebatch"
FILES = sorted(SOURCE.rglob("*.py"))
EXPORTED = {
    "BatchLayout",
    "EvaluationReport",
    "GradientAccumulator",
    "LossSum",
    "StepReport",
    "WholeBatchError",
    "whole_batches",
}
HEAVY = ("accelerate", "cyclopts", "datasets", "lightning", "peft", "plotly", "rich", "tokenizers", "transformers")


def shown(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def code_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


# ---- What is exported ----


def test_exactly_the_stated_names_are_exported() -> None:
    """`__all__` is the stated list, sorted and without repeats, and each name is there."""
    assert set(wholebatch.__all__) == EXPORTED
    assert list(wholebatch.__all__) == sorted(EXPORTED)
    assert [name for name in EXPORTED if not hasattr(wholebatch, name)] == []


def test_nothing_else_is_exported() -> None:
    """Beside its submodules, `wholebatch` shows no public name that is not in `__all__`."""
    stray = {
        name
        for name, value in vars(wholebatch).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert stray <= EXPORTED


def public_members() -> Iterator[tuple[str, object]]:
    """Each exported name, and each public method and property that a class among them defines itself."""
    for name in sorted(EXPORTED):
        value = getattr(wholebatch, name)
        yield name, value
        for member, of_class in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and (callable(of_class) or isinstance(of_class, property | classmethod)):
                yield f"{name}.{member}", of_class


def test_every_public_name_is_explained() -> None:
    """Each exported name, with its methods and properties, has a docstring of its own."""
    assert [name for name, value in public_members() if not (getattr(value, "__doc__", None) or "").strip()] == []


# ---- What an import loads ----


def test_import_loads_nothing_heavier_than_torch() -> None:
    """`import wholebatch` loads no host framework and no library of the command line, and gives no warning."""
    script = f"import sys, wholebatch; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[]", "")


# ---- The exception tree ----


def drawn_tree() -> dict[str, str | None]:
    """Each class in the tree that the docstring of errors.py draws, with the class it hangs from."""
    above: list[str] = []
    tree: dict[str, str | None] = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^    ((?:│   |    )*(?:[├└]── )?)([A-Z]\w+(?:Error|Warning))\b", line):
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            tree[match[2]] = above[depth - 1] if depth else None
    return tree


def test_the_drawn_exception_tree_is_the_real_one() -> None:
    """The docstring of errors.py draws each class, under the class it derives from, and no other."""
    defined = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    real = {
        name: next((base.__name__ for base in value.__bases__ if base.__name__ in defined), None)
        for name, value in defined.items()
    }
    assert drawn_tree() == real


def test_every_exception_is_a_wholebatch_error() -> None:
    """One `except WholeBatchError` catches whatever wholebatch raises, one filter what it warns of."""
    bases = (errors.WholeBatchError, errors.WholeBatchWarning)
    assert [name for name in drawn_tree() if not issubclass(getattr(errors, name), bases)] == []


# ---- How long things are ----


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(code_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_stay_below_500_lines() -> None:
    """A file does one job; at 500 lines it does several."""
    lengths = {shown(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {file: length for file, length in lengths.items() if length >= 500} == {}


def test_functions_stay_within_60_lines() -> None:
    """A function fits one screen, its signature and docstring included."""
    lengths = {
        f"{shown(file)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for file in FILES
        for node in functions(file)
    }
    assert {name: length for name, length in lengths.items() if length > 60} == {}


# ---- What is used where ----


def attributes(file: Path) -> set[str]:
    """Every dotted name that a file uses or imports, and every attribute by itself."""
    found: set[str] = set()
    for node in ast.walk(code_of(file)):
        if isinstance(node, ast.Attribute):
            found |= {ast.unparse(node), node.attr}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {name for alias in node.names for name in (alias.name, f"{node.module}.{alias.name}")}
    return found | {".".join(name.split(".")[:2]) for name in found}


def files_that_use(*names: str) -> set[str]:
    return {shown(file) for file in FILES if attributes(file) & set(names)}


def test_only_one_room_talks_to_other_ranks() -> None:
    """`torch.distributed` is used in parallel/ alone."""
    assert {file for file in files_that_use("torch.distributed") if "/parallel/" not in file} == set()


def test_only_one_file_touches_device_memory() -> None:
    """Asking for, freeing and running out of device memory are the business of memory/device.py."""
    used = files_that_use(
        "OutOfMemoryError",
        "empty_cache",
        "max_memory_allocated",
        "mem_get_info",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_peak_memory_stats",
    )
    assert used <= {"src/wholebatch/memory/device.py"}


def test_no_file_is_named_after_nothing() -> None:
    """A file's name says which job it does."""
    assert [shown(file) for file in FILES if re.search(r"util|helper|manager|misc|common", file.stem)] == []


# ---- What is written ----


def tracked_texts() -> dict[str, str]:
    """The text of each file in the repository, by its name."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    files = {name: ROOT / name for name in names if name and (ROOT / name).is_file()}
    written = {name: file for name, file in files.items() if file.stat().st_size < 2**20}  # not a stray environment
    return {name: file.read_text(encoding="utf-8", errors="replace") for name, file in written.items()}


PLACES = re.compile(r"(?<![\w.~-])/(?:work|tmp|root|home|Users|mnt|opt)/")
# In parts, or this file would be the first to break the rule.
WORDS = re.compile(r"(?<![\w-])share" + r"d/|pypi\." + r"org|python" + "hosted")


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    """No absolute path of a machine, no folder outside the repository and no package host stands in any file."""
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if PLACES.search(line) or WORDS.search(line)
    ]
    assert found == []


def test_each_script_in_examples_is_short() -> None:
    """An example shows one feature on one page: at most 60 lines of code beside comments and blank lines."""
    lengths = {
        shown(file): sum(1 for line in file.read_text(encoding="utf-8").splitlines() if re.match(r"\s*[^#\s]", line))
        for file in (ROOT / "examples").glob("*.py")
    }
    assert {file: length for file, length in lengths.items() if length > 60} == {}


# ---- What is claimed about torch ----


def test_claimed_torch_versions_are_the_tested_ones() -> None:
    """The lowest torch in pyproject.toml is the one of the smoke lane; the pinned one lies in the claimed range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [claim] = [item for item in project["dependencies"] if item.startswith("torch")]
    lowest, above = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", claim).groups()  # type: ignore[union-attr]
    [smoke] = re.findall(r"^LOWEST_TORCH := ([\d.]+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    [pinned] = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert lowest == smoke
    major, minor = pinned.split(".")[:2]
    assert above == f"{major}.{int(minor) + 1}"


def test_core_needs_torch_alone() -> None:
    """Installing wholebatch installs torch and nothing else of its own choosing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [re.match(r"[\w-]+", item)[0] for item in project["dependencies"]] == ["torch"]  # type: ignore[index]
