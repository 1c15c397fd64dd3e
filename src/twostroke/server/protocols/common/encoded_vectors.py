"""Vectors as JSON, encoded in small parts so that other threads run in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_VALUES: Final = 4096  # encoded at once: about a millisecond, in which no other thread runs


def encode_vectors(vectors: NDArray[np.float32]) -> msgspec.Raw:
    """Return one vector (width,), or a list of vectors (count, width), as JSON."""
    if vectors.ndim > 1:
        return msgspec.Raw(b"[" + b",".join(map(_encoded, vectors)) + b"]")
    return msgspec.Raw(_encoded(vectors))


def _encoded(vector: NDArray[np.float32]) -> bytes:
    starts = range(0, len(vector), _MAX_VALUES)
    parts = [encode_json(vector[start : start + _MAX_VALUES].tolist())[1:-1] for start in starts]
    return b"[" + b",".join(parts) + b"]"
