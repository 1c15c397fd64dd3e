"""The plain twin of pooling, and embedders without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.engine.embedding import Embedder
from twostroke.engine.output import Mailbox

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.request import Request


def twin(states: NDArray[np.float32], pooling: str) -> NDArray[np.float64]:
    """The plain way from a text's last states to its vector."""
    pooled = states.astype(np.float64).mean(axis=0) if pooling == "mean" else states[-1]
    wide = np.asarray(pooled, np.float64)
    vector: NDArray[np.float64] = wide / np.linalg.norm(wide)
    return vector


def embedder_of(request: Request) -> Embedder:
    """Return what adds up the states of a request that no engine runs."""
    return Embedder(request, 0, Mailbox(lambda _: None))
