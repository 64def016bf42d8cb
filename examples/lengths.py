"""Texts of unequal lengths, 64 per update: the same update from less than half of the tokens, as little is padded.

Run it with `python examples/lengths.py`; it takes a few seconds on a CPU.
"""

import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb

VOCABULARY, WIDTH = 50, 64


class Tagger(nn.Module):
    """Two Transformer layers that give each token a tag; padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(tokens), src_key_padding_mask=mask == 0))


def collate(examples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad to the longest of these; the tag of a token is whether it is odd."""
    tokens = pad_sequence(examples, batch_first=True)
    mask = pad_sequence([torch.ones_like(example) for example in examples], batch_first=True)
    return {"tokens": tokens, "mask": mask, "labels": (tokens % 2).masked_fill(mask == 0, -100)}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["tokens"], batch["mask"]).transpose(1, 2), batch["labels"])


torch.manual_seed(0)
lengths = torch.distributions.LogNormal(3.5, 0.8).sample((64,)).long().clamp(2, 256).tolist()
batch = [torch.randint(0, VOCABULARY, (length,)) for length in lengths]
gradients = {}
for regroup in (False, True):
    torch.manual_seed(1)
    model = Tagger()
    accumulator = wb.GradientAccumulator(
        model, loss_fn, count="tokens", collate_fn=collate, micro_batch_size=8, regroup=regroup
    )
    accumulator.backward(batch)  # the first batch is checked
    model.zero_grad()
    started = time.thread_time()
    report = accumulator.backward(batch)
    seconds, waste = time.thread_time() - started, report.padded_tokens / report.real_tokens
    gradients[regroup] = torch.cat([p.grad.flatten() for p in model.parameters()])
    print(f"regroup={regroup}: {waste:.2f} padded tokens for each real one, {seconds:.2f} s")
same = torch.allclose(gradients[True], gradients[False], rtol=1e-4, atol=1e-7)
print("the gradients are the same" if same else "the gradients differ")
