"""A small safetensors writer for tests."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.model.quant import QuantTensor


def safetensors_bytes(tensors: Mapping[str, QuantTensor]) -> bytes:
    """Return a whole file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        begin = len(data)
        data += tensor.data.tobytes()
        entries[name] = {
            "dtype": tensor.format.name,
            "shape": list(tensor.shape),
            "data_offsets": [begin, len(data)],
        }
    return with_header(entries, bytes(data))


def with_header(entries: Any, data: bytes) -> bytes:
    """Return a file of any header, sound or not, and `data`."""
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def write_safetensors(path: Path, tensors: Mapping[str, QuantTensor]) -> Path:
    """Write a whole file and return its path."""
    path.write_bytes(safetensors_bytes(tensors))
    return path
