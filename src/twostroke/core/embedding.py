"""Options of an embedding, checked once when they are built."""

from __future__ import annotations

from enum import Enum
from typing import Final

from twostroke.core.errors import RequestError, nearest
from twostroke.core.frozen import Frozen


class Pooling(Enum):
    """The final hidden states, after the last norm, that make up a text's embedding."""

    MEAN = "mean"  # of all tokens
    LAST = "last"  # of the last token, which depends on all
    NONE = "none"  # of each token: a vector for each, as the model computes it


AUTO: Final = "auto"
POOLINGS: Final = (AUTO, *(pooling.value for pooling in Pooling))


class EmbeddingParams(Frozen):
    """How a text becomes a vector of length 1, or with the pooling "none" one for each token.

    `pooling` is one of `POOLINGS`; "auto" is what the model's files say, else the mean. With
    `dimensions` only that many first values are kept, and the vector is scaled to length 1 again.
    Vectors of tokens are not scaled.

    Raises:
        RequestError: a value is outside its bounds; `field` names it.
    """

    pooling: str = AUTO
    dimensions: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that no request may carry."""
        if self.pooling not in POOLINGS:
            word = str(self.pooling)[:40]
            reason = f"must be {', '.join(POOLINGS)}, got {word!r}."
            raise RequestError(reason + nearest(word, POOLINGS), field="pooling")
        count = self.dimensions
        if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
            raise RequestError(f"must be an integer, got {count!r}.", field="dimensions")
        if count is not None and count < 1:
            raise RequestError(f"must be at least 1, got {count}.", field="dimensions")
