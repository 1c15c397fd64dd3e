"""Writes JSON that every line reader sees as one line."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_encode = msgspec.json.Encoder().encode

# JSON allows these characters in strings, but Python's `str.splitlines` and the line readers of
# several clients end a line at them. (JSON always escapes the other characters at which they do.)
_LINE_ENDS: Final = {
    b"\xe2\x80\xa8": rb"\u2028",  # line separator
    b"\xe2\x80\xa9": rb"\u2029",  # paragraph separator
    b"\xc2\x85": rb"\u0085",  # next line
}


def encode_json(body: Any) -> bytes:
    """Return a value as one line of JSON, which no line reader splits."""
    return escape_line_ends(_encode(body))


def escape_line_ends(data: bytes) -> bytes:
    """Return the same JSON, with escapes for the characters at which some readers end a line."""
    if data.isascii():  # much faster than three searches
        return data
    for character, escaped in _LINE_ENDS.items():
        if character in data:
            data = data.replace(character, escaped)
    return data
