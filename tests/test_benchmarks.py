"""What the benchmarks compute from their measurements, and one measurement from end to end; no timing is asserted."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytest.importorskip("transformers")


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch):
    """Import a file of benchmarks/ by its name, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield lambda name: __import__(name)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
