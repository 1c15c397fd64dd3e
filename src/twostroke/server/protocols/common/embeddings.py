"""The inputs of embedding requests, and the vectors of their responses as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def split_inputs(value: str | list[Any], field: str) -> tuple[str | list[int | str], ...]:
    """Return the inputs in a field that takes one or several of them.

    An input is a text, or a list of token ids and texts that follow each other: a list that has an
    id is one input.

    Raises:
        RequestError: the list is empty, or mixes token ids with lists.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise RequestError(f"is an empty list: give at least one {field}.", field=field)
    if not any(isinstance(part, int) for part in value):
        return tuple(value)
    if any(isinstance(part, list) for part in value):
        reason = f"mixes token ids with lists: give one {field} or a list of {field}s."
        raise RequestError(reason, field=field)
    return (value,)


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
