"""Reads arguments of a tool call that a model writes as names and literals, as in Python."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Final

import regex

from twostroke.engine.structured_output.notations import BLANKS, to_json_literal
from twostroke.engine.structured_output.schema.argument_types import ALL_TYPES
from twostroke.model.tokenizer.preface import partial_match_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.structured_output.notations import LiteralNotation

_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_ESCAPE_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_CLOSERS: Final = ")]}"
_ROOT: Final = "("
_NO_BLANK: Final = regex.compile(rf"[^{BLANKS}]")


class LiteralReader:
    """Reads arguments that are written as names and literals, and returns them as JSON.

    A string is returned as it arrives. A value that is no literal becomes a string. Text that the
    notation does not allow is skipped.
    """

    def __init__(self, notation: LiteralNotation) -> None:
        """Begin at the first argument."""
        self._notation = notation
        self._open = [_ROOT]  # brackets of the containers around the next character
        self._num_inside = [0]  # members or items of each
        self._state: Callable[[str, int], int] = self._read_begin
        self._quote = ""  # of the string that is being read
        self._is_name = False  # whether that string is a name inside an object
        self._texts: list[str] = []  # of the name or literal that is being read
        self._json: list[str] = []
        self._is_over = False

    def read(self, text: str, offset: int) -> tuple[int, str, bool]:
        """Read the text from `offset`; see `ArgumentReader.read`.

        Returns the next offset, new JSON, and whether the arguments have ended.
        """
        while offset < len(text) and not self._is_over:
            end = self._state(text, offset)
            if end < 0:  # more text is needed to go on
                break
            offset = end
        result = "".join(self._json)
        self._json = []
        return offset, result, self._is_over

    def finish(self, rest: str, *, is_cut: bool) -> str | None:
        """Return the end of the JSON; None if the answer ends inside an argument."""
        del rest
        if is_cut or len(self._open) > 1:
            return None
        if self._state == self._read_scalar:
            self._add_scalar()
        elif self._state not in (self._read_begin, self._read_name, self._read_after):
            return None
        return "".join([*self._json, "}"]) if self._state != self._read_begin else "{}"

    def _read_begin(self, text: str, offset: int) -> int:
        del text
        self._json.append("{")
        self._state = self._read_name
        return offset

    def _read_name(self, text: str, offset: int) -> int:
        """Read the name of an argument or of an object's member, or the end of the object."""
        if not self._texts:
            offset = _after_blanks(text, offset)
            if offset == len(text):
                return offset
            if self._closes(text[offset]):
                return self._close(offset)
            if text[offset] == ",":
                return offset + 1
            if self._open[-1] != _ROOT and (quote := self._opening_quote(text, offset)):
                if quote == "?":
                    return -1
                self._begin_string(quote, is_name=True)
                return offset + len(quote)
        sign = (self._notation.equals if self._open[-1] == _ROOT else self._notation.colon).strip()
        end = _name_end(sign).search(text, offset)
        self._texts.append(text[offset : end.start() if end else len(text)])
        offset = end.start() if end else len(text)
        if offset == len(text):
            return offset
        name = "".join(self._texts).strip(BLANKS)
        self._texts = []
        if text[offset] != sign:  # no name: the text is skipped
            is_end = text[offset] == "," or self._closes(text[offset])
            return offset if is_end else offset + 1
        self._add_separator()
        self._json.append(f"{json.dumps(name, ensure_ascii=False)}: ")
        self._state = self._read_value
        return offset + 1

    def _read_colon(self, text: str, offset: int) -> int:
        """Read the colon after a quoted name."""
        offset = _after_blanks(text, offset)
        if offset == len(text):
            return offset
        self._json.append(": ")
        self._state = self._read_value
        return offset + 1 if text[offset] == ":" else offset

    def _read_value(self, text: str, offset: int) -> int:
        """Read the first character of a value, or the end of a list."""
        offset = _after_blanks(text, offset)
        if offset == len(text):
            return offset
        in_list = self._open[-1] == "["
        if in_list and self._closes(text[offset]):
            return self._close(offset)
        quote = self._opening_quote(text, offset)
        if quote == "?":
            return -1
        if in_list:
            self._add_separator()
        if quote:
            self._begin_string(quote, is_name=False)
            return offset + len(quote)
        if text[offset] in "[{":
            self._open.append(text[offset])
            self._num_inside.append(0)
            self._json.append(text[offset])
            self._state = self._read_value if text[offset] == "[" else self._read_name
            return offset + 1
        self._state = self._read_scalar
        return offset

    def _read_scalar(self, text: str, offset: int) -> int:
        """Read a value without quotes, up to the character that ends it."""
        end = offset
        while end < len(text) and text[end] != "," and not self._closes(text[end]):
            end += 1
        self._texts.append(text[offset:end])
        if end < len(text):
            self._add_scalar()
            self._state = self._read_after
        return end

    def _add_scalar(self) -> None:
        value = "".join(self._texts).strip(BLANKS)
        self._texts = []
        literal = to_json_literal(value, ALL_TYPES)
        self._json.append(json.dumps(value, ensure_ascii=False) if literal is None else literal)

    def _begin_string(self, quote: str, *, is_name: bool) -> None:
        if is_name:
            self._add_separator()
        self._json.append('"')
        self._quote, self._is_name = quote, is_name
        self._state = self._read_string

    def _read_string(self, text: str, offset: int) -> int:
        """Read a part of a string, or its end."""
        if self._notation.has_escapes and text[offset] == "\\":
            return self._read_escape(text, offset)
        has_escapes = self._notation.has_escapes
        match = _string_end(self._quote, has_escapes=has_escapes).search(text, offset)
        end: int
        if match is not None:
            end = match.start()
        else:
            tail = text[max(offset, len(text) - len(self._quote)) :]
            end = len(text) - partial_match_length(tail, self._quote)
        self._json.append(json.dumps(text[offset:end], ensure_ascii=False)[1:-1])
        if match is None:
            return end if end > offset else -1
        if match[0] == "\\":
            return end
        self._json.append('"')
        self._state = self._read_colon if self._is_name else self._read_after
        return end + len(self._quote)

    def _read_escape(self, text: str, offset: int) -> int:
        """Read an escape sequence; unknown sequences stay as they are."""
        if offset + 1 == len(text):
            return -1
        sign = text[offset + 1]
        end = offset + 2 + _ESCAPE_DIGITS.get(sign, 0)
        if end > len(text):
            return -1
        value = _ESCAPES.get(sign, text[offset : offset + 2])
        if sign in _ESCAPE_DIGITS:
            value = _character(text[offset + 2 : end]) or text[offset:end]
        self._json.append(json.dumps(value, ensure_ascii=False)[1:-1])
        return end

    def _read_after(self, text: str, offset: int) -> int:
        """Read the separator after a value, or the end of its container."""
        offset = _after_blanks(text, offset)
        if offset == len(text):
            return offset
        if self._closes(text[offset]):
            return self._close(offset)
        if text[offset] == ",":
            self._state = self._read_value if self._open[-1] == "[" else self._read_name
        return offset + 1

    def _closes(self, character: str) -> bool:
        """Whether a character ends the innermost container."""
        return character in (_CLOSERS if len(self._open) > 1 else self._notation.end)

    def _close(self, offset: int) -> int:
        """End the innermost container. The character that ends the arguments stays unread."""
        bracket = self._open.pop()
        self._num_inside.pop()
        self._json.append("]" if bracket == "[" else "}")
        self._state = self._read_after
        if not self._open:
            self._is_over = True
            return offset
        return offset + 1

    def _add_separator(self) -> None:
        self._json.append(", " if self._num_inside[-1] else "")
        self._num_inside[-1] += 1

    def _opening_quote(self, text: str, offset: int) -> str:
        """Return the quote at an offset of a text, or "?" if it may become a quote."""
        for quote in self._notation.quotes:
            begin = text[offset : offset + len(quote)]
            if begin == quote:
                return quote
            if offset + len(begin) == len(text) and quote.startswith(begin):
                return "?"
        return ""


def _after_blanks(text: str, offset: int) -> int:
    """Return the offset of the next character that is not white space."""
    match = _NO_BLANK.search(text, offset)
    return match.start() if match else len(text)


@cache
def _string_end(quote: str, *, has_escapes: bool) -> regex.Pattern[str]:
    """Return the regular expression of a quote, or of the beginning of an escape sequence."""
    return regex.compile(regex.escape(quote) + (r"|\\" if has_escapes else ""))


@cache
def _name_end(sign: str) -> regex.Pattern[str]:
    """Return the regular expression of the sign after a name, or of the end of other text."""
    return regex.compile(rf"[,{regex.escape(sign)}{regex.escape(_CLOSERS)}]")


def _character(digits: str) -> str:
    """Return the character with a code in hexadecimal digits; empty if there is none."""
    try:
        character = chr(int(digits, 16))
        character.encode()
    except ValueError:
        return ""
    return character
