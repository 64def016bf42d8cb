"""Text in, examples out: Python's own documentation, a tokenizer trained on it, contexts of bounded length."""

import hashlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from wholebatch.errors import ConfigurationError

END_OF_TEXT = "<|endoftext|>"
_HEADING = re.compile(r"^(\S.*)\n[*=\-~^]{3,}$", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as token ids, in two parts without a document in common."""

    tokenizer: PreTrainedTokenizerFast
    """Trained on the training part only."""

    train: Sequence[Tensor]
    """Examples: token ids, each an int64 vector of at most `context_length`."""

    validation: Sequence[Tensor]
    """As `train`; no document of theirs is among the training documents."""

    unigram_entropy: float
    """Nats per token: see `unigram_entropy`."""


def python_documentation(topics: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The sections of the Python reference that every CPython carries for `help()`, in order, each once.

    Topics overlap: a chapter repeats the sections that are topics of their own. Cut at their headings, with the
    underlining left out (it depends on the level), such repetitions are equal, and only the first is kept. Otherwise
    the same text would be trained on and validated on.

    Args:
        topics: Texts by name; by default those of `pydoc_data.topics`.

    Raises:
        ConfigurationError: This Python comes without its documentation.
    """
    if topics is None:
        topics = _installed_topics()
    sections = (section for name in sorted(topics) for section in _sections(topics[name]))
    return tuple(dict.fromkeys(sections))


def _installed_topics() -> Mapping[str, str]:
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ConfigurationError(
            f"no text to train on: this Python has no module {error.name!r}, which CPython ships for help(); "
            "use a complete CPython"
        ) from error
    return topics


def _sections(text: str) -> Iterator[str]:
    starts = sorted({0, *(match.start() for match in _HEADING.finditer(text))})
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        section = _HEADING.sub(r"\1", text[start:end]).strip()
        if section:
            yield section


def is_validation(document: str, fraction: float = 0.1) -> bool:
    """Whether a document belongs to the validation part: decided by its content, whatever else there is to read."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def train_tokenizer(documents: Sequence[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it knows every text, for each byte is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def contexts(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, context_length: int) -> list[Tensor]:
    """The documents as examples of at most `context_length` token ids, never across the edge of a document.

    Each document begins and ends with the end-of-text token, and each context begins with the last token of the
    one before it: so every token of the text is predicted exactly once.
    """
    examples = []
    for document in documents:
        ids = tokenizer.encode(END_OF_TEXT + document + END_OF_TEXT)
        starts = range(0, len(ids) - 1, context_length - 1)
        examples += [torch.tensor(ids[start : start + context_length]) for start in starts]
    return examples


def unigram_entropy(train: Sequence[Tensor], validation: Sequence[Tensor], vocabulary_size: int) -> float:
    """What a model that knows only how frequent each token is would pay on the validation part, in nats per token.

    Frequencies are those of the predicted tokens (all but the first of an example) of the training part, plus one
    each, so that a token never seen there has a price too. A language model is of use only below this.
    """
    seen, asked = (
        torch.cat([example[1:] for example in part]).bincount(minlength=vocabulary_size) for part in (train, validation)
    )
    log_probability = ((seen + 1).double() / (seen + 1).sum()).log()
    return float(-(asked * log_probability).sum() / asked.sum())


def load_corpus(documents: Sequence[str], context_length: int, vocabulary_size: int) -> Corpus:
    """Split the documents, train the tokenizer on the training part, and cut both parts into examples.

    Raises:
        ConfigurationError: Too few documents: one of the two parts is empty.
    """
    held_out = [document for document in documents if is_validation(document)]
    seen = [document for document in documents if not is_validation(document)]
    if not held_out or not seen:
        raise ConfigurationError(
            f"{len(documents)} documents: {len(seen)} to train on and {len(held_out)} to validate on, and both parts "
            "need at least one; about one document in ten is held out, so use more of them"
        )
    tokenizer = train_tokenizer(seen, vocabulary_size)
    train, validation = (contexts(part, tokenizer, context_length) for part in (seen, held_out))
    return Corpus(tokenizer, train, validation, unigram_entropy(train, validation, len(tokenizer)))


def shuffled(examples: Sequence[Tensor], seed: int, epoch: int) -> list[Tensor]:
    """All examples once, in an order that only the seed and the epoch decide."""
    generator = torch.Generator().manual_seed(_mixed(seed, epoch))
    return [examples[position] for position in torch.randperm(len(examples), generator=generator).tolist()]


def _mixed(seed: int, epoch: int) -> int:
    """One number of both: with `seed + epoch`, run 1 would repeat the second epoch of run 0."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "big", signed=True)


def collate(examples: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pad examples to the longest of them: `input_ids` and `labels` of shape (examples, longest).

    No attention mask is needed: a causal model sees only what lies before, the padding lies behind, and the labels
    there are -100.
    """
    return {
        "input_ids": pad_sequence(list(examples), batch_first=True, padding_value=0),
        "labels": pad_sequence(list(examples), batch_first=True, padding_value=-100),
    }
