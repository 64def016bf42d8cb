"""Which examples each update sees: a pure function of the seed and of how many have been seen.

An epoch is one pass over the data; its last batch holds what is left. Nothing is drawn from a global random state, so
a run that is stopped and resumed sees what it would have seen.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    epoch: int = 0
    """Passes over the data that are complete."""

    in_epoch: int = 0
    """Examples seen in the epoch under way."""

    examples: int = 0
    """Examples seen in all."""

    tokens: int = 0
    """Tokens of these, padding left out."""

    updates: int = 0
    """Batches seen, each an update unless it was skipped."""

    def after(self, epoch: int, place: int, num_examples: int, num_tokens: int) -> "Position":
        """After one more batch, which began at that place of that epoch."""
        return Position(
            epoch,
            place + num_examples,
            self.examples + num_examples,
            self.tokens + num_tokens,
            self.updates + 1,
        )


@dataclass(frozen=True)
class Drawn:
    """An example as it is to be collated."""

    example: Any
    seed: int
    """For whatever is random about it, such as which tokens are masked: the same in every run, another each epoch."""


class Source(Protocol):
    """Examples that can be gone through again and again."""

    def epoch(self, number: int, start: int) -> Iterator[Drawn]:
        """The examples of an epoch from the `start`-th on."""


class Shuffled:
    """Examples in memory, in an order that only the seed and the epoch decide."""

    def __init__(self, examples: Sequence[Any], seed: int) -> None:
        self._examples, self._seed = examples, seed

    def __len__(self) -> int:
        return len(self._examples)

    def positions(self, epoch: int) -> list[int]:
        """The examples of an epoch in order."""
        generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
        order: list[int] = torch.randperm(len(self._examples), generator=generator).tolist()
        return order

    def epoch(self, number: int, start: int) -> Iterator[Drawn]:
        """See `Source`."""
        for position in self.positions(number)[start:]:
            yield Drawn(self._examples[position], mixed(self._seed, number, position))


class InOrder:
    """Examples of unknown number, read anew in each epoch."""

    def __init__(self, examples: Iterable[Any], seed: int) -> None:
        self._examples, self._seed = examples, seed

    def epoch(self, number: int, start: int) -> Iterator[Drawn]:
        """See `Source`. What has been seen is read again, and left out."""
        numbered = enumerate(self._examples)
        return (Drawn(example, mixed(self._seed, number, place)) for place, example in numbered if place >= start)


def batches(source: Source, size: int, start: Position) -> Iterator[tuple[list[Drawn], int, int]]:
    """Batches of `size` examples from `start` on, without end, each with its epoch and its place in it.

    The last batch of an epoch holds what is left. A source that has nothing ends it.
    """
    epoch, place = start.epoch, start.in_epoch
    while True:
        examples = source.epoch(epoch, place)
        while batch := list(itertools.islice(examples, size)):
            yield batch, epoch, place
            place += len(batch)
        if place == 0:
            return
        epoch, place = epoch + 1, 0


def mixed(*numbers: int) -> int:
    """One seed of several numbers: with their sum, run 1 would repeat the second epoch of run 0."""
    digest = hashlib.sha256("/".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
