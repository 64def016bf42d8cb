"""Tiny models of many kinds, with ragged batches, and the loss of each in every form that `loss_fn` may return.

All from configs, nothing is downloaded. No dropout, so that only the cut differs. Token batches are padded, their
rows of unequal length, with prompts that carry no label and one row without any label: that is where faults show.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from wholebatch.facts import LossSum

Batch = dict[str, torch.Tensor]
Unreduced = tuple[torch.Tensor, torch.Tensor]
"""The losses, one per example or one per token, and a mask of the same shape: which of them count."""

NUM_EXAMPLES, NUM_CLASSES, VOCABULARY, LENGTH, IGNORED = 7, 3, 29, 8, -100


@dataclass(frozen=True)
class Family:
    """A kind of model."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    logits: Callable[[nn.Module, Batch], torch.Tensor]
    shift: bool = False
    """Whether the logits at t are for the label at t + 1."""

    hugging_face: bool = True
    """Whether the model computes a loss itself."""

    upcasts: bool = False
    """Whether that loss is computed in float32 whatever the model's type."""

    float32_inside: bool = False
    """Whether the model normalises in float32 whatever its type: another seed of the backward then rounds otherwise."""

    prepare: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)
    """What is done to the model once it has its weights and type."""

    def unreduced(self, model: nn.Module, batch: Batch) -> Unreduced:
        """The losses in the type of the logits (float32 under autocast), and which of them count."""
        logits, labels = self.logits(model, batch), batch["labels"]
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(labels.shape), labels != IGNORED

    def count(self, batch: Batch) -> torch.Tensor:
        """Labels that the model predicts."""
        labels = batch["labels"]
        return ((labels[:, 1:] if self.shift else labels) != IGNORED).sum()


# ---- Batches ----


def sequences(num_examples: int = NUM_EXAMPLES) -> Batch:
    """Padded sequences, each token its own label; prompts and padding have none, and neither has the third row."""
    lengths = torch.randint(3, LENGTH + 1, (num_examples, 1))
    lengths[0] = LENGTH
    places = torch.arange(LENGTH)
    ids = torch.randint(3, VOCABULARY, (num_examples, LENGTH))
    inside = places < lengths
    prompt = places < torch.randint(0, 3, (num_examples, 1))
    labels = torch.where(inside & ~prompt, ids, IGNORED)
    labels[2] = IGNORED
    return {"input_ids": torch.where(inside, ids, 0), "attention_mask": inside.long(), "labels": labels}


def masked_sequences() -> Batch:
    """As for masked-language models: about a third of the tokens are hidden and have a label."""
    batch = sequences()
    hidden = (torch.rand(batch["input_ids"].shape) < 0.35) & batch["attention_mask"].bool()
    hidden[:, 1], hidden[2] = True, False
    labels = torch.where(hidden, batch["input_ids"], IGNORED)
    return {**batch, "input_ids": torch.where(hidden, 1, batch["input_ids"]), "labels": labels}


def pairs() -> Batch:
    """As for encoder-decoder models: inputs, and targets of other lengths."""
    source, target = sequences(), sequences()
    return {**source, "labels": target["labels"]}


def classified_sequences() -> Batch:
    """One class for each sequence."""
    return {**sequences(), "labels": torch.randint(NUM_CLASSES, (NUM_EXAMPLES,))}


def images() -> Batch:
    """One class for each image."""
    return {
        "pixel_values": torch.randn(NUM_EXAMPLES, 3, 8, 8),
        "labels": torch.randint(NUM_CLASSES, (NUM_EXAMPLES,)),
    }


def in_type(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point fields in `dtype`."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


# ---- Models of Hugging Face ----


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama_with_grouped_queries() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def bert(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=NUM_CLASSES,
        )
        return getattr(transformers, kind)(config)

    return build


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=NUM_CLASSES,
        )
    )


def lora_on_frozen_gpt2() -> nn.Module:
    """Adapters whose B is not zero, so that the gradients of A are not zero either."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.0,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(gpt2(), config)


def checkpointed(use_reentrant: bool) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    return prepare


# ---- Models of plain torch ----


class Tied(nn.Module):
    """A language model whose output layer is its embedding; one parameter is frozen and one takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((16,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mix(self.embed(ids))[0] + self.frozen))


class Recomputed(nn.Module):
    """A language model that checkpoints its block whether it trains or not."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.block = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.embed(ids), use_reentrant=self.use_reentrant))


def hugging_face_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def t5_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    targets = batch["labels"].masked_fill(batch["labels"] == IGNORED, 0)
    decoder_inputs = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], dim=1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return model(**inputs, decoder_input_ids=decoder_inputs).logits


def plain_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["input_ids"])


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=True)


def _causal(build: Callable[[], nn.Module], **further: Any) -> Family:
    return Family(build, sequences, hugging_face_logits, shift=True, upcasts=True, **further)


def _plain(build: Callable[[], nn.Module], **further: Any) -> Family:
    return Family(build, sequences, plain_logits, hugging_face=False, **further)


FAMILIES = {
    "gpt2": _causal(gpt2),
    "llama with grouped queries": _causal(llama_with_grouped_queries, float32_inside=True),
    "bert classifier": Family(bert("BertForSequenceClassification"), classified_sequences, hugging_face_logits),
    "bert masked-lm": Family(bert("BertForMaskedLM"), masked_sequences, hugging_face_logits),
    "t5": Family(t5, pairs, t5_logits, float32_inside=True),
    "vit": Family(vit, images, hugging_face_logits),
    "lora on frozen": _causal(lora_on_frozen_gpt2),
    "tied": _plain(Tied),
    "checkpointed": _causal(gpt2, prepare=checkpointed(use_reentrant=False)),
    "checkpointed, reentrant": _causal(gpt2, prepare=checkpointed(use_reentrant=True)),
    "always checkpointed": _plain(lambda: Recomputed(use_reentrant=False)),
    "always checkpointed, reentrant": _plain(lambda: Recomputed(use_reentrant=True)),
    "compiled": _plain(Tied, prepare=compiled),
}


# ---- The loss in every form ----


@dataclass(frozen=True)
class Form:
    """One way to state a family's loss: the accumulator's arguments, and the whole batch's loss by plain torch."""

    loss_fn: Callable[[Family], Callable[[nn.Module, Batch], Any] | None]
    count: Callable[[Family], Any]
    whole: Callable[[Any], torch.Tensor]
    """The loss to differentiate in one pass, from what `loss_fn` returned for the whole batch."""


def _mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (losses * mask).sum() / mask.sum()


def _scalar(family: Family) -> Callable[[nn.Module, Batch], torch.Tensor]:
    return lambda model, batch: _mean(*family.unreduced(model, batch))


def _loss_sum(family: Family) -> Callable[[nn.Module, Batch], LossSum]:
    def loss_fn(model: nn.Module, batch: Batch) -> LossSum:
        losses, mask = family.unreduced(model, batch)
        return LossSum((losses * mask).sum(), mask.sum())

    return loss_fn


def _two_terms(family: Family) -> Callable[[nn.Module, Batch], dict[str, LossSum]]:
    """The usual loss over its units, and the mean over examples of the squares of their summed losses."""

    def loss_fn(model: nn.Module, batch: Batch) -> dict[str, LossSum]:
        losses, mask = family.unreduced(model, batch)
        per_example = (losses * mask).reshape(len(losses), -1).sum(dim=1)
        return {
            "units": LossSum((losses * mask).sum(), mask.sum()),
            "examples": LossSum(0.1 * per_example.square().sum(), len(losses)),
        }

    return loss_fn


def _per_example(family: Family) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """Each example's mean over its own units; 0 where it has none."""

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses, mask = (part.reshape(len(part), -1) for part in family.unreduced(model, batch))
        return (losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)

    return loss_fn


def _sum(family: Family) -> Callable[[nn.Module, Batch], torch.Tensor]:
    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        losses, mask = family.unreduced(model, batch)
        return (losses * mask).sum()

    return loss_fn


def _of_sums(terms: dict[str, LossSum]) -> torch.Tensor:
    return torch.stack([term.sum / term.count for term in terms.values()]).sum()


FORMS = {
    "scalar": Form(_scalar, lambda family: family.count, lambda loss: loss),
    "loss sum": Form(_loss_sum, lambda family: None, lambda loss: loss.sum / loss.count),
    "loss sum, counted before": Form(_loss_sum, lambda family: family.count, lambda loss: loss.sum / loss.count),
    "two terms": Form(_two_terms, lambda family: {"units": family.count, "examples": "examples"}, _of_sums),
    "per example": Form(_per_example, lambda family: None, lambda losses: losses.mean()),
    "sum": Form(_sum, lambda family: "sum", lambda loss: loss),
    "model's own": Form(lambda family: None, lambda family: None, lambda output: output.loss),
}
