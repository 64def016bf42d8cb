"""Bad input gets an error that says what is wrong, the numbers and the way out; and nothing is changed by it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholebatch as wb
from wholebatch import errors

Batch = dict[str, Any]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4).double()


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(1)
    return {"x": torch.randn(5, 3, dtype=torch.float64), "labels": torch.randint(0, 4, (5,))}


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mean over examples."""
    return F.cross_entropy(model(batch["x"]), batch["labels"])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"micro_batch_size": 0}, errors.ConfigurationError, r"micro_batch_size=0.*at least 1"),
        ({"micro_batch_size": -3}, errors.ConfigurationError, "micro_batch_size=-3"),
        ({"micro_batch_size": 2.0}, errors.ConfigurationError, "micro_batch_size=2.0"),
        ({"micro_batch_size": True}, errors.ConfigurationError, "micro_batch_size=True"),
        ({"micro_batch_size": "big"}, errors.ConfigurationError, '"auto"'),
        ({"memory_budget": 1}, errors.MemoryBudgetError, "below 1 MiB.*did you mean a fraction"),
        ({"memory_budget": 0.0}, errors.MemoryBudgetError, "fraction"),
        ({"memory_budget": "6 gigs"}, errors.MemoryBudgetError, '"6GiB"'),
        ({"memory_budget": 1, "micro_batch_size": 2}, errors.MemoryBudgetError, "below 1 MiB"),
        ({"on_bad_batch": "drop"}, errors.ConfigurationError, '"skip", "raise" or "ignore"'),
        ({"max_skipped_batches": 0}, errors.ConfigurationError, "max_skipped_batches=0"),
        ({"regroup": "no"}, errors.ConfigurationError, "True or False"),
        ({"optimizer": torch.optim.SGD}, errors.ConfigurationError, "one optimizer"),
        ({"optimizer": []}, errors.ConfigurationError, "one optimizer"),
        ({"collate_fn": 5}, errors.ConfigurationError, "collate_fn=5"),
        ({"layout": {"shared_fields": ["w"]}}, errors.ConfigurationError, "wb.BatchLayout"),
        ({"count": "token"}, errors.ConfigurationError, "count='token' is unknown"),
        ({"count": 4}, errors.ConfigurationError, "count=4 is unknown"),
        ({"count": {}}, errors.ConfigurationError, "unknown"),
        ({"count": {"a": "words"}}, errors.ConfigurationError, r"terms \['a'\]"),
    ],
    ids=str,
)
def test_options_that_cannot_be_right(
    model: nn.Module, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        wb.GradientAccumulator(model, loss_fn, **{"count": "examples", **options})
    assert isinstance(caught.value, wb.WholeBatchError)


@pytest.mark.parametrize(
    "criterion",
    [nn.CrossEntropyLoss(), nn.MSELoss(reduction="sum"), F.cross_entropy, F.binary_cross_entropy_with_logits],
)
def test_a_criterion_is_not_a_loss_function(model: nn.Module, criterion: Any) -> None:
    """The message shows the two lines to write."""
    with pytest.raises(errors.LossFormError, match=r"def loss_fn\(model, batch\):\n +return (nn|F)\."):
        wb.GradientAccumulator(model, criterion, count="examples")


def test_no_loss_function(model: nn.Module) -> None:
    with pytest.raises(errors.LossFormError, match=r"Linear.*Pass loss_fn"):
        wb.GradientAccumulator(model, count="examples")


def test_arguments_in_another_order_and_lazy_parameters(model: nn.Module) -> None:
    with pytest.raises(errors.ConfigurationError, match="first argument must be the model"):
        wb.GradientAccumulator(loss_fn, model, count="examples")  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match=r"'weight'.*lazy"):
        wb.GradientAccumulator(nn.LazyLinear(3), loss_fn, count="examples")


def untouched(model: nn.Module, call: Callable[[], Any], error: type[Exception], says: str) -> None:
    """`call` raises `error`; parameters, `.grad` and random state stay as they were."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [(p.detach().clone(), p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    random = torch.get_rng_state()
    with pytest.raises(error, match=says) as caught:
        call()
    assert isinstance(caught.value, wb.WholeBatchError)
    for parameter, (value, gradient, gradient_value) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient
        assert torch.equal(gradient, gradient_value)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("loss", "error", "says"),
    [
        (lambda m, b: loss_fn(m, b).item(), errors.LossFormError, r"Python number.*\.item\(\)"),
        (lambda m, b: None, errors.LossFormError, "NoneType"),
        (lambda m, b: "loss", errors.LossFormError, "str"),
        (lambda m, b: m(b["x"]), errors.LossFormError, r"shape \(2, 4\)"),
        (lambda m, b: m(b["x"]).argmax(), errors.LossFormError, "torch.int64"),
        (lambda m, b: loss_fn(m, b).detach(), errors.LossFormError, "depends on a trainable parameter"),
        (lambda m, b: {}, errors.LossFormError, "mapping"),
        (lambda m, b: {"a": loss_fn(m, b)}, errors.LossFormError, r"'a': 'Tensor'"),
        (lambda m, b: {"a": wb.LossSum(loss_fn(m, b), 1)}, errors.CountRequiredError, r"terms \['a'\].*count=\{"),
        (lambda m, b: wb.LossSum(m(b["x"]), 1), errors.LossFormError, "0-d"),
        (lambda m, b: wb.LossSum(loss_fn(m, b), torch.ones(2)), errors.LossFormError, "one number"),
        (lambda m, b: wb.LossSum(loss_fn(m, b) * len(b["x"]), len(b["x"]), {"a": 1.0}), errors.LossFormError, "pair"),
    ],
)
def test_a_loss_of_no_known_form(model: nn.Module, batch: Batch, loss: Any, error: type[Exception], says: str) -> None:
    accumulator = wb.GradientAccumulator(model, loss, count="examples", micro_batch_size=2)
    untouched(model, lambda: accumulator.backward(batch), error, says)


def test_a_scalar_without_a_count_is_told_its_count(model: nn.Module, batch: Batch) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, micro_batch_size=2)
    untouched(model, lambda: accumulator.backward(batch), errors.CountRequiredError, 'pass count="examples"')


@pytest.mark.parametrize("size", [2, 64], ids=["cut", "uncut"])
def test_a_scalar_without_a_count_is_refused_also_where_nothing_is_cut(
    model: nn.Module, batch: Batch, size: int
) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, micro_batch_size=size)
    untouched(model, lambda: accumulator.backward(batch), errors.CountRequiredError, "say what it is a mean over")


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (lambda b: -1, "is -1; it must be finite and not negative"),
        (lambda b: float("nan"), "nan"),
        (lambda b: float("inf"), "inf"),
        (lambda b: None, "NoneType, not a number"),
        (lambda b: torch.ones(2), r"shape \(2,\)"),
        (lambda b: 3, "not additive"),
    ],
)
def test_impossible_counts(model: nn.Module, batch: Batch, count: Any, says: str) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count=count, micro_batch_size=2)
    untouched(model, lambda: accumulator.backward(batch), errors.CountError, says)


def test_counts_that_come_with_the_loss_are_checked_too(model: nn.Module, batch: Batch) -> None:
    def negative(model: nn.Module, batch: Batch) -> wb.LossSum:
        return wb.LossSum(loss_fn(model, batch) * len(batch["x"]), -len(batch["x"]))

    def other(model: nn.Module, batch: Batch) -> wb.LossSum:
        return wb.LossSum(loss_fn(model, batch) * len(batch["x"]), 2 * len(batch["x"]))

    untouched(model, lambda: wb.GradientAccumulator(model, negative).backward(batch), errors.CountError, "negative")
    stated = wb.GradientAccumulator(model, other, count="examples", micro_batch_size=8)
    untouched(model, lambda: stated.backward(batch), errors.CountError, "comes to 10 .*says 5")


def test_labels_that_cannot_be_found(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, lambda m, b: m(b).mean(), count="tokens")
    untouched(model, lambda: accumulator.backward(torch.zeros(4, 3).double()), errors.CountError, "labels to count")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"x": torch.zeros(5, 3), "labels": torch.zeros(4)}, r"labels.*\(4,\)"),
        ({"x": torch.tensor(1.0)}, "dimension of examples|batch dimension"),
        ({"x": torch.zeros(0, 3), "labels": torch.zeros(0)}, "0 examples|no example|empty"),
        ({"x": torch.zeros(5, 3), "thing": object()}, "thing.*object"),
        ({"x": torch.zeros(5, 3), "size": (1, 2, 3, 4, 5)}, "size"),
        ({"x": torch.zeros(5, 3), "class_weights": torch.zeros(5)}, r"class_weights.*\(5,\)"),
        ({"x": torch.zeros(5, 3), "names": ["a", "b"]}, "names"),
        ([torch.zeros(5)] * 64, "list of 64 vectors.*collate_fn"),
        ([torch.zeros(n) for n in (3, 5, 2, 7)], "list of 4 vectors.*collate_fn"),
    ],
)
def test_batches_that_cannot_be_cut(model: nn.Module, wrong: Batch, says: str) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    untouched(model, lambda: accumulator.backward(wrong), errors.BatchLayoutError, says)


def test_a_list_without_collate_fn_and_a_mapping_with_it(model: nn.Module, batch: Batch) -> None:
    examples = [{"x": torch.zeros(3), "labels": 1}] * 5
    plain = wb.GradientAccumulator(model, loss_fn, count="examples")
    untouched(model, lambda: plain.backward(examples), errors.BatchLayoutError, "collate_fn")
    collating = wb.GradientAccumulator(model, loss_fn, count="examples", collate_fn=lambda examples: batch)
    untouched(model, lambda: collating.backward(batch), errors.BatchLayoutError, "dict")
    untouched(model, lambda: collating.backward([]), errors.BatchLayoutError, "empty")
    losing = wb.GradientAccumulator(
        model, loss_fn, count="examples", collate_fn=lambda examples: {"x": torch.zeros(1, 3)}, micro_batch_size=2
    )
    untouched(model, lambda: losing.backward([1, 2, 3]), errors.BatchLayoutError, "made 1 rows of the 2 examples")


def test_a_wrong_count_and_a_coupled_loss(model: nn.Module, batch: Batch) -> None:
    summed = wb.GradientAccumulator(model, loss_fn, count="sum", micro_batch_size=2)
    untouched(model, lambda: summed.backward(batch), errors.LossNotAdditiveError, 'pass count="examples"')

    def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
        features = F.normalize(model(batch["x"]), dim=1)
        return F.cross_entropy(features @ features.T.roll(1, 0), torch.arange(len(features)))

    coupled = wb.GradientAccumulator(model, contrastive, count="examples", micro_batch_size=2)
    untouched(model, lambda: coupled.backward(batch), errors.LossNotAdditiveError, "compared with each other")


def test_gradients_switched_off_and_nothing_to_train(model: nn.Module, batch: Batch) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples")
    with torch.no_grad():
        untouched(model, lambda: accumulator.backward(batch), errors.UnsupportedModelError, "no_grad")
    model.requires_grad_(False)
    untouched(model, lambda: accumulator.backward(batch), errors.UnsupportedModelError, "no trainable parameter")


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a.evaluate([]),
        lambda a, b: a.evaluate(iter([])),
        lambda a, b: a.evaluate({**b, "labels": torch.full((5,), -100)}),
    ],
)
def test_nothing_to_evaluate(model: nn.Module, batch: Batch, call: Any) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count=lambda b: (b["labels"] != -100).sum())
    untouched(model, lambda: call(accumulator, batch), errors.CountError, "nothing to evaluate")


def test_evaluate_wants_batches(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples")
    untouched(model, lambda: accumulator.evaluate(5), errors.BatchLayoutError, "not a int")


def test_a_scaler_that_is_none(model: nn.Module, batch: Batch) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples", micro_batch_size=2)
    scaler: Any = 1024.0
    untouched(model, lambda: accumulator.backward(batch, grad_scaler=scaler), errors.ConfigurationError, "GradScaler")


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, "state"])
def test_a_state_of_something_else(model: nn.Module, state: Any) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples")
    before = accumulator.state_dict()
    untouched(model, lambda: accumulator.load_state_dict(state), errors.ConfigurationError, "GradientAccumulator")
    assert accumulator.state_dict() == before


def test_a_state_of_another_version(model: nn.Module) -> None:
    accumulator = wb.GradientAccumulator(model, loss_fn, count="examples")
    later = {**accumulator.state_dict(), "version": 99}
    untouched(model, lambda: accumulator.load_state_dict(later), errors.ConfigurationError, "version 99")
