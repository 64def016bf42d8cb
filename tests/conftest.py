"""What every test may rely on: one torch thread, and the same random numbers each time."""

import random

import pytest
import torch

# Small tensors gain nothing from more threads, and results do not depend on the machine's cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start each test from the same random state, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)
