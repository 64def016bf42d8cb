"""The model that the recipe trains, its optimizer, and the course of the learning rate."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHT_DECAY = 0.1
WARM_UP = 0.1
"""Part of the updates in which the learning rate rises to its peak."""

FINAL_LEARNING_RATE = 0.1
"""At the end, as a part of the peak."""


def small_llama(tokenizer: PreTrainedTokenizerFast, context_length: int, seed: int) -> LlamaForCausalLM:
    """A Llama of little more than a million parameters: grouped-query attention, tied embeddings, no dropout.

    It starts three times as far from zero as Llama does by default: in a run of few updates it learns faster so.
    """
    end_of_text = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    with torch.random.fork_rng():  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only; fused where torch has it, which is faster and needs no copies."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, num_updates: int) -> LambdaLR:
    """The learning rate by update: it rises along a line, then falls along half a cosine."""
    warm_up = max(1, round(WARM_UP * num_updates))

    def factor(update: int) -> float:
        if update < warm_up:
            return (update + 1) / warm_up
        done = (update - warm_up) / max(1, num_updates - warm_up)
        return FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
