"""Documents into examples, examples into batches, batches into losses."""

import itertools

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from wholebatch.errors import ConfigurationError
from wholebatch.training.data import train_tokenizer
from wholebatch.training.documents import Document
from wholebatch.training.objectives import (
    NO_LABEL,
    CausalLM,
    Classify,
    Example,
    MaskedLM,
    UnknownLabelError,
    class_loss,
    next_token_loss,
)
from wholebatch.training.order import Drawn

TEXTS = [f"The statement number {number} binds {number % 7} names.\n" * (1 + number % 5) for number in range(60)]


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return CausalLM(train_tokenizer(TEXTS, 300), 16)


@pytest.fixture(scope="module")
def masked() -> MaskedLM:
    return MaskedLM(train_tokenizer(TEXTS, 300, masks=True), 16)


@pytest.mark.parametrize("context_length", [2, 3, 7, 8, 9, 64, 10_000])
def test_every_token_is_predicted_exactly_once(causal: CausalLM, context_length: int) -> None:
    """Put together without their first tokens, the contexts of a document are the document and its end."""
    end = causal.tokenizer.eos_token_id
    for text in [TEXTS[0], "", "a"]:
        examples = [one.ids for one in CausalLM(causal.tokenizer, context_length).examples(Document(text))]
        predicted = torch.cat([ids[1:] for ids in examples]).tolist()
        assert predicted == [*causal.tokenizer.encode(text), end]
        assert all(2 <= len(ids) <= context_length for ids in examples)
        assert examples[0][0] == end
        for earlier, later in itertools.pairwise(examples):
            assert later[0] == earlier[-1]


def test_padding_has_no_label(causal: CausalLM) -> None:
    batch = causal.collate([Drawn(Example(torch.tensor(ids)), 0) for ids in ([5, 6, 7], [8, 9])])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, 9, -100]]


def test_masked_pieces_are_the_document_between_special_tokens(masked: MaskedLM) -> None:
    tokenizer = masked.tokenizer
    examples = list(masked.examples(Document(TEXTS[4])))
    assert len(examples) > 1
    assert all(len(one.ids) <= 16 for one in examples)
    assert all((one.ids[0], one.ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id) for one in examples)
    inside = list(itertools.chain(*(one.ids[1:-1].tolist() for one in examples)))
    assert inside == tokenizer.encode(TEXTS[4], add_special_tokens=False)
    assert list(masked.examples(Document(""))) == []


def test_masks_depend_on_the_seed_of_the_example_alone(masked: MaskedLM) -> None:
    """Whatever else is in the batch, and whatever was drawn before."""
    first, second = (next(iter(masked.examples(Document(text)))) for text in TEXTS[:2])
    alone = masked.collate([Drawn(first, 7)])
    torch.manual_seed(5)
    both = masked.collate([Drawn(second, 3), Drawn(first, 7)])
    length = len(first.ids)
    for name, field in alone.items():
        assert torch.equal(field[0], both[name][1, :length])
    others = {tuple(masked.collate([Drawn(first, seed)])["labels"][0].tolist()) for seed in range(20)}
    assert len(others) > 3


def test_about_one_token_in_seven_is_to_be_guessed_and_most_of_these_are_hidden(masked: MaskedLM) -> None:
    ids = torch.cat([torch.tensor([1]), torch.arange(4, 260).repeat(40), torch.tensor([2])])
    batch = masked.collate([Drawn(Example(ids), 0)])
    labels, shown = batch["labels"][0], batch["input_ids"][0]
    chosen = labels != NO_LABEL
    assert int(chosen.sum()) == round(0.15 * 256 * 40)
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(shown[~chosen], ids[~chosen])
    hidden = (shown == masked.tokenizer.mask_token_id)[chosen].float().mean()
    kept = (shown == ids)[chosen].float().mean()
    assert 0.77 < hidden < 0.83  # of 1,536; a standard deviation is 0.01
    assert 0.07 < kept < 0.13
    assert not chosen[0]
    assert not chosen[-1]


def test_a_short_text_has_a_token_to_guess_too(masked: MaskedLM) -> None:
    batch = masked.collate([Drawn(next(iter(masked.examples(Document("a")))), 1)])
    assert int((batch["labels"] != NO_LABEL).sum()) == 1


def test_a_tokenizer_without_a_mask_is_refused(causal: CausalLM) -> None:
    with pytest.raises(ConfigurationError, match="has no mask token"):
        MaskedLM(causal.tokenizer, 16)


def test_classes_have_their_numbers_by_name(masked: MaskedLM) -> None:
    objective = Classify(masked.tokenizer, 8, ["blue", "red"])
    [example] = objective.examples(Document(TEXTS[4], "red"))
    assert (example.label, len(example.ids)) == (1, 8)
    for label in ("green", None):
        with pytest.raises(UnknownLabelError):
            list(objective.examples(Document("text", label)))
    batch = objective.collate([Drawn(example, 0), Drawn(Example(example.ids[:3], 0), 0)])
    assert batch["labels"].tolist() == [1, 0]
    assert batch["attention_mask"].sum(dim=1).tolist() == [8, 3]
    assert batch["input_ids"][1, 3:].eq(masked.tokenizer.pad_token_id).all()


def test_the_loss_in_float64_is_that_of_the_model_but_for_its_rounding() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).double()
    ids = torch.randint(50, (3, 9))
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][1, 5:] = NO_LABEL
    loss = next_token_loss(model, batch)
    assert (int(loss.count), loss.sum.dtype) == (8 + 4 + 8, torch.float64)
    assert (loss.sum / loss.count).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_the_class_loss_is_a_sum_and_counts_what_was_told_right() -> None:
    class Fixed(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> object:
            logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
            return type("Output", (), {"logits": logits})

    loss = class_loss(Fixed(), {"input_ids": torch.zeros(3, 1), "labels": torch.tensor([0, 1, 1])})
    expected = sum(torch.tensor([1 + 2.718281828459045**-d for d in (2.0, 1.0, -3.0)], dtype=torch.float64).log())
    assert float(loss.sum) == pytest.approx(float(expected), rel=1e-12)
    assert (loss.count, int(loss.metrics["accuracy"][0]), loss.metrics["accuracy"][1]) == (3, 2, 3)
