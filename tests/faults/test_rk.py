"""Known faults about several devices: here the one that several devices in one process cause."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lin import Lin, accumulator
from wholebatch.errors import UnsupportedModelError

pytestmark = pytest.mark.smoke


class OwnDataParallel(nn.DataParallel):
    """A subclass, as some projects have one."""


class DataParallel(nn.Module):
    """A stand-in from elsewhere that is known by its name alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(nn.DataParallel(model), backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("wrap", [nn.DataParallel, OwnDataParallel, DataParallel, compiled])
@pytest.mark.parametrize("form", ["masked mean", "sum and count", "output"])
def test_rk5_several_devices_in_one_process(form: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replicas averaged with equal weight are not the batch: refused at once, with the reason and the way out."""
    with pytest.raises(UnsupportedModelError, match=r"DataParallel.*equal weight.*model\.module"):
        accumulator(wrap(Lin()), form)
