"""The model that the recipe trains, its optimizer and its schedule."""

import math

import pytest
import torch

from wholebatch.training.data import train_tokenizer
from wholebatch.training.model import adamw, small_llama, warm_up_and_cosine


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text"], vocabulary_size=300)


def test_the_seed_alone_decides_the_initial_parameters(tokenizer) -> None:
    """The caller's random numbers neither matter nor are used up."""
    torch.manual_seed(5)
    first, state = small_llama(tokenizer, 16, seed=0), torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    second, other = small_llama(tokenizer, 16, seed=0), small_llama(tokenizer, 16, seed=1)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_weight_decay_spares_the_vectors(tokenizer) -> None:
    model = small_llama(tokenizer, 16, seed=0)
    matrices, vectors = adamw(model, 1e-3).param_groups
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("num_updates", [1, 2, 7, 100])
def test_the_learning_rate_rises_once_and_ends_at_a_tenth(num_updates: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = warm_up_and_cosine(optimizer, num_updates)
    rates = []
    for _ in range(num_updates + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    warm_up = max(1, round(num_updates / 10))
    assert rates[:warm_up] == pytest.approx([2.0 * (k + 1) / warm_up for k in range(warm_up)])
    half = (num_updates + warm_up) // 2
    if num_updates == 100:
        assert rates[half] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 90)) / 2))
    assert rates[num_updates] == pytest.approx(0.2 if num_updates > 1 else 2.0)
    assert sorted(rates[warm_up - 1 :], reverse=True) == rates[warm_up - 1 :]
