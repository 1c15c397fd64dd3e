"""Finds the lines of coding agents' prompts that change with each request or each day.

A prefix cache can reuse a prompt only up to the first token that differs. Some agents begin their
instructions, which never change, with a line that always changes: Claude Code with a billing
header, other agents with the date and the time, or the id of a session. With `--stable-prefix`
these lines are removed.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Message = Mapping[str, Any]
    RemoveLines = Callable[[str, dict[str, None]], str]

KINDS: Final = ("billing", "date", "id")  # of lines that change
_MAX_START_CHARS: Final = 40  # from the start of a line to one of `_KEYWORDS`
_SYSTEM_ROLES: Final = frozenset(("system", "developer"))
# Each line that changes has one of these texts near its start.
_KEYWORDS: Final = (
    *("x-anthropic-billing-header", "oday", "ODAY", "urrent", "URRENT", "imestamp", "IMESTAMP"),
    *("id:", "Id:", "ID:", "id=", "ID=", "id>", "ID>"),
)
_BULLET: Final = r"[ \t]{0,20}(?:[-*] )?(?:\*\*)?"
_COLON: Final = r"(?:\*\*)?(?: is:?|:|(?= \d))(?:\*\*)?[ \t]{1,9}"
_DATE_NAME: Final = (
    r"(?:today(?:'|’|\\u2019)?s date|(?:the )?current (?:local )?(?:date and time|date/time|"
    r"datetime|date|time)(?: in iso format)?)"
)
_DATE_TAG: Final = r"(?:current_?date(?:_?time)?|current_?time|todays_date|timestamp)"
_ID_NAME: Final = r"(?:session|conversation|request|thread|trace|turn|run)[ _-]?id"
_ID: Final = r"(?=(?:(?!\d)[\w.:-]){0,99}\d)[\w.:-]{6,100}"  # a word without a digit is no id
# The first number of a date or a time.
_DATE: Final = (
    r"(?:(?:19|20)\d\d|\d{1,2}[.:/-]\d|\d{1,2}[^\d\n]{1,15}(?:19|20)\d\d|\d{1,2} ?[ap]\.?m\b"
    r"|\d{10})"
)
# Blocks of a user's first messages in which agents describe their surroundings.
_BLOCK_BEGIN: Final = re.compile(
    r"<(env|environment|environment_context|environment_details|system-reminder|context)>"
)


def _line_pattern(character: str, line_end: str) -> str:
    """Return the regular expression of a changing line, with a named group for each of `KINDS`.

    Args:
        character: matches a character of a line.
        line_end: matches the end of a line, with its line break if there is one.
    """
    has_date = rf"(?=(?:(?!\d){character}){{0,40}}{_DATE})"
    # Two words after a date and a full stop are an instruction.
    sentence = rf"{character}{{1,100}}?[.!?;] +[^\W\d](?:(?! ){character}){{0,40}} +[^\W\d]"
    # So is a time of a story or of a task, such as "5 pm in our story".
    prose = (
        rf"{character}{{1,60}}? in (?:the|an?|this|our|my|your) (?!{character}{{0,40}}time ?zone)"
    )
    value = rf"{has_date}(?!{sentence}|{prose}){character}{{1,100}}{line_end}"
    attribute = rf"(?:[ \t]?[\w-]+=[^;\s\"\\]*(?:;|(?={line_end})))"
    any_character = rf"(?:{character}|{line_end})"
    text_in_tag = rf"(?=(?:(?!\d){any_character}){{0,40}}{_DATE}){any_character}{{0,100}}?"
    return (
        rf"(?P<billing>x-anthropic-billing-header:{attribute}+(?:{line_end})?)"
        rf"|(?P<date>{_BULLET}{_DATE_NAME}{_COLON}{value}"
        rf"|#{{1,6}} {_DATE_NAME}:?[ \t]{{0,9}}{line_end}{value}"
        rf"|[ \t]{{0,20}}<(?P<tag>{_DATE_TAG})>{text_in_tag}</(?P=tag)>{line_end}?)"
        rf"|(?P<id>{_BULLET}{_ID_NAME}(?:\*\*)?[:=](?:\*\*)?[ \t]{{0,9}}{_ID}[ \t]{{0,9}}{line_end}"
        rf"|[ \t]{{0,20}}<(?P<id_tag>{_ID_NAME})>{_ID}</(?P=id_tag)>{line_end}?)"
    )


class _Lines(Frozen):
    """Finds and removes changing lines in a plain text, or in a text encoded as JSON.

    Attributes:
        encoding: the encoding of the text; empty for `str`.
        breaks: the texts after which a line begins, such as a line break.
        pattern: returns the regular expression that matches a changing line from its start.
    """

    encoding: str
    breaks: tuple[Any, ...]
    pattern: Callable[[], re.Pattern[Any]]

    def spans(self, text: Any) -> Iterator[tuple[int, int, str]]:
        """Yield the offset, the end and the kind of each changing line in a text."""
        for name in _KEYWORDS:
            keyword: Any = name.encode(self.encoding) if self.encoding else name
            offset = text.find(keyword)
            while offset >= 0:
                end = offset + 1
                for start in self._starts(text, offset):
                    match = self.pattern().match(text, start)
                    if match is not None:
                        yield start, match.end(), next(kind for kind in KINDS if match[kind])
                        end = max(end, match.end())
                        break
                offset = text.find(keyword, end)

    def _starts(self, text: Any, offset: int) -> Iterator[int]:
        """Yield the offsets where a changing line may begin that has a keyword at `offset`."""
        first = max(0, offset - _MAX_START_CHARS)
        start = max(text.rfind(mark, first, offset) + len(mark) for mark in self.breaks)
        if start >= first + len(self.breaks[0]) or not first:
            yield start if start > first else 0
        tag = text.rfind(b"<" if self.encoding else "<", first, offset)
        if tag >= 0:
            yield tag

    def remove(self, text: Any, kinds: dict[str, None]) -> Any:
        """Return a text without its changing lines; add the kinds of these lines to `kinds`."""
        parts, done = [], 0
        for start, end, kind in sorted(self.spans(text)):
            if start >= done:
                parts.append(text[done:start])
                done = end
                kinds[kind] = None
        return text[:0].join([*parts, text[done:]]) if done else text


@cache  # most processes never need the expressions, whose compilation takes some milliseconds
def _text_pattern() -> re.Pattern[str]:
    return re.compile(_line_pattern(r"[^\n]", r"(?:\n|\Z)"), re.IGNORECASE)


@cache
def _json_pattern() -> re.Pattern[bytes]:
    """Return the changing lines' expression for JSON, in which line breaks are escaped."""
    return re.compile(_line_pattern(r'[^"\\]', r'(?:\\n|(?="))').encode(), re.IGNORECASE)


_TEXT: Final = _Lines("", ("\n",), _text_pattern)
_JSON: Final = _Lines("ascii", (b"\\n", b'"'), _json_pattern)


def without_changing_lines(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Return a conversation without its changing lines, and the kinds of the removed lines.

    Lines are removed from system and developer messages. In the user's messages before the first
    answer they are removed from blocks such as `<env>` in which agents describe their surroundings.
    The kinds are listed in `KINDS`. Messages without changing lines are not copied.
    """
    kinds: dict[str, None] = {}
    stable = list(messages)
    is_first_turn = True
    for index, message in enumerate(stable):
        role, content = message.get("role"), message.get("content")
        is_first_turn = is_first_turn and role != "assistant"
        if role in _SYSTEM_ROLES:
            stable_content = _map_texts(content, _TEXT.remove, kinds)
        elif role == "user" and is_first_turn:
            stable_content = _map_texts(content, _remove_in_blocks, kinds)
        else:
            continue
        if stable_content != content:
            stable[index] = {**message, "content": stable_content}
    return stable, tuple(kinds)


def without_changing_json_lines(body: bytes) -> bytes:
    """Return the JSON of a prompt without its changing lines, for a hash of the prompt."""
    result: bytes = _JSON.remove(body, {})
    return result


def _map_texts(content: Any, remove: RemoveLines, kinds: dict[str, None]) -> Any:
    """Return a message's content, a text or a list of parts, without its changing lines."""
    if isinstance(content, str):
        return remove(content, kinds)
    if not isinstance(content, (list, tuple)):
        return content
    return [
        {**part, "text": remove(part["text"], kinds)}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def _remove_in_blocks(text: str, kinds: dict[str, None]) -> str:
    """Return a text without the changing lines in blocks such as `<env>`."""
    parts: list[str] = []
    done = 0
    unclosed_tags = set[str]()
    for begin in _BLOCK_BEGIN.finditer(text):
        if begin.start() < done or begin[1] in unclosed_tags:
            continue
        end = text.find(f"</{begin[1]}>", begin.end())
        if end < 0:
            unclosed_tags.add(begin[1])
            continue
        block: str = _TEXT.remove(text[begin.end() : end], kinds)
        parts += [text[done : begin.end()], block]
        done = end
    return "".join([*parts, text[done:]]) if done else text
