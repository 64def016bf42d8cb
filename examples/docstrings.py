"""Text with a class, from every Python: the docstrings of the standard library, each with its package.

Writes docstrings.jsonl, one {"text": ..., "package": ...} a line, for

    wholebatch train --data docstrings.jsonl --objective classify --label-column package --model FOLDER
"""

import ast
import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def docstrings() -> Iterator[tuple[str, str]]:
    """Package and text, of modules, classes and functions; the sources are read, not run."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library)
        if LEFT_OUT.intersection(path.parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, WITH_DOCSTRING) and (text := ast.get_docstring(node)):
                yield path.parts[0].removesuffix(".py"), text


def main(output: Path) -> None:
    packages: Counter[str] = Counter()
    with output.open("w", encoding="utf-8") as file:
        for package, text in docstrings():
            file.write(json.dumps({"text": text, "package": package}) + "\n")
            packages[package] += 1
    print(f"{output}: {packages.total():,} docstrings of {len(packages)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docstrings.jsonl"))
