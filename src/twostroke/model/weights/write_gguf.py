"""Writes GGUF files (version 3, little-endian).

Source: the GGUF specification (ggml repository, docs/gguf.md).
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from twostroke.model.weights.gguf import DEFAULT_ALIGNMENT, MAGIC

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twostroke.model.quant import QuantTensor

# A value, or its bytes as another GGUF file stores them, with the type first.
Value: TypeAlias = "bool | int | float | str | bytes"

_VERSION = 3
_LAYOUTS: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (12, "d")}
_STRING = 8


def write_gguf(
    path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, QuantTensor]
) -> None:
    """Write a GGUF file with metadata and tensors; raise OSError if it cannot be written.

    Whole numbers are stored with 32 bits. The alignment is 32 bytes, and `metadata` must not set
    another alignment.
    """
    sizes = [_aligned(tensor.num_bytes) for tensor in tensors.values()]
    starts = accumulate(sizes[:-1], initial=0)
    head = MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
    head += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    head += b"".join(
        _entry(name, tensor, start)
        for (name, tensor), start in zip(tensors.items(), starts, strict=True)
    )
    with path.open("wb") as file:
        file.writelines(_padded(head))
        for tensor in tensors.values():
            file.writelines(_padded(tensor.data.tobytes()))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _padded(raw: bytes) -> Iterable[bytes]:
    """Yield bytes, then zeros up to the next multiple of GGUF's alignment."""
    return raw, bytes(_aligned(len(raw)) - len(raw))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    kind, code = _LAYOUTS[type(value)]
    return struct.pack(f"<I{code}", kind, value)


def _entry(name: str, tensor: QuantTensor, start: int) -> bytes:
    dims = tensor.shape[::-1]
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.format.gguf_id, start)
    return _string(name) + packed
