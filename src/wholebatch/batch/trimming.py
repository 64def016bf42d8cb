"""Padding off micro-batches that were cut from a padded batch.

A batch with an attention mask says how long each example is. Micro-batches of short examples need not carry the width
of the longest: the columns that are padding in all their rows are left out. Which fields have those columns is decided
by their shapes, and anything doubtful leaves the batch as it is: only an end-to-end check on the model and the loss
(`first_batch`) can say that nothing else depends on them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wholebatch.batch.containers import opened
from wholebatch.batch.fields import children
from wholebatch.batch.layout import Piece
from wholebatch.batch.lengths import rounded_up
from wholebatch.facts import IGNORED_LABEL, LABEL_FIELDS

MASK = "attention_mask"

NUMBERED = ("position_ids",)
"""Fields that may hold anything where there is padding."""


@dataclass(frozen=True)
class Padding:
    """Where the padding of a batch lies."""

    width: int
    """Columns of the batch."""

    before: Sequence[int]
    """By example: columns of padding at its beginning."""

    behind: Sequence[int]
    """By example: columns of padding at its end."""

    tokens: int
    """What the mask leaves in, over all examples."""

    fields: Mapping[str, str]
    """The fields that have these columns, by path, each with the value that it holds in the padding."""

    multiple: int = 1
    """What micro-batches' widths are rounded up to."""

    @property
    def lengths(self) -> list[int]:
        """By example: the columns that it needs at least."""
        pairs = zip(self.before, self.behind, strict=True)
        return [self._rounded(self.width - before - behind) for before, behind in pairs]

    def columns(self, rows: Sequence[int]) -> slice:
        """The columns that a micro-batch of these rows needs."""
        before, behind = min(self.before[row] for row in rows), min(self.behind[row] for row in rows)
        missing = self._rounded(self.width - before - behind) - (self.width - before - behind)
        behind, missing = behind - min(behind, missing), missing - min(behind, missing)
        return slice(before - missing, self.width - behind)

    @property
    def kind(self) -> str:
        """What trimming does, in words: from which side, in which fields, and what stands there."""
        sides = [side for side, cut in (("left", self.before), ("right", self.behind)) if any(cut)]
        fields = (f"{path} ({value})" for path, value in sorted(self.fields.items()))
        return f"{' and '.join(sides)} padding of {', '.join(fields)}"

    def _rounded(self, length: int) -> int:
        return min(self.width, rounded_up(max(length, 1), self.multiple))


@dataclass
class Trims:
    """Which kinds of padding may be left out, by what checks on the model and its loss have said."""

    allowed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def settle(self, kind: str, holds: bool) -> None:
        """Note what a check has found."""
        self.allowed.discard(kind)
        (self.allowed if holds else self.refused).add(kind)

    def state_dict(self) -> dict[str, list[str]]:
        """What was found."""
        return {"allowed": sorted(self.allowed), "refused": sorted(self.refused)}

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Take over what an earlier run found, of the same model and loss."""
        self.allowed, self.refused = set(state["allowed"]), set(state["refused"])


def padding_of(piece: Piece, multiple: int = 1) -> Padding | None:
    """The padding of a batch; None if it has none, has no mask on the host, or could not be trimmed safely."""
    mask = mask_of(piece.whole)
    if mask is None or mask.shape[0] != piece.num_examples or mask.device.type != "cpu":
        return None
    width = mask.shape[1]
    fields = _fields_of_width(piece, width)
    if fields is None:
        return None
    real = mask != 0
    positions = real.any(dim=1)
    if bool(real.all()) or not bool(positions.all()):  # nothing to trim, or an example that is all padding
        return None
    before = real.long().argmax(dim=1)
    behind = real.flip(1).long().argmax(dim=1)
    found: dict[str, str] = {}
    if not _only_padding(piece.whole, "", fields, _Columns(before, width - behind), found):
        return None
    return Padding(width, before.tolist(), behind.tolist(), int(real.sum()), found, multiple)


@dataclass(frozen=True)
class _Columns:
    """The columns that each example needs: from `start` to before `stop`."""

    start: torch.Tensor
    stop: torch.Tensor

    def outside(self, field: torch.Tensor) -> torch.Tensor:
        """What a field holds in the other columns."""
        columns = torch.arange(field.shape[1])
        return field[(columns < self.start[:, None]) | (columns >= self.stop[:, None])]

    def first_after_padding(self, field: torch.Tensor) -> torch.Tensor:
        """What a field holds where an example begins behind padding."""
        rows = self.start.nonzero().flatten()
        return field[rows, self.start[rows]]


def trimmed(batch: Any, columns: slice, fields: Collection[str], path: str = "") -> Any:
    """The same containers with `fields` narrowed to these columns; contiguous, as `labels.view(-1)` needs it."""
    if path in fields:
        return batch[:, columns].contiguous()
    if not any(field.startswith(f"{path}." if path else "") for field in fields):
        return batch
    pairs = children(batch, path)
    values = [trimmed(child, columns, fields, its_path) for child, its_path in pairs]
    return opened(batch).rebuild(values)


def mask_of(batch: Any) -> torch.Tensor | None:
    """The attention mask `(examples, width)` of whole numbers among the fields of a mapping, or of a mapping in it."""
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get(MASK)
    if isinstance(mask, torch.Tensor):
        plain = mask.ndim == 2 and mask.layout == torch.strided and not mask.is_nested
        return mask if plain and not mask.is_floating_point() and mask.shape[1] else None
    found = [inner for inner in map(mask_of, batch.values()) if inner is not None]
    return found[0] if len(found) == 1 else None


def masked_tokens(batch: Any) -> int | None:
    """Tokens that the attention mask leaves in; None without one, and where reading it would wait for a device."""
    mask = mask_of(batch)
    return None if mask is None or mask.device.type != "cpu" else int((mask != 0).sum())


def _fields_of_width(piece: Piece, width: int) -> frozenset[str] | None:
    """The fields whose dimension 1, and no other, is as long as the mask; None where it is not clear which these are.

    Fields that are shared, or have that length elsewhere (square masks, channels first), make it unclear.
    """
    found = set()
    for its, value in zip(piece.fields, piece.values, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        shape = tuple(value.shape) if not value.is_nested else ()
        if width not in shape[1:] and not (its.role == "shared" and width in shape):
            continue
        per_example = its.role == "per example" and shape[0] == piece.num_examples
        numbered = its.role == "shared" and shape == (1, width)
        if shape.count(width) - (shape[0] == width) != 1 or shape[1:2] != (width,) or not (per_example or numbered):
            return None
        found.add(its.path)
    return frozenset(found)


def _only_padding(value: Any, path: str, fields: Collection[str], columns: _Columns, found: dict[str, str]) -> bool:
    """Whether fields hold nothing but one value outside their columns, which goes into `found`.

    Labels hold only ignored ones there, and where an example begins behind padding too: a model that predicts the next
    label would predict that one from the padding.
    """
    if path in fields:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return False
        name, shared = path.rpartition(".")[2], value.shape[0] != len(columns.start)
        if name in NUMBERED or shared:
            found[path] = "any"
            return True
        outside = columns.outside(value)
        if not bool((outside == outside.flatten()[:1]).all()):
            return False
        found[path] = f"{outside.flatten()[0].item():g}" if outside.numel() else ""
        ignored = name in LABEL_FIELDS or found[path] == str(IGNORED_LABEL)
        begins = columns.first_after_padding(value)
        return not ignored or bool((outside == IGNORED_LABEL).all() and (begins == IGNORED_LABEL).all())
    if not any(field.startswith(f"{path}." if path else "") for field in fields):
        return True
    return all(_only_padding(child, its_path, fields, columns, found) for child, its_path in children(value, path))
