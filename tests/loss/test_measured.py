"""What is kept of a gradient: enough to add, to compare, and to find in it what is wrong."""

import pytest
import torch
from torch import nn

from wholebatch.loss.measured import looked_at, sketch, sketch_size

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_a_sketch_is_linear(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sketches of sums are sums of sketches, in double precision and of the size that is told beforehand."""
    one, other = (torch.randn(shape, dtype=torch.float64).round(decimals=1).to(dtype) for _ in range(2))
    assert sketch(one).shape == (sketch_size(one),)
    assert sketch(one).dtype == torch.float64
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(sketch(one) + sketch(other), sketch(one + other), rtol=tolerance, atol=tolerance * 10)


def test_a_sketch_of_a_sparse_gradient_is_that_of_the_dense_one() -> None:
    dense = torch.zeros(6, 3).index_put((torch.tensor([1, 4]),), torch.randn(2, 3))
    assert torch.equal(sketch(dense.to_sparse()), sketch(dense))


def test_a_sketch_of_nothing() -> None:
    assert sketch(torch.ones(4, 3), zero=True).tolist() == [0.0] * 4


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


def test_all_parameters_of_a_small_model_are_looked_at() -> None:
    few = parameters(*[1000] * 300)
    assert looked_at(few) == few


def test_of_a_large_model_the_small_parameters_and_both_ends_are() -> None:
    """Routers and norms are small, and faults of theirs are smaller; the choice is the same each time."""
    layer = [2**24, 2**24, 2**10, 2**15]
    many = parameters(*layer * 10)
    chosen = looked_at(many)
    places = [place for place, parameter in enumerate(many) if any(parameter is one for one in chosen)]
    assert {0, 1, 38, 39} <= set(places)
    assert all(place in places for place in range(40) if place % 4 > 1)
    assert sum(many[place].numel() == 2**24 for place in places) <= 2 + 16
    assert [id(one) for one in looked_at(many)] == [id(one) for one in chosen]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_large_parameters(count: int) -> None:
    many = parameters(*[2**24] * count)
    assert len(looked_at(many)) == count
