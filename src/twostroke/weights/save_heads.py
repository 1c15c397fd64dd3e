"""Writes trained heads; each file is replaced in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import TwostrokeError
from twostroke.core.files import write_json
from twostroke.weights.heads import HEADS_JSON, HEADS_WEIGHTS, facts_json, stored_shapes
from twostroke.weights.safetensors import write_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.quant import QuantTensor
    from twostroke.weights.heads import HeadsFacts


def save_heads(folder: Path, facts: HeadsFacts, tensors: Mapping[str, QuantTensor]) -> None:
    """Write `heads.safetensors`, with tensors in float32, float16 or bfloat16, and `heads.json`.

    Raises:
        TwostrokeError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = {name: tensors[name] for name in stored_shapes(facts.spec)}
        write_safetensors(folder / HEADS_WEIGHTS, own)
        write_json(folder / HEADS_JSON, facts_json(facts))
    except OSError as error:
        message = f"Heads cannot be written to {str(folder)!r}: {error.strerror}."
        raise TwostrokeError(message) from None
