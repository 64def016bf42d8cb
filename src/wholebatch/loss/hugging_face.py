"""What a Hugging Face model says about its own loss: that it has one, and what it is a mean over.

Reads classes and names only; `transformers` is never imported.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from torch import nn

from wholebatch.errors import LossFormError

OwnCount: TypeAlias = Literal["tokens", "tokens after the shift", "labelled examples"]

_PER_EXAMPLE = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
_PER_TOKEN = ("ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def hugging_face_model(model: nn.Module) -> nn.Module | None:
    """The `transformers.PreTrainedModel` in `model` (compiled, PEFT and data-parallel wrappers taken off), or None."""
    inner: Any = model
    for _ in range(8):  # wrappers in wrappers, but never a cycle
        if _is_pretrained(inner):
            return inner  # type: ignore[no-any-return]
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # torch.compile
            inner = inner._orig_mod
        elif callable(getattr(inner, "get_base_model", None)):  # PEFT
            inner = inner.get_base_model()
        elif type(inner).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = inner.module
        else:
            return None
    return None


def _is_pretrained(model: Any) -> bool:
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers") for c in type(model).__mro__)


def own_count(model: nn.Module) -> OwnCount | None:
    """What the loss of a Hugging Face model is a mean over, by the name of its class; None where that does not tell.

    Encoder-decoder models shift the decoder's inputs, not the labels. The answer is verified on the first batch like
    any other (`wholebatch.loss.verified`).
    """
    name = type(model).__name__
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if any(kind in name for kind in _CAUSAL):
        return "tokens" if encoder_decoder else "tokens after the shift"
    if "ForConditionalGeneration" in name and not encoder_decoder:  # a language model that sees images or sound
        return "tokens after the shift"
    if any(kind in name for kind in _PER_EXAMPLE):
        return "labelled examples"
    return "tokens" if any(kind in name for kind in _PER_TOKEN) else None


def forward_loss(model: nn.Module, micro_batch: Any) -> Any:
    """The loss that a Hugging Face model computes itself.

    `num_items_in_batch` is not passed on purpose: whether a model heeds it cannot be known from its signature (a
    classifier that takes `**kwargs` and ignores it trains at K times the gradient), and a micro-batch's own mean,
    weighted by its count, gives the same gradient for all of them.
    """
    if not isinstance(micro_batch, Mapping):
        raise LossFormError(
            f"a Hugging Face model is called with the batch's fields by name, but the batch is a "
            f"{type(micro_batch).__name__}. Make it a mapping, or pass loss_fn(model, micro_batch)."
        )
    output = model(**micro_batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        raise LossFormError(
            f"{type(model).__name__} returned no loss for the fields {sorted(map(str, micro_batch))}: it needs `labels`"
        )
    return loss
