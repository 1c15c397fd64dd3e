"""How a vocabulary spells bytes: byte-level (GPT-2) and SentencePiece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes() -> Callable[[str], bytes]:
    """Return a function from a byte-level token's text to its bytes.

    GPT-2's table (encoder.py of openai/gpt-2): the printable Latin-1 characters stand for
    themselves, the other byte values for U+0100 onwards in order. A character outside the table
    (a damaged vocabulary) stands for its own UTF-8.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    table.update((chr(0x100 + place), value) for place, value in enumerate(others))

    def to_bytes(text: str) -> bytes:
        try:
            return bytes([table[char] for char in text])
        except KeyError:
            return b"".join(
                bytes([table[char]]) if char in table else char.encode("utf-8", "replace")
                for char in text
            )

    return to_bytes


def sentencepiece_bytes(text: str) -> bytes:
    """Return the bytes of a SentencePiece token: U+2581 is a space, `<0xAB>` the byte 0xAB."""
    value = byte_token(text)
    return value if value is not None else text.replace("\u2581", " ").encode("utf-8", "replace")


def byte_token(text: str) -> bytes | None:
    """Return the one byte that a text of the form `<0xAB>` stands for, or None."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else None
