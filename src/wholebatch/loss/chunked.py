"""Linear layer and cross-entropy in one, in chunks of rows: the logits of all rows never exist together.

For a language-model head the logits, `(examples x length, vocabulary)`, are the largest tensor of a step, and its
cross-entropy makes three or four of that size. Here a chunk of rows is taken from its logits to the gradient at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from wholebatch.errors import ConfigurationError
from wholebatch.facts import IGNORED_LABEL, LossSum, Number
from wholebatch.loss.kernels import Form, Gradients, fused_pass

CHUNK_ROWS = 128
"""Enough to keep the products busy, few enough for small logits; `benchmarks/head.py --rows` compares others."""

_FULL = (torch.float32, torch.float64)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED_LABEL,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    soft_cap: float | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> LossSum:
    """What `cross_entropy(linear(hidden, weight, bias), labels)` is, without its logits as a whole.

    For a `loss_fn` of your own: run the model up to its last hidden states, and leave the head to this. The gradient is
    computed in the forward, since it is the loss's last step, so nothing but it is kept: one tensor of the size of
    `weight`, one of `hidden`. Under autocast the products are in its type, as those of `linear`; the cross-entropy is
    in float32, in float64 for float64. No double backward.

    Args:
        hidden: `(..., features)`.
        weight: `(classes, features)`, as of `nn.Linear`. Frozen, it costs nothing.
        labels: `(...)`, whole numbers: the class of each row. A causal model's are shifted beforehand.
        bias: `(classes,)`.
        ignore_index: The label of rows that do not count. Where the labels lie on a CPU, such rows are not computed.
        label_smoothing: As of `torch.nn.functional.cross_entropy`, 0 to 1.
        class_weights: `(classes,)`, without a gradient.
        soft_cap: Logits become `soft_cap * tanh(logits / soft_cap)`, as Gemma's do.
        chunk_rows: Rows whose logits exist at once.

    Returns:
        The sum over the rows that count, and how many they are; with `class_weights` the sum of their labels' weights,
        by which torch's mean divides. Without any such row both are 0.

    Raises:
        ConfigurationError: Shapes, types or an option cannot be right.

    Example:
        >>> import torch
        >>> hidden, weight = torch.randn(2, 7, 4), torch.randn(50, 4, requires_grad=True)
        >>> linear_cross_entropy(hidden, weight, torch.randint(50, (2, 7))).count
        14
    """
    form = Form(ignore_index, float(label_smoothing), class_weights, soft_cap, chunk_rows, _product_type(hidden))
    _check(hidden, weight, labels, bias, form)
    rows, targets, count = _labelled(hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), form)
    total = LinearCrossEntropy.apply(rows, weight, bias, targets, form, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return LossSum(total, count)


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all rows; the gradient is made beside it.

    torch has such a function of its own (`torch.nn.functional.linear_cross_entropy`, from 2.13). It is not used: it has
    neither label smoothing nor a soft cap, and with a graph that may be used twice (`allow_retain_graph`) it holds one
    more tensor of the weight's size than these lines, at the same speed (`benchmarks/head.py`).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, form: Form, differentiable: bool
    ) -> Tensor:
        """In float16 the gradient is left to the backward: small entries vanish unless a scaler's scale is in them."""
        wanted = [need and differentiable for need in ctx.needs_input_grad[:3]]
        ctx.form, ctx.wanted, ctx.later = form, wanted, form.dtype == torch.float16
        ctx.run = fused_pass(hidden.device.type, weight, form) or _in_chunks
        now = [False] * 3 if ctx.later else wanted
        loss: Tensor
        loss, gradients = ctx.run(hidden, weight, bias, labels, form, now, None)
        ctx.save_for_backward(*((hidden, weight, bias, labels) if ctx.later else gradients))
        return loss

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        """Whatever the seed, and as often as the graph is kept: what was saved is not touched."""
        if torch.is_grad_enabled():  # torch's `once_differentiable` lets a seed without a graph pass: zero, silently
            raise ConfigurationError(
                "create_graph=True: linear_cross_entropy has no double backward, since its gradient is made in its "
                "forward. Use cross_entropy(linear(hidden, weight, bias), labels) where a gradient is differentiated."
            )
        if ctx.later:
            _, gradients = ctx.run(*ctx.saved_tensors, ctx.form, ctx.wanted, seed)
        else:
            gradients = [None if one is None else one * seed.to(one.dtype) for one in ctx.saved_tensors]
        return (*gradients, None, None, None)


@torch.no_grad()
def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    form: Form,
    wanted: Sequence[bool],
    seed: Tensor | None,
) -> tuple[Tensor, Gradients]:
    """The loss, and the gradients in hidden, weight and bias that are wanted."""
    of_hidden, of_weight, of_bias = (
        one.new_zeros(one.shape) if want and one is not None else None
        for want, one in zip(wanted, (hidden, weight, bias), strict=True)
    )
    with torch.autocast(hidden.device.type, enabled=False):
        matrix, offset = weight.to(form.dtype), None if bias is None else bias.to(form.dtype)
        loss = hidden.new_zeros((), dtype=_wide(form.dtype))
        for start in range(0, len(hidden), form.chunk_rows):
            chunk = slice(start, start + form.chunk_rows)
            rows = hidden[chunk].to(form.dtype)
            part, of_logits = _loss_and_gradient(linear(rows, matrix, offset), labels[chunk], form)
            loss += part
            if not any(wanted):
                continue
            of_logits = (of_logits if seed is None else of_logits.mul_(seed)).to(form.dtype)
            if of_hidden is not None:
                of_hidden[chunk] = of_logits @ matrix
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), rows)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            del of_logits  # before the next chunk's logits
    return loss, [of_hidden, of_weight, of_bias]


def _loss_and_gradient(logits: Tensor, labels: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The sum of the rows' losses, and its gradient in the logits, which are overwritten.

    With a = (1 - smoothing) * the label's class weight, and e = smoothing / classes * the class weights, the loss of a
    row is (a + sum e) log sum exp(l) - a l[label] - e l; its gradient (a + sum e) softmax(l) - a [at label] - e.
    """
    logits, slope = _capped(logits.to(_wide(logits.dtype)), form.soft_cap)
    counted = labels != form.ignore_index
    places = torch.where(counted, labels, 0)[:, None]
    at_label, evenly = _shares(counted, places, form, logits)
    logits.sub_(logits.amax(1, keepdim=True))
    reached, share = at_label * logits.gather(1, places)[:, 0], at_label
    if evenly is not None:
        reached, share = reached + logits @ evenly, at_label + counted * evenly.sum()
    total = logits.exp_().sum(1)
    loss = torch.where(counted, share * total.log() - reached, 0.0).sum()
    gradient = logits.mul_((share / total)[:, None])
    gradient.scatter_add_(1, places, -at_label[:, None])
    if evenly is not None:
        gradient.addr_(counted.to(gradient.dtype), evenly, alpha=-1)
    return loss, gradient if slope is None else gradient.mul_(slope)


def _shares(counted: Tensor, places: Tensor, form: Form, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """For each row, what its label counts; what each class counts in every row, None without label smoothing."""
    smoothing, number = form.label_smoothing, logits.shape[1]
    weights = None if form.class_weights is None else form.class_weights.to(logits)
    of_label = counted.to(logits.dtype) if weights is None else counted * weights[places[:, 0]]
    if not smoothing:
        return of_label, None
    evenly = logits.new_full((number,), smoothing / number) if weights is None else weights * (smoothing / number)
    return of_label * (1.0 - smoothing), evenly


def _capped(logits: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """The logits under their cap, and its slope."""
    if soft_cap is None:
        return logits, None
    bent = logits.div_(soft_cap).tanh_()
    slope = 1.0 - bent * bent
    return bent.mul_(soft_cap), slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, in the type of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _labelled(rows: Tensor, labels: Tensor, form: Form) -> tuple[Tensor, Tensor, Number]:
    """Rows, labels and count; only the rows that count where that can be told without waiting for a device."""
    count: Number
    counted = labels != form.ignore_index
    if type(labels) is Tensor and labels.device.type == "cpu":
        count = int(counted.sum())
        if count < len(labels):
            kept = counted.nonzero()[:, 0]
            rows, labels = rows.index_select(0, kept.to(rows.device)), labels[kept]
    else:
        count = counted.sum()
    labels = labels.to(rows.device)
    if form.class_weights is not None:
        weights = form.class_weights.to(_wide(form.class_weights.dtype))
        counted = labels != form.ignore_index
        count = torch.where(counted, weights[torch.where(counted, labels, 0)], 0.0).sum()
    return rows, labels, count


def _product_type(hidden: Tensor) -> torch.dtype:
    """What `linear` computes in: autocast leaves float64 alone."""
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return hidden.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _FULL else torch.float32


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, form: Form) -> None:
    """Raise `ConfigurationError` for what would fail later, or pass unseen."""
    classes = weight.shape[0]
    for right, wrong in (
        (weight.ndim == 2 and hidden.shape[-1:] == weight.shape[1:], "hidden must be (..., features)"),
        (labels.shape == hidden.shape[:-1], "labels must have the shape of hidden without its last dimension"),
        (not labels.is_floating_point() and labels.dtype != torch.bool, "labels must be whole numbers"),
        (_one_type(hidden, weight), f"hidden is {hidden.dtype}, but weight {weight.dtype}, without autocast"),
        (bias is None or bias.shape == (classes,), "bias must be (classes,)"),
        (_plain_weights(form.class_weights, classes), "class_weights must be (classes,), without a gradient"),
        (0.0 <= form.label_smoothing <= 1.0, f"label_smoothing={form.label_smoothing} must be 0 to 1"),
        (form.soft_cap is None or form.soft_cap > 0.0, f"soft_cap={form.soft_cap} must be positive, or None"),
        (form.chunk_rows >= 1, f"chunk_rows={form.chunk_rows} must be at least 1"),
    ):
        if not right:
            raise ConfigurationError(
                f"linear_cross_entropy: {wrong}. hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)} "
                f"(classes, features), labels {tuple(labels.shape)} of {labels.dtype}, "
                f"bias {None if bias is None else tuple(bias.shape)}"
            )


def _plain_weights(class_weights: Tensor | None, classes: int) -> bool:
    return class_weights is None or (class_weights.shape == (classes,) and not class_weights.requires_grad)


def _one_type(hidden: Tensor, weight: Tensor) -> bool:
    """As `linear` asks for it: autocast casts all but float64."""
    if hidden.dtype == weight.dtype:
        return True
    kind = hidden.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return autocast and torch.float64 not in (hidden.dtype, weight.dtype)
