"""How long a run is, in updates, examples and tokens; also when it goes on at another batch size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wholebatch.training.order import Position, Shuffled
from wholebatch.training.settings import DEFAULT_STEPS, TrainingSettings


@dataclass(frozen=True)
class Course:
    """The end of a run."""

    total_updates: int
    """Updates of the whole run."""

    total_examples: int
    """Examples of the whole run; of data without a length, as if no batch were smaller than the others."""

    in_examples: bool = True
    """Whether the examples decide where it ends, so that it is the same at another batch size."""

    def reached(self, position: Position) -> bool:
        """Whether the run is complete."""
        if self.in_examples:
            return position.examples >= self.total_examples
        return position.updates >= self.total_updates


def course_of(
    settings: TrainingSettings,
    num_examples: int | None,
    start: Position,
    recorded: tuple[TrainingSettings, int] | None = None,
) -> Course:
    """The course of a run that goes on from `start`.

    Args:
        settings: What it is to be from now on.
        num_examples: Of an epoch; None where that is not known.
        start: Where it stands.
        recorded: What it was before, with its total of examples. That total stays unless its length was set anew.
    """
    size = settings.global_batch_size
    if num_examples is None:
        steps = settings.max_steps or DEFAULT_STEPS
        return Course(steps, steps * size, in_examples=False)
    length = (settings.max_steps, settings.epochs)
    if recorded is not None and length == (recorded[0].max_steps, recorded[0].epochs):
        total = recorded[1]
    elif settings.epochs is not None:
        total = settings.epochs * num_examples
    else:
        total = examples_after(start, (settings.max_steps or DEFAULT_STEPS) - start.updates, num_examples, size)
    return Course(start.updates + updates_until(start, total, num_examples, size), total)


def examples_after(start: Position, updates: int, num_examples: int, batch_size: int) -> int:
    """Examples seen in all, so many updates after `start`; the last batch of an epoch holds what is left."""
    seen, left = start.examples, num_examples - start.in_epoch
    while updates > 0:
        taken = min(updates, math.ceil(left / batch_size))
        seen += min(taken * batch_size, left)
        updates, left = updates - taken, num_examples
    return seen


def updates_until(start: Position, total_examples: int, num_examples: int, batch_size: int) -> int:
    """Updates from `start` until `total_examples` have been seen, or a few more where a batch reaches beyond."""
    updates, seen, left = 0, start.examples, num_examples - start.in_epoch
    while seen < total_examples:
        wanted = min(left, total_examples - seen)
        updates += math.ceil(wanted / batch_size)
        seen, left = seen + left, num_examples
    return updates


def tokens_of(order: Shuffled, lengths: Sequence[int], total_examples: int) -> int:
    """Tokens of the first so many examples of a run."""
    epochs, rest = divmod(total_examples, len(order))
    part = sum(lengths[position] for position in order.positions(epochs)[:rest]) if rest else 0
    return epochs * sum(lengths) + part
