"""Reads the arguments of one tool call from a streamed answer, and returns them as JSON text."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

import regex

from twostroke.engine.chat.literal_reader import LiteralReader
from twostroke.engine.structured_output.notations import (
    BLANKS,
    CDATA,
    TYPE,
    JsonNotation,
    TagNotation,
    to_json_literal,
)
from twostroke.engine.structured_output.schema.argument_types import (
    ALL_TYPES,
    STRING_ONLY,
    ArgumentTypes,
)
from twostroke.model.tokenizer.preface import partial_match_length

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from twostroke.engine.structured_output.notations import Notation

MAX_HELD_CHARS: Final = 500  # of text that may become a mark, and of blanks
_MAX_KEY_CHARS: Final = 257
_NO_BLANK: Final = regex.compile(rf"[^{BLANKS}]")
_BRACKETS: Final = {"[": "array", "{": "object"}


class ArgumentReader(Protocol):
    """The interface of readers of one tool call's arguments, as they arrive from the model."""

    def read(self, text: str, offset: int) -> tuple[int, str, bool]:
        """Read the text from `offset`; return the next offset, JSON, and whether arguments ended.

        The JSON texts of all calls of this method, joined, are the arguments. If the arguments have
        not ended, the next call must get the text from the returned offset on, with more text after
        it. If they have ended, the text after the offset is not part of the arguments.
        """

    def finish(self, rest: str, *, is_cut: bool) -> str | None:
        """Return the rest of the JSON when the answer ends; None if the arguments are incomplete.

        `rest` is the text that was not read. Closing texts after the arguments may be missing.
        `is_cut` says that the answer was cut short: then arguments that more text could have
        continued are incomplete.
        """


def reader_of(notation: Notation, schema: Mapping[str, Any]) -> ArgumentReader:
    """Return a reader of one call's arguments; `schema` is the JSON schema of the function."""
    match notation:
        case JsonNotation():
            return JsonReader()
        case TagNotation():
            return TagReader(notation, ArgumentTypes(schema))
        case _:
            return LiteralReader(notation)


class JsonReader:
    """Reads arguments that are a JSON object, up to the bracket that closes the object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def read(self, text: str, offset: int) -> tuple[int, str, bool]:
        """Read the text from `offset`; see `ArgumentReader.read`.

        Returns the next offset, new JSON, and whether the arguments have ended.
        """
        for index in range(offset, len(text)):
            char = text[index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1, text[offset : index + 1], True
        return len(text), text[offset:], False

    def finish(self, rest: str, *, is_cut: bool) -> str | None:
        """Return None: an object that was not closed is incomplete."""
        del rest, is_cut
        return None


class TagReader:
    """Reads arguments whose names and values stand between tags, such as `<parameter=city>`.

    A value whose type can only be a string is returned as it arrives. Other values are returned
    when they are complete: as JSON literals if they are, and else as strings.
    """

    def __init__(self, notation: TagNotation, types: ArgumentTypes) -> None:
        """Begin at the first argument; `types` are the types of the function's arguments."""
        self._notation = notation
        self._pattern = _argument_pattern(notation)
        self._types = types
        self._num_arguments = 0
        self._value: _TagValue | None = None
        self._end = ""  # of the JSON of the value
        self._is_open = False

    def read(self, text: str, offset: int) -> tuple[int, str, bool]:
        """Read the text from `offset`; see `ArgumentReader.read`.

        Returns the next offset, new JSON, and whether the arguments have ended.
        """
        parts: list[str] = []
        if not self._is_open:
            self._is_open = True
            parts.append("{")
        while True:
            if self._value is None:
                end = offset + MAX_HELD_CHARS + 1
                match = self._pattern.match(text, pos=offset, endpos=end, partial=True)
                if match and match.partial and len(text) < end:
                    return offset, "".join(parts), False
                if not match or match.partial:
                    return offset, "".join([*parts, "}"]), True
                offset = match.end()
                self._begin(match, parts)
            assert self._value is not None
            offset, is_over = self._value.read(text, offset, parts)
            if not is_over:
                return offset, "".join(parts), False
            self._value = None
            parts.append(self._end)

    def finish(self, rest: str, *, is_cut: bool) -> str | None:
        """Return the end of the JSON; None if the answer ends inside an argument."""
        may_go_on = is_cut and self._pattern.match(rest, partial=True) is not None
        return None if self._value is not None or may_go_on else "}"

    def _begin(self, match: regex.Match[str], parts: list[str]) -> None:
        """Begin the value of the argument whose tags `match` has matched."""
        name = match["key"]
        separator = ", " if self._num_arguments else ""
        parts.append(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_arguments += 1
        types = self._types.of(name)
        if self._notation.other_key_end:
            types = STRING_ONLY if match["string"] else ALL_TYPES - STRING_ONLY
        self._value = _TagValue(self._notation, types)
        self._end = '"' if types == STRING_ONLY else ""
        parts.append(self._end)


class _TagValue:
    """Reads the value of one argument, up to the tag that ends it.

    Inside the strings of an array or an object, this tag is part of the value. If the value may
    have any type, it may also be a text that looks like an array; then the first such tag ends the
    value.
    """

    def __init__(self, notation: TagNotation, types: frozenset[str]) -> None:
        self._lead = notation.lead
        self._trail = notation.trail
        self._mark = notation.closing_mark
        self._may_be_cdata = notation.has_cdata
        self._is_text = types == STRING_ONLY
        self._literal_types = types - STRING_ONLY if "string" in types else ALL_TYPES
        self._brackets = "".join(
            sign for sign, name in _BRACKETS.items() if name in types and types != ALL_TYPES
        )
        self._texts: list[str] = []  # of a value that is returned when it is complete
        self._json: JsonReader | None = None  # reads an array or an object
        self._has_begun = False  # whether a character was read that is no blank

    def read(self, text: str, offset: int, parts: list[str]) -> tuple[int, bool]:
        """Read from an offset of a text, and add JSON to `parts`.

        Returns the next offset, and whether the value is complete.
        """
        if self._lead:
            begin = text[offset : offset + len(self._lead)]
            if begin != self._lead and self._lead.startswith(begin):
                return offset, False
            offset += len(self._lead) if begin == self._lead else 0
            self._lead = ""
        if self._may_be_cdata:
            begin = text[offset : offset + len(CDATA[0])]
            if begin != CDATA[0] and CDATA[0].startswith(begin):
                return offset, False
            self._may_be_cdata = False
            if begin == CDATA[0]:
                offset += len(begin)
                self._mark, self._trail = CDATA[1] + self._mark, ""
                self._literal_types, self._brackets = frozenset(), ""
        offset = self._read_json(text, offset)
        end = text.find(self._mark, offset)
        if end < 0:
            tail = text[max(offset, len(text) - len(self._trail) - len(self._mark)) :]
            num_held = max(
                partial_match_length(tail, self._trail + self._mark),
                partial_match_length(tail, self._mark),
            )
            self._take(text[offset : len(text) - num_held], parts)
            return len(text) - num_held, False
        self._take(text[offset:end].removesuffix(self._trail), parts)
        if not self._is_text:
            value = "".join(self._texts)
            literal = to_json_literal(value, self._literal_types)
            parts.append(json.dumps(value, ensure_ascii=False) if literal is None else literal)
        return end + len(self._mark), True

    def _read_json(self, text: str, offset: int) -> int:
        """Read an array or an object, if the value is one; return the next offset."""
        if not self._has_begun and self._brackets:
            match = _NO_BLANK.search(text, offset)
            self._has_begun = match is not None
            if match and match[0] in self._brackets:
                self._json = JsonReader()
        if self._json is None:
            return offset
        end, _, is_over = self._json.read(text, offset)
        self._texts.append(text[offset:end])
        if is_over:
            self._json = None
        return end

    def _take(self, text: str, parts: list[str]) -> None:
        if self._is_text:
            parts.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._texts.append(text)


@cache
def _argument_pattern(notation: TagNotation) -> regex.Pattern[str]:
    """Return the regular expression of the tags and the name before an argument's value."""
    stop = regex.escape(notation.key_end.strip(BLANKS)[0])
    key_end = _with_loose_blanks(notation.key_end.rstrip(BLANKS))
    if notation.other_key_end:
        other = _with_loose_blanks(notation.other_key_end.rstrip(BLANKS))
        other = other.replace(regex.escape(TYPE), r"\w++")  # models also write `integer`
        key_end = f"(?:(?<string>{key_end})|{other})"
    return regex.compile(
        rf"\s*+{_with_loose_blanks(notation.key_begin)}"
        rf"(?<key>[^{stop}\n]{{1,{_MAX_KEY_CHARS}}}+){key_end}"
    )


def _with_loose_blanks(text: str) -> str:
    """Return a regular expression of a text that accepts any white space for its white space."""
    return r"\s*+".join(map(regex.escape, text.split()))
