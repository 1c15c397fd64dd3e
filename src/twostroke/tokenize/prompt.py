"""A rendered chat prompt: text in which the template's own special tokens are set apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt; `special` when it is exactly one special token of the template."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a chat template rendered, in order.

    `Tokenizer.encode_prompt` turns special pieces into single ids and everything else into plain
    text, so what looks like a special token in a user's message never becomes one.
    """

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The whole prompt as one string, as other engines would show it."""
        return "".join(piece.text for piece in self.pieces)
