"""How many ranks see different data, and whether that is supported."""

import torch

from wholebatch.errors import UnsupportedModelError


def refuse_several_ranks() -> None:
    """Raise `UnsupportedModelError` in a process group of more than one rank.

    The counts that a loss is divided by would be those of one rank, so the update would not be the whole batch's.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if (ranks := distributed.get_world_size()) > 1:
        raise UnsupportedModelError(
            f"this process is one of {ranks} ranks, and this version of wholebatch sums the loss's count within one "
            "process only: with unequal counts the ranks' average would not be the batch's gradient. "
            "Run it on one rank."
        )
