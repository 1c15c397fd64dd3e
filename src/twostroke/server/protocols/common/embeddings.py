"""The inputs of embedding requests, and the vectors of their responses as JSON.

The protocols differ in their fields; the inputs and the vectors have the same form in all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import RequestError
from twostroke.core.json_io import encode_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Encoding this many values takes about a millisecond, during which no other thread runs.
_MAX_VALUES_PER_CHUNK: Final = 4096


def split_inputs(value: str | list[Any], field_name: str) -> tuple[str | list[int | str], ...]:
    """Return the inputs to embed from a request field that holds one input or a list of inputs.

    An input is a text, or a list of token ids and texts that are joined. So a list that contains a
    token id is one input, and a list of texts has several. `field_name` is the field's name in
    errors.

    Raises:
        RequestError: the list is empty, or mixes token ids with lists.
    """
    if isinstance(value, str):
        return (value,)
    if not value:
        raise RequestError(f"is an empty list: give at least one {field_name}.", field=field_name)
    if not any(isinstance(part, int) for part in value):
        return tuple(value)
    if any(isinstance(part, list) for part in value):
        reason = f"mixes token ids with lists: give one {field_name} or a list of {field_name}s."
        raise RequestError(reason, field=field_name)
    return (value,)


def encode_vectors(vectors: NDArray[np.float32]) -> msgspec.Raw:
    """Encode the embedding of one input as JSON numbers, for a response.

    `vectors` is one vector (width,), or a vector for each token (count, width). Long vectors are
    encoded in chunks, so that other threads can run in between.
    """
    if vectors.ndim > 1:
        return msgspec.Raw(b"[" + b",".join(map(_encode_vector, vectors)) + b"]")
    return msgspec.Raw(_encode_vector(vectors))


def _encode_vector(vector: NDArray[np.float32]) -> bytes:
    chunks = []
    for start in range(0, len(vector), _MAX_VALUES_PER_CHUNK):
        values = vector[start : start + _MAX_VALUES_PER_CHUNK].tolist()
        chunks.append(encode_json(values)[1:-1])
    return b"[" + b",".join(chunks) + b"]"
