"""Gradients that were there before a batch are given back untouched, or with the batch's added."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from wholebatch.gradients.set_aside import SetAside


def two(first: float | None, second: float | None) -> list[nn.Parameter]:
    """Two parameters with these gradients."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    for parameter, value in zip(parameters, (first, second), strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    return parameters


def test_kept_gradients_are_added_to_the_same_tensors() -> None:
    parameters = two(1.0, None)
    before = parameters[0].grad
    with SetAside(parameters) as aside:
        aside.discard()
        parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2,), 5.0)
        aside.keep()
    assert parameters[0].grad is before
    assert parameters[0].grad.tolist() == [3.0] * 3
    assert parameters[1].grad.tolist() == [5.0] * 2


def test_without_keep_all_is_as_before() -> None:
    parameters = two(1.0, None)
    before = parameters[0].grad
    with SetAside(parameters) as aside:
        aside.discard()
        parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0), torch.full((2,), 5.0)
    assert parameters[0].grad is before
    assert before.tolist() == [1.0] * 3
    assert parameters[1].grad is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_any_exception_gives_back_what_was_there(error: type[BaseException]) -> None:
    parameters = two(None, 4.0)
    before = parameters[1].grad

    def fail() -> None:
        with SetAside(parameters) as aside:
            aside.discard()
            parameters[0].grad = torch.ones(3)
            raise error

    with pytest.raises(error):
        fail()
    assert parameters[0].grad is None
    assert parameters[1].grad is before


def test_a_gradient_that_was_there_stays_where_the_batch_has_none() -> None:
    parameters = two(1.0, 2.0)
    with SetAside(parameters) as aside:
        aside.discard()
        parameters[0].grad = torch.ones(3)
        aside.keep()
    assert parameters[1].grad is not None
    assert parameters[1].grad.tolist() == [2.0] * 2


@pytest.mark.parametrize(("before_sparse", "new_sparse"), [(True, True), (True, False), (False, True)])
def test_sparse_and_dense_gradients_add_up(before_sparse: bool, new_sparse: bool) -> None:
    def gradient(value: float, sparse: bool) -> torch.Tensor:
        dense = torch.tensor([[value], [0.0], [value]])
        return dense.to_sparse(1) if sparse else dense

    parameter = nn.Parameter(torch.zeros(3, 1))
    parameter.grad = gradient(1.0, before_sparse)
    with SetAside([parameter]) as aside:
        aside.discard()
        parameter.grad = gradient(2.0, new_sparse)
        aside.keep()
    assert parameter.grad is not None
    total = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
    assert total.flatten().tolist() == [3.0, 0.0, 3.0]


class _Interrupting(torch.Tensor):
    """A gradient during whose addition Ctrl-C arrives."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.add_:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_ctrl_c_during_the_addition_comes_after_it() -> None:
    """The addition is never left half-way: the interrupt is delivered when all of it is done."""
    parameters = two(1.0, 2.0)

    def interrupted() -> None:
        with SetAside(parameters) as aside:
            aside.discard()
            parameters[0].grad = torch.ones(3).as_subclass(_Interrupting)
            parameters[1].grad = torch.ones(2)
            aside.keep()
        time.sleep(5)  # where the interrupt arrives

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert parameters[0].grad is not None
    assert parameters[1].grad is not None
    assert (parameters[0].grad.tolist(), parameters[1].grad.tolist()) == ([2.0] * 3, [3.0] * 2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
