"""Documents in, examples out: what is learned from, what is held out, the tokenizer, and what a guesser would pay."""

import hashlib
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from wholebatch.errors import ConfigurationError
from wholebatch.training.documents import Document
from wholebatch.training.objectives import CausalLM, Classify, Example, MaskedLM, Objective, UnknownLabelError
from wholebatch.training.settings import TrainingSettings

END_OF_TEXT = "<|endoftext|>"
_HEADING = re.compile(r"^(\S.*)\n[*=\-~^]{3,}$", re.MULTILINE)
_HEAD = 20_000
"""Documents of a stream that are looked at before the training: for the tokenizer, and to be held out."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as examples, in two parts without a document in common."""

    objective: Objective
    """With the tokenizer."""

    train: Sequence[Example] | Iterable[Example]
    """To learn from; without a length where they are read as the run goes on."""

    validation: Sequence[Example]
    """Held out: no document of theirs is among the training documents."""

    guess: str
    """What a guesser without a model would come to, to compare with: "unigram entropy 5.906"."""

    guess_value: float

    fingerprint: str
    """Tells whether the data is what it was; of a stream, whether its beginning, and the size of its files, is."""

    documents: Iterable[Document]
    """What all this is made of."""

    unused: Counter[str]
    """Documents without anything to learn from, by reason; of a stream, in the pass under way, or the last one."""

    @property
    def left_out(self) -> Counter[str]:
        """What could not be used, by reason: when it was read, or afterwards."""
        return Counter(getattr(self.documents, "left_out", ())) + self.unused

    @property
    def known(self) -> Sequence[Example] | None:
        """The training examples, where they are in memory."""
        return self.train if isinstance(self.train, Sequence) else None


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


def train_tokenizer(documents: Iterable[str], vocabulary_size: int, masks: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it knows every text, for each byte is a token of its own.

    With `masks` it has the special tokens of a masked language model, and puts a text between two of them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if masks else [END_OF_TEXT]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if masks:
        ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    else:
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)  # type: ignore[no-untyped-call]


def unigram_entropy(train: Iterable[Tensor], validation: Iterable[Tensor], vocabulary_size: int) -> float:
    """What a model that knows only how frequent each token is would pay on the validation part, in nats per token.

    Frequencies are those of the predicted tokens (all but the first of an example) of the training part, plus one
    each, so that a token never seen there has a price too. A language model is of use only below this.
    """
    seen, asked = (
        torch.cat([ids[1:] for ids in part]).bincount(minlength=vocabulary_size) for part in (train, validation)
    )
    log_probability = ((seen + 1).double() / (seen + 1).sum()).log()
    return float(-(asked * log_probability).sum() / asked.sum())


def majority_share(train: Iterable[int], validation: Sequence[int]) -> float:
    """Accuracy on the validation part of always saying the class that is most frequent in training."""
    [(majority, _)] = Counter(train).most_common(1)
    return validation.count(majority) / len(validation)


def load_corpus(
    documents: Iterable[Document], settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase | None = None
) -> Corpus:
    """Hold documents out, train a tokenizer on the others if none is given, and cut all of them into examples.

    Raises:
        ConfigurationError: Too few documents: one of the two parts is empty.
    """
    if settings.streaming:
        return _streamed(documents, settings, tokenizer)
    seen, held_out = _split(documents, settings.validation_fraction)
    objective = _objective(seen, settings, tokenizer)
    left_out: Counter[str] = Counter()
    train, validation = (list(_examples(part, objective, left_out)) for part in (seen, held_out))
    return _corpus(objective, train, train, validation, documents, left_out)


def _streamed(
    documents: Iterable[Document], settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase | None
) -> Corpus:
    if settings.objective == "classify":
        raise ConfigurationError("streaming: for classify all classes must be known before; leave streaming out")
    fraction, left_out = settings.validation_fraction, Counter[str]()
    seen, held_out = _split(itertools.islice(documents, _HEAD), fraction)
    objective = _objective(seen, settings, tokenizer)
    head, validation = (list(_examples(part, objective, left_out)) for part in (seen, held_out))
    stream = _Stream(documents, fraction, objective, left_out)
    return _corpus(objective, stream, head, validation, documents, left_out)


@dataclass(frozen=True)
class _Stream:
    """The training examples of documents that are read anew each time."""

    documents: Iterable[Document]
    fraction: float
    objective: Objective
    unused: Counter[str]

    def __iter__(self) -> Iterator[Example]:
        self.unused.clear()
        train = (document for document in self.documents if not is_validation(document.text, self.fraction))
        return _examples(train, self.objective, self.unused)


def _corpus(
    objective: Objective,
    train: Sequence[Example] | Iterable[Example],
    head: Sequence[Example],
    validation: Sequence[Example],
    documents: Iterable[Document],
    unused: Counter[str],
) -> Corpus:
    if not head or not validation:
        raise ConfigurationError(
            f"{len(head)} examples to learn from and {len(validation)} held out, and both parts need one at least; "
            f"left out: {', '.join(unused) or 'nothing'}"
        )
    if isinstance(objective, Classify):
        value = majority_share([one.label for one in head], [one.label for one in validation])
        guess = f"always the most frequent class: accuracy {value:.3f}"
    else:
        size = len(objective.tokenizer)
        value = unigram_entropy((one.ids for one in head), (one.ids for one in validation), size)
        guess = f"unigram entropy {value:.3f}"
    fingerprint = _fingerprint([*head, *validation], objective, documents)
    return Corpus(objective, train, validation, guess, value, fingerprint, documents, unused)


def _fingerprint(examples: Iterable[Example], objective: Objective, documents: Iterable[Document]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.ids.numpy().tobytes() + example.label.to_bytes(8, "little", signed=True))
    digest.update("\n".join(getattr(objective, "labels", ())).encode())
    digest.update(str([file.stat().st_size for file in getattr(documents, "files", ())]).encode())
    return digest.hexdigest()


def _split(documents: Iterable[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Those to learn from, and those held out."""
    parts: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        parts[is_validation(document.text, fraction)].append(document)
    seen, held_out = parts
    if not held_out or not seen:
        raise ConfigurationError(
            f"documents: {len(seen)} to train on and {len(held_out)} held out, and both parts need at least one. About "
            f"{fraction:.0%} are held out, chosen by their content: use more documents (of a few .txt: --documents "
            "paragraph, or line), or another --validation-fraction"
        )
    return seen, held_out


def _objective(
    seen: Sequence[Document], settings: TrainingSettings, tokenizer: PreTrainedTokenizerBase | None
) -> Objective:
    if tokenizer is None:
        masks = settings.objective != "causal-lm"
        tokenizer = train_tokenizer((one.text for one in seen), settings.vocabulary_size, masks)
    if settings.objective == "causal-lm":
        return CausalLM(tokenizer, settings.context_length, double=settings.dtype == "float64")
    if settings.objective == "masked-lm":
        return MaskedLM(tokenizer, settings.context_length, double=settings.dtype == "float64")
    labels = sorted({one.label for one in seen if one.label is not None})
    return Classify(tokenizer, settings.context_length, labels)


def _examples(documents: Iterable[Document], objective: Objective, left_out: Counter[str]) -> Iterator[Example]:
    for document in documents:
        try:
            examples = list(objective.examples(document))
        except UnknownLabelError as error:
            left_out[f"of a class that no training document has ({error})"] += 1
            continue
        if not examples:
            left_out["without a token to learn"] += 1
        yield from examples
