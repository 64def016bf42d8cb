"""Linear and cross-entropy in chunks against torch's own on whole logits: loss and every gradient, in every form."""

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wholebatch.errors import ConfigurationError
from wholebatch.facts import LossSum
from wholebatch.loss import kernels
from wholebatch.loss.chunked import linear_cross_entropy
from wholebatch.loss.kernels import Form, fused_pass

pytestmark = pytest.mark.smoke

ROWS, FEATURES, CLASSES, IGNORED = 10, 3, 5, -100
CHUNKS = (1, 3, 4, 10, 16)


@dataclass
class Case:
    """Tensors, and the form of the loss over them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    options: dict[str, Any]

    @property
    def inputs(self) -> list[Tensor]:
        return [one for one in (self.hidden, self.weight, self.bias) if one is not None and one.requires_grad]

    def logits(self) -> Tensor:
        logits, cap = linear(self.hidden, self.weight, self.bias), self.options.get("soft_cap")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def plain(self, reduction: str = "sum") -> Tensor:
        """By torch, from whole logits."""
        return cross_entropy(
            self.logits().flatten(0, -2).to(torch.promote_types(self.logits().dtype, torch.float32)),
            self.labels.flatten(),
            weight=self.options.get("class_weights"),
            ignore_index=self.options.get("ignore_index", IGNORED),
            label_smoothing=self.options.get("label_smoothing", 0.0),
            reduction=reduction,
        )

    def ours(self, chunk_rows: int) -> LossSum:
        return linear_cross_entropy(
            self.hidden, self.weight, self.labels, bias=self.bias, chunk_rows=chunk_rows, **self.options
        )


def case(
    labels: list[int] | None = None,
    bias: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    torch.manual_seed(seed)
    hidden = torch.randn(2, ROWS // 2, FEATURES, dtype=dtype).requires_grad_()
    weight = torch.randn(CLASSES, FEATURES, dtype=dtype).requires_grad_()
    offset = torch.randn(CLASSES, dtype=dtype).requires_grad_() if bias else None
    found = torch.randint(CLASSES, (ROWS,)) if labels is None else torch.tensor(labels)
    if options.get("class_weights") is True:
        options["class_weights"] = torch.rand(CLASSES, dtype=dtype)
    return Case(hidden, weight, offset, found.view(2, -1), options)


def error(found: list[Tensor], right: list[Tensor]) -> float:
    with torch._C.DisableTorchFunctionSubclass():  # of `Unread`
        return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(found, right, strict=True))


label = st.one_of(st.just(IGNORED), st.integers(0, CLASSES - 1))


@given(
    labels=st.lists(label, min_size=ROWS, max_size=ROWS),
    chunk_rows=st.sampled_from(CHUNKS),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    soft_cap=st.sampled_from([None, 0.7, 30.0]),
    bias=st.booleans(),
    seed=st.sampled_from([1.0, 0.37, -3.0, 0.0]),
    on_the_device=st.booleans(),
)
def test_as_torch_on_whole_logits(
    labels: list[int],
    chunk_rows: int,
    smoothing: float,
    weighted: bool,
    soft_cap: float | None,
    bias: bool,
    seed: float,
    on_the_device: bool,
) -> None:
    """Loss, mean, gradients in float64 to 1e-10, from any seed, with and without leaving out rows that do not count."""
    it = case(labels, bias, label_smoothing=smoothing, soft_cap=soft_cap, class_weights=weighted or None)
    right = torch.autograd.grad(it.plain() * seed, it.inputs)
    if on_the_device:  # labels that are not looked at, as on a GPU
        it.labels = it.labels.as_subclass(Unread)
    loss = it.ours(chunk_rows)
    if on_the_device:
        with torch._C.DisableTorchFunctionSubclass():
            it.labels = it.labels.as_subclass(Tensor)
            loss = LossSum(loss.sum.as_subclass(Tensor), loss.count.as_subclass(Tensor))
    assert error([loss.sum], [it.plain()]) < 1e-10
    assert error(list(torch.autograd.grad(loss.sum * seed, it.inputs)), list(right)) < 1e-10
    if any(one != IGNORED for one in labels):
        assert error([loss.sum / loss.count], [it.plain("mean")]) < 1e-10
    else:
        assert float(loss.sum.detach()) == float(loss.count) == 0.0


class Unread(Tensor):
    """A tensor whose values must not be waited for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__int__, Tensor.__bool__, Tensor.__float__, Tensor.tolist, Tensor.nonzero):
            raise AssertionError(f"{func.__name__} waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_another_ignored_label_and_gradients_only_where_wanted() -> None:
    it = case([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], ignore_index=2)
    it.weight.requires_grad_(False)
    right, loss = torch.autograd.grad(it.plain(), it.inputs), it.ours(4)
    assert loss.count == 8
    assert error(list(torch.autograd.grad(loss.sum, it.inputs, retain_graph=True)), list(right)) < 1e-10
    loss.sum.backward()
    assert it.weight.grad is None


def test_twice_through_a_graph_that_is_kept() -> None:
    """The second backward, from another seed, gives its own gradient, and leaves the first one as it was."""
    it = case([1, IGNORED, 2, 0, 4, 3, IGNORED, 1, 1, 2])
    loss, right = it.ours(3).sum, torch.autograd.grad(it.plain(), it.inputs)
    first = torch.autograd.grad(loss * 2.0, it.inputs, retain_graph=True)
    second = torch.autograd.grad(loss * -5.0, it.inputs)
    assert error(list(first), [2.0 * one for one in right]) < 1e-10
    assert error(list(second), [-5.0 * one for one in right]) < 1e-10


def test_a_double_backward_is_refused() -> None:
    it = case()
    with pytest.raises(ConfigurationError, match="no double backward"):
        torch.autograd.grad(it.ours(4).sum, [it.hidden], create_graph=True)


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    it = case()
    with torch.no_grad():
        assert not it.ours(4).sum.requires_grad
    assert it.ours(4).sum.requires_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("everything", [False, True], ids=["autocast", "a model of this type"])
def test_in_half_precision_as_torch(dtype: torch.dtype, tolerance: float, everything: bool) -> None:
    """Gradients have the types of their tensors; the loss is in float32."""
    it = case([1, IGNORED, 2, 0, 4, 3, IGNORED, 1, 1, 2], dtype=dtype if everything else torch.float32, soft_cap=5.0)
    with torch.autocast("cpu", dtype=dtype, enabled=not everything):
        right, loss = it.plain(), it.ours(4).sum
    assert loss.dtype == torch.float32
    wanted = torch.autograd.grad(right, it.inputs)
    found = torch.autograd.grad(loss, it.inputs)
    assert [one.dtype for one in found] == [one.dtype for one in it.inputs]
    assert abs(float(loss.detach()) - float(right.detach())) < tolerance * abs(float(right.detach()))
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm()) < tolerance * float(b.norm())


def test_small_gradients_survive_in_float16_as_with_torch() -> None:
    """Entries of the logits' gradient below float16's smallest number are kept by the scale of a GradScaler."""
    torch.manual_seed(0)
    hidden = torch.full((4, 1), 1.0, requires_grad=True)
    weight = torch.tensor([[0.0], [-19.0]], requires_grad=True)  # a probability of 5.6e-9 for the second class
    labels = torch.zeros(4, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.float16):
        [found] = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).sum * 65536.0, [weight])
        plain = cross_entropy(linear(hidden, weight).float(), labels, reduction="sum")
        [right] = torch.autograd.grad(plain * 65536.0, [weight])
    assert right[1] > 0
    torch.testing.assert_close(found, right, rtol=4e-3, atol=0.0)


def test_the_logits_never_exist_as_a_whole() -> None:
    largest = Largest()
    hidden, weight = torch.randn(64, 8).requires_grad_(), torch.randn(500, 8).requires_grad_()
    with largest:
        linear_cross_entropy(hidden, weight, torch.randint(500, (64,)), chunk_rows=4).sum.backward()
    assert largest.elements == 500 * 8


def test_a_frozen_weight_costs_nothing() -> None:
    """No gradient of its size is made."""
    hidden, weight = torch.randn(64, 8).requires_grad_(), torch.randn(500, 8)
    with Largest(beside=weight) as largest:
        linear_cross_entropy(hidden, weight, torch.randint(500, (64,)), chunk_rows=4).sum.backward()
    assert largest.elements == 4 * 500


class Largest(TorchDispatchMode):
    """Sees the largest tensor, `beside` one that is there already."""

    elements = 0

    def __init__(self, beside: Tensor | None = None) -> None:
        super().__init__()
        self._there = 0 if beside is None else beside.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        sizes = [one.numel() for one in made if one.untyped_storage().data_ptr() != self._there]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 4)}, r"hidden must be \(\.\.\., features\)"),
        ({"labels": torch.zeros(10, dtype=torch.long)}, "labels must have the shape of hidden"),
        ({"labels": torch.zeros(2, 5)}, "labels must be whole numbers"),
        ({"bias": torch.zeros(4)}, r"bias must be \(classes,\)"),
        ({"hidden": torch.zeros(2, 5, 3)}, "hidden is torch.float32, but weight torch.float64"),
        ({"class_weights": torch.ones(5, requires_grad=True)}, "class_weights must be"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
    ],
)
def test_what_cannot_be_right_is_refused(change: dict[str, Any], message: str) -> None:
    it = case()
    arguments = {"hidden": it.hidden, "weight": it.weight, "labels": it.labels, "bias": it.bias} | change
    with pytest.raises(ConfigurationError, match=message):
        linear_cross_entropy(**arguments)


# ---- Kernels of other libraries ----


def form(dtype: torch.dtype = torch.float32, **options: Any) -> Form:
    return Form(
        IGNORED,
        **({"label_smoothing": 0.0, "class_weights": None, "soft_cap": 2.0} | options),
        chunk_rows=4,
        dtype=dtype,
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    """Stand-ins for both libraries, and the options that each was called with last."""
    called: dict[str, dict[str, Any]] = {}

    def standing_in(name: str) -> Any:
        def kernel(
            hidden: Tensor, weight: Tensor, labels: Tensor, bias: Any = None, accum_dtype: Any = None, **options: Any
        ) -> Tensor:
            called[name] = options
            logits = linear(hidden, weight, bias)
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
            return cross_entropy(
                logits.float(),
                labels,
                options.get("ce_weight"),
                label_smoothing=options.get("label_smoothing", 0.0),
                reduction="sum",
            )

        return kernel

    cut = types.ModuleType("cut_cross_entropy")
    cut.linear_cross_entropy = standing_in("cut")  # type: ignore[attr-defined]
    liger = types.ModuleType("liger_kernel.transformers.functional")
    liger.liger_fused_linear_cross_entropy = standing_in("liger")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", cut)
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
        monkeypatch.setitem(sys.modules, name, liger)
    cut_found, liger_found = kernels._cut, kernels._liger
    for cached in (cut_found, liger_found):
        cached.cache_clear()
    yield called
    for cached in (cut_found, liger_found):
        cached.cache_clear()


def chosen(kind: str, weight: torch.dtype, asked: Form) -> str:
    found = fused_pass(kind, torch.zeros(CLASSES, FEATURES, dtype=weight), asked)
    return "" if found is None else found.__name__.removeprefix("_by_")


def test_a_kernel_is_used_for_the_forms_it_supports_only(installed: dict[str, dict[str, Any]]) -> None:
    """On a GPU; never in float64, and none that rounds or filters what plain torch would not."""
    half, full = torch.bfloat16, torch.float32
    assert chosen("cpu", full, form()) == ""
    assert chosen("cuda", full, form()) == "liger"
    assert chosen("cuda", half, form(half)) == chosen("cuda", full, form(torch.float16)) == "cut_cross_entropy"
    assert chosen("cuda", half, form(half, label_smoothing=0.1)) == "liger"
    assert chosen("cuda", half, form(half, class_weights=torch.ones(CLASSES))) == "liger"
    assert chosen("cuda", full, form(torch.float16, label_smoothing=0.1)) == ""
    assert chosen("cuda", torch.float64, form(torch.float64)) == ""


def test_liger_without_full_sums_is_not_used_under_autocast(
    installed: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_liger", lambda: lambda input, weight, target: None)
    assert chosen("cuda", torch.float32, form(torch.bfloat16, label_smoothing=0.1)) == ""
    assert chosen("cuda", torch.bfloat16, form(torch.bfloat16, label_smoothing=0.1)) == "liger"


def test_nothing_is_used_that_is_not_installed() -> None:
    assert kernels._module("no_such_module_anywhere") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_through_a_kernel_as_without(
    installed: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Loss, gradients from any seed, and twice; with the options that make the kernel exact."""
    it = case([1, 0, 2, 0, 4, 3, 2, 1, 1, 2], dtype=dtype, soft_cap=2.0)
    right = torch.autograd.grad(it.ours(4).sum * 3.0, it.inputs)
    monkeypatch.setattr("wholebatch.loss.chunked.fused_pass", lambda kind, *rest: fused_pass("cuda", *rest))
    loss = it.ours(4).sum
    for _ in range(2):
        found = torch.autograd.grad(loss * 3.0, it.inputs, retain_graph=True)
        for a, b in zip(found, right, strict=True):
            assert float((a - b).norm()) <= (1e-6 if dtype == torch.float32 else 3e-2) * float(b.norm())
    [(name, options)] = installed.items()
    assert (name, options["reduction"]) == ("liger" if dtype == torch.float32 else "cut", "sum")
    assert options.get("impl", "cce_exact") == "cce_exact"
