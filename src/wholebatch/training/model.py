"""The model that is trained: from nothing by a preset or a config, or pretrained; its optimizer; how it is saved."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, BertConfig, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from wholebatch.errors import ConfigurationError
from wholebatch.training.objectives import Classify, Objective
from wholebatch.training.settings import TrainingSettings
from wholebatch.undisturbed import evaluation_mode

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 6, "num_attention_heads": 4},
    "small": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
}
"""Models from nothing, of 1 and 14 million parameters besides the embeddings: Llama for the next token, else BERT."""

LEARNING_RATES = {"tiny": 6e-3, "from nothing": 1e-3, "pretrained": 5e-5, "lora": 2e-4}


def pretrained(settings: TrainingSettings) -> bool:
    """Whether `model` names weights to start from."""
    return settings.model not in PRESETS and not settings.model.endswith(".json")


def learning_rate(settings: TrainingSettings) -> float:
    """As set; else what suits the kind of model."""
    if settings.learning_rate is not None:
        return settings.learning_rate
    if settings.lora:
        return LEARNING_RATES["lora"]
    kind = "pretrained" if pretrained(settings) else "tiny" if settings.model == "tiny" else "from nothing"
    return LEARNING_RATES[kind]


def own_tokenizer(settings: TrainingSettings) -> PreTrainedTokenizerBase | None:
    """The tokenizer that belongs to a pretrained model; None for others."""
    if not pretrained(settings):
        return None
    with _named(settings.model), _quiet():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(settings.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def kept_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a run was begun with."""
    with _named(str(folder)), _quiet():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def build_model(settings: TrainingSettings, objective: Objective) -> tuple[nn.Module, list[str]]:
    """The model as training begins with it, on the CPU, in training mode; and what pretrained weights do not have.

    Raises:
        ConfigurationError: There is no such model, it does not suit the objective, or its tokenizer is too large.
    """
    auto = getattr(transformers, objective.auto_class)
    overrides = _dropout(settings) | _classes(objective)
    with torch.random.fork_rng(), _named(settings.model), _quiet():  # the caller's random numbers stay as they were
        torch.manual_seed(settings.seed or 0)
        if pretrained(settings):
            config = AutoConfig.from_pretrained(settings.model)
            config.update(_known(config, overrides))
            model, loaded = auto.from_pretrained(
                settings.model, config=config, dtype=torch.float32, output_loading_info=True
            )
        else:
            config = _config(settings, objective)
            config.update(_known(config, overrides))
            model, loaded = auto.from_config(config), {"missing_keys": ()}
            if model.can_generate():
                model.generation_config.pad_token_id = objective.tokenizer.pad_token_id
    _check(model, settings, objective)
    new = sorted({name.rpartition(".")[0] for name in loaded["missing_keys"]})
    return _adapted(model.to(_parameter_dtype(settings)), settings).train(), new


def rebuilt_model(settings: TrainingSettings, objective: Objective, folder: Path) -> nn.Module:
    """The same model without its weights, from the config kept in `folder`, for a checkpoint to fill."""
    auto = getattr(transformers, objective.auto_class)
    with torch.random.fork_rng(), _named(str(folder)), _quiet():
        torch.manual_seed(settings.seed or 0)
        config = AutoConfig.from_pretrained(folder)
        config.update(_known(config, _dropout(settings)))
        model = auto.from_config(config)
    return _adapted(model.to(_parameter_dtype(settings)), settings).train()


def _parameter_dtype(settings: TrainingSettings) -> torch.dtype:
    return torch.float64 if settings.dtype == "float64" else torch.float32


def _config(settings: TrainingSettings, objective: Objective) -> PretrainedConfig:
    if settings.model.endswith(".json"):
        config: PretrainedConfig = AutoConfig.from_pretrained(settings.model)
        config.vocab_size = len(objective.tokenizer)
        return config
    sizes = PRESETS[settings.model]
    tokenizer = objective.tokenizer
    if settings.objective == "causal-lm":
        # It starts three times as far from zero as Llama does by default: in a run of few updates it learns faster so.
        return LlamaConfig(
            vocab_size=len(tokenizer),
            **sizes,
            num_key_value_heads=sizes["num_attention_heads"] // 2,
            max_position_embeddings=settings.context_length,
            tie_word_embeddings=True,
            initializer_range=0.06,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            # No padding token: that would be the end of text here, whose embedding would then be zero, and stay so.
        )
    return BertConfig(
        vocab_size=len(tokenizer),
        **sizes,
        max_position_embeddings=settings.context_length,
        pad_token_id=tokenizer.pad_token_id,
    )


def _dropout(settings: TrainingSettings) -> dict[str, float]:
    """Under every name that a config may have for it; those it does not have are left out later."""
    if settings.dropout is None:
        return {}
    names = (
        "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout",
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout_rate", "embedding_dropout", "mlp_dropout",
    )  # fmt: skip
    return dict.fromkeys(names, settings.dropout)


def _classes(objective: Objective) -> dict[str, Any]:
    if not isinstance(objective, Classify):
        return {}
    names = dict(enumerate(objective.labels))
    # A decoder finds the end of a text by its padding.
    return {
        "id2label": names,
        "label2id": {label: number for number, label in names.items()},
        "pad_token_id": objective.tokenizer.pad_token_id,
    }


def _known(config: PretrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in overrides.items() if hasattr(config, name)}


def _check(model: nn.Module, settings: TrainingSettings, objective: Objective) -> None:
    """Whether model, tokenizer, context and objective belong together; said here, not by an index error later on."""
    rows: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if len(objective.tokenizer) > rows:
        raise ConfigurationError(
            f"the tokenizer has {len(objective.tokenizer):,} tokens, and the model embeds {rows:,}: they do not belong "
            "together"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and settings.context_length > positions:
        raise ConfigurationError(
            f"context_length={settings.context_length}: the model has positions for {positions} tokens at most"
        )
    if settings.objective == "causal-lm" and not _sees_the_past_only(model):
        raise ConfigurationError(
            f"objective='causal-lm': in {type(model).__name__} a token sees those after it, so it would learn to copy "
            "them; use masked-lm, or another model"
        )


@torch.no_grad()
def _sees_the_past_only(model: nn.Module) -> bool:
    """Whether another last token leaves the predictions before it as they are."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]) % model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    one, other = model.eval()(input_ids=ids).logits[:, :-1]
    return torch.allclose(one, other, atol=1e-3 * float(one.abs().max()))


@torch.no_grad()
def keeps_documents_apart(model: nn.Module) -> bool:
    """Whether documents in one context, where positions begin anew with each, are to the model what they are alone.

    Found by trying: whatever stands in the first document, the predictions in the second are the same to the last bit,
    and up to rounding those of the second alone. A model in which no token sees another would pass, and proves nothing.
    """
    size: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    device = next(model.parameters()).device
    ids = (torch.arange(1, 15, device=device) % size).view(2, 7)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2]], device=device)
    second = torch.stack([torch.arange(7) >= 3, torch.arange(7) >= 4]).to(device)
    ends = torch.tensor([2, 3], device=device)[:, None]  # of the first documents
    others = torch.where(second, ids, (ids + 20) % size)
    try:
        with evaluation_mode(model):
            one, other, same_end = (
                model(input_ids=row, position_ids=places, use_cache=False).logits
                for row in (ids, others, others.scatter(1, ends, ids.gather(1, ends)))
            )
            alone = torch.cat(
                [model(input_ids=row[kept][None]).logits[0] for row, kept in zip(ids, second, strict=True)]
            )
    except (TypeError, ValueError, LookupError, RuntimeError):  # it does not know such an argument, or not in this form
        return False
    seen = all(not torch.equal(a[end], b[end]) for a, b, end in zip(one, same_end, ends[:, 0].tolist(), strict=True))
    unmoved = torch.equal(one[second], other[second]) and torch.equal(one[second], same_end[second])
    return seen and unmoved and torch.allclose(one[second], alone, atol=1e-3 * float(alone.abs().max()))


def _adapted(model: nn.Module, settings: TrainingSettings) -> nn.Module:
    if not settings.lora:
        return model
    from peft import LoraConfig, get_peft_model

    trained = [
        name
        for name, module in model.named_children()
        if settings.objective == "classify" and name in ("classifier", "score")
    ]
    config = LoraConfig(
        r=settings.lora, lora_alpha=2 * settings.lora, target_modules="all-linear", modules_to_save=trained or None
    )
    with torch.random.fork_rng(), warnings.catch_warnings(action="ignore", category=FutureWarning):
        torch.manual_seed(settings.seed or 0)  # peft asks transformers by an old name
        adapted: nn.Module = get_peft_model(model, config)
    return adapted


def save_model(model: nn.Module, folder: Path) -> None:
    """In `save_pretrained` form, for `AutoModel` to load; adapters are merged into a copy."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    with _quiet():
        model.save_pretrained(folder)  # type: ignore[operator]


def autocast(settings: TrainingSettings, device: torch.device) -> AbstractContextManager[Any]:
    """For bfloat16 and float16; the parameters stay as they are."""
    if settings.dtype not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, settings.dtype))


def adamw(model: nn.Module, rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only; fused where torch has it, which is faster and needs no copies."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.95), fused=fused)


@contextmanager
def _named(model: str) -> Iterator[None]:
    """What transformers has to say against a model, in one line."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"model={model!r} cannot be loaded: {reason} (presets: {', '.join(PRESETS)}; else a config.json, a folder "
            "with a pretrained model, or a name on the hub)"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and reports of transformers: a new head is what was asked for."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
