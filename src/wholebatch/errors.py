"""What wholebatch raises and warns.

Callers need one name, `WholeBatchError`; the others say which kind of thing went wrong::

    WholeBatchError
    ├── ConfigurationError            an argument that cannot be right (also a ValueError)
    ├── MemoryBudgetError             the memory budget is unusable, or a single example does not fit in it
    ├── UnsupportedModelError         a model, wrapper or hook under which the result would not be exact
    ├── BatchLayoutError              a batch that cannot be cut safely (also a ValueError)
    ├── LossError                     what the loss function returned, or what it is said to be a mean over
    │   ├── LossFormError             a loss of no known form (also a TypeError)
    │   ├── CountRequiredError        the denominator of the loss has not been stated
    │   │   └── ScalarWithoutCountError   the loss is a scalar, whose graph may suggest the answer
    │   ├── CountError                the stated count is impossible: negative, not finite, not additive
    │   └── LossNotAdditiveError      pieces of the batch do not add up to the batch under the stated count
    ├── NonFiniteLossError            a loss is inf or nan and `on_bad_batch="raise"`
    ├── NoLabelsError                 nothing in the batch has a label and `on_bad_batch="raise"`
    └── TooManySkippedBatchesError    `max_skipped_batches` batches in a row were skipped

    WholeBatchWarning                 (a UserWarning)
    ├── BatchStatisticsWarning        modules whose statistics are those of a micro-batch, not of the batch
    ├── LossNotVerifiedWarning        the stated count could not be checked against this loss
    ├── PaddingKeptWarning            micro-batches keep the padding of the batch: without it the loss was another
    └── BadBatchWarning               a bad batch was let through because of `on_bad_batch="ignore"`

Each message says what is wrong, the numbers, and the way out.
"""

from typing import Any


class WholeBatchError(Exception):
    """Base of everything wholebatch raises about the caller's input, model, loss or memory."""


class ConfigurationError(WholeBatchError, ValueError):
    """An argument that cannot be right: a batch size below 1, an unknown option, a malformed budget."""


class MemoryBudgetError(WholeBatchError):
    """The memory budget is unusable, or a single example needs more than it allows."""


class UnsupportedModelError(WholeBatchError):
    """A model, wrapper or hook under which the accumulated gradient would not be the whole batch's."""


class BatchLayoutError(WholeBatchError, ValueError):
    """A batch that cannot be cut into micro-batches safely; the field and its shape are named."""


class LossError(WholeBatchError):
    """Base of the errors about the loss and its count."""


class LossFormError(LossError, TypeError):
    """The loss function, or what it returned, has no known form."""


class CountRequiredError(LossError):
    """The loss is a mean, and what it is a mean over has not been stated."""


class ScalarWithoutCountError(CountRequiredError):
    """A scalar loss without a count. Holds the loss, from whose graph the answer can be suggested."""

    def __init__(self, loss: Any, num_examples: int) -> None:
        of_one = "; or keep its dimension, .squeeze(-1), if it is the loss of this micro-batch's one example"
        super().__init__(
            "loss_fn returned a scalar: say what it is a mean over, "
            'count="examples", "tokens", "sum" or a function of the micro-batch' + of_one * (num_examples == 1)
        )
        self.loss = loss


class CountError(LossError, ValueError):
    """The stated count is impossible: negative, not finite, or not additive over micro-batches."""


class LossNotAdditiveError(LossError):
    """Under the stated count, the pieces of a batch do not add up to the batch."""


class NonFiniteLossError(WholeBatchError):
    """A loss is inf or nan, and `on_bad_batch="raise"` was asked for."""


class NoLabelsError(WholeBatchError):
    """Nothing in the batch has a label, and `on_bad_batch="raise"` was asked for."""


class TooManySkippedBatchesError(WholeBatchError):
    """`max_skipped_batches` batches in a row had no label or a non-finite loss."""


class WholeBatchWarning(UserWarning):
    """Base of the warnings wholebatch gives."""


class BatchStatisticsWarning(WholeBatchWarning):
    """Modules such as BatchNorm see the statistics of a micro-batch, not of the batch."""


class LossNotVerifiedWarning(WholeBatchWarning):
    """The stated count could not be checked: the loss draws its own randomness, say."""


class PaddingKeptWarning(WholeBatchWarning):
    """Micro-batches keep all the padding of their batch: with less of it the loss, or its gradient, is another."""


class BadBatchWarning(WholeBatchWarning):
    """A batch with a non-finite loss, or without labels, was let through because `on_bad_batch="ignore"`."""
