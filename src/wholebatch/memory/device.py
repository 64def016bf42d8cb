"""The only file that touches device memory: the budget, the peak, and what counts as running out."""

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from wholebatch.errors import MemoryBudgetError

MIB = 2**20
_UNITS = {"": 1, "B": 1} | {p + s: b**e for e, p in enumerate("KMGT", 1) for s, b in (("B", 1000), ("iB", 1024))}
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, on any device; nothing else about it is judged."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def budget_bytes(budget: str | int | float, device: torch.device) -> int | None:
    """The memory budget in bytes.

    Args:
        budget: `"auto"` (what the device has for this process), bytes, `"6GiB"`, or a fraction of the device's memory.
        device: The device of the model. On a CPU the budget is resident memory of the process.

    Returns:
        Bytes, or None for `"auto"` where the device does not tell.

    Raises:
        MemoryBudgetError: Not a budget, or below 1 MiB.
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise MemoryBudgetError(f'memory_budget={budget!r}: use "auto", bytes, "6GiB", or a fraction such as 0.9')
    if budget == "auto":
        return available_bytes(device)
    if isinstance(budget, float):
        return _fraction_bytes(budget, device)
    size = budget if isinstance(budget, int) else _parse_size(budget)
    if size < MIB:
        with_unit = f'"{budget}GiB"' if str(budget).isdecimal() and size else '"6GiB"'
        raise MemoryBudgetError(
            f"memory_budget={budget!r} is {size:,} bytes, below 1 MiB. Without a unit it is bytes: did you mean a "
            f"fraction such as 0.9 (a float), or a size with its unit such as {with_unit}?"
        )
    return size


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", text, re.IGNORECASE)
    unit = "" if match is None else f"{match[2].upper()}{match[3].lower()}{match[4].upper()}"
    if match is None or unit not in _UNITS:
        raise MemoryBudgetError(
            f'memory_budget={text!r}: use "auto", bytes, "6GiB", "900MB", or a fraction such as 0.9'
        )
    return int(float(match[1]) * _UNITS[unit])


def _fraction_bytes(fraction: float, device: torch.device) -> int:
    if not 0 < fraction <= 1:
        as_size = f'"{fraction:g}GiB"' if 1 < fraction < 1e6 else '"6GiB"'
        raise MemoryBudgetError(
            f"memory_budget={fraction!r}: a fraction lies in (0, 1]; bytes are an int, and {as_size} is a size"
        )
    total = _total_bytes(device)
    if total is None:
        raise MemoryBudgetError(f"memory_budget={fraction!r}: {device} does not tell how much memory it has; use bytes")
    return int(fraction * total)


def _total_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    sizes = [_meminfo("MemTotal"), _cgroup_bytes("memory.max", "memory/memory.limit_in_bytes")]
    return min((size for size in sizes if size is not None), default=None)


def available_bytes(device: torch.device) -> int | None:
    """What `device` has left for this process together with what the process already holds; None where unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device)
    if device.type != "cpu":
        return None
    limit, used = (
        _cgroup_bytes("memory.max", "memory/memory.limit_in_bytes"),
        _cgroup_bytes("memory.current", "memory/memory.usage_in_bytes"),
    )
    left = [_meminfo("MemAvailable"), None if limit is None or used is None else limit - used]
    known = [size for size in left if size is not None]
    return min(known) + _resident_bytes("VmRSS") if known else None


def _meminfo(key: str) -> int | None:
    return _kib_line("/proc/meminfo", key)


def _resident_bytes(key: str) -> int:
    return _kib_line("/proc/self/status", key) or 0


def _kib_line(path: str, key: str) -> int | None:
    """A figure of a file in /proc; through `os`, which is faster than `open`, as it is read with every batch."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # not Linux
        return None
    try:
        text = os.read(file, 2**16)
    finally:
        os.close(file)
    match = re.search(rf"^{key}:\s*(\d+) kB".encode(), text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _cgroup_bytes(v2: str, v1: str) -> int | None:
    """A figure of the container's control group; None where there is no limit."""
    for name in (v2, v1):
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


class PeakMeter:
    """Measures the most memory in use since `start`, and in each lap between.

    `reset` starts the device's own peak statistics anew, `read` reads them, `now` is what is in use at the moment;
    the last two give None where it cannot be known.
    """

    def __init__(
        self, reset: Callable[[], object], read: Callable[[], int | None], now: Callable[[], int | None]
    ) -> None:
        self._reset, self._read, self.current_bytes = reset, read, now
        self._highest = 0

    def start(self) -> None:
        """Begin a new measurement."""
        self._highest = 0
        self._reset()

    def lap(self) -> int | None:
        """The peak since `start` or the last lap."""
        if (peak := self._read()) is not None:
            self._highest = max(self._highest, peak)
            self._reset()
        return peak

    def peak_bytes(self) -> int | None:
        """The peak since `start`."""
        peak = self._read()
        return None if peak is None else max(self._highest, peak)


def peak_meter(device: torch.device) -> PeakMeter:
    """The meter for `device`: allocated bytes on CUDA, resident bytes of the process on Linux, none elsewhere."""
    if device.type == "cuda":
        return PeakMeter(
            lambda: torch.cuda.reset_peak_memory_stats(device),
            lambda: torch.cuda.max_memory_allocated(device),
            lambda: torch.cuda.memory_allocated(device),
        )
    if device.type == "cpu" and _forget_resident_peak():
        return PeakMeter(
            _forget_resident_peak,
            lambda: _resident_bytes("VmHWM") or None,
            lambda: _resident_bytes("VmRSS") or None,
        )
    return PeakMeter(lambda: None, lambda: None, lambda: None)


def _forget_resident_peak() -> bool:
    """Start the kernel's record of this process's peak anew (proc(5), /proc/pid/clear_refs); False if it may not be."""
    try:
        file = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:  # not Linux
        return False
    try:
        os.write(file, b"5")
    except OSError:  # a container that forbids it
        return False
    finally:
        os.close(file)
    return True


def give_back_unused(device: torch.device) -> None:
    """Let the process hold what is in use and no more, where its memory is what is measured: on a CPU.

    C libraries keep what was freed for later use; glibc can be asked to give it back (malloc_trim(3)). Without that, a
    small need after a large one would not show. Elsewhere nothing happens.
    """
    linux = device.type == "cpu" and sys.platform.startswith("linux")
    if linux and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
