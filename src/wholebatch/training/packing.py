"""Documents laid end to end in contexts without a gap, where the model keeps them apart."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from wholebatch.training.data import Corpus
from wholebatch.training.objectives import CausalLM, Example, Packing


def packed(corpus: Corpus, packing: Packing) -> Corpus:
    """The same corpus with its training examples packed; what is held out stays as it is, document by document."""
    objective = corpus.objective
    if packing == "off" or not isinstance(objective, CausalLM):
        return corpus
    train = _Contexts(corpus.train, objective.context_length)
    return dataclasses.replace(
        corpus,
        objective=dataclasses.replace(objective, packing=packing),
        train=train if corpus.known is None else list(train),
    )


@dataclass(frozen=True)
class _Contexts:
    """The contexts of examples that may be read anew each time."""

    examples: Iterable[Example]
    length: int

    def __iter__(self) -> Iterator[Example]:
        return contexts(self.examples, self.length)


def contexts(examples: Iterable[Example], length: int) -> Iterator[Example]:
    """Cut documents laid end to end into contexts of exactly `length` tokens, the last of what is left.

    A document that does not end with a context begins the next one with the last token it has there, so each of its
    tokens but the first is predicted exactly once.

    Args:
        examples: The documents in order, each in its pieces (`CausalLM.examples`).
        length: Tokens, from 2 up.
    """
    ids, starts = torch.empty(0, dtype=torch.long), list[int]()
    for example in examples:
        if example.starts:
            starts.append(len(ids))
        ids = torch.cat([ids, example.ids if example.starts else example.ids[1:]])
        while len(ids) > length:
            yield Example(ids[:length].clone(), starts=tuple(start for start in starts if start < length))
            first = length if length in starts else length - 1
            ids, starts = ids[first:], [start - first for start in starts if start >= length]
    if len(ids):
        yield Example(ids.clone(), starts=tuple(starts))
