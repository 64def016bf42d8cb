"""The index of known faults is complete, and what it claims is true."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.smoke

FAULTS = Path(__file__).parent
ROOT = FAULTS.parent.parent
FIELDS = {"fault": str, "reports": list, "right": str, "status": str}
NUMBERS = {
    "LN": (1, 2, 4, 5, 8),
    "RK": (1, 2, 4, 5, 6, 8),
    "ZT": (1, 3, 5, 6, 8),
    "WN": (1, 2, 5, 7, 8, 9),
    "SC": (1, 3),
    "AM": (1, 2, 3, 5, 7, 8, 9, 10),
    "DD": (1, 2, 3, 6, 7),
    "FS": (1, 2, 4),
    "OO": (1, 3, 5, 7, 9, 10, 11, 12, 13, 14),
    "PL": (1, 2, 3, 4, 6),
    "RS": (1, 2, 4, 5),
    "LG": (1, 2, 4, 5),
    "BN": (1, 2, 4, 5, 8),
    "CT": (1, 2, 4, 5, 7),
    "MO": (1, 3, 4),
    "PR": (1, 3),
    "CH": (2,),
    "CG": (1, 3),
    "SP": (1, 3, 5),
    "PA": (1, 2, 4),
    "UN": (1,),
    "GN": (1, 3),
    "PI": (1, 2),
}
KNOWN = [f"{kind}{number}" for kind, numbers in NUMBERS.items() for number in numbers]


def entry_problems(name: str, entry: dict[str, Any], existing: set[str]) -> Iterator[str]:
    """What is wrong with one entry, given the node ids of the tests that exist."""
    for field, kind in FIELDS.items():
        if not isinstance(entry.get(field), kind) or not entry[field]:
            yield f"{name} has no {field}"
    tests = entry.get("tests", [])
    match entry.get("status"):
        case "tested" if not tests:
            yield f"{name} is said to be tested and names no test"
        case "later" if tests:
            yield f"{name} names tests and is said to come later"
        case status if status not in ("tested", "later"):
            yield f"{name} has the unknown status {status!r}"
    for test in tests:
        if test.partition("[")[0] not in existing:
            yield f"{name} names {test}, which does not exist"


def problems(index: dict[str, dict[str, Any]], existing: set[str], owned: set[str]) -> list[str]:
    """All that is wrong with an index: `existing` may be named by its entries, `owned` must be."""
    found = [f"{name} is missing" for name in KNOWN if name not in index]
    found += [f"{name} is not a known fault" for name in index if name not in KNOWN]
    for name, entry in index.items():
        found += entry_problems(name, entry, existing)
    named = {test.partition("[")[0] for entry in index.values() for test in entry.get("tests", [])}
    return found + [f"{test} belongs to no entry" for test in sorted(owned - named)]


def node_ids(file: Path) -> set[str]:
    """The pytest node ids of the test functions and methods in a file, read without importing it."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        where = f"::{node.name}" if inside != [node] and isinstance(node, ast.ClassDef) else ""
        for item in inside:
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test_"):
                found.add(f"{file.relative_to(ROOT).as_posix()}{where}::{item.name}")
    return found


def test_index_is_complete_and_true() -> None:
    """All 92 faults are listed, each named test exists, and each test in this folder is named."""
    index = tomllib.loads((FAULTS / "INDEX.toml").read_text(encoding="utf-8"))
    files = set((ROOT / "tests").rglob("test_*.py"))
    existing = {test for file in files for test in node_ids(file)}
    owned = {test for file in files if file.parent == FAULTS and file != Path(__file__) for test in node_ids(file)}
    assert len(KNOWN) == 92
    assert problems(index, existing, owned) == []


def good_index() -> dict[str, dict[str, Any]]:
    entry = {"fault": "f", "reports": ["r#1"], "right": "1.0", "status": "later"}
    return {name: dict(entry) for name in KNOWN}


def claim(*tests: str) -> dict[str, Any]:
    return {"fault": "f", "reports": ["r#1"], "right": "1.0", "status": "tested", "tests": list(tests)}


def test_a_good_index_has_no_problem() -> None:
    """A complete index whose tests exist is accepted, also where it names one case of a parametrised test."""
    index = good_index() | {"LN1": claim("a::test_x[case]", "a::test_y")}
    assert problems(index, {"a::test_x", "a::test_y"}, {"a::test_x"}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"LN1": claim("a::test_gone")}, "LN1 names a::test_gone, which does not exist"),
        ({"LN1": claim()}, "LN1 is said to be tested and names no test"),
        ({"LN1": claim("a::test_x") | {"status": "later"}}, "LN1 names tests and is said to come later"),
        ({"LN1": claim("a::test_x") | {"status": "done"}}, "LN1 has the unknown status 'done'"),
        ({"LN1": claim("a::test_x") | {"reports": []}}, "LN1 has no reports"),
        ({"LN3": claim("a::test_x")}, "LN3 is not a known fault"),
    ],
)
def test_a_false_claim_is_found(change: dict[str, Any], problem: str) -> None:
    """Each way in which an entry can be wrong is reported, and nothing else."""
    assert problems(good_index() | change, {"a::test_x"}, set()) == [problem]


def test_a_missing_entry_is_found() -> None:
    """Leaving out any one of the faults is reported."""
    for name in KNOWN:
        index = good_index()
        del index[name]
        assert problems(index, set(), set()) == [f"{name} is missing"]


def test_a_test_without_an_entry_is_found() -> None:
    """A test in the folder that no entry names is reported."""
    index = good_index() | {"LN1": claim("a::test_x")}
    assert problems(index, {"a::test_x", "a::test_y"}, {"a::test_x", "a::test_y"}) == ["a::test_y belongs to no entry"]
