"""Two thousand tokens of text, written for this, that no model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.engine.build import build_tokenizer

if TYPE_CHECKING:
    from twostroke.weights import LoadedModel

PATH = Path(__file__).parents[1] / "data" / "heldout.txt"


def heldout_pieces(loaded: LoadedModel, length: int) -> list[list[int]]:
    """Return the text as token ids in pieces of `length` (the last may be shorter)."""
    tokens = build_tokenizer(loaded).encode(PATH.read_text(encoding="utf-8"))
    return [tokens[i : i + length] for i in range(0, len(tokens), length)]
