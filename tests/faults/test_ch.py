"""Known faults of losses that are computed in chunks."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import wholebatch as wb
from wholebatch.facts import LossSum
from wholebatch.loss.chunked import linear_cross_entropy

pytestmark = pytest.mark.smoke

TOKENS, FEATURES, CLASSES, IGNORED = 10, 4, 5, -100
LABELS = {
    "ignored at the edges of chunks": [IGNORED, 1, IGNORED, IGNORED, 2, 0, IGNORED, 4, 3, IGNORED],
    "a chunk of three and one of four without any": [1, 2, 0, IGNORED, IGNORED, IGNORED, IGNORED, IGNORED, 3, 4],
    "none ignored": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4],
}
FORMS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"class_weights": 1.0},
    "capped": {"soft_cap": 0.8},
    "all": {"label_smoothing": 0.1, "class_weights": 1.0, "soft_cap": 0.8},
}


# ---- CH2 ----


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 10, 16])
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("in_view", [True, False], ids=["labels on the host", "labels not looked at"])
def test_ch2_the_chunks_do_not_show(
    chunk_rows: int, labels: list[int], form: dict[str, float], in_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and all gradients are those of the mean over all labelled tokens, to 1e-10 in float64."""
    hidden = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(CLASSES, dtype=torch.float64) if form.get("class_weights") else None
    cap, smoothing, targets = form.get("soft_cap"), form.get("label_smoothing", 0.0), torch.tensor(labels)
    logits = linear(hidden, weight, bias)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    right = cross_entropy(logits, targets, weights, label_smoothing=smoothing)
    if not in_view:
        monkeypatch.setattr("wholebatch.loss.chunked._labelled", everything)
    loss = linear_cross_entropy(
        hidden, weight, targets, bias=bias, class_weights=weights, soft_cap=cap, label_smoothing=smoothing,
        chunk_rows=chunk_rows,
    )  # fmt: skip
    found, counted = loss.sum / loss.count, targets != IGNORED
    assert float(loss.count) == pytest.approx(
        float(counted.sum() if weights is None else weights[targets[counted]].sum())
    )
    assert abs(float(found.detach()) - float(right.detach())) < 1e-10
    tensors = [hidden, weight, bias]
    pairs = zip(torch.autograd.grad(found, tensors), torch.autograd.grad(right, tensors), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-10


def everything(rows: Tensor, labels: Tensor, form: object) -> tuple[Tensor, Tensor, Tensor]:
    """As on a GPU: rows without a label are not left out."""
    weights, counted = getattr(form, "class_weights", None), labels != IGNORED
    return rows, labels, counted.sum() if weights is None else weights[labels[counted]].sum()


# ---- ZT3, in chunks ----


class Tagger(nn.Module):
    """Hidden states and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, FEATURES), nn.Linear(FEATURES, CLASSES)


def in_chunks(model: Tagger, batch: dict[str, Tensor]) -> LossSum:
    return linear_cross_entropy(
        model.body(batch["x"]), model.head.weight, batch["labels"], bias=model.head.bias, chunk_rows=3
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("heeds_should_step", [True, False])
def test_zt3_a_batch_without_labels_in_chunks(size: int, heeds_should_step: bool) -> None:
    """AdamW with weight decay: parameters and state bitwise as before, and the batch is reported as skipped."""
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    accumulator = wb.GradientAccumulator(model, in_chunks, micro_batch_size=size, optimizer=optimizer)
    good = {"x": torch.randn(4, 5, 3), "labels": torch.randint(CLASSES, (4, 5))}
    assert accumulator.backward(good).should_step
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    report = accumulator.backward(good | {"labels": torch.full((4, 5), IGNORED)})
    if report.should_step or not heeds_should_step:
        optimizer.step()
    assert not report.should_step
    assert "label" in (report.reason or "")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before[0].values(), strict=True))
    assert str(optimizer.state_dict()["state"]) == str(before[1])
