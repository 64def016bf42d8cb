"""The losses that Hugging Face models compute themselves: right counts pass, wrong ones are refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from verification import accepted, in_precision, refusal, suggestion

# A span is chosen among all positions, padding included: BERT for questions sees it, and keeps it.
pytestmark = pytest.mark.filterwarnings("ignore::wholebatch.errors.PaddingKeptWarning")

ROWS, LENGTH, VOCABULARY, CLASSES, IGNORED = 6, 10, 31, 3, -100
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}

Batch = dict[str, torch.Tensor]


# ---- Batches ----


def sequences(lengths: Sequence[int] = (6, 3, 10, 4, 8, 5)) -> Batch:
    torch.manual_seed(3)
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, VOCABULARY, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def language() -> Batch:
    """Padded sequences; two tokens of each have no label, the first has one, which the shift drops."""
    batch = sequences()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    labels[:, 1:3] = IGNORED
    return batch | {"labels": labels}


def masked_language() -> Batch:
    batch = sequences()
    hidden = (torch.rand(ROWS, LENGTH) < 0.4) & (batch["attention_mask"] == 1)
    hidden[:, 1] = True
    return batch | {"labels": batch["input_ids"].masked_fill(~hidden, IGNORED)}


def tagged() -> Batch:
    batch = sequences()
    return batch | {"labels": (batch["input_ids"] % CLASSES).masked_fill(batch["attention_mask"] == 0, IGNORED)}


def classes() -> Batch:
    return sequences() | {"labels": torch.tensor([0, 2, 1, 1, 0, 2])}


def classes_some_without() -> Batch:
    return sequences() | {"labels": torch.tensor([0, IGNORED, 1, IGNORED, 0, 2])}


def regression() -> Batch:
    return sequences() | {"labels": torch.rand(ROWS)}


def several_labels() -> Batch:
    return sequences() | {"labels": (torch.rand(ROWS, CLASSES) < 0.5).float()}


def spans() -> Batch:
    return sequences() | {
        "start_positions": torch.tensor([1, 0, 4, 2, 3, 0]),
        "end_positions": torch.tensor([3, 2, 7, 3, 5, 4]),
    }


def choices() -> Batch:
    """Three answers to each of the questions."""
    batch = sequences()
    answers = {name: torch.stack([value, value.roll(1, 0), value.roll(2, 0)], dim=1) for name, value in batch.items()}
    return answers | {"labels": torch.tensor([0, 2, 1, 1, 0, 2])}


def pretraining() -> Batch:
    return masked_language() | {"next_sentence_label": torch.tensor([0, 1, 1, 0, 1, 0])}


def translation() -> Batch:
    labels = language()["labels"]
    labels[:, 0] = 5
    return sequences((10, 4, 7, 3, 9, 6)) | {"labels": labels}


def images() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8), "labels": torch.tensor([0, 2, 1, 1, 0, 2])}


# ---- Models ----


def bert(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**BERT, **options))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral(router: bool) -> Callable[[], nn.Module]:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        output_router_logits=router, router_aux_loss_coef=0.02,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the others do not compute in float64
    return lambda: transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


# ---- Counts and losses ----


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def with_items(kind: type, share: bool = True) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """With `num_items_in_batch` of the micro-batch, as an int or a tensor; of the whole batch where it is no share."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        items = (batch["labels"][:, 1:] != IGNORED).sum() if share else torch.tensor(19)
        return model(**batch, num_items_in_batch=int(items) if kind is int else items).loss

    return loss_fn


def every_label(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


def after_the_shift(batch: Batch) -> torch.Tensor:
    return (batch["labels"][:, 1:] != IGNORED).sum()


def real_tokens(batch: Batch) -> torch.Tensor:
    return batch["attention_mask"].sum()


def examples(batch: Batch) -> int:
    return len(batch["input_ids"])


SEQUENCE_COUNTS = ("examples", "tokens", "sum", every_label, after_the_shift, real_tokens)
EXAMPLE_COUNTS = ("examples", "sum", real_tokens, examples)


@dataclass(frozen=True)
class Head:
    """A model with a loss of its own."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    right: Sequence[Any]
    """None among them: nothing has to be stated."""

    counts: Sequence[Any] = SEQUENCE_COUNTS
    looks: str = ""
    """Of the suggestion, where something has to be stated."""

    loss_fn: Callable[[Any, Any], Any] | None = None
    precisions: Sequence[str] = ("float32", "bf16 autocast")

    @property
    def wrong(self) -> list[Any]:
        return [count for count in self.counts if count not in self.right]


SHIFTED = (None, "tokens", after_the_shift)
UNSHIFTED = (None, "tokens", every_label)
PRECISIONS = ("float64", "float32", "bf16 autocast", "bf16")
LOOKS_SHIFTED = 'labelled tokens after the shift: pass count="tokens"'

HEADS = {
    "GPT-2": Head(gpt2, language, SHIFTED, precisions=PRECISIONS),
    "GPT-2 in a loss_fn": Head(gpt2, language, SHIFTED[1:], looks=LOOKS_SHIFTED, loss_fn=own_loss),
    "GPT-2, items as int": Head(gpt2, language, SHIFTED[1:], looks=LOOKS_SHIFTED, loss_fn=with_items(int)),
    "GPT-2, items as tensor": Head(gpt2, language, SHIFTED[1:], looks=LOOKS_SHIFTED, loss_fn=with_items(torch.Tensor)),
    "GPT-2, items of the batch": Head(
        gpt2, language, ("sum",), looks='a plain sum: pass count="sum"', loss_fn=with_items(int, share=False)
    ),
    "Llama": Head(llama, language, SHIFTED),
    "Mixtral without router term": Head(mixtral(False), language, SHIFTED),
    "BERT masked-LM": Head(bert("MaskedLM"), masked_language, UNSHIFTED, precisions=PRECISIONS),
    "BERT token classes": Head(bert("TokenClassification", num_labels=CLASSES), tagged, (*UNSHIFTED, real_tokens)),
    "T5": Head(t5, translation, UNSHIFTED, precisions=PRECISIONS),
    "BERT classes": Head(
        bert("SequenceClassification", num_labels=CLASSES), classes, (None, "examples", examples, every_label),
        EXAMPLE_COUNTS, precisions=PRECISIONS,
    ),
    "BERT classes, some without": Head(
        bert("SequenceClassification", num_labels=CLASSES), classes_some_without, (None, every_label),
        (*EXAMPLE_COUNTS, every_label),
    ),
    "BERT regression": Head(
        bert("SequenceClassification", num_labels=1), regression, (None, "examples", examples), EXAMPLE_COUNTS
    ),
    "BERT several labels": Head(
        bert("SequenceClassification", num_labels=CLASSES, problem_type="multi_label_classification"),
        several_labels, (None, "examples", examples), EXAMPLE_COUNTS,
    ),
    "BERT multiple choice": Head(bert("MultipleChoice"), choices, (None, "examples", examples), EXAMPLE_COUNTS),
    "BERT questions": Head(
        bert("QuestionAnswering"), spans, ("examples", examples), EXAMPLE_COUNTS,
        looks='a mean over 3 examples: pass count="examples"',
    ),
    "ViT classes": Head(vit, images, (None, "examples"), ("examples", "sum")),
}  # fmt: skip

PAIRS = [(name, precision) for name, head in HEADS.items() for precision in head.precisions]


def prepared(head: Head, precision: str) -> tuple[nn.Module, Any, Batch]:
    torch.manual_seed(0)
    model, loss_fn, batch = in_precision(precision, head.model(), head.loss_fn, head.batch())
    return model.train(), loss_fn, batch


@pytest.mark.parametrize(("name", "precision"), PAIRS)
def test_right_counts_pass(name: str, precision: str) -> None:
    """Also with dropout, which makes one pass incomparable: gradients are compared in the oracle."""
    model, loss_fn, batch = prepared(HEADS[name], precision)
    for count in HEADS[name].right:
        accepted(model, loss_fn, batch, count, precision=precision, one_pass=False)


@pytest.mark.parametrize(("name", "precision"), PAIRS)
def test_wrong_counts_are_refused(name: str, precision: str) -> None:
    model, loss_fn, batch = prepared(HEADS[name], precision)
    for count in HEADS[name].wrong:
        refusal(model, loss_fn, batch, count, precision=precision)


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if None not in head.right])
def test_the_right_count_is_suggested(name: str) -> None:
    model, loss_fn, batch = prepared(HEADS[name], "float32")
    assert HEADS[name].looks in suggestion(model, loss_fn, batch)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("count", [None, "tokens", "examples", "sum", after_the_shift])
def test_a_router_is_a_second_term(count: Any, precision: str) -> None:
    """Mixtral's balance of experts fits no count: the error speaks of the second term."""
    head = Head(mixtral(True), language, ())
    model, loss_fn, batch = prepared(head, precision)
    message = refusal(model, loss_fn, batch, count, precision=precision)
    assert "2 terms" in message
    assert "router" in message


@pytest.mark.parametrize("count", ["tokens", "examples", "sum", every_label])
def test_two_losses_in_one_are_refused(count: Any) -> None:
    """BertForPreTraining adds a mean over tokens to a mean over examples: no count fits, and none is suggested."""
    model, loss_fn, batch = prepared(Head(bert("PreTraining"), pretraining, ()), "float32")
    assert "2 terms" in refusal(model, loss_fn, batch, count)
    message = suggestion(model, loss_fn, batch)
    assert "2 terms" in message
    assert "looks like" not in message
