"""What a scalar loss was divided by, read from the head of its autograd graph.

Used for the message of the error that asks for `count=`, and as a second opinion where figures cannot decide. The graph
is walked from the loss downwards, through whatever changes neither sum nor mean, to the first division or mean; only
that outermost divisor counts. Nothing is changed and nothing is run.

What the graph cannot tell:

- A multiplication by a number under 1 over a bare sum is read as a division (`s * (1/n)`); over a mean, a
  multiplication or division by a number is read as a scale (`0.5 * ce`, `ce / 8`), since the mean's own divisor is
  there to be read. A mean times its own count is a sum again.
- A division over additions is read as a divisor if it divides by as many terms as were added
  (`sum(losses) / len(losses)`), or if no term was divided before; otherwise as a scale.
- Sums and means of a single element say nothing, and are passed over.
- Weights that were normalised beforehand leave a plain sum.
- Compiled functions and custom autograd Functions show nothing of their inside; a division above one is its divisor.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

Node: TypeAlias = torch.autograd.graph.Node


@dataclass(frozen=True)
class LossHead:
    """What the head of a loss's graph says about the loss. Holds no graph."""

    denominator: float | None
    """What the loss's outermost sum was divided by; 1.0 for a plain sum; None where it cannot be read. With several
    terms, the denominator of those that were divided, if it is one and the same."""

    terms: int
    """1, or the number of added terms (cross-entropy + router loss, or + penalty); 0 where nothing can be read. The two
    halves of a label-smoothed loss are one term."""

    form: str
    """In words, for messages: "mean of cross-entropy over 13", "sum over 24 elements divided by 13"."""


def read_head(loss: torch.Tensor) -> LossHead:
    """What a scalar loss was divided by, as far as its autograd graph shows it.

    Never raises: what is unknown, freed by a backward, changed in place, or kept by saved-tensor hooks (activation
    checkpointing, offloading: unpacking would run the user's code again) is reported as unreadable. Older torch (2.6)
    does not show whether there are hooks; there they are run. Waits for the device: numbers are copied to the host.

    Args:
        loss: One element, of any shape, before its backward.
    """
    if loss.numel() != 1 or loss.grad_fn is None:
        return LossHead(None, 0, f"a tensor of shape {tuple(loss.shape)} without a readable graph")
    reading = _read(loss.grad_fn)
    form = _in_words(reading)
    if reading.kind == "unread":
        return LossHead(None, 0, form)
    terms = max(1, len(reading.addends))
    if reading.kind == "mean" or reading.divisor is None:
        return LossHead(reading.divisor, terms, form)
    if 0 < abs(reading.scale) < 1:
        divisor = 1 / abs(reading.scale)
        return LossHead(divisor, terms, f"{reading.form} times {reading.scale:g}, that is divided by {_plain(divisor)}")
    hint = "no division in sight; weights that were normalised beforehand would look the same"
    return LossHead(1.0, terms, f"plain {form} ({hint})")


def suggest_count(head: LossHead, candidates: Mapping[str, float]) -> str | None:
    """The name of the one candidate that equals the denominator; None if none does, or several do.

    Args:
        head: From `read_head`. Where `head.terms` > 1 the name speaks of the divided terms only.
        candidates: Counts by name, `{"sum": 1, "examples": 4, "tokens": 13, "tokens after the shift": 12}`.
    """
    if head.denominator is None:
        return None
    fitting = [name for name, count in candidates.items() if math.isclose(count, head.denominator, rel_tol=1e-6)]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True)
class _Reading:
    """What is known of the value at one node."""

    kind: Literal["sum", "mean", "unread"]
    """"sum": nothing has divided it yet, a division to come is its divisor."""

    divisor: float | None
    form: str
    scale: float = 1.0
    addends: tuple["_Reading", ...] = ()


@dataclass(frozen=True)
class _Step:
    """One node: the nodes to read next, and how their readings combine to its own."""

    inputs: Sequence[Node]
    combine: Callable[..., _Reading]


class _UnreadableError(Exception):
    """This node cannot be read; caught in this file."""


_UNREADABLE = (_UnreadableError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What may be raised where another torch names or saves things differently."""

_MOST_FORKS = 4
_MOST_ADDENDS = 2**14


def _read(node: Node, forks: int = _MOST_FORKS) -> _Reading:
    """Down while a single input leads on, then combined on the way up; only additions recurse, `forks` deep."""
    way_up: list[Callable[..., _Reading]] = []
    while True:
        step = _step(node) if forks else _unread(node)
        way_up.append(step.combine)
        if len(step.inputs) != 1:
            break
        node = step.inputs[0]
    readings = [_read(one, forks - 1) for one in step.inputs]
    for combine in reversed(way_up):
        readings = [combine(*readings)]
    return readings[0]


def _step(node: Node) -> _Step:
    try:
        return _STEPS.get(_operation(node), _unread)(node)
    except _UNREADABLE:
        return _unread(node)


def _operation(node: Node) -> str:
    """`MulBackward0` -> `Mul`. A custom Function's name never ends in a digit, so that it is not taken for torch's."""
    match = re.fullmatch(r"(\w+)Backward\d+", node.name())
    return match[1] if match else ""


def _unread(node: Node) -> _Step:
    return _known(_Reading("unread", None, f"something that cannot be read ({node.name()})"))


def _known(reading: _Reading) -> _Step:
    return _Step((), lambda: reading)


# --- what a node holds ------------------------------------------------------------------------------------------------


def _inputs(node: Node) -> list[Node | None]:
    """None for an input without a graph: a constant."""
    return [function for function, _ in node.next_functions]


def _sole_input(node: Node) -> Node:
    found = [one for one in _inputs(node) if one is not None]
    if len(found) != 1:
        raise _UnreadableError
    return found[0]


def _saved(node: Node, name: str) -> Any:
    if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
        raise _UnreadableError
    try:
        return getattr(node, f"_saved_{name}")
    except Exception as error:  # freed, changed in place, or a hook, which may raise anything
        raise _UnreadableError from error


def _number(node: Node, name: str) -> float:
    """A saved number or one-element tensor; not of tensor subclasses, whose reading may communicate."""
    value = _saved(node, name)
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.numel() != 1:
            raise _UnreadableError
        value = value.item()
    if not math.isfinite(number := float(value)):
        raise _UnreadableError
    return number


def _sizes(node: Node) -> tuple[int, ...]:
    """The shape of the node's input."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return tuple(_saved(node, "self_sym_sizes"))
    return tuple(_saved(node, "self").shape)


def _num_reduced(node: Node) -> int:
    """How many elements each element of a sum or mean was made of."""
    sizes, dims = _sizes(node), getattr(node, "_saved_dim", None)
    return math.prod(sizes[_signed(dim)] for dim in dims) if dims else math.prod(sizes)


def _signed(number: int) -> int:
    """Negative integers are saved as unsigned 64-bit ones."""
    return number - 2**64 if number >= 2**63 else number


# --- numbers that only scale ------------------------------------------------------------------------------------------


def _factor(node: Node) -> float:
    """The number in a multiplication, on whichever side it stands."""
    _sole_input(node)
    return _number(node, "other" if _inputs(node)[0] is not None else "self")


def _divisor(node: Node) -> float:
    """The number below the line. Unreadable if the loss is below the line, or the divisor has a gradient itself."""
    if _inputs(node)[0] is not _sole_input(node) or not (number := _number(node, "other")):
        raise _UnreadableError
    return number


def _one(node: Node) -> float:
    return 1.0


def _one_if_single(node: Node) -> float:
    """Indexing leaves the value alone where there is a single element to choose."""
    if math.prod(_sizes(node)) != 1:
        raise _UnreadableError
    return 1.0


_FACTORS: dict[str, Callable[[Node], float]] = {
    **dict.fromkeys(("Alias", "Clone", "ToCopy", "View"), _one),
    **dict.fromkeys(("Permute", "Squeeze", "T", "Transpose", "Unsqueeze"), _one),
    **dict.fromkeys(("Index", "Select", "Slice"), _one_if_single),
    "Neg": lambda node: -1.0,
    "Mul": _factor,
    "Div": lambda node: 1 / _divisor(node),
}
"""What every element was multiplied by."""


def _scaling(node: Node) -> _Step:
    factor = _FACTORS[_operation(node)](node)
    return _Step((_sole_input(node),), lambda reading: _scaled(reading, factor))


def _scaled(reading: _Reading, factor: float) -> _Reading:
    its_count = reading.divisor if reading.kind == "mean" and reading.divisor else 1.0
    if its_count != 1 and math.isclose(factor, its_count, rel_tol=1e-6):
        return _Reading("sum", 1.0, f"{reading.form} times {_plain(factor)}", reading.scale)
    return replace(reading, scale=reading.scale * factor)


def _division(node: Node) -> _Step:
    divisor = _divisor(node)
    return _Step((_sole_input(node),), lambda reading: _divided(reading, divisor))


def _divided(reading: _Reading, divisor: float) -> _Reading:
    if len(reading.addends) == divisor and len({one.kind for one in reading.addends}) == 1:
        own = f", each over {_plain(reading.divisor)}" if reading.kind == "mean" and reading.divisor else ""
        return _Reading("mean", divisor, f"mean over {_plain(divisor)} added terms{own}", reading.scale)
    if reading.kind == "mean":
        return _scaled(reading, 1 / divisor)
    form = f"({reading.form})" if reading.addends else reading.form
    return _Reading("mean", divisor, f"{form} divided by {_plain(divisor)}", reading.scale)


def _passed_over(node: Node) -> _Step:
    return _Step((_sole_input(node),), lambda reading: reading)


def _chosen_branch(node: Node) -> _Step:
    branch = _inputs(node)[0 if _number(node, "condition") else 1]
    if branch is None:
        raise _UnreadableError
    return _Step((branch,), lambda reading: reading)


# --- sums and means ---------------------------------------------------------------------------------------------------


def _sum(node: Node) -> _Step:
    count = _num_reduced(node)
    return _passed_over(node) if count == 1 else _known(_sum_over(count, _sole_input(node)))


def _mean(node: Node) -> _Step:
    count = _num_reduced(node)
    return _passed_over(node) if count == 1 else _known(_Reading("mean", float(count), f"mean over {count} elements"))


def _sum_over(count: int, node: Node) -> _Reading:
    """A sum, with the numbers that multiply or divide all of its elements, since sums are linear."""
    form, scale = f"sum over {count} elements", 1.0
    try:
        while (operation := _operation(node)) in _FACTORS or operation == "Sum":
            scale *= _FACTORS.get(operation, _one)(node)
            node = _sole_input(node)
    except _UNREADABLE:  # a mask or weights, one for each element
        return _Reading("sum", 1.0, form, scale)
    if operation == "Mean":  # of which of the two the loss is a mean over, only its author knows
        return _Reading("sum", None, f"{form} that are means over {_num_reduced(node)}", scale)
    return _Reading("sum", 1.0, form, scale)


def _dot_product(node: Node) -> _Step:
    return _known(_Reading("sum", 1.0, "sum of products"))


def _cross_entropy(node: Node) -> _Step:
    remark = "" if _saved(node, "weight") is None else " (class weights included)"
    return _loss_over(node, _total_weight(node), "cross-entropy", remark)


def _total_weight(node: Node) -> float:
    """What the cross-entropy was divided by; counted anew where it was saved in a low precision (1027 as 1024)."""
    if _saved(node, "total_weight").dtype not in (torch.bfloat16, torch.float16):
        return _number(node, "total_weight")
    target, weight = _saved(node, "target"), _saved(node, "weight")
    kept = target[target != _signed(_saved(node, "ignore_index"))]
    return float(kept.numel() if weight is None else weight.double()[kept].sum().item())


def _elementwise_loss(node: Node) -> _Step:
    return _loss_over(node, math.prod(_sizes(node)), _ELEMENTWISE_LOSSES[_operation(node)])


def _rowwise_loss(node: Node) -> _Step:
    sizes = _sizes(node)
    return _loss_over(node, sizes[0] if len(sizes) > 1 else 1, _ROWWISE_LOSSES[_operation(node)])


def _loss_over(node: Node, count: float, name: str, remark: str = "") -> _Step:
    reduction = _REDUCTIONS[_saved(node, "reduction")]
    if reduction == "none" or count == 0:
        raise _UnreadableError
    if reduction == "sum":
        return _known(_Reading("sum", 1.0, f"sum of {name}{remark}"))
    return _known(_Reading("mean", float(count), f"mean of {name} over {_plain(count)}{remark}"))


# --- additions --------------------------------------------------------------------------------------------------------


def _addition(node: Node) -> _Step:
    addends, constant = _addends(node)
    classes = _smoothed_classes(node)

    def combine(*readings: _Reading) -> _Reading:
        scaled = [_scaled(reading, factor) for reading, (_, factor) in zip(readings, addends, strict=True)]
        return _added([one for one in scaled if one.scale] or scaled, classes, constant)

    return _Step([one for one, _ in addends], combine)


def _addends(head: Node) -> tuple[list[tuple[Node, float]], bool]:
    """The terms of nested additions in the order written, each with its factor; and whether constants were added."""
    found: list[tuple[Node, float]] = []
    pending, constant = [(head, 1.0)], False
    while pending:
        if len(pending) + len(found) > _MOST_ADDENDS:
            raise _UnreadableError
        node, factor = pending.pop()
        factors = _ADDITIONS.get(_operation(node))
        if factors is None or (node is not head and _smoothed_classes(node)):
            found.append((node, factor))
            continue
        alpha = _number(node, "alpha") if hasattr(node, "_saved_alpha") else 1.0
        inputs = [
            (one, factor * own) for one, own in zip(_inputs(node), factors(alpha), strict=False) if one is not None
        ]
        constant = constant or len(inputs) < 2
        pending += reversed(inputs)
    return found, constant


def _added(terms: Sequence[_Reading], classes: int | None, constant: bool) -> _Reading:
    if len(terms) == 1:
        return replace(terms[0], form=f"{terms[0].form} (a constant added)") if constant else terms[0]
    if classes is not None and (smoothed := _label_smoothed(terms, classes)) is not None:
        return smoothed
    terms = [one for term in terms for one in _flat(term)]
    divisors = {term.divisor for term in terms if term.kind != "unread" and (term.kind, term.divisor) != ("sum", 1.0)}
    all_sums = all(term.kind == "sum" for term in terms) and not divisors
    divisor = 1.0 if all_sums else divisors.pop() if len(divisors) == 1 else None
    kind: Literal["sum", "mean"] = "mean" if any(term.kind == "mean" for term in terms) else "sum"
    added = _Reading(kind, divisor, f"sum of {len(terms)} terms: {_listed(terms)}", addends=tuple(terms))
    return _divided(added, float(len(terms))) if _are_shares(terms) else added


def _are_shares(terms: Sequence[_Reading]) -> bool:
    """Whether each was divided by their number: `total += loss / n`. Two halves are more often two different losses."""
    alike = len({term.kind for term in terms}) == 1 and len(terms) > 2
    return alike and all(math.isclose(abs(term.scale) * len(terms), 1, rel_tol=1e-6) for term in terms)


def _flat(term: _Reading) -> Iterable[_Reading]:
    return [_scaled(one, term.scale) for one in term.addends] or [term]


def _listed(terms: Sequence[_Reading]) -> str:
    shown = [_in_words(term) for term in terms[:3]]
    return "; ".join(shown) + (f"; {len(terms) - len(shown)} more" if len(terms) > len(shown) else "")


def _label_smoothed(terms: Sequence[_Reading], classes: int) -> _Reading | None:
    """The two halves of a label-smoothed cross-entropy as one; one half may be a mean over the classes too."""
    first, second = sorted(terms, key=lambda term: term.divisor or math.inf)
    if first.kind != second.kind or not first.divisor or second.divisor not in (first.divisor, first.divisor * classes):
        return None
    return replace(first, scale=1.0, form=f"{first.form}, in two parts as with label smoothing")


def _smoothed_classes(addition: Node) -> int | None:
    """The number of classes, if both terms were made of the very same log-probabilities, as label smoothing does."""
    log_softmaxes = [_log_softmax_below(node) for node in _inputs(addition)]
    first = log_softmaxes[0]
    if first is None or len(log_softmaxes) != 2 or log_softmaxes[1] is not first:
        return None
    try:
        return int(_saved(first, "result").shape[_signed(_saved(first, "dim"))])
    except _UNREADABLE:
        return None


def _log_softmax_below(node: Node | None, depth: int = 16) -> Node | None:
    for _ in range(depth):
        if node is None or _operation(node) == "LogSoftmax":
            return node
        inputs = [one for one in _inputs(node) if one is not None]
        node = inputs[0] if len(inputs) == 1 else None
    return None


# --- words and tables -------------------------------------------------------------------------------------------------


def _in_words(reading: _Reading) -> str:
    sign = "minus " if reading.scale < 0 else ""
    size = "" if abs(reading.scale) == 1 else f"{abs(reading.scale):g} × "
    return f"{sign}{size}{reading.form}"


def _plain(number: float) -> str:
    """13, not 13.0; 13.5."""
    return f"{round(number)}" if math.isclose(number, round(number), rel_tol=1e-7) else f"{number:.6g}"


_REDUCTIONS = ("none", "mean", "sum")  # torch's own numbering
_ELEMENTWISE_LOSSES = {
    "BinaryCrossEntropy": "binary cross-entropy",
    "BinaryCrossEntropyWithLogits": "binary cross-entropy",
    "HuberLoss": "Huber loss",
    "MseLoss": "squared error",
    "SmoothL1Loss": "smooth L1 loss",
    "SoftMarginLoss": "soft margin loss",
}
_ROWWISE_LOSSES = {"MultiMarginLoss": "multi-margin loss", "MultilabelMarginLoss": "multi-label margin loss"}

_ADDITIONS: dict[str, Callable[[float], tuple[float, float]]] = {
    "Add": lambda alpha: (1.0, alpha),
    "Sub": lambda alpha: (1.0, -alpha),
    "Rsub": lambda alpha: (-alpha, 1.0),
}
"""The factors of both inputs of `torch.add(a, b, alpha=alpha)` and its kin."""

_STEPS: dict[str, Callable[[Node], _Step]] = {
    **dict.fromkeys(_FACTORS, _scaling),
    **dict.fromkeys(("Clamp", "ClampMax", "ClampMin", "Maximum", "Minimum", "Relu"), _passed_over),  # a bound not met
    **dict.fromkeys(("Expand", "MaskedFill", "NanToNum"), _passed_over),
    **dict.fromkeys(_ELEMENTWISE_LOSSES, _elementwise_loss),
    **dict.fromkeys(_ROWWISE_LOSSES, _rowwise_loss),
    **dict.fromkeys(_ADDITIONS, _addition),
    **dict.fromkeys(("Bmm", "Dot", "Mm"), _dot_product),
    "Div": _division,
    "Mean": _mean,
    "Nansum": _sum,
    "NllLoss": _cross_entropy,
    "NllLoss2D": _cross_entropy,
    "Sum": _sum,
    "Where": _chosen_branch,
}
"""What each of torch's operations does to a loss, by its name in the graph without `Backward` and number."""
