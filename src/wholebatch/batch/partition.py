"""The fastest way to cut a batch whose examples lie in order of length. Numbers in, sizes out; no torch.

A group of neighbours is padded to its longest. What a group costs is `per_micro_batch` plus, for each of its examples,
what its padded length costs, so that with `best[j]` for the `j` shortest examples

    best[j] = min over i of  best[i] + per_micro_batch + (j - i) * per_example(length of j)

where `i` is bounded below by what fits into one micro-batch. Of two possible `i`, the later one, once it is better,
stays better, since the cost per example grows with the length, and since what fits shrinks with it. So each `i` is best
over one span of `j`, and the spans are kept in a queue: the optimum over all contiguous groups, with one look at the
cost for each example (least-weight subsequence with the concave Monge property: Hirschberg and Larmore, SIAM J. Comput.
16 (1987); Galil and Park, Theoretical Computer Science 92 (1992)).
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from wholebatch.batch.costs import Cost


def equal_sizes(num_examples: int, limit: int) -> list[int]:
    """As few micro-batches of at most `limit` as possible, as equal as possible: 10 at 4 are 4, 3, 3.

    Equal, because the memory needed is that of the largest, and because fewer shapes mean fewer compiles.
    """
    return _equal_parts(num_examples, math.ceil(num_examples / limit))


def full_sizes(num_examples: int, limit: int) -> list[int]:
    """Micro-batches of exactly `limit`, and one of what is left: 10 at 4 are 4, 4, 2."""
    left = num_examples % limit
    return [limit] * (num_examples // limit) + ([left] if left else [])


def partition(lengths: Sequence[int], cost: Cost, most: Callable[[int], int]) -> list[int]:
    """The sizes of the contiguous groups with the smallest cost.

    Args:
        lengths: The padded length of each example, longest first.
        cost: Of a micro-batch.
        most: How many examples a micro-batch of a padded length may hold; it must not grow with the length. A single
            example is always a group.

    Returns:
        Sizes in the order of `lengths`. Where several cuts cost the same, neighbours of one length are equal in size.
    """
    ascending, n = lengths[::-1], len(lengths)
    each = {length: cost.per_example(length) for length in set(lengths)}
    fit = {length: max(1, most(length)) for length in each}
    slopes = [each[length] for length in ascending]  # slopes[j - 1]: of the group that ends with the j-th shortest
    firsts = [max(0, j - fit[length]) for j, length in enumerate(ascending, 1)]
    came_from = _best(n, cost.per_micro_batch, slopes, firsts)
    sizes, j = [], n
    while j:
        sizes.append(j - came_from[j])
        j = came_from[j]
    return _levelled(sizes, lengths)


def _best(n: int, overhead: float, slopes: list[float], firsts: list[int]) -> list[int]:
    """For each `j`, the `i` that `best[j]` came from. `firsts[j - 1]` is the lowest `i` that fits."""
    best, came_from = [0.0] * (n + 1), [0] * (n + 1)
    spans = deque([(0, 1)])  # each i with the first j over which it is best
    for j in range(1, n + 1):
        while len(spans) > 1 and spans[1][1] <= j:
            spans.popleft()
        i = spans[0][0]
        best[j] = best[i] + overhead + (j - i) * slopes[j - 1]
        came_from[j] = i
        start = j + 1
        while spans:
            i, its_start = spans[-1]
            # From where on j is better than i: where the cost per example is high enough, or i does not fit any more.
            start = 1 + min(bisect_right(slopes, (best[j] - best[i]) / (j - i)), bisect_right(firsts, i))
            start = max(start, j + 1)
            if start > max(its_start, j + 1):
                break
            spans.pop()
        if not spans:
            start = j + 1
        if start <= n:
            spans.append((j, start))
    return came_from


def _levelled(sizes: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The same groups, those next to each other that are padded to one length as equal in size as possible."""
    level, at, run, groups = [], 0, 0, 0
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        run, groups, at = run + size, groups + 1, at + size
        if not following or lengths[at] != lengths[at - run]:
            level += _equal_parts(run, groups)
            run, groups = 0, 0
    return level


def _equal_parts(num_examples: int, parts: int) -> list[int]:
    smaller, larger = divmod(num_examples, parts)
    return [smaller + 1] * larger + [smaller] * (parts - larger)
