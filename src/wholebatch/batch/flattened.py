"""Micro-batches without padding: several examples end to end in one row, as Transformers' flattening collator has it.

`DataCollatorWithFlattening` puts the examples of a micro-batch into one row of all their tokens; `position_ids` that
begin anew with each example tell attention where to stop (the attention implementations for packed sequences heed them,
and the check of the first batch finds out whether the model at hand does). Such a row is several examples to everything
that counts or cuts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wholebatch.batch.layout import Field
from wholebatch.errors import BatchLayoutError

_ENDS, _LONGEST, _NUMBERS = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k"), ("seq_idx",)


class FlatPiece:
    """A row of several examples that can be cut between them; as `Piece`."""

    fields: tuple[Field, ...] = ()
    values: tuple[Any, ...] = ()
    one_reading = False

    def __init__(self, batch: Mapping[str, Any], starts: Sequence[int]) -> None:
        self.whole, self.num_examples = batch, len(starts)
        self._total = batch["position_ids"].shape[1]
        self._spans = list(zip(starts, [*starts[1:], self._total], strict=True))

    def take(self, rows: Sequence[int]) -> Any:
        """A row of these examples, with what the collator adds for them."""
        if list(rows) == list(range(self.num_examples)):
            return self.whole
        spans = [self._spans[row] for row in rows]
        columns = torch.cat([torch.arange(start, stop) for start, stop in spans])
        return {name: self._taken(name, value, spans, columns) for name, value in self.whole.items()}

    def _taken(self, name: str, value: Any, spans: Sequence[tuple[int, int]], columns: torch.Tensor) -> Any:
        lengths = torch.tensor([stop - start for start, stop in spans])
        is_tensor = isinstance(value, torch.Tensor)
        if name in _ENDS and is_tensor:
            return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(value.device, value.dtype)
        if name in _LONGEST:
            return torch.full_like(value, int(lengths.max())) if is_tensor else int(lengths.max())
        if name in _NUMBERS and is_tensor:
            numbers = torch.arange(len(spans)).repeat_interleave(lengths)
            return numbers.reshape(1, -1).to(value.device, value.dtype)
        if is_tensor and value.shape[:2] == (1, self._total):
            return value.index_select(1, columns.to(value.device))
        if not is_tensor or value.ndim == 0:
            return value
        raise BatchLayoutError(
            f"a flattened micro-batch of {self.num_examples} examples has to be cut, and it is not known how to cut "
            f"{name!r} of shape {tuple(value.shape)}: leave it out, or use a collator that pads"
        )


def flattened(batch: Any, num_examples: int) -> FlatPiece | None:
    """A row of `num_examples` examples, told by positions that begin anew as often; None if it is not."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[0] != 1:
        return None
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    return FlatPiece(batch, starts) if len(starts) == num_examples > 1 and starts[0] == 0 else None
