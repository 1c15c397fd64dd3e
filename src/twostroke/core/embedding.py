"""How the text of an embedding request becomes a vector: pooling and dimensions."""

from __future__ import annotations

from enum import Enum
from typing import Final

from twostroke.core.errors import RequestError, nearest
from twostroke.core.frozen import Frozen


class Pooling(Enum):
    """Which final hidden states, after the last norm, make up a text's embedding."""

    MEAN = "mean"  # the mean over all tokens
    LAST = "last"  # the state of the last token, which depends on all tokens
    NONE = "none"  # the state of each token: one vector per token, as the model computes it


AUTO: Final = "auto"
_MAX_QUOTED_LENGTH: Final = 40  # characters of an unknown pooling in an error
POOLINGS: Final = (AUTO, *(pooling.value for pooling in Pooling))


class EmbeddingParams(Frozen):
    """How a text becomes a vector of length 1, or one vector per token with the pooling "none".

    Attributes:
        pooling: one of `POOLINGS`; "auto" is the pooling that the model's files name, else the
            mean.
        dimensions: how many values of the vector to keep, from the first on; the vector is then
            scaled to length 1 again. None keeps all. Vectors of tokens are never scaled.

    Raises:
        RequestError: the pooling is unknown, or `dimensions` is not an integer from 1 on.
    """

    pooling: str = AUTO
    dimensions: int | None = None

    def __post_init__(self) -> None:
        """Check each value."""
        if self.pooling not in POOLINGS:
            word = str(self.pooling)[:_MAX_QUOTED_LENGTH]
            reason = f"must be {', '.join(POOLINGS)}, got {word!r}."
            raise RequestError(reason + nearest(word, POOLINGS), field="pooling")
        count = self.dimensions
        if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
            raise RequestError(f"must be an integer, got {count!r}.", field="dimensions")
        if count is not None and count < 1:
            raise RequestError(f"must be at least 1, got {count}.", field="dimensions")
