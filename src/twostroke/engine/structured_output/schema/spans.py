"""Finds the wrong value in a complete JSON answer, and values to hold back in a streamed one."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.structured_output.schema.verify import SchemaViolation

    Path = tuple[str | int, ...]
    PathPattern = tuple[str | int | None, ...]  # None matches any name or index

_BLANKS: Final = re.compile(r"[ \t\n\r]*")
# Numbers stay texts, because Python does not convert more than 4300 digits.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_KEYWORD_LOCATION: Final = re.compile(r"[^ ]+ \((#|/[^…]*)\)")
_REPEATED: Final = "(names that repeat)"
_IN_PLACE: Final = frozenset(("allOf", "anyOf", "oneOf"))  # followed by an index


def wrong_span(text: str, fault: SchemaViolation) -> tuple[int, int]:
    """Return the start and end offsets, in an answer's text, of the value that breaks the schema.

    The answer is generated again from the start offset. For a name that occurs twice in an object,
    these are the offsets of its second occurrence. If the violation's path leads to no value, they
    are the offsets of the last value on the path.
    """
    if fault.name:
        return _repeated_span(text, fault.name)
    start = _skip(text, 0)
    for step in fault.path:
        inner = _member_offset(text, start, step)
        if inner is None:
            break
        start = inner
    return start, _DECODER.raw_decode(text, start)[1]


def _member_offset(text: str, start: int, step: str | int) -> int | None:
    """Return the start offset of one member's or item's value in a JSON text.

    `start` is the offset of the object or array, `step` the member's name or the item's index. None
    if the member or item is missing.
    """
    for key, begin, _ in _members(text, start):
        if key == step:
            return begin
    return None


def _members(text: str, start: int) -> list[tuple[str | int, int, int]]:
    """Return the members or items of the JSON object or array at an offset of a text.

    For each: its name or index, the offset of its value, and the offset of its name.
    """
    members: list[tuple[str | int, int, int]] = []
    if text[start] not in "{[":
        return members
    is_object, offset = text[start] == "{", _skip(text, start + 1)
    while offset < len(text) and text[offset] not in "}]":
        key: str | int = len(members)
        name_start = offset
        if is_object:
            key, offset = _DECODER.raw_decode(text, offset)
            offset = _skip(text, _skip(text, offset) + 1)  # the colon
        members.append((key, offset, name_start))
        offset = _skip(text, _DECODER.raw_decode(text, offset)[1])
        if text[offset] == ",":
            offset = _skip(text, offset + 1)
    return members


def _repeated_span(text: str, name: str) -> tuple[int, int]:
    """Return the offsets of the second occurrence of a name that an object contains twice.

    These are the start and the end of the name in the JSON text.
    """
    waiting = [_skip(text, 0)]
    while waiting:
        start = waiting.pop()
        seen: set[str | int] = set()
        for key, begin, name_start in _members(text, start):
            if key in seen and str(key).startswith(name):
                return name_start, _DECODER.raw_decode(text, name_start)[1]
            seen.add(key)
            waiting.append(begin)
    return 0, len(text)


def _skip(text: str, offset: int) -> int:
    """Return the offset of the next character of a JSON text that is not white space."""
    match = _BLANKS.match(text, offset)
    assert match
    return match.end()


def checked_paths(unenforced_keywords: Sequence[str], schema: str) -> tuple[PathPattern, ...]:
    """Return the paths of values in an answer that only the check of the finished answer covers.

    The grammar does not enforce the `unenforced_keywords` of these values, so a streamed answer is
    held back from the first of these values on. An empty path stands for the whole answer. Names
    that occur twice in an object have no path here, because `HoldBackDetector` finds them.
    """
    patterns: dict[PathPattern, None] = {}
    for keyword in unenforced_keywords:
        if keyword.endswith(_REPEATED):
            continue
        match = _KEYWORD_LOCATION.fullmatch(keyword)
        path = _instance_path(match[1]) if match else None
        if path is None or '"$ref"' in schema or '"$dynamicRef"' in schema:
            return ((),)
        patterns[path] = None
    return tuple(patterns)


def _instance_path(pointer: str) -> PathPattern | None:
    """Return the path of the values in an answer that a subschema describes.

    `pointer` is the subschema's JSON pointer. None if it does not determine the path.
    """
    path: list[str | int | None] = []
    steps = pointer.split("/")[1:]
    while steps:
        keyword = steps.pop(0)
        if keyword == "properties" and steps:
            path.append(steps.pop(0))
        elif keyword in _IN_PLACE and steps:
            steps.pop(0)
        elif keyword in {"items", "prefixItems"}:
            path.append(None)
            if steps and steps[0].isdecimal():
                steps.pop(0)
        elif keyword == "additionalProperties":
            path.append(None)
        else:
            return None
    return tuple(path)


class HoldBackDetector:
    """Finds the value from which a streamed JSON answer must be held back.

    `is_held` is true from the first value or name that the check of the finished answer may reject.
    The text before it can be sent to the client at once.
    """

    def __init__(self, patterns: Sequence[PathPattern]) -> None:
        """Hold back values at the paths in `patterns`, and repeated member names of an object."""
        self._patterns = patterns
        self._path: list[str | int] = []  # path of the value that is being read
        self._names: list[set[str] | None] = []  # names in each open object; None for an array
        self._string: list[str] | None = None  # the string that is being read
        self._is_escaped = False
        self._expects_name = False
        self.is_held = self._is_checked()

    @property
    def is_in_name(self) -> bool:
        """Whether the streamed text ends inside a member's name, which may repeat another name."""
        return self._string is not None and self._expects_name and bool(self._names[-1])

    def feed(self, text: str) -> None:
        """Read more of a streamed answer; set `is_held` at the first value or name to hold back."""
        for character in text:
            if self.is_held:
                return
            self._read(character)

    def _read(self, character: str) -> None:
        if self._string is not None:
            self._string.append(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._end_string(json.loads("".join(self._string), strict=False))
        elif character == '"':
            self._string = ['"']
        elif character in "{[":
            self._names.append(set() if character == "{" else None)
            self._path.append("" if character == "{" else 0)
            self._expects_name = character == "{"
            if character == "[":
                self.is_held = self._is_checked()
        elif character in "}]" and self._names:
            self._names.pop()
            self._path.pop()
            self._expects_name = False
        elif character == "," and self._names:
            self._expects_name = self._names[-1] is not None
            if not self._expects_name:
                self._path[-1] = int(self._path[-1]) + 1
                self.is_held = self._is_checked()

    def _end_string(self, value: str) -> None:
        self._string = None
        names = self._names[-1] if self._names else None
        if not self._expects_name or names is None:
            return
        self._expects_name = False
        self.is_held = value in names
        names.add(value)
        self._path[-1] = value
        self.is_held = self.is_held or self._is_checked()

    def _is_checked(self) -> bool:
        """Whether the value that begins now must wait for the check of the finished answer."""
        return any(
            len(path) == len(self._path)
            and all(
                step in (None, actual_step)
                for step, actual_step in zip(path, self._path, strict=True)
            )
            for path in self._patterns
        )
