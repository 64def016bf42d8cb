"""Text in, examples out."""

import itertools
import math
import sys
from collections import Counter

import pytest
import torch

from wholebatch.errors import ConfigurationError
from wholebatch.training.data import (
    END_OF_TEXT,
    collate,
    contexts,
    is_validation,
    load_corpus,
    python_documentation,
    shuffled,
    train_tokenizer,
    unigram_entropy,
)

DOCUMENTS = [f"The statement number {number} binds {number % 7} names.\n" * (1 + number % 5) for number in range(60)]


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
        corpus = load_corpus(documents, context_length=10_000, vocabulary_size=300)
        texts = {corpus.tokenizer.decode(example[1:-1]) for example in corpus.validation}
        assert texts & set(DOCUMENTS[25:45]) == {DOCUMENTS[number] for number in (31, 32, 35)}


def test_the_split_stays_the_same_from_version_to_version() -> None:
    """Those whose SHA-256 lies in the lowest tenth; otherwise a continued run would validate on what it has learned."""
    assert [number for number in range(60) if is_validation(str(number))] == [9, 39, 49, 51, 55]


def test_about_one_document_in_ten_is_held_out() -> None:
    held_out = sum(is_validation(str(number)) for number in range(10_000))
    assert 900 < held_out < 1_100  # a binomial of 10,000 and 0.1 has a standard deviation of 30


def test_no_text_is_both_learned_and_validated() -> None:
    corpus = load_corpus(DOCUMENTS, context_length=10_000, vocabulary_size=300)
    both = {tuple(e.tolist()) for e in corpus.train} & {tuple(e.tolist()) for e in corpus.validation}
    assert not both
    assert len(corpus.train) + len(corpus.validation) == len(DOCUMENTS)


@pytest.mark.parametrize("documents", [["only one"], []])
def test_too_few_documents_are_refused_with_their_number(documents: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=f"{len(documents)} documents: .* use more of them"):
        load_corpus(documents, context_length=16, vocabulary_size=300)


@pytest.mark.parametrize("text", ["x = {1: 'a'}\n\tprint(x)  ", "Grüße, 世界 🙂", ""])
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = train_tokenizer(DOCUMENTS, vocabulary_size=300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_has_the_size_asked_for_and_is_the_same_each_time() -> None:
    first, second = (train_tokenizer(DOCUMENTS, vocabulary_size=280) for _ in range(2))
    assert len(first) == 280
    assert first.get_vocab() == second.get_vocab()
    assert first.eos_token == END_OF_TEXT


@pytest.mark.parametrize("context_length", [2, 3, 7, 8, 9, 64, 10_000])
def test_every_token_is_predicted_exactly_once(context_length: int) -> None:
    """Put together without their first tokens, the contexts of a document are the document and its end."""
    tokenizer = train_tokenizer(DOCUMENTS, vocabulary_size=300)
    for document in [DOCUMENTS[0], "", "a"]:
        examples = contexts([document], tokenizer, context_length)
        predicted = torch.cat([example[1:] for example in examples]).tolist()
        assert predicted == tokenizer.encode(document + END_OF_TEXT)
        assert all(2 <= len(example) <= context_length for example in examples)
        assert examples[0][0] == tokenizer.eos_token_id
        for earlier, later in itertools.pairwise(examples):
            assert later[0] == earlier[-1]


def test_unigram_entropy_is_the_price_of_the_validation_tokens() -> None:
    """Computed once more with dictionaries and logarithms."""
    train = [torch.tensor([9, 1, 1, 2]), torch.tensor([9, 3])]
    validation = [torch.tensor([9, 1, 4, 1])]
    seen = Counter([1, 1, 2, 3])
    price = [-math.log((seen[token] + 1) / (4 + 10)) for token in (1, 4, 1)]
    assert unigram_entropy(train, validation, vocabulary_size=10) == pytest.approx(sum(price) / 3, rel=1e-12)


def test_an_epoch_holds_each_example_once_in_an_order_of_its_own() -> None:
    examples = [torch.tensor([number, number]) for number in range(50)]
    orders = {
        key: [int(example[0]) for example in shuffled(examples, *key)] for key in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 4
    assert [int(example[0]) for example in shuffled(examples, 0, 1)] == orders[0, 1]


def test_shuffling_leaves_the_global_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    shuffled([torch.tensor([0])], seed=0, epoch=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_padding_has_no_label() -> None:
    batch = collate([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, 9, -100]]
