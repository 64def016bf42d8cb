"""With nothing but torch: a few updates are those of the whole batch. Also run on the lowest torch that is claimed."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb

pytestmark = pytest.mark.smoke

NUM_CLASSES, LENGTH, IGNORED = 5, 6, -100


class TinyTagger(nn.Module):
    """Labels each token; float64, so that rounding does not hide a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.out = nn.Linear(8, NUM_CLASSES)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(tokens)))


def mean_over_labelled_tokens(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    scores = model(batch["tokens"]).flatten(0, 1)
    return cross_entropy(scores, batch["labels"].flatten(), ignore_index=IGNORED)


def batch_of(num_rows: int) -> dict[str, torch.Tensor]:
    """Rows with 1 to `LENGTH` labelled tokens, so that a mean of means would be wrong."""
    tokens = torch.randint(11, (num_rows, LENGTH))
    labels = torch.randint(NUM_CLASSES, (num_rows, LENGTH))
    labels[torch.arange(LENGTH) > torch.arange(num_rows).unsqueeze(1) % LENGTH] = IGNORED
    return {"tokens": tokens, "labels": labels}


def trained_in_one_pass(batches: list[dict[str, torch.Tensor]]) -> tuple[list[float], nn.Module]:
    torch.manual_seed(1)
    model = TinyTagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = mean_over_labelled_tokens(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def trained_in_micro_batches(batches: list[dict[str, torch.Tensor]], size: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(1)
    model = TinyTagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accumulator = wb.GradientAccumulator(
        model, mean_over_labelled_tokens, count="tokens", optimizer=optimizer, micro_batch_size=size
    )
    losses = []
    for batch in batches:
        report = accumulator.backward(batch)
        assert report.should_step
        assert sum(report.micro_batch_sizes) == len(batch["labels"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(report.loss.item())
    return losses, model


@pytest.mark.parametrize("size", [1, 3, 10])
def test_three_updates_are_those_of_the_whole_batch(size: int) -> None:
    """After 3 AdamW updates on 10 rows of unequal length, losses and parameters are those of one pass, to 1e-10."""
    batches = [batch_of(10) for _ in range(3)]
    losses, model = trained_in_micro_batches(batches, size)
    expected_losses, expected = trained_in_one_pass(batches)
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    for found, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
