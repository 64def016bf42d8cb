"""Text in, examples out."""

import math
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from wholebatch.errors import ConfigurationError
from wholebatch.training.data import (
    Corpus,
    is_validation,
    load_corpus,
    majority_share,
    python_documentation,
    train_tokenizer,
    unigram_entropy,
)
from wholebatch.training.documents import Document
from wholebatch.training.settings import TrainingSettings

DOCUMENTS = [f"The statement number {number} binds {number % 7} names.\n" * (1 + number % 5) for number in range(60)]


def corpus_of(documents: Iterable[str | Document], **settings: Any) -> Corpus:
    texts = [Document(one) if isinstance(one, str) else one for one in documents]
    given = {"context_length": 10_000, "vocabulary_size": 300} | settings
    return load_corpus(texts, TrainingSettings(**given))


def rows(examples: Iterable[Any]) -> list[tuple[int, ...]]:
    return [tuple(example.ids.tolist()) for example in examples]


def test_a_section_repeated_under_another_heading_level_is_kept_once() -> None:
    topics = {
        "chapter": "Calls\n*****\n\nOn calls.\n\n\nArguments\n=========\n\nOn arguments.\n",
        "topic": "Arguments\n*********\n\nOn arguments.\n",
    }
    assert python_documentation(topics) == ("Calls\n\nOn calls.", "Arguments\n\nOn arguments.")


def test_text_before_the_first_heading_is_kept() -> None:
    assert python_documentation({"topic": "No heading.\n\nHeading\n-------\nText."}) == (
        "No heading.",
        "Heading\nText.",
    )


def test_this_python_carries_enough_text_to_train_on() -> None:
    sections = python_documentation()
    assert sum(map(len, sections)) > 200_000
    assert len(set(sections)) == len(sections)


def test_a_python_without_its_documentation_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigurationError, match=r"no module 'pydoc_data\.topics'.*use a complete CPython"):
        python_documentation()


def test_the_split_asks_the_document_alone() -> None:
    """Whatever else there is to read, and in whatever order, a document stays in its part."""
    for documents in (DOCUMENTS[25:45], [*reversed(DOCUMENTS), "another text"]):
        corpus = corpus_of(documents)
        texts = {corpus.objective.tokenizer.decode(example.ids[1:-1]) for example in corpus.validation}
        assert texts & set(DOCUMENTS[25:45]) == {DOCUMENTS[number] for number in (31, 32, 35)}


def test_the_split_stays_the_same_from_version_to_version() -> None:
    """Those whose SHA-256 lies in the lowest tenth; otherwise a continued run would validate on what it has learned."""
    assert [number for number in range(60) if is_validation(str(number))] == [9, 39, 49, 51, 55]


def test_about_one_document_in_ten_is_held_out() -> None:
    held_out = sum(is_validation(str(number)) for number in range(10_000))
    assert 900 < held_out < 1_100  # a binomial of 10,000 and 0.1 has a standard deviation of 30


def test_no_text_is_both_learned_and_validated() -> None:
    corpus = corpus_of(DOCUMENTS)
    assert not {*rows(corpus.train)} & {*rows(corpus.validation)}
    assert len(rows(corpus.train)) + len(corpus.validation) == len(DOCUMENTS)


@pytest.mark.parametrize("documents", [["only one"], []])
def test_too_few_documents_are_refused_with_their_number(documents: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"documents: \d to train on and \d held out.*use more documents"):
        corpus_of(documents)


def test_a_stream_has_the_examples_of_the_whole() -> None:
    """Without a length, in order, and as often as it is gone through."""
    whole = corpus_of(DOCUMENTS)
    stream = corpus_of(DOCUMENTS, streaming=True, max_steps=1, data=("somewhere",))
    assert stream.known is None
    assert rows(stream.train) == rows(stream.train) == rows(whole.train)
    assert rows(stream.validation) == rows(whole.validation)
    assert stream.guess == whole.guess


def test_a_stream_of_classes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="all classes must be known"):
        corpus_of(DOCUMENTS, streaming=True, max_steps=1, data=("somewhere",), objective="classify")


def test_the_fingerprint_tells_whether_the_data_is_the_same() -> None:
    assert corpus_of(DOCUMENTS).fingerprint == corpus_of(DOCUMENTS).fingerprint
    others = [corpus_of([*DOCUMENTS[:-1], "another"]), corpus_of(DOCUMENTS[:-1]), corpus_of(DOCUMENTS[::-1])]
    assert corpus_of(DOCUMENTS).fingerprint not in {one.fingerprint for one in others}


def test_classes_are_those_of_the_training_documents() -> None:
    """One that is held out only is left out and counted."""
    labels = ["odd" if number % 2 else "even" for number in range(60)]
    labels[31] = "seldom"  # held out, see above
    corpus = corpus_of(map(Document, DOCUMENTS, labels), objective="classify")
    assert corpus.objective.labels == ["even", "odd"]
    assert corpus.left_out == {"of a class that no training document has (seldom)": 1}
    held_out = [number for number, text in enumerate(DOCUMENTS) if is_validation(text) and number != 31]
    assert [one.label for one in corpus.validation] == [number % 2 for number in held_out]
    assert corpus.guess == f"always the most frequent class: accuracy {corpus.guess_value:.3f}"


def test_one_class_is_none_to_learn() -> None:
    with pytest.raises(ConfigurationError, match=r"have 1 class\(es\), same"):
        corpus_of([Document(text, "same") for text in DOCUMENTS], objective="classify")


def test_the_majority_is_that_of_the_training_part() -> None:
    assert majority_share([1, 1, 0], [0, 0, 1, 2]) == 0.25


@pytest.mark.parametrize("text", ["x = {1: 'a'}\n\tprint(x)  ", "Grüße, 世界 🙂", ""])
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = train_tokenizer(DOCUMENTS, vocabulary_size=300)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    masks = train_tokenizer(DOCUMENTS, vocabulary_size=300, masks=True)
    assert masks.decode(masks.encode(text), skip_special_tokens=True) == text
    assert masks.encode(text)[0], masks.encode(text)[-1] == (masks.cls_token_id, masks.sep_token_id)


def test_the_tokenizer_has_the_size_asked_for_and_is_the_same_each_time() -> None:
    first, second = (train_tokenizer(DOCUMENTS, vocabulary_size=280) for _ in range(2))
    assert len(first) == 280
    assert first.get_vocab() == second.get_vocab()
    assert first.eos_token == "<|endoftext|>"


def test_unigram_entropy_is_the_price_of_the_validation_tokens() -> None:
    """Computed once more with dictionaries and logarithms."""
    train = [torch.tensor([9, 1, 1, 2]), torch.tensor([9, 3])]
    validation = [torch.tensor([9, 1, 4, 1])]
    seen = Counter([1, 1, 2, 3])
    price = [-math.log((seen[token] + 1) / (4 + 10)) for token in (1, 4, 1)]
    assert unigram_entropy(train, validation, vocabulary_size=10) == pytest.approx(sum(price) / 3, rel=1e-12)
