"""Two thousand tokens of text, written for these tests, that no model was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.lab.measure.compare import held_out_text
from twostroke.model.loader import build_tokenizer

if TYPE_CHECKING:
    from twostroke.model.weights import LoadedModel


def heldout_pieces(loaded: LoadedModel, length: int) -> list[list[int]]:
    """Return the text as token ids in pieces of `length` (the last may be shorter)."""
    tokens = build_tokenizer(loaded).encode(held_out_text())
    return [tokens[i : i + length] for i in range(0, len(tokens), length)]
