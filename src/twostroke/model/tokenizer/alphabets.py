"""How vocabularies spell bytes and spaces as characters: byte-level (GPT-2) and SentencePiece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.model.tokenizer.vocabulary import Vocabulary
    from twostroke.model.tokenizer.words import Cut

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

SPACE = "\u2581"  # how SentencePiece spells a space


def _byte_characters() -> list[str]:
    """Return the character that spells each byte value in byte-level vocabularies.

    GPT-2's table (encoder.py of openai/gpt-2): printable Latin-1 characters spell their own byte,
    and the characters from U+0100 on spell the other byte values in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    other_characters = (chr(code) for code in range(0x100, 0x200))
    return [chr(value) if value in printable else next(other_characters) for value in range(256)]


_CHARACTERS = _byte_characters()
_BYTES = {char: bytes([value]) for value, char in enumerate(_CHARACTERS)}


def byte_level_text(word: str) -> str:
    """Return a word's UTF-8 bytes, each as the character that spells it in byte-level tokens."""
    return word.encode().decode("latin-1").translate(_CHARACTERS)


def byte_level_bytes(text: str) -> bytes:
    """Return the bytes of a byte-level token's text.

    A character outside the alphabet (in a damaged vocabulary) becomes its UTF-8 bytes.
    """
    return b"".join(_BYTES.get(char) or char.encode("utf-8", "replace") for char in text)


def sentencepiece_bytes(text: str) -> bytes:
    """Return the bytes of a SentencePiece token's text.

    U+2581 stands for a space, and `<0xAB>` for the byte 0xAB.
    """
    value = byte_token(text)
    return value if value is not None else text.replace(SPACE, " ").encode("utf-8", "replace")


def byte_token(text: str) -> bytes | None:
    """Return the byte that a text of the form `<0xAB>` spells, or None for other texts."""
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else None


def mark_spaces(*, prefix: bool) -> Cut:
    """Return a function that writes a text's spaces as U+2581, for SentencePiece.

    Functions of the type `Cut` return a list of words; this one returns the whole text as one word.
    With `prefix`, U+2581 is also put first.
    """
    start = SPACE if prefix else ""
    return lambda text: [start + text.replace(" ", SPACE)]


def cut_before_spaces(vocabulary: Vocabulary) -> Cut:
    """Return a function that cuts text before its marked spaces (U+2581), for SentencePiece.

    Text is not cut where a token of the vocabulary may contain the space. Merging the resulting
    words one by one therefore has the same result as merging the whole text, but words occur
    repeatedly and can be cached.
    """
    chars_before_space = re.escape(vocabulary.characters_before(SPACE))
    joined = f"(?:(?<=[{chars_before_space}]){SPACE}+[^{SPACE}]*)*" if chars_before_space else ""
    words = re.compile(f"{SPACE}*[^{SPACE}]+{joined}|{SPACE}+")
    return words.findall
