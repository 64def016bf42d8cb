"""Several examples end to end in one row: cut between them, counted as what they are, exact where attention stops."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import wholebatch as wb
from oracle.one_pass import copied_gradients, distance
from wholebatch.batch.flattened import flattened
from wholebatch.errors import BatchLayoutError, LossNotAdditiveError

LENGTHS = [5, 2, 9, 4, 3, 7, 6, 2]


def examples() -> list[dict[str, list[int]]]:
    torch.manual_seed(0)
    return [{"input_ids": torch.randint(1, 40, (length,)).tolist()} for length in LENGTHS]


def collator(**options: Any) -> transformers.DataCollatorWithFlattening:
    return transformers.DataCollatorWithFlattening(**options)


def test_a_row_of_examples_is_cut_between_them() -> None:
    """As the collator makes a row of the chosen examples alone, in every field that it may add."""
    rows = examples()
    collate = collator(return_flash_attn_kwargs=True, return_seq_idx=True)
    piece = flattened(collate(rows), len(rows))
    assert piece is not None
    assert piece.num_examples == len(rows)
    for chosen in ([2], [0, 1], [5, 3, 7], range(8), range(2, 5)):
        taken, right = piece.take(chosen), collate([rows[place] for place in chosen])
        assert taken.keys() == right.keys()
        for name in right:
            assert torch.equal(torch.as_tensor(taken[name]), torch.as_tensor(right[name])), name


def test_what_cannot_be_cut_is_named() -> None:
    piece = flattened(collator()(examples()) | {"table": torch.ones(3, 4)}, len(LENGTHS))
    assert piece is not None
    with pytest.raises(BatchLayoutError, match="'table'"):
        piece.take([0])


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(1, 5),
        {"position_ids": torch.arange(6)[None]},
        {"position_ids": torch.tensor([[0, 1], [0, 1]])},
        {"position_ids": torch.tensor([[1, 0, 0, 1]])},
    ],
)
def test_other_batches_are_not_taken_for_one(batch: Any) -> None:
    assert flattened(batch, 2) is None


def gpt2(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options
    )
    return transformers.GPT2LMHeadModel(config)


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> wb.LossSum:
    """In the model's own precision: Hugging Face's is in float32."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return wb.LossSum(loss, (labels != -100).sum())


def alone(model: nn.Module) -> list[torch.Tensor | None]:
    """The gradient from the examples one by one."""
    model.zero_grad()
    total = sum(length - 1 for length in LENGTHS)
    for example in examples():
        ids = torch.tensor([example["input_ids"]])
        logits = model(input_ids=ids).logits[0, :-1]
        (nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / total).backward()
    gradients = copied_gradients(model)
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("size", [1, 2, 3, 8, "auto"])
def test_exact_where_attention_stops_at_the_examples(size: Any) -> None:
    model = gpt2(use_cache=False).double()
    right = alone(model)
    accumulator = wb.GradientAccumulator(model, loss_fn, collate_fn=collator(), micro_batch_size=size)
    report = accumulator.backward(examples())
    assert distance(copied_gradients(model), right) < 1e-10
    assert report.num_examples == len(LENGTHS)
    assert report.real_tokens == report.padded_tokens == sum(LENGTHS)


def test_refused_where_attention_does_not_stop() -> None:
    """With a cache, transformers does not look at where positions begin anew."""
    model = gpt2(use_cache=True)
    accumulator = wb.GradientAccumulator(model, loss_fn, collate_fn=collator(), micro_batch_size=2)
    with pytest.raises(LossNotAdditiveError):
        accumulator.backward(examples())
    assert all(parameter.grad is None for parameter in model.parameters())
