"""What can be learned from text: the next token, masked tokens, or the class of a document.

An objective turns documents into examples, examples into a batch, and a batch into a loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

import wholebatch as wb
from wholebatch.errors import ConfigurationError
from wholebatch.training.documents import Document
from wholebatch.training.order import Drawn

Batch: TypeAlias = dict[str, Any]
"""Tensors by name, and what is said of all examples alike."""

Unit: TypeAlias = Literal["tokens", "examples"]
LossFunction: TypeAlias = Callable[[nn.Module, Batch], Any]
Packing: TypeAlias = Literal["off", "apart", "across"]
"""How documents lie in contexts: each by itself; several, none of which sees another, as the model is told where they
begin; or several, each of which sees those before it."""

NO_LABEL = -100
MASKED = 0.15
"""Part of the tokens that are to be guessed: BERT's. Of these, 8 of 10 are masked, 1 is another token, 1 is left."""


class Example(NamedTuple):
    """A piece of a document, or pieces of several one after another; as long as the context at most."""

    ids: Tensor
    """Token ids, int64."""

    label: int = NO_LABEL
    """Its class, where classes are learned."""

    starts: tuple[int, ...] = (0,)
    """Where documents begin. One that began in the example before goes on with its last token there, at 0."""


class UnknownLabelError(Exception):
    """A class that no training document has."""


@dataclass(frozen=True)
class CausalLM:
    """The next token, from those before it. Exactly once for each token of a document."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    double: bool = False
    """Whether the model is in float64. Its own loss is then not: Hugging Face models compute that in float32."""

    packing: Packing = "off"
    """How the training examples were made of documents (`wholebatch.training.packing`)."""

    auto_class = "AutoModelForCausalLM"
    unit = "tokens"

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise ConfigurationError("objective='causal-lm': the model's tokenizer has no end-of-text token")

    @property
    def loss_fn(self) -> LossFunction | None:
        """None where the model computes its own, over the labels after the shift."""
        return next_token_loss if self.double else None

    @property
    def count(self) -> Unit | None:
        """As `GradientAccumulator` takes it."""
        return "tokens" if self.double else None

    def examples(self, document: Document) -> Iterator[Example]:
        """Contexts of a document, never across its edges.

        Each document begins and ends with the end-of-text token, and each context begins with the last token of the
        one before it: so every token of the text is predicted exactly once.
        """
        end = self.tokenizer.eos_token_id
        start = end if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id
        ids = [start, *_encoded(self.tokenizer, document.text), end]
        for first in range(0, len(ids) - 1, self.context_length - 1):
            yield Example(torch.tensor(ids[first : first + self.context_length]), starts=() if first else (0,))

    def collate(self, drawn: Sequence[Drawn]) -> Batch:
        """Pad to the longest: `input_ids`, `labels` and, where documents are kept apart, `position_ids`.

        Each is (examples, longest). No attention mask is needed: a causal model sees only what lies before, the padding
        lies behind, and the labels there are -100, as are those of the first tokens of documents.
        """
        examples = [one.example for one in drawn]
        batch: Batch = {"input_ids": _padded([one.ids for one in examples], 0), "labels": _labels(examples)}
        if self.packing == "apart":  # with a cache, transformers does not look at where positions begin anew
            batch |= {"position_ids": _positions(examples), "use_cache": False}
        return batch


@dataclass(frozen=True)
class MaskedLM:
    """Some tokens of a text, from all others. Which ones is drawn anew in each epoch, from the example's own seed."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    double: bool = False
    """As for `CausalLM`."""

    auto_class = "AutoModelForMaskedLM"
    unit = "tokens"
    packing: Packing = field(default="off", init=False)

    def __post_init__(self) -> None:
        if self.tokenizer.mask_token_id is None or self.tokenizer.pad_token_id is None:
            raise ConfigurationError("objective='masked-lm': the model's tokenizer has no mask token, or no padding")
        _check_room(self.tokenizer, self.context_length)

    @property
    def loss_fn(self) -> LossFunction | None:
        """None where the model computes its own."""
        return masked_token_loss if self.double else None

    @property
    def count(self) -> Unit | None:
        """As `GradientAccumulator` takes it."""
        return "tokens" if self.double else None

    def examples(self, document: Document) -> Iterator[Example]:
        """The document in pieces that fill the context, each with the tokenizer's own special tokens."""
        encoded = self.tokenizer(
            document.text, truncation=True, max_length=self.context_length, return_overflowing_tokens=True
        )["input_ids"]
        for ids in encoded if encoded and isinstance(encoded[0], list) else [encoded]:
            if not self._special.issuperset(ids):
                yield Example(torch.tensor(ids))

    @property
    def _special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    def collate(self, drawn: Sequence[Drawn]) -> Batch:
        """`input_ids`, `attention_mask` and `labels`, all (examples, longest)."""
        special = torch.tensor(sorted(self._special))
        pairs = [self._masked(one, special) for one in drawn]
        ids = [ids for ids, _ in pairs]
        return {
            "input_ids": _padded(ids, self.tokenizer.pad_token_id),
            "attention_mask": _padded([torch.ones_like(one) for one in ids], 0),
            "labels": _padded([labels for _, labels in pairs], NO_LABEL),
        }

    def _masked(self, drawn: Drawn, special: Tensor) -> tuple[Tensor, Tensor]:
        ids, generator = drawn.example.ids, torch.Generator().manual_seed(drawn.seed)
        ordinary = (~torch.isin(ids, special)).nonzero().flatten()
        number = max(1, round(MASKED * len(ordinary)))
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:number]]
        fate = torch.rand(number, generator=generator)
        others = torch.randint(len(self.tokenizer), (number,), generator=generator)
        labels, masked = torch.full_like(ids, NO_LABEL), ids.clone()
        labels[chosen] = ids[chosen]
        masked[chosen] = torch.where(
            fate < 0.8, self.tokenizer.mask_token_id, torch.where(fate < 0.9, others, ids[chosen])
        )
        return masked, labels


@dataclass(frozen=True)
class Classify:
    """The class of a document, from its beginning."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int
    labels: Sequence[str]
    """The classes of the training documents, sorted by name."""

    auto_class = "AutoModelForSequenceClassification"
    unit = "examples"
    packing: Packing = field(default="off", init=False)
    count: Unit | None = "examples"
    _numbers: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.labels) < 2:
            raise ConfigurationError(
                f"objective='classify': the training documents have {len(self.labels)} class(es), "
                f"{', '.join(self.labels)}; there must be two at least"
            )
        _check_room(self.tokenizer, self.context_length)
        object.__setattr__(self, "_numbers", {label: number for number, label in enumerate(self.labels)})

    def examples(self, document: Document) -> Iterator[Example]:
        """One for each document, cut off at the context's length.

        Raises:
            UnknownLabelError: Its class is none of `labels`.
        """
        label = self._numbers.get(document.label or "")
        if label is None:
            raise UnknownLabelError(document.label)
        ids = self.tokenizer(document.text, truncation=True, max_length=self.context_length)["input_ids"]
        yield Example(torch.tensor(ids, dtype=torch.long), label)

    def collate(self, drawn: Sequence[Drawn]) -> Batch:
        """`input_ids` and `attention_mask` (examples, longest), `labels` (examples,)."""
        ids = [one.example.ids for one in drawn]
        padding = self.tokenizer.pad_token_id
        return {
            "input_ids": _padded(ids, 0 if padding is None else padding),
            "attention_mask": _padded([torch.ones_like(one) for one in ids], 0),
            "labels": torch.tensor([one.example.label for one in drawn]),
        }

    @property
    def loss_fn(self) -> LossFunction:
        """Cross-entropy, and how many examples were told right."""
        return class_loss


Objective: TypeAlias = CausalLM | MaskedLM | Classify


def next_token_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
    """The sum of the cross-entropies of all labels but the first of each row, in the model's own dtype."""
    logits = model(**_inputs(batch)).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return wb.LossSum(cross_entropy(logits, labels, reduction="sum"), (labels != NO_LABEL).sum())


def masked_token_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
    """The sum of the cross-entropies of the tokens to guess, in the model's own dtype."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.flatten(0, 1)
    labels = batch["labels"].flatten()
    return wb.LossSum(cross_entropy(logits, labels, reduction="sum"), (labels != NO_LABEL).sum())


def class_loss(model: nn.Module, batch: Batch) -> wb.LossSum:
    """The sum of the cross-entropies of a micro-batch, its number of examples, and how many were told right."""
    labels = batch["labels"]
    logits = model(**_inputs(batch)).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    right = (logits.argmax(dim=-1) == labels).sum()
    return wb.LossSum(
        cross_entropy(logits, labels, reduction="sum"), len(labels), metrics={"accuracy": (right, len(labels))}
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def _inputs(batch: Batch) -> dict[str, Any]:
    return {name: field for name, field in batch.items() if name != "labels"}


def _labels(examples: Sequence[Example]) -> Tensor:
    """The tokens themselves, but for the first of each document that begins within an example.

    The first token of an example is no label after the shift, whatever stands there.
    """
    labels = _padded([one.ids for one in examples], NO_LABEL)
    for row, example in zip(labels, examples, strict=True):
        row[[start for start in example.starts if start]] = NO_LABEL
    return labels


def _positions(examples: Sequence[Example]) -> Tensor:
    """0, 1, 2, ... from the beginning of each piece of a document; padding is counted on."""
    places = torch.arange(max(len(one.ids) for one in examples))
    positions = places.repeat(len(examples), 1)
    for row, example in zip(positions, examples, strict=True):
        for start in example.starts:
            row[start:] = places[: len(row) - start]
    return positions


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def _check_room(tokenizer: PreTrainedTokenizerBase, context_length: int) -> None:
    special = tokenizer.num_special_tokens_to_add()
    if context_length <= special:
        raise ConfigurationError(
            f"context_length={context_length}: the tokenizer adds {special} tokens of its own to each text; use more"
        )
