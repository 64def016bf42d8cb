"""Gradient accumulation by hand, its usual faults switched on one at a time, and wholebatch, side by side."""

# Run it with `python examples/by_hand.py`. It takes a few seconds on a CPU and prints the same figures each time.
#
# The task: learn a label for each token of 22 padded sequences, in batches of 8. Say that memory holds only 2. So each
# batch is cut into 4 micro-batches; the last batch has only 6 sequences, hence 3 micro-batches.

import torch
from torch import nn

import wholebatch as wb

NO_SCALING, MEANS, LAST_WINDOW = "no scaling", "mean of the micro-batches' means", "short last window divided by 4"
CLIPPING, SCHEDULER = "clipped per micro-batch", "scheduler stepped per micro-batch"

torch.manual_seed(0)
tokens, lengths = torch.randint(30, (22, 12)), torch.randint(1, 13, (22, 1))  # each sequence has its own length
DATA = {"tokens": tokens, "labels": tokens.roll(1).masked_fill(torch.arange(12) >= lengths, -100)}  # -100: padding


def cut(batch, size):  # the last piece may be smaller
    return [{name: field[i : i + size] for name, field in batch.items()} for i in range(0, len(batch["tokens"]), size)]


def mean_loss(model, batch):  # the mean over the labels, as every training script has it; padding is left out
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


# The classic loop. Without a fault it is exact; with a micro-batch as large as the batch, it is the loop of one pass.
def by_hand(model, optimizer, scheduler, max_norm, micro_batch_size=2, fault=None):
    for batch in cut(DATA, 8):
        # The window: the micro-batches of one update. All of it has to be there before its first backward pass, because
        # of the next line. A loop that takes micro-batches as they come (`if i % 4 == 3: optimizer.step()`) cannot know
        # it, and that is how the faults below begin.
        window = cut(batch, micro_batch_size)

        # The batch's loss is one sum over its labels, divided once by their number: all of them, wherever they lie.
        num_labels = (batch["labels"] != -100).sum()

        for micro_batch in window:
            # The share of this micro-batch in that sum. Its mean counts by its number of labels: one with 3 labels must
            # not move the model as much as one with 20.
            share = (micro_batch["labels"] != -100).sum() / num_labels

            if fault == NO_SCALING:
                share = 1.0  # four means are added up: the gradient is about four times too large
            if fault == MEANS:
                share = 1 / len(window)  # `loss / gradient_accumulation_steps`: right if all hold the same number
            if fault == LAST_WINDOW:
                share *= len(window) / 4  # a window of 3 is averaged as if it were one of 4

            # Forward holds the activations of one micro-batch only, and backward frees them. It adds to .grad, and that
            # is the whole trick: after the last micro-batch, .grad is the sum.
            (mean_loss(model, micro_batch) * share).backward()

            if fault == CLIPPING:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)  # cuts down a sum that is not complete

        # Only now is .grad the batch's gradient, and what happens once per update may happen: clip, step, zero, and
        # move the learning rate on. After the last window too, however short: forgotten, its examples are lost, or leak
        # into the next epoch.
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        for _ in window if fault == SCHEDULER else [batch]:
            scheduler.step()  # stepped per micro-batch, the learning rate falls four times too fast


# A loop that never heard of accumulation: no window, no share, no counter. One line stands for `loss.backward()`.
def with_wholebatch(model, optimizer, scheduler, max_norm):
    accumulator = wb.GradientAccumulator(model, mean_loss, count="tokens", micro_batch_size=2)
    for batch in cut(DATA, 8):
        accumulator.backward(batch)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


# What one epoch adds to the parameters, a row for each update: the gradient times the learning rate. SGD shows a wrong
# gradient as it is. Adam divides a constant factor out again, until weight decay, clipping or a change of the factor
# (the short window!) meets it: the faults are there all the same, only harder to find.
def updates(loop, max_norm, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 30))
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.01), []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def note(*_):
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * scheduler.get_last_lr()[0])

    optimizer.register_step_pre_hook(note)
    loop(model, optimizer, scheduler, max_norm, **options)
    return torch.stack(rows)


# How far the worst update of an epoch is from the truth, as a part of it. The truth is one pass over each batch.
def error(loop, max_norm, **options):
    truth = updates(by_hand, max_norm, micro_batch_size=8)
    return float(((updates(loop, max_norm, **options) - truth).norm(dim=1) / truth.norm(dim=1)).max())


print(f"{'error of the worst update':36}{'by hand':>10}{'wholebatch':>12}")
for fault in (None, NO_SCALING, MEANS, LAST_WINDOW, CLIPPING, SCHEDULER):
    max_norm = 0.1 if fault == CLIPPING else 1e9  # clipping would hide a wrong factor: it acts where it is the topic
    figures = error(by_hand, max_norm, fault=fault), error(with_wholebatch, max_norm)
    print("{:36}{:10.1e}{:12.1e}".format(fault or "no fault", *figures))
