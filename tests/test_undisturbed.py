"""What a model, its flags and the random numbers are after they were used without leaving a trace."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from wholebatch.undisturbed import draw_once, drawn_so_far, evaluation_mode, last_bits_flipped, undisturbed

CPU = torch.device("cpu")

pytestmark = pytest.mark.smoke


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("last", None)
        self.longest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + 1
        self.last = x
        self.longest = max(self.longest, len(x))
        self.table = torch.arange(len(x))
        self.register_buffer("new", torch.ones(1), persistent=False)
        return self.inner(x)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_buffers_and_attributes_are_as_before(error: type[BaseException] | None) -> None:
    """Changed in place, replaced, filled, or new: whether the use ends well or not."""
    model = Remembering()
    model.inner[0].eval()
    calls, mean, flags = model.calls, model.mean, [module.training for module in model.modules()]

    def use() -> None:
        with undisturbed(model, CPU):
            assert not any(module.training for module in model.modules())
            model(torch.ones(3, 2))
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert model.calls is calls
    assert model.mean is mean
    assert (calls.item(), mean.tolist(), model.last, model.longest) == (0, [0.0, 0.0], None, 0)
    assert set(dict(model.named_buffers())) == {"calls", "mean"}
    assert not hasattr(model, "table")
    assert [module.training for module in model.modules()] == flags


def test_training_mode_where_it_is_wanted() -> None:
    model = Remembering()
    model.inner[1].eval()
    with undisturbed(model, CPU, evaluation=False):
        assert [module.training for module in model.modules()] == [True, True, True, False]


def test_random_numbers_follow_as_if_nothing_had_been_drawn() -> None:
    def numbers() -> list[float]:
        return [random.random(), torch.rand(()).item(), torch.randn(()).item(), numpy.random.random()]

    model = Remembering()
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    right = numbers()
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    numpy.random.set_state(states[2])
    with undisturbed(model, CPU):
        draw_once(CPU)
        assert numbers() != right
    assert numbers() == right


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), lambda: numpy.random.random()])
def test_each_kind_of_random_number_is_noticed(draw: Callable[[], object]) -> None:
    before = drawn_so_far()
    draw()
    assert drawn_so_far() != before


def test_the_models_own_eval_and_train_are_not_called() -> None:
    """They may do more than set flags."""

    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> "Merging":
            raise AssertionError("merges weights")

    model = Merging(2, 2)
    with evaluation_mode(model):
        assert not model.training
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [52, 23, 10, 7])
def test_last_bits_are_flipped_and_put_back(dtype: torch.dtype, bits: int) -> None:
    """One unit in the last of so many bits, of each element and no more; afterwards bit by bit as before."""
    parameter = nn.Parameter(torch.randn(50, dtype=torch.float64).to(dtype))
    before, version = parameter.detach().clone(), parameter._version
    own = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[dtype]
    with last_bits_flipped([parameter, nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)], bits):
        moved = (parameter.detach().double() - before.double()).abs() / before.double().abs()
        assert bool((moved > 2.0 ** (-min(bits, own) - 1)).all())
        assert bool((moved <= 2.0 ** -min(bits, own)).all())
    assert torch.equal(parameter.detach(), before)
    assert parameter._version == version
