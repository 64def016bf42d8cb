"""How long it takes to cut a batch: the exact optimum over contiguous groups of examples in order of length.

Prints, for batches of 64 to 32,768 examples of log-normal lengths (mean about 128, at most 512), the best of several
times, the evaluations of the cost for each example, and padded / real tokens. Times are of one thread.

    .venv/bin/python benchmarks/cut.py
"""

import json
import platform
import random
import sys
import time
from itertools import accumulate
from pathlib import Path

from wholebatch.batch.costs import Cost
from wholebatch.batch.partition import partition


class Counted(Cost):
    """A cost that counts how often it is asked."""

    asked = 0

    def per_example(self, length: int) -> float:
        Counted.asked += 1
        return super().per_example(length)


def main() -> None:
    """Print the table and write it."""
    random.seed(0)
    rows = []
    for examples in (64, 512, 4096, 32768):
        drawn = (min(512, max(4, round(random.lognormvariate(4.6, 0.7)))) for _ in range(examples))
        lengths = sorted(drawn, reverse=True)
        Counted.asked, times = 0, []
        sizes = partition(lengths, Counted(32.0, 1.0, 0.001), lambda length: 1024 // length)
        asked = Counted.asked
        for _ in range(7):
            started = time.perf_counter()
            partition(lengths, Cost(32.0, 1.0, 0.001), lambda length: 1024 // length)
            times.append(time.perf_counter() - started)
        starts = accumulate(sizes, initial=0)
        padded = sum(s * lengths[a] for s, a in zip(sizes, starts, strict=False)) / sum(lengths)
        row = {
            "examples": examples,
            "micro_batches": len(sizes),
            "milliseconds": min(times) * 1e3,
            "cost_evaluations_per_example": asked / examples,
            "padded_over_real_tokens": padded,
        }
        rows.append(row)
        print(
            f"{examples:6,} examples: {len(sizes):5,} micro-batches in {min(times) * 1e3:7.2f} ms, "
            f"{asked / examples:.2f} evaluations of the cost per example, padded / real tokens {padded:.3f}"
        )
    result = {"command": "python benchmarks/cut.py " + " ".join(sys.argv[1:]), "python": platform.python_version()}
    output = Path(__file__).parent / "results" / "cut.json"
    output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
