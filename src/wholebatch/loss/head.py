"""The loss that a Hugging Face language model computes itself, with its head in chunks where that is the same loss.

No model is patched or known by name: a hook on the head, a plain `nn.Linear`, takes the hidden states and lets a single
position pass, so that the model makes no logits to speak of; the loss is then `linear_cross_entropy` of what was taken.
Whether that is the model's loss is found out once, by `HeadProbe`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from wholebatch.facts import IGNORED_LABEL
from wholebatch.loss.chunked import CHUNK_ROWS, linear_cross_entropy
from wholebatch.loss.hugging_face import forward_loss, hugging_face_model, own_count

LEAST_LOGITS = 2**23
"""Rows times vocabulary from which on chunks were no slower on a CPU in any shape tried; at a quarter of it, it depends
on the shape (`benchmarks/head.py --threshold`)."""

_ACCELERATOR_ROWS = 1024
"""A GPU needs more rows at once to be busy."""

_PROBE_SPREAD = 20.0
"""Standard deviation of the logits that a model's own loss is probed with: far above any soft cap's straight part."""

_ROUNDING, _ROUNDING_IN_HALF = 1e-5, 1e-2


@dataclass(frozen=True)
class Head:
    """The head of a language model."""

    linear: nn.Linear
    shifted: bool
    """Whether the model predicts the label after the position."""

    soft_cap: float | None

    def worthwhile(self, labels: Any) -> bool:
        """Whether the logits for these labels are so large that chunks are faster and smaller."""
        weight = self.linear.weight
        rows = labels.numel() if isinstance(labels, Tensor) else 0
        # Whole, about three tensors of the logits' size; in chunks, one more of the weight's size.
        smaller = not weight.requires_grad or 3 * rows > self.linear.in_features + 2 * CHUNK_ROWS
        return smaller and rows * self.linear.out_features >= LEAST_LOGITS

    def targets(self, labels: Tensor) -> Tensor:
        """The label of each position."""
        return pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:] if self.shifted else labels


class ChunkedHead:
    """The model's own loss, called as `forward_loss` is; in chunks where a check has found that to be the same loss.

    What was found holds for the training or evaluation mode, and for the names of the batch's fields, that it was found
    with; under others the model computes its loss itself. Where it was another loss, it always does.
    """

    def __init__(self, model: nn.Module) -> None:
        self._same: set[tuple[bool, frozenset[str]]] = set()
        self.reason = head if isinstance(head := head_of(model), str) else ""
        """Why the head is not in chunks; empty where it is, or may be."""

    def __call__(self, model: nn.Module, micro_batch: Any) -> Any:
        """The loss: a mean, as the model's own."""
        if self.reason or _key(model, micro_batch) not in self._same:
            return forward_loss(model, micro_batch)
        head = head_of(model)
        if isinstance(head, Head) and head.worthwhile(micro_batch["labels"]):
            return chunked_loss(model, head, micro_batch)
        return forward_loss(model, micro_batch)

    def due(self, model: nn.Module, micro_batch: Any) -> Head | None:
        """The head, if it has still to be found out, and matters, for micro-batches like this one."""
        if self.reason or not isinstance(micro_batch, Mapping) or _key(model, micro_batch) in self._same:
            return None
        head = head_of(model)
        return head if isinstance(head, Head) and head.worthwhile(micro_batch.get("labels")) else None

    def found_same(self, micro_batch: Mapping[str, Any], modes: Collection[bool]) -> None:
        """From now on in chunks for such fields, in training mode (True) or evaluation mode (False)."""
        self._same.update((mode, frozenset(map(str, micro_batch))) for mode in modes)

    def __str__(self) -> str:
        """On or off, and why."""
        if self.reason:
            return f"off: {self.reason}"
        return "on" if self._same else f"not yet: no micro-batch so far had {LEAST_LOGITS:,} logits, and rows enough"


def _key(model: nn.Module, micro_batch: Any) -> tuple[bool, frozenset[str]]:
    return model.training, frozenset(map(str, micro_batch)) if isinstance(micro_batch, Mapping) else frozenset()


def head_of(model: nn.Module) -> Head | str:
    """The head of a Hugging Face language model; or why it cannot be taken apart from it."""
    host = hugging_face_model(model)
    if host is None or (count := own_count(host)) not in ("tokens", "tokens after the shift"):
        return "the model is no language model of Hugging Face"
    config: Any = host.config
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder makes the decoder's inputs of its labels"
    if model is not host and not callable(getattr(model, "get_base_model", None)):
        return f"the model is wrapped in {type(model).__name__}"
    try:
        linear = host.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # noqa: BLE001  some models have none, and say so in ways of their own
        linear = None
    if reason := _not_plain(host, linear):
        return reason
    inner = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    soft_cap = getattr(inner, "final_logit_softcapping", None)
    return Head(linear, count == "tokens after the shift", None if soft_cap is None else float(soft_cap))


def _not_plain(host: nn.Module, linear: Any) -> str:
    """Why a head is more than a matrix and a bias; empty if it is not."""
    if type(linear) is not nn.Linear:
        return f"the model's head is no plain nn.Linear, but {type(linear).__name__}"
    if type(linear.weight) is not nn.Parameter or "forward" in vars(linear):
        return "the model's head is wrapped: its weight is made anew, sharded, or its forward replaced"
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return "the model's head has hooks"
    if any(module._compiled_call_impl is not None for module in (host, linear)):
        return "the model is compiled"
    return ""


def chunked_loss(model: nn.Module, head: Head, micro_batch: Mapping[str, Any]) -> Tensor:
    """The mean over the labels, from hidden states that the model's head does not see."""
    taken = run_without_head(model, head.linear, {k: v for k, v in micro_batch.items() if k != "labels"})
    hidden, linear = taken.hidden, head.linear
    with taken.autocast():
        loss = linear_cross_entropy(
            hidden,
            linear.weight,
            head.targets(micro_batch["labels"]),
            bias=linear.bias,
            soft_cap=head.soft_cap,
            chunk_rows=CHUNK_ROWS if hidden.device.type == "cpu" else _ACCELERATOR_ROWS,
        )
    count = loss.count if isinstance(loss.count, Tensor) else loss.sum.new_tensor(loss.count)
    return loss.sum / count.clamp(min=1)  # a tensor, which the graph shows (`shown`)


@dataclass
class Taken:
    """What reached the head."""

    inputs: list[Tensor] = field(default_factory=list)
    _autocast: tuple[bool, torch.dtype] = (False, torch.float32)

    def __call__(self, linear: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        """The hook: keep the input and pass on its first position."""
        hidden: Tensor = arguments[0]
        kind = hidden.device.type
        self.inputs.append(hidden)
        if torch.amp.is_autocast_available(kind):
            self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return (hidden[..., :1, :].detach(),)

    @property
    def hidden(self) -> Tensor:
        """Of every position."""
        [hidden] = self.inputs
        return hidden

    def autocast(self) -> torch.autocast:
        """As it was where the head was called: some models switch it on themselves."""
        enabled, dtype = self._autocast
        return torch.autocast(self.hidden.device.type, dtype=dtype if enabled else None, enabled=enabled)


def run_without_head(model: nn.Module, linear: nn.Linear, inputs: Mapping[str, Any]) -> Taken:
    """Run a model up to its head; the hook is gone afterwards, whatever happens."""
    taken = Taken()
    with _hooked(linear.register_forward_pre_hook, taken):
        model(**inputs)
    return taken


@contextmanager
def _hooked(register: Callable[[Any], Any], hook: Any) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


class HeadProbe:
    """Whether a model's own loss is the cross-entropy of what its head makes, and of nothing else.

    Real logits would not tell: those of a fresh model are near zero, where a soft cap, a scale or a smoothed label
    hardly shows. So the head's output is replaced by large random logits, and the model's own loss must be theirs: in
    value, in every element of its gradient, and without a path to any parameter (a router's balance, say).
    """

    def __init__(self, model: nn.Module, head: Head, micro_batch: Mapping[str, Any]) -> None:
        self._model, self._head, self._batch = model, head, micro_batch

    def own(self, trainable: list[nn.Parameter]) -> str | Tensor:
        """The hidden states of a run with labels; or why the loss is another one."""
        taken, logits = Taken(), _Replaced(self._batch["labels"].shape)
        linear = self._head.linear
        with _hooked(linear.register_forward_pre_hook, taken), _hooked(linear.register_forward_hook, logits):
            loss = forward_loss(self._model, self._batch)
        if len(logits.made) != 1 or taken.hidden.shape[:-1] != self._batch["labels"].shape:
            return "the model does not call its head once with one position for each label"
        return self._difference(loss, logits.made[0], trainable) or taken.hidden.detach()

    def _difference(self, loss: Any, logits: Tensor, trainable: list[nn.Parameter]) -> str:
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            return "the model's own loss is no scalar that depends on its logits"
        gradient, *others = torch.autograd.grad(loss, [logits, *trainable], allow_unused=True)
        if any(other is not None for other in others):
            return "the model's own loss has a part that does not come from its logits (a router's, say)"
        wanted, plain = self._plain(logits)
        if gradient is None or not _close(loss, wanted, _ROUNDING) or not _close(gradient, plain, _ROUNDING):
            return (
                "the model's own loss is not the plain cross-entropy of what its head makes (logits that are scaled "
                f"afterwards, smoothed labels): {float(loss):.6g} against {float(wanted):.6g} for the same logits"
            )
        return ""

    def _plain(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy of these logits, and its gradient."""
        leaf, cap = logits.detach().requires_grad_(), self._head.soft_cap
        capped = leaf if cap is None else cap * torch.tanh(leaf / cap)
        targets = self._head.targets(self._batch["labels"]).to(leaf.device)
        loss = cross_entropy(capped.flatten(0, -2), targets.flatten(), ignore_index=IGNORED_LABEL)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    def without_labels(self, own: Tensor) -> str:
        """Why the hidden states of a run without labels are others; empty if they are not."""
        inputs = {name: value for name, value in self._batch.items() if name != "labels"}
        hidden = run_without_head(self._model, self._head.linear, inputs).hidden.detach()
        if hidden.shape != own.shape or not _close(hidden, own, _ROUNDING_IN_HALF):
            return "the model computes something else when it is given no labels"
        return ""


class _Replaced:
    """A hook that replaces the head's output by large random logits, in float32 at least: rounding hides nothing."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape, self.made = shape, list[Tensor]()

    def __call__(self, linear: nn.Linear, arguments: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        random = torch.randn((*self._shape, linear.out_features), generator=generator) * _PROBE_SPREAD
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        self.made.append(random.to(output.device, wide).requires_grad_())
        return self.made[-1]


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Also where both are zero; never where one is not finite."""
    gap = (one.detach().double() - other.double()).norm()
    return bool(gap <= tolerance * other.double().norm())
