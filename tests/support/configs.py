"""Models that are known by their configuration alone, as plans take them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "intermediate_size", "vocab_size",
)  # fmt: skip
SIZES = {
    "7B": (4096, 32, 32, 32, 11008, 32000),
    "8B": (4096, 32, 8, 32, 14336, 128256),
    "13B": (5120, 40, 40, 40, 13824, 32000),
    "34B": (8192, 64, 8, 48, 22016, 32000),
    "70B": (8192, 64, 8, 80, 28672, 128256),
    "405B": (16384, 128, 8, 126, 53248, 128256),
}


def write_config(path: Path, sizes: str | tuple[int, ...], **more: Any) -> str:
    """Write a configuration of these sizes, a key of `SIZES` or values of `KEYS`; return its path.

    `more` are other fields of it.
    """
    values = dict(zip(KEYS, SIZES[sizes] if isinstance(sizes, str) else sizes, strict=True))
    config = {"model_type": "llama", "max_position_embeddings": 1 << 17, **values, **more}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)
