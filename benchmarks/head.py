"""A language-model head and its cross-entropy: whole logits, torch's own chunks, and ours; and a whole small model.

Pairs of the same forward and backward, in random order, CPU time of the thread, with pairs of the whole logits among
themselves (A/A), which show what the machine alone makes of a ratio. The peak is exact: the profiler's record of every
allocation, above the parameters and their gradients, which are there before. One thread; on an otherwise idle machine:

    .venv/bin/python benchmarks/head.py [--pairs 15]
    .venv/bin/python benchmarks/head.py --threshold      from which size on chunks are faster
    .venv/bin/python benchmarks/head.py --rows           how many rows a chunk should have
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import wholebatch as wb
from wholebatch.loss.chunked import CHUNK_ROWS, linear_cross_entropy

Step = Callable[[], object]
"""Whatever it leaves in `.grad` is there before, or does not count (`of_gradients`)."""


def nothing() -> None:
    """What comes before most steps."""


def peak_bytes(step: Step) -> int:
    """The most that was allocated at once during `step`, above what was there before."""
    before(step)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most - getattr(step, "of_gradients", 0)


def seconds(step: Step) -> float:
    """CPU time of this thread."""
    before(step)
    started = time.thread_time()
    step()
    return time.thread_time() - started


def before(step: Step) -> None:
    """What is done before a step and not measured."""
    getattr(step, "before", nothing)()


def interval(values: list[float], draws: int = 5000) -> tuple[float, float, float]:
    """The median and its bootstrap 95 % interval."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], statistics.median(values), medians[int(0.975 * draws)]


def compared(steps: dict[str, Step], pairs: int) -> list[dict[str, object]]:
    """Each step against the first of them, which is also run against itself."""
    base_name, base = next(iter(steps.items()))
    rows: list[dict[str, object]] = []
    for name, step in [(f"{base_name} again", base), *steps.items()]:
        if step is base and name == base_name:
            continue
        step()
        ratios = []
        for _ in range(pairs):
            order = [0, 1]
            random.shuffle(order)
            taken = {which: seconds((base, step)[which]) for which in order}
            ratios.append(taken[1] / taken[0])
        rows.append({"variant": name, "time": interval(ratios), "peak_bytes": peak_bytes(step)})
    whole = peak_bytes(base)
    return [row | {"peak": int(str(row["peak_bytes"])) / whole} for row in rows]


def head(
    vocabulary: int, rows: int = 1024, features: int = 256, chunk_rows: tuple[int, ...] = (CHUNK_ROWS,)
) -> dict[str, Step]:
    """The variants of one head, in float32; their gradients exist already."""
    hidden = torch.randn(rows, features, requires_grad=True)
    weight = (0.05 * torch.randn(vocabulary, features)).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)

    def whole() -> None:
        cross_entropy(linear(hidden, weight), labels, reduction="sum").backward()

    def ours(size: int) -> Step:
        return lambda: linear_cross_entropy(hidden, weight, labels, chunk_rows=size).sum.backward()

    def built_in(again: bool) -> Step:
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=CHUNK_ROWS, chunking_method=None, allow_retain_graph=again
        )
        call: Callable[..., Tensor] = torch.nn.functional.linear_cross_entropy
        return lambda: call(hidden, weight, labels, reduction="sum", options=options).backward()

    steps: dict[str, Step] = {"whole logits": whole}
    steps |= {f"wholebatch, chunks of {size}": ours(size) for size in chunk_rows}
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        steps |= {"torch's chunks": built_in(False), "torch's chunks, graph kept": built_in(True)}
    return steps


def model(vocabulary: int, length: int = 128, examples: int = 8) -> dict[str, Step]:
    """A Llama of 12 M parameters beside its embeddings, one micro-batch of a step, with and without chunks."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=384, intermediate_size=1536, num_hidden_layers=5, num_attention_heads=6,
        num_key_value_heads=6, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    body = sum(p.numel() for p in llama.model.layers.parameters())
    assert 11e6 < body < 13e6, body
    ids = torch.randint(3, vocabulary, (examples, length))
    batch = {"input_ids": ids, "labels": ids}

    def step(chunking: bool) -> Step:
        accumulator = wb.GradientAccumulator(llama, micro_batch_size=examples, loss_chunking=chunking)
        accumulator.backward(batch)  # the check, and gradients that exist from now on
        assert accumulator.loss_chunking.startswith("on" if chunking else "off"), accumulator.loss_chunking
        accumulator.backward(batch)

        def run() -> None:
            accumulator.backward(batch)

        run.before = llama.zero_grad  # type: ignore[attr-defined]
        run.of_gradients = sum(4 * p.numel() for p in llama.parameters())  # type: ignore[attr-defined]
        return run

    return {"whole logits": step(False), "wholebatch": step(True)}


def shown(case: str, rows: list[dict[str, object]]) -> dict[str, object]:
    """Print a case and return it for the file."""
    print(case)
    for row in rows:
        low, median, high = row["time"]  # type: ignore[misc]
        mebibytes = int(str(row["peak_bytes"])) / 2**20
        print(
            f"    {row['variant']:28} time {median:.3f} ({low:.3f} to {high:.3f})"
            f"   peak {mebibytes:7.1f} MiB = {row['peak']:.3f} of the whole"
        )
    return {"case": case, "rows": rows}


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs per variant (default 15)")
    parser.add_argument("--threshold", action="store_true", help="sizes round the one from which on chunks are used")
    parser.add_argument("--rows", action="store_true", help="other numbers of rows in a chunk")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    cases: dict[str, Callable[[], dict[str, Step]]] = {}
    kind = "head"
    if arguments.threshold:
        kind = "head_threshold"
        for features, vocabulary, rows in (
            (128, 4096, 512),
            (128, 16384, 512),
            (512, 4096, 2048),
            (512, 16384, 128),
            (512, 16384, 512),
        ):
            name = f"vocabulary {vocabulary}, {rows} rows, d {features}: {rows * vocabulary / 2**20:g} Mi logits"
            cases[name] = lambda v=vocabulary, r=rows, f=features: head(v, r, f)  # type: ignore[misc]
    elif arguments.rows:
        kind = "head_rows"
        cases["vocabulary 32000, 1024 rows, d 256"] = lambda: head(32000, chunk_rows=(32, 64, 128, 256, 512))
    else:
        for vocabulary in (32000, 50257):
            cases[f"head, vocabulary {vocabulary}, 1024 rows, d 256"] = lambda v=vocabulary: head(v)  # type: ignore[misc]
        for vocabulary in (32000, 50257):
            name = f"Llama of 12 M, tied, vocabulary {vocabulary}, 8 x 128 tokens, one step"
            cases[name] = lambda v=vocabulary: model(v)  # type: ignore[misc]
    result = {
        "command": "python benchmarks/head.py " + " ".join(sys.argv[1:]),
        "pairs": arguments.pairs,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "cases": [shown(name, compared(build(), arguments.pairs)) for name, build in cases.items()],
    }
    output = arguments.output or Path(__file__).parent / "results" / f"{kind}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
