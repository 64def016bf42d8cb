"""The loop of any PyTorch training, with one line changed: fill in hidden tokens, 64 sequences per update, 8 at a time.

Run it with `python examples/plain_loop.py`; it takes a few seconds on a CPU.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb

VOCABULARY, LENGTH, HIDDEN = 20, 16, 0  # the token 0 hides another


class Filler(nn.Module):
    """One Transformer layer that guesses the hidden tokens of a sequence from the others."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(tokens) + self.positions))


def make_batch(num_examples: int = 64) -> dict[str, torch.Tensor]:
    """Sequences that go to and fro between two tokens; each sequence hides another number of its tokens."""
    tokens = torch.randint(1, VOCABULARY, (num_examples, 2)).repeat(1, LENGTH // 2)
    hidden = torch.rand(num_examples, LENGTH) < 0.6 * torch.rand(num_examples, 1)
    return {"tokens": tokens.masked_fill(hidden, HIDDEN), "labels": tokens.masked_fill(~hidden, -100)}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["labels"])  # a mean over the hidden tokens


torch.manual_seed(0)
model = Filler()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
accumulator = wb.GradientAccumulator(model, loss_fn, count="tokens", optimizer=optimizer, micro_batch_size=8)

for update in range(60):
    batch = make_batch()
    report = accumulator.backward(batch)  # instead of loss_fn(model, batch).backward()
    if report.should_step:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()
    if update % 10 == 0 or update == 59:
        print(f"update {update:2}  loss {report.loss:.4f}  a mean over {report.count:.0f} hidden tokens")
print(f"{report.num_examples} examples = {report.gradient_accumulation_steps} micro-batches of 8")
