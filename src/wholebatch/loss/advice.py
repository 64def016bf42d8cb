"""What is said about a loss whose count does not hold, or was not stated: the size of the error and the way out."""

from collections.abc import Mapping, Sequence

from wholebatch.loss.measured import Measured
from wholebatch.loss.suggested import LossHead
from wholebatch.loss.verified import Evidence, Judgement, Rival, counts_shown, fitting_counts, gap, shares_shown

_COUPLED = (
    "If examples are compared with each other (contrastive, in-batch negatives, statistics of the batch), no cut gives "
    "the batch's gradient: use a micro_batch_size of at least the batch."
)


def refusal(evidence: Evidence, judgement: Judgement, stated: str | None) -> str:
    """Why a stated count is refused.

    Args:
        evidence: What was measured.
        judgement: Which says that it does not hold.
        stated: The name of the count, or None where it came with the loss.
    """
    said = "what loss_fn returned" if evidence.union.form != "scalar" else _said(stated)
    sizes = " + ".join(f"{size:g}" for size in evidence.rivals["examples"].counts)
    text = f"under {said} the parts of a batch ({sizes} examples) do not add up to it: {_sizes(judgement)}."
    if judgement.gap.holds:  # in low precision
        text = f"{said} is not what the loss is a mean over, although figures of this precision do not show it."
    return f"{text} {_way_out(evidence, judgement.fitting, judgement.shown)} Nothing was changed."


def refusal_apart(pieces: Sequence[Measured], rivals: Mapping[str, Rival], shown: str, stated: str | None) -> str:
    """Why a stated count is refused where no two examples could be put together."""
    one, other = (piece.head.form for piece in pieces)
    return (
        f"{_said(stated)} is not what the loss is a mean over: its graph shows a {one}, and for another example a "
        f"{other}. It looks like {_looks(rivals, shown)}. Nothing was changed."
    )


def seed_ignored() -> str:
    """Why a loss is refused whose gradient does not depend on what the backward starts from."""
    return (
        "the gradient of this loss does not grow with what its backward starts from: a custom autograd Function in it "
        "ignores grad_output (it computes its gradient in forward, perhaps). No scaling of the loss then reaches the "
        "gradient: neither the batch's count nor a GradScaler's scale. Multiply by grad_output in its backward. "
        "Nothing was changed."
    )


def bent() -> str:
    """Why a loss is refused whose gradient is no multiple of what the backward starts from."""
    return (
        "the loss is the same each time, but its gradient does not grow in proportion to what backward starts from: "
        "a hook on a parameter or a tensor changes it (clamps it, adds to it), or a custom autograd Function does. A "
        "hook sees each micro-batch's gradient, not the batch's. Do it to .grad after backward has returned. "
        "Nothing was changed."
    )


def padding_matters(refused: Exception) -> str:
    """Of parts that add up as long as all are padded alike."""
    return (
        f"{str(refused).partition(':')[0]}, unless all are padded alike: an example's loss depends on how far it is "
        "padded. Either the model sees the padding, as attention without a padding mask does: give it the mask "
        "(attention_mask, src_key_padding_mask). Or the loss's denominator contains the padded length: return "
        "wb.LossSum(sum, count)."
    )


def _said(stated: str | None) -> str:
    if stated in (None, "function"):
        return "your count function"
    return f'count="{stated}"' if stated in ("examples", "tokens", "sum") else f"a mean over {stated}"


def _sizes(judgement: Judgement) -> str:
    found = judgement.gap
    if found.loss == found.gradient == float("inf"):
        return "a part's loss is not finite, that of all together is"
    return f"the loss is off by {_percent(found.loss)} and the gradient by {_percent(found.gradient)}"


def _percent(share: float) -> str:
    if share == float("inf"):
        return "more than can be measured"
    return f"{100 * share:,.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _way_out(evidence: Evidence, fitting: Sequence[str], shown: bool) -> str:
    if fitting:
        return f"It looks like {_looks(evidence.rivals, fitting[0])}."
    head, form = evidence.union.head, evidence.union.form
    if shown:
        return _other_denominator(head)
    if form == "terms":
        return f"One of the terms is no plain sum over the units of its own count. {_COUPLED}"
    if form == "sum and count":
        return f"LossSum.sum must be a plain sum over the units that LossSum.count counts. {_COUPLED}"
    if form == "per example":
        return f"The loss of an example must not depend on which others are there. {_COUPLED}"
    if head.terms > 1:
        return _several_terms(head)
    what = f"Its graph shows a {head.form}." if head.terms else "Its graph does not show what it was divided by."
    return (
        f"{what} If its denominator contains the padded length, or weights were normalised beforehand, return "
        f"wb.LossSum(sum, count). {_COUPLED}"
    )


def _several_terms(head: LossHead) -> str:
    return (
        f"The loss has {head.terms} terms ({head.form}): one of them, a router's, a second task's or a penalty, is a "
        "mean over other units than the rest, or over none. Give each term its own count: return a mapping of "
        "wb.LossSum and count={term: ...}; or leave that term out (a router's: output_router_logits=False)."
    )


def _other_denominator(head: LossHead) -> str:
    example = (
        'count=lambda micro_batch: class_weights[micro_batch["labels"]].sum()'
        if "class weights" in head.form
        else "count=lambda micro_batch: ..."
    )
    return (
        f"Its graph shows a {head.form}, and that fits. State this denominator with a function that counts it, "
        f"{example}, or return wb.LossSum(sum, count)."
    )


def suggestion(evidence: Evidence) -> str:
    """What a scalar loss without a count looks like."""
    fitting = fitting_counts(evidence)
    on = f"On {sum(evidence.rivals['examples'].counts):g} examples of this batch"
    if len(fitting) == 1:
        return f"{on} it looks like {_looks(evidence.rivals, fitting[0])}."
    if fitting:
        several = "; or ".join(_looks(evidence.rivals, name) for name in fitting[:3])
        return f"{on} it may be {several}. They cannot be told apart here."
    shown = shares_shown(evidence)
    fits = shown is not None and gap(evidence, shown).holds
    return f"{on} it is a mean over none of the usual units. {_way_out(evidence, [], fits)}"


def suggestion_apart(pieces: Sequence[Measured], rivals: Mapping[str, Rival]) -> str:
    """What a scalar loss without a count looks like, by its graph alone."""
    shown = counts_shown(pieces, rivals)
    return f"It looks like {_looks(rivals, shown[0])}." if shown else f"Its graph shows: {pieces[0].head.form}."


def _looks(rivals: Mapping[str, Rival], name: str) -> str:
    if name == "sum":
        return 'a plain sum: pass count="sum"'
    rival = rivals[name]
    number = f"{sum(rival.counts):g}"
    what = f"{number} {rival.words}" if " " in rival.words or name == "examples" else f"{number}, {rival.words}"
    return f"a mean over {what}: pass {rival.code}"
