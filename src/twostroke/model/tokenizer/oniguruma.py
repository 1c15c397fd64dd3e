"""Translates the regular expressions of tokenizer.json files from Oniguruma's syntax to `regex`'s.

`tokenizers` compiles them with Oniguruma (https://github.com/kkos/oniguruma, doc/RE). Most patterns
mean the same in both; the differences are silent, such as `&&` in a class, which is an intersection
in one and two characters in the other.
"""

from __future__ import annotations

import re
from typing import Final

import regex

_HEX: Final = "0-9A-Fa-f"
_WORD_IN_CLASS: Final = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}"
_WORD: Final = f"{_WORD_IN_CLASS}²³¹¼½¾"
_ESCAPES: Final = {
    "h": f"[{_HEX}]",
    "H": f"[^{_HEX}]",
    "w": f"[{_WORD}]",
    "W": f"[^{_WORD}]",
    "b": f"(?:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))",
    "B": f"(?:(?<=[{_WORD}])(?=[{_WORD}])|(?<![{_WORD}])(?![{_WORD}]))",
    "Z": r"(?=\n?\Z)",
    "z": r"\Z",
    "O": "(?s:.)",
    "N": r"[^\n]",
    "e": r"\x1b",
}
_ESCAPES_IN_CLASS: Final = {
    "h": _HEX,
    "H": f"[^{_HEX}]",
    "w": _WORD_IN_CLASS,
    "W": f"[^{_WORD_IN_CLASS}]",
    "e": r"\x1b",
}
_NAMED_CLASSES: Final = {
    "[:digit:]": r"\p{Nd}",
    "[:^digit:]": r"\P{Nd}",
    "[:word:]": _WORD_IN_CLASS,
    "[:xdigit:]": _HEX,
}
_NAMED: Final = re.compile(r"\[:\^?\w+:\]")
_CODE: Final = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}")
_FLAGS: Final = re.compile(r"\(\?[imx]*m[imx]*(-[imx]+)?[:)]")
_LATER_FLAGS: Final = re.compile(r"(?<!\\)(?<!^)\(\?[imx]+\)")
_OPERATORS: Final = "|~-"  # of classes in `regex`, if doubled


def compiled(pattern: str) -> regex.Pattern[str]:
    """Return the compiled pattern; raises regex.error if it is not valid.

    As in Oniguruma, `^` and `$` match at every line.
    """
    translation = _Translation(pattern)
    text = translation.translated()
    if not (translation.has_sets or _LATER_FLAGS.search(pattern)):
        return regex.compile(text, regex.MULTILINE)
    # Version 1 has sets of classes, and flags that begin where they stand.
    return regex.compile(text, regex.MULTILINE | regex.VERSION1)


class _Translation:
    """Reads a pattern from left to right; `has_sets`: a class is inside another, or cut by one."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self.has_sets = False

    def translated(self) -> str:
        """Return the whole pattern."""
        parts: list[str] = []
        while self._position < len(self._pattern):
            char = self._pattern[self._position]
            if char == "\\":
                parts.append(self._escape(_ESCAPES))
            elif char == "[":
                parts.append(self._class())
            elif flags := _FLAGS.match(self._pattern, self._position):
                # `(?m)` lets a dot match line breaks, which is `(?s)` in `regex`.
                parts.append(flags[0].replace("m", "s"))
                self._position = flags.end()
            else:
                parts.append(self._next())
        return "".join(parts)

    def _next(self, size: int = 1) -> str:
        start = self._position
        self._position += size
        return self._pattern[start : self._position]

    def _escape(self, translations: dict[str, str]) -> str:
        if code := _CODE.match(self._pattern, self._position):
            self._position = code.end()
            return rf"\U{int(code[1], 16):08x}"
        spelled = self._next(2)
        translated = translations.get(spelled[1:], spelled)
        self.has_sets |= translations is _ESCAPES_IN_CLASS and translated.startswith("[")
        return translated

    def _class(self) -> str:
        """Return the class that begins here, with the classes inside it."""
        parts = [self._next()]
        if self._pattern.startswith("^", self._position):
            parts.append(self._next())
        if self._pattern.startswith("]", self._position):  # first, it is a character
            parts.append("\\" + self._next())
        while self._position < len(self._pattern):
            char = self._pattern[self._position]
            if char == "]":
                parts.append(self._next())
                break
            if char == "\\":
                parts.append(self._escape(_ESCAPES_IN_CLASS))
            elif named := _NAMED.match(self._pattern, self._position):
                self._position = named.end()
                parts.append(_NAMED_CLASSES.get(named[0], named[0]))
            elif char == "[":
                self.has_sets = True
                parts.append(self._class())
            elif self._pattern.startswith("&&", self._position):
                self.has_sets = True
                parts.append(self._next(2))
            elif char in _OPERATORS and self._pattern.startswith(char * 2, self._position):
                parts.append("\\" + self._next())
            else:
                parts.append(self._next())
        return "".join(parts)
