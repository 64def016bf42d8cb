"""wholebatch beside its peers: speed, memory and losses on the same updates.

Each measurement is a process of its own; in each round every contestant trains the same model on the same examples, in
random order. Speeds are real (unpadded) tokens per second of CPU time; a ratio compares two processes of one round.
"by hand, again" is the hand-written loop a second time (A/A): it shows what the machine alone makes of a ratio.
README.md in this folder says what is compared with what. Run it on an otherwise idle machine:

    .venv/bin/python benchmarks/peers.py [--rounds 8] [--updates 1] [--only classify fixed]
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measurement import Task, in_fresh_process, processes
from ratios import Target, quotients
from workloads import (
    CLASSIFY,
    DECODE,
    FIXED,
    LOG_NORMAL,
    SCALING,
    Example,
    Workload,
    equal_length,
    real_tokens,
    shortened,
)

Figures = dict[str, Any]
PEERS = ("by hand", "Accelerate", "Trainer", "Lightning")
AGAIN, WHOLE = "by hand, again", "by hand, whole batch at once"
BY_LENGTH, EQUAL = "Trainer, by length", "by hand, equal lengths"
MIB = 2**20
PEAKS = {
    "peak_bytes_over_loaded": "resident peak",
    "peak_bytes_over_loaded_after_warm_up": "resident peak after the warm-up",
}
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "wholebatch")

ROUNDS = {"classify": 4, "decode": 2, "log-normal": 2, "fixed": 4, "scaling": 3}
"""A compromise with time; more rounds give narrower bounds."""

SETTLING = 8
"""At most so many batches does wholebatch see before the first update, to choose its sizes."""

MEGABATCH = 4
"""Updates among which Trainer sorts by length here: it makes four such groups of a data set of 16 updates."""


@dataclass(frozen=True)
class Settings:
    """How much is measured, and with which processes."""

    processes: Any
    rounds: int | None
    updates: int
    tensor_bytes: bool

    def rounds_of(self, name: str) -> int:
        return ROUNDS[name] if self.rounds is None else self.rounds


@dataclass
class Outcome:
    """A workload's figures: of each contestant, one for each round."""

    workload: Workload
    by_label: dict[str, list[Figures]]
    lengths: list[int]
    targets: list[Target]
    notes: list[str]
    tensor_peaks: dict[str, int]

    def of(self, label: str, key: str) -> list[float]:
        return [figures[key] for figures in self.by_label[label]]

    def speeds(self, label: str) -> list[float]:
        """Real tokens per second of CPU time."""
        return [figures["real_tokens"] / figures["process_seconds"] for figures in self.by_label[label]]

    def wall_speeds(self, label: str) -> list[float]:
        return [figures["real_tokens"] / figures["wall_seconds"] for figures in self.by_label[label]]

    def has_peaks(self) -> bool:
        """Whether this system tells resident memory."""
        return all(row["peak_bytes_over_loaded"] is not None for rows in self.by_label.values() for row in rows)


# ---- Measuring ----


def batched(examples: list[Example], size: int) -> list[list[Example]]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def task_of(workload: Workload, contestant: str, seed: int, updates: int, **options: Any) -> Task:
    """One update to warm up and `updates` to time; the examples depend on the seed alone."""
    size = workload.batch_size
    batches = batched(workload.examples(size * (updates + SETTLING), seed), size)
    options |= {"num_labels": workload.num_labels()}
    if contestant == "wholebatch":
        options |= {"settling": batches[updates:]}
    return Task(workload.name, contestant, warmed_up(batches[:updates]), **options)


def warmed_up(batches: list[list[Example]]) -> list[list[Example]]:
    """Before these an update of short examples, which makes the optimizer's state and costs little."""
    return [shortened(batches[0]), *batches]


def interleaved(workload: Workload, tasks: dict[str, Callable[[int], Task]], settings: Settings) -> Outcome:
    """Every contestant once a round, in random order."""
    by_label: dict[str, list[Figures]] = {label: [] for label in tasks}
    lengths: list[int] = []
    chance = random.Random(workload.name)
    for seed in range(rounds := settings.rounds_of(workload.name)):
        for label in chance.sample(list(tasks), len(tasks)):
            task = tasks[label](seed)
            by_label[label].append(in_fresh_process(settings.processes, task))
            say(f"{workload.name}: round {seed + 1} of {rounds}, {label}")
            if label == next(iter(tasks)):
                lengths += [len(example["input_ids"]) for batch in task.batches[task.warm_up :] for example in batch]
    outcome = Outcome(workload, by_label, lengths, [], unsettled(by_label), {})
    for again in (label for label in tasks if label.endswith(", again")):
        once = again.removesuffix(", again")
        control = quotients(outcome.speeds(again), outcome.speeds(once))
        outcome.notes.append(f'A/A, speed of "{again}" over "{once}": {control}')
    return outcome


def unsettled(by_label: dict[str, list[Figures]]) -> list[str]:
    """A note if wholebatch was still trying sizes while it was timed."""
    settled = [figures["settled"] for rows in by_label.values() for figures in rows if "settled" in figures]
    return [] if all(settled) else [f"sizes not settled in {settled.count(False)} of {len(settled)} processes"]


def count_tensor_bytes(outcome: Outcome, tasks: dict[str, Callable[[int], Task]], settings: Settings) -> None:
    """One more run of each, not timed, in which torch records its allocations."""
    for label, task in tasks.items():
        counted = in_fresh_process(settings.processes, replace(task(0), count_tensor_bytes=True))
        outcome.tensor_peaks[label] = counted["tensor_peak_bytes"] - counted.get("batch_bytes", 0)
        outcome.notes.append(
            f"tensors after the warm-up, {label}: {counted['tensor_peak_bytes_after_warm_up']:,} bytes"
        )
        say(f"{outcome.workload.name}: tensor bytes, {label}")


def best_size(workload: Workload, batch: list[Example], most: int, settings: Settings) -> tuple[int, dict[int, float]]:
    """The micro-batch size at which the hand-written loop is fastest on this batch, and its speed at each."""
    task = Task(workload.name, "sweep", [batch], warm_up=0, num_labels=workload.num_labels(), micro_batch_size=most)
    rates = in_fresh_process(settings.processes, task)["tokens_per_second"]
    say(f"{workload.name}: sweep")
    return max(rates, key=rates.__getitem__), rates


def say(text: str) -> None:
    """Where it is; not part of the result."""
    print(f"  [{time.perf_counter() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


# ---- The workloads ----


def peers_of(workload: Workload, updates: int) -> dict[str, Callable[[int], Task]]:
    """The library and its peers on the same updates."""

    def of(contestant: str) -> Callable[[int], Task]:
        return lambda seed: task_of(workload, contestant, seed, updates)

    return {label: of(label) for label in ("wholebatch", *PEERS)} | {AGAIN: of("by hand")}


def classify(settings: Settings) -> Outcome:
    """MiniLM on docstrings, with Trainer's sampling by length, and the distance to input without padding."""
    workload, updates = CLASSIFY, settings.updates
    sample = workload.examples(4096, 0)
    length, size = round(real_tokens(sample) / len(sample)), workload.batch_size

    def even(seed: int) -> list[Example]:
        return equal_length(updates * size, seed, length, classes=workload.num_labels(), vocabulary=30522)

    best, rates = best_size(workload, even(0)[:size], size // 2, settings)

    def deterministic(seed: int) -> Task:
        return task_of(workload, "wholebatch, deterministic", seed, updates)

    def by_length(seed: int) -> Task:
        batches = batched(workload.examples(size * 4 * MEGABATCH, seed), size)
        stop = min(4 * MEGABATCH, MEGABATCH + max(MEGABATCH, updates))
        return Task(workload.name, BY_LENGTH, batches, MEGABATCH, stop, num_labels=workload.num_labels())

    def without_padding(seed: int) -> Task:
        batches = warmed_up(batched(even(seed), size))
        return Task(workload.name, "by hand", batches, num_labels=workload.num_labels(), micro_batch_size=best)

    tasks = peers_of(workload, updates) | {"wholebatch, deterministic": deterministic}
    tasks |= {BY_LENGTH: by_length, EQUAL: without_padding}
    outcome = interleaved(workload, tasks, settings)
    if settings.tensor_bytes:
        count_tensor_bytes(outcome, {label: tasks[label] for label in ("wholebatch", "by hand")}, settings)
    outcome.notes += [f'"{EQUAL}": {length} random tokens each, micro-batches of {best}, the best of {shown(rates)}']
    own, peer = outcome.speeds("wholebatch"), fastest_peer(outcome)
    outcome.targets = [
        Target(f"speed over the fastest peer ({peer})", quotients(own, outcome.speeds(peer)), 2.5, low_at_least=2.3),
        Target(f'speed over "{BY_LENGTH}"', quotients(own, outcome.speeds(BY_LENGTH)), 0.95),
        Target(f'speed over "{EQUAL}"', quotients(own, outcome.speeds(EQUAL)), 0.85),
        Target(
            "padded over real tokens",
            quotients(outcome.of("wholebatch", "padded_tokens"), outcome.of("wholebatch", "real_tokens")),
            at_most=1.12,
        ),
        *peak_targets(outcome, PEERS, 0.65),
    ]
    return outcome


def with_peers(workload: Workload, settings: Settings) -> Outcome:
    """The library and its peers; nothing was aimed at."""
    return interleaved(workload, peers_of(workload, settings.updates), settings)


def fixed(settings: Settings) -> Outcome:
    """Nothing to gain from lengths: the best hand-written loop, and the whole batch at once."""
    workload = FIXED
    best, rates = best_size(workload, workload.examples(workload.batch_size, 0), workload.batch_size // 2, settings)

    def of(contestant: str, size: int) -> Callable[[int], Task]:
        return lambda seed: task_of(workload, contestant, seed, settings.updates, micro_batch_size=size)

    hand, whole = of("by hand", best), of("by hand", workload.batch_size)
    tasks = {"wholebatch": of("wholebatch", best), "by hand": hand, AGAIN: hand, WHOLE: whole}
    outcome = interleaved(workload, tasks, settings)
    if settings.tensor_bytes:
        count_tensor_bytes(outcome, {label: tasks[label] for label in ("wholebatch", "by hand", WHOLE)}, settings)
    outcome.notes += [f'"by hand": micro-batches of {best}, the best of {shown(rates)}']
    own = outcome.speeds("wholebatch")
    outcome.targets = [
        Target("time over the best hand-written loop", quotients(outcome.speeds("by hand"), own), high_at_most=1.03),
        Target("speed over the whole batch at once", quotients(own, outcome.speeds(WHOLE)), 1.1),
        *peak_targets(outcome, (WHOLE,), 0.25),
    ]
    return outcome


def scaling(settings: Settings) -> Outcome:
    """One batch of 4,096 examples against 64 batches of 64."""

    def of(size: int) -> Callable[[int], Task]:
        def task(seed: int) -> Task:
            batches = batched(SCALING.examples(2 * 4096, seed), size)
            contestant = "wholebatch, gradient alone"
            options = {"warm_up": 4096 // size, "num_labels": SCALING.num_labels(), "micro_batch_size": 16}
            return Task(SCALING.name, contestant, batches, **options)

        return task

    small, large = "batches of 64", "batch of 4,096"
    tasks = {large: of(4096), small: of(64), f"{small}, again": of(64)}
    outcome = interleaved(SCALING, tasks, settings)
    count_tensor_bytes(outcome, {label: tasks[label] for label in (large, small)}, settings)
    outcome.targets = [
        Target(
            "time per example, 4,096 over 64", quotients(outcome.speeds(small), outcome.speeds(large)), at_most=1.03
        ),
    ]
    tensors = quotients([outcome.tensor_peaks[large]], [outcome.tensor_peaks[small]])
    outcome.targets += [Target("peak tensor bytes less the batches', 4,096 over 64", tensors, 0.98, 1.02)]
    for key, words in PEAKS.items() if outcome.has_peaks() else ():
        peaks = quotients(outcome.of(large, key), outcome.of(small, key))
        outcome.targets += [Target(f"{words} over loaded model and batches, 4,096 over 64", peaks, 0.98, 1.02)]
    return outcome


def fastest_peer(outcome: Outcome) -> str:
    return max(PEERS, key=lambda label: statistics.median(outcome.speeds(label)))


def peak_targets(outcome: Outcome, others: tuple[str, ...], at_most: float) -> list[Target]:
    """The peak over that of whichever of the others needs least; and without wholebatch's choice of its sizes."""
    if not outcome.has_peaks():
        return []
    least = min(others, key=lambda label: statistics.median(outcome.of(label, next(iter(PEAKS)))))
    found = []
    for key, words in PEAKS.items():
        against = quotients(outcome.of("wholebatch", key), outcome.of(least, key))
        found.append(Target(f'{words} over that of "{least}"', against, at_most=at_most))
    return found


MEASURED: dict[str, Callable[[Settings], Outcome]] = {
    "classify": classify,
    "decode": lambda settings: with_peers(DECODE, settings),
    "log-normal": lambda settings: with_peers(LOG_NORMAL, settings),
    "fixed": fixed,
    "scaling": scaling,
}


# ---- Showing ----


def shown(rates: dict[int, float]) -> str:
    return ", ".join(f"{size}: {rate:,.0f} tokens/s" for size, rate in rates.items())


def loss_difference(outcome: Outcome, label: str) -> float | None:
    """The largest difference of an update's mean loss from the hand-written loop's; None where examples differ."""
    if "by hand" not in outcome.by_label or label in (BY_LENGTH, EQUAL):
        return None
    pairs = zip(outcome.by_label[label], outcome.by_label["by hand"], strict=True)
    return max(
        abs(own - right) for ours, theirs in pairs for own, right in zip(ours["losses"], theirs["losses"], strict=True)
    )


def row_of(outcome: Outcome, label: str) -> dict[str, Any]:
    """A contestant's line, and what `results/` keeps of it."""
    first, figures = next(iter(outcome.by_label)), outcome.by_label[label]
    speeds, padded = outcome.speeds(label), sum(outcome.of(label, "padded_tokens"))
    row = {
        "contestant": label,
        "real_tokens_per_second": statistics.median(speeds),
        "speed of the first over it": asdict(quotients(outcome.speeds(first), speeds)),
        "the same in wall time": asdict(quotients(outcome.wall_speeds(first), outcome.wall_speeds(label))),
        "padded_over_real_tokens": padded / sum(outcome.of(label, "real_tokens")),
        "largest_loss_difference": loss_difference(outcome, label),
        "tensor_peak_bytes": outcome.tensor_peaks.get(label),
        "rounds": figures,
    }
    if "by hand" in outcome.by_label:
        row["speed over by hand"] = asdict(quotients(speeds, outcome.speeds("by hand")))
    for key in PEAKS:
        row[key] = statistics.median(outcome.of(label, key)) if outcome.has_peaks() else None
    return row


HEADS = (
    f"{'':27}{'real':>9}{'speed of the first over it':>30}{'peak MiB over loaded':>27}{'padded':>8}{'loss':>9}",
    f"{'':27}{'tokens/s':>9}  {'min':>5} {'median':>6} {'max':>5} {'95 %':>9}"
    f"{'all':>10}{'warm':>7}{'tensors':>9}{'/ real':>8}{'differs':>9}",
)


def line(row: dict[str, Any]) -> str:
    """A contestant's line of the table."""
    found, difference = row["speed of the first over it"], row["largest_loss_difference"]
    ratios = (
        f"  {found['least']:5.2f} {found['median']:6.3f} {found['most']:5.2f} {found['low']:5.2f}-{found['high']:4.2f}"
    )
    peaks = [row[key] for key in (*PEAKS, "tensor_peak_bytes")]
    in_mib = ["-" if peak is None else f"{peak / MIB:,.0f}" for peak in peaks]
    return (
        f"{row['contestant']:27}{row['real_tokens_per_second']:9,.0f}{ratios}"
        f"{in_mib[0]:>9}{in_mib[1]:>7}{in_mib[2]:>9}{row['padded_over_real_tokens']:8.2f}"
        f"{'-' if difference is None else f'{difference:.0e}' if difference else '0':>9}"
    )


def show(outcome: Outcome, rows: list[dict[str, Any]]) -> None:
    """Print a workload's table."""
    mean, most = statistics.mean(outcome.lengths), max(outcome.lengths)
    print(f"\n{outcome.workload.name}: {outcome.workload.says}; batch of {outcome.workload.batch_size}")
    print(f"lengths: mean {mean:.1f}, longest {most} tokens; {len(rows[0]['rounds'])} rounds")
    print(*HEADS, *map(line, rows), sep="\n")
    for note in outcome.notes:
        print(f"  {note}")
    for target in outcome.targets:
        print(f"  {'met    ' if target.met else 'NOT MET'} {target.says}: {target.found} (aim: {target.asked})")


def written(outcome: Outcome, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `results/` keeps of a workload."""
    return {
        "workload": outcome.workload.says,
        "batch_size": outcome.workload.batch_size,
        "mean_length": statistics.mean(outcome.lengths),
        "longest": max(outcome.lengths),
        "rows": rows,
        "targets": [asdict(one) | {"asked": one.asked, "met": one.met} for one in outcome.targets],
        "notes": outcome.notes,
    }


def main() -> None:
    """Measure, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"rounds of every workload (default {ROUNDS})")
    parser.add_argument("--updates", type=int, default=1, help="updates timed in each process (default 1)")
    parser.add_argument("--only", nargs="+", choices=list(MEASURED), default=list(MEASURED), help="these workloads")
    parser.add_argument("--tensor-bytes", action="store_true", help="also count the bytes of tensors, in further runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "peers.json")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    settings = Settings(processes(), arguments.rounds, arguments.updates, arguments.tensor_bytes)
    workloads: dict[str, Any] = {}
    for name in arguments.only:
        outcome = MEASURED[name](settings)
        rows = [row_of(outcome, label) for label in outcome.by_label]
        show(outcome, rows)
        workloads[name] = written(outcome, rows)
    result = {
        "command": "python benchmarks/peers.py " + " ".join(sys.argv[1:]),
        "updates": arguments.updates,
        "versions": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "threads": 1,
        "seconds": time.perf_counter() - STARTED,
        "workloads": workloads,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


STARTED = time.perf_counter()

if __name__ == "__main__":
    main()
