"""Pooling computed plainly, and embedders without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.engine.embedding import Embedder
from twostroke.engine.output import Mailbox

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.core.request import Request


def twin(states: NDArray[np.float32], pooling: str) -> NDArray[np.float64]:
    """Compute a text's embedding plainly from its last hidden states."""
    pooled = states.astype(np.float64).mean(axis=0) if pooling == "mean" else states[-1]
    wide = np.asarray(pooled, np.float64)
    vector: NDArray[np.float64] = wide / np.linalg.norm(wide)
    return vector


def embedder_of(request: Request) -> Embedder:
    """Return the object that pools the hidden states of a request, without an engine."""
    return Embedder(request, 0, Mailbox(lambda _: None))
