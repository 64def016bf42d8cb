"""Mixed precision: autocast round `backward`, and a GradScaler as its own documentation has it.

Run it with `python examples/grad_scaler.py`; it takes a few seconds on a CPU. With bfloat16 no scaler is needed.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wholebatch as wb


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["inputs"]), batch["labels"])  # a mean over the examples


def train(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=dtype == torch.float16)
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=16)

    skipped_by_scaler, first_loss = 0, None
    inputs = torch.randn(64, 20)
    batch = {"inputs": inputs, "labels": inputs[:, :5].argmax(dim=1)}
    for _ in range(40):
        with torch.autocast("cpu", dtype):
            report = accumulator.backward(batch, grad_scaler=scaler)  # one scale for the whole batch
        if report.should_step:  # speaks of the batch; a gradient that overflows is the scaler's business
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            old_scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= old_scale:
                scheduler.step()  # only with the optimizer: once per update
            else:
                skipped_by_scaler += 1
        optimizer.zero_grad()
        first_loss = first_loss or float(report.loss)
    print(f"{dtype}: loss {first_loss:.3f} -> {report.loss:.3f}, {skipped_by_scaler} updates skipped by the scaler")


train(torch.float16)
train(torch.bfloat16)
