"""The budget, the peak, and what counts as running out."""

import pytest
import torch

from wholebatch.errors import MemoryBudgetError
from wholebatch.memory.device import available_bytes, budget_bytes, is_out_of_memory, peak_meter

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:30]}",
)
def test_running_out_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: invalid configuration argument"),
        KeyError("out of memory"),
        ValueError("out of memory"),
    ],
    ids=str,
)
def test_nothing_else_is_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_a_real_allocation_failure_is_recognised() -> None:
    """The allocator's own error, provoked by asking for more than any machine has."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (64 * MIB, 64 * MIB),
        ("6GiB", 6 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("900MB", 900_000_000),
        ("512 MiB", 512 * MIB),
        ("2097152", 2 * MIB),
    ],
)
def test_budgets_in_bytes(budget: str | int, size: int) -> None:
    assert budget_bytes(budget, CPU) == size


def test_a_fraction_is_of_the_whole_device() -> None:
    whole = budget_bytes(1.0, CPU)
    assert whole is not None
    assert budget_bytes(0.5, CPU) == whole // 2


def test_auto_is_what_is_left_for_this_process() -> None:
    """No more than the machine has, and not nothing."""
    whole, left = budget_bytes(1.0, CPU), budget_bytes("auto", CPU)
    assert left == pytest.approx(available_bytes(CPU), rel=0.2)
    assert whole is not None
    assert left is not None
    assert 16 * MIB < left <= whole


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (1, "fraction"),
        (6, '"6GiB"'),
        (MIB - 1, "below 1 MiB"),
        (0, "below 1 MiB"),
        (-5, "below 1 MiB"),
        (1.5, r"\(0, 1\]"),
        (0.0, r"\(0, 1\]"),
        ("lots", "6GiB"),
        ("6 giga", "6GiB"),
        ("", "6GiB"),
        (None, "6GiB"),
        (True, "6GiB"),
    ],
)
def test_what_is_no_budget_is_refused(budget: object, says: str) -> None:
    with pytest.raises(MemoryBudgetError, match=says):
        budget_bytes(budget, CPU)  # type: ignore[arg-type]


def test_the_peak_is_of_the_time_since_start() -> None:
    """64 MiB that came and went show in the peak; after a new start they do not."""
    meter = peak_meter(CPU)
    meter.start()
    if (before := meter.peak_bytes()) is None:
        pytest.skip("this system does not tell the peak of resident memory")
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    high = meter.peak_bytes()
    assert high is not None
    assert high >= before + 60 * MIB
    meter.start()
    low = meter.peak_bytes()
    assert low is not None
    assert low < high - 30 * MIB


def test_laps_do_not_lose_the_peak() -> None:
    meter = peak_meter(CPU)
    meter.start()
    if meter.peak_bytes() is None:
        pytest.skip("this system does not tell the peak of resident memory")
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    del block
    first, second = meter.lap(), meter.lap()
    assert first is not None
    assert second is not None
    assert second < first - 30 * MIB
    assert meter.peak_bytes() == first


def test_where_it_cannot_be_known_it_is_none() -> None:
    meter = peak_meter(torch.device("meta"))
    meter.start()
    assert meter.peak_bytes() is meter.current_bytes() is meter.lap() is None
    assert budget_bytes("auto", torch.device("meta")) is None
