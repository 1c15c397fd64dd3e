"""Reads the input of a custom tool, which models write as a function's only argument."""

from __future__ import annotations

import json
from typing import Final

import regex

_OPENING: Final = regex.compile(r'\s*+\{\s*+"input"\s*+:\s*+"')
# Text as far as its escapes are complete; one of a pair may be followed by the other.
_HIGH: Final = r"[dD][89abAB][0-9a-fA-F]{2}"
_HEX: Final = "[0-9a-fA-F]{4}"
_TEXT: Final = regex.compile(
    rf'(?:[^"\\]|\\[^u]|\\u(?!{_HIGH}){_HEX}|\\u{_HIGH}(?:\\u{_HEX}|(?=[^\\]|\\[^u])))*+'
)


class FreeTextReader:
    """Turns the pieces of `{"input": "..."}` into pieces of the text."""

    def __init__(self) -> None:
        self._held = ""
        self._is_open = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """Return the text that more of the arguments makes certain."""
        if self._is_over:
            return ""
        self._held += arguments
        if not self._is_open:
            found = _OPENING.match(self._held)
            if not found:
                return ""
            self._held, self._is_open = self._held[found.end() :], True
        found = _TEXT.match(self._held)
        assert found
        self._held = self._held[found.end() :]
        self._is_over = self._held.startswith('"')
        text: str = json.loads(f'"{found[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
