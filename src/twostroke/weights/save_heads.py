"""Writes heads: each file whole, or as it was before."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import TwostrokeError
from twostroke.weights.disk import write_json
from twostroke.weights.heads import HEADS_JSON, HEADS_WEIGHTS, facts_json, stored_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.quant import QuantTensor
    from twostroke.weights.heads import HeadsFacts

_ALIGNMENT = 8  # bytes of the header, as safetensors wants it


def save_heads(folder: Path, facts: HeadsFacts, tensors: Mapping[str, QuantTensor]) -> None:
    """Write `heads.safetensors`, with tensors in float32, float16 or bfloat16, and `heads.json`.

    Raises:
        TwostrokeError: the folder cannot be written, or the disk is full.
    """
    chosen = {name: tensors[name] for name in stored_shapes(facts.spec)}
    part = folder / f".{HEADS_WEIGHTS}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(_safetensors(chosen))
            part.replace(folder / HEADS_WEIGHTS)
        finally:
            part.unlink(missing_ok=True)
        write_json(folder / HEADS_JSON, facts_json(facts))
    except OSError as error:
        message = f"Heads cannot be written to {str(folder)!r}: {error.strerror}."
        raise TwostrokeError(message) from None


def _safetensors(tensors: Mapping[str, QuantTensor]) -> bytes:
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
    data = b"".join(tensor.data.tobytes() for tensor in tensors.values())
    return struct.pack("<Q", len(header)) + header + data
