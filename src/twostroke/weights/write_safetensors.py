"""Writes a safetensors file, whole or not at all."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.quant import QuantTensor

_ALIGNMENT = 8  # bytes of the header


def write_safetensors(path: Path, tensors: Mapping[str, QuantTensor]) -> None:
    """Write tensors in float32, float16 or bfloat16; OSError if they cannot be written."""
    entries: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.num_bytes
        entries[name] = {
            "dtype": tensor.format.name,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in tensors.values():
                file.write(tensor.data.tobytes())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
