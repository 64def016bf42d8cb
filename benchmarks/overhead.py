"""The cost of wholebatch against the best hand-written loop at the same cut.

Pairs of the same whole batch, one through `GradientAccumulator.backward`, one through a hand-written loop, in random
order within each pair; CPU time of the thread; and in the same run pairs of the hand-written loop with itself (A/A),
which show what the machine alone makes of a ratio. Prints, for each model, the median ratio with its bootstrap 95 %
interval. Run it on an otherwise idle machine:

    .venv/bin/python benchmarks/overhead.py [--pairs 50]
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import wholebatch as wb

Batch = dict[str, torch.Tensor]


@dataclass
class Case:
    """A model, its whole batch, and how it is cut."""

    name: str
    model: torch.nn.Module
    batch: Batch
    micro_batch_size: int
    count: Callable[[Batch], int]
    """What the model's loss is a mean over, for the hand-written loop."""


def llama(hidden: int, layers: int, length: int, examples: int, micro: int) -> Case:
    """A causal language model; every label counts but the first of a sequence."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 2048, (examples, length))
    name = f"Llama {layers} layers, d {hidden}, {examples} x {length} tokens, micro-batch {micro}"
    batch = {"input_ids": ids, "labels": ids.clone()}
    return Case(name, LlamaForCausalLM(config), batch, micro, lambda b: int((b["labels"][:, 1:] != -100).sum()))


def bert(hidden: int, layers: int, length: int, examples: int, micro: int) -> Case:
    """A classifier with an attention mask."""
    config = BertConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    batch = {
        "input_ids": torch.randint(0, 2048, (examples, length)),
        "attention_mask": torch.ones(examples, length, dtype=torch.long),
        "labels": torch.randint(0, 5, (examples,)),
    }
    name = f"BERT {layers} layers, d {hidden}, {examples} x {length} tokens, micro-batch {micro}"
    return Case(name, BertForSequenceClassification(config), batch, micro, lambda b: len(b["labels"]))


def by_hand(case: Case) -> Callable[[], float]:
    """The best hand-written loop: the count known beforehand, each share differentiated, one addition for the log."""

    def step() -> float:
        examples = len(case.batch["labels"])
        parts = [
            {name: field[start : start + case.micro_batch_size] for name, field in case.batch.items()}
            for start in range(0, examples, case.micro_batch_size)
        ]
        counts = [case.count(part) for part in parts]
        total, logged = sum(counts), []
        for part, count in zip(parts, counts, strict=True):
            share = case.model(**part).loss * (count / total)
            share.backward()
            logged.append(share.detach())
        return float(torch.stack(logged).sum())

    return step


def by_wholebatch(case: Case) -> Callable[[], float]:
    """The same through the library."""
    accumulator = wb.GradientAccumulator(case.model, micro_batch_size=case.micro_batch_size)
    return lambda: float(accumulator.backward(case.batch).loss)


def seconds(step: Callable[[], float], model: torch.nn.Module) -> float:
    """CPU time of this thread for one whole batch into empty gradients."""
    model.zero_grad()
    started = time.thread_time()
    step()
    return time.thread_time() - started


def ratios(first: Callable[[], float], second: Callable[[], float], model: torch.nn.Module, pairs: int) -> list[float]:
    """`first` over `second`, pair by pair, in random order within each."""
    found = []
    for _ in range(pairs):
        order = [first, second]
        random.shuffle(order)
        taken = {id(step): seconds(step, model) for step in order}
        found.append(taken[id(first)] / taken[id(second)])
    return found


def interval(values: list[float], draws: int = 5000) -> tuple[float, float, float]:
    """The median and its bootstrap 95 % interval."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], statistics.median(values), medians[int(0.975 * draws)]


def measure(case: Case, pairs: int) -> dict[str, object]:
    """The library against the loop and the loop against itself, interleaved."""
    hand, again, library = by_hand(case), by_hand(case), by_wholebatch(case)
    case.model.zero_grad()
    expected = hand()
    case.model.zero_grad()
    assert abs(library() - expected) < 1e-4 * abs(expected), "the two do not compute the same loss"
    against, control = [], []
    for _ in range(pairs):  # interleaved, so that both see the same machine
        against += ratios(library, hand, case.model, 1)
        control += ratios(again, hand, case.model, 1)
    return {"case": case.name, "wholebatch / by hand": interval(against), "by hand / by hand": interval(control)}


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50, help="pairs per model (default 50)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    cases = [llama(128, 4, 64, 32, 4), llama(256, 4, 128, 16, 4), bert(128, 2, 64, 64, 8), bert(384, 6, 64, 32, 8)]
    rows = [measure(case, arguments.pairs) for case in cases]
    for row in rows:
        print(row["case"])
        for name in ("wholebatch / by hand", "by hand / by hand"):
            low, median, high = row[name]  # type: ignore[misc]
            print(f"    {name:22} median {median:.4f}   95 % of the median {low:.4f} to {high:.4f}")
    result = {
        "command": "python benchmarks/overhead.py " + " ".join(sys.argv[1:]),
        "pairs": arguments.pairs,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": 1,
        "rows": rows,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
