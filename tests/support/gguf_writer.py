"""A small GGUF writer for tests: valid files, and invalid files piece by piece."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.model.quant import QuantTensor

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"}
_CODES |= {U64: "Q", I64: "q", F64: "d"}


class Typed:
    """A metadata value with its GGUF type: `Typed(U64, 7)`, `Typed(I32, [1, 2])`."""

    def __init__(self, kind: int, value: Any) -> None:
        self.kind = kind
        self.value = value


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, QuantTensor],
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """Return a whole file; an alignment other than 32 must be in the metadata, too."""
    out = header(len(tensors), len(metadata), version)
    for key, value in metadata.items():
        out += key_value(key, value)
    data = bytearray()
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        assert tensor.format.gguf_id is not None
        out += tensor_info(name, tensor.shape, tensor.format.gguf_id, len(data))
        data += tensor.data.tobytes()
    out += bytes(-len(out) % alignment)
    return bytes(out + data)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, QuantTensor], **options: int
) -> Path:
    """Write a whole file and return its path."""
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: str, value: Any) -> bytes:
    kind, value = (value.kind, value.value) if isinstance(value, Typed) else (None, value)
    if isinstance(value, list):
        return string(key) + struct.pack("<I", ARRAY) + _array(value, kind)
    kind = _kind(value) if kind is None else kind
    return string(key) + struct.pack("<I", kind) + _scalar(kind, value)


def tensor_info(name: str, shape: tuple[int, ...], gguf_type: int, offset: int) -> bytes:
    dims = tuple(reversed(shape))
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, gguf_type, offset)
    return string(name) + packed


def _array(values: Any, kind: int | None = None) -> bytes:
    if isinstance(values, Typed):
        values, kind = values.value, values.kind
    kind = _kind(values[0]) if kind is None else kind
    out = struct.pack("<IQ", kind, len(values))
    if kind in _CODES:
        return out + struct.pack(f"<{len(values)}{_CODES[kind]}", *values)
    return out + b"".join(_scalar(kind, value) for value in values)


def _scalar(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        return _array(value, None)
    return struct.pack(f"<{_CODES[kind]}", value)


def _kind(value: Any) -> int:
    if isinstance(value, list):
        return ARRAY
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING, bytes: STRING}
    return kinds[type(value)]
