"""Reads calls of tools out of an answer while it comes: text, names, and arguments in pieces."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import regex

from twostroke.serve.tools import BEGIN, END

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# As the grammar of `serve.tools` writes it; possessive, so that reading takes linear time.
_HEAD: Final = re.compile(r'\s*+\{"name": ("(?:[^"\\]|\\.)*+"), "arguments": ')
_BARE: Final = regex.compile(
    r'\s*+(?<fence>```(json)?\s*+)?\{\s*+"name"\s*+:\s*+(?<name>"(?:[^"\\]|\\.){1,64}+")\s*+'
    r',\s*+"arguments"\s*+:\s*+(?=\{)'
)
_MAX_HEAD: Final = 500  # characters, and of blanks that are held back


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer besides calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function begins; `index` counts those of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the JSON of a call's arguments."""

    index: int
    text: str


Piece = TextPiece | CallBegin | ArgumentsPiece


class CallReader:
    """Takes an answer's text apart; the pieces come as soon as it is clear what they are.

    Blanks around calls are dropped. What looks like a call and turns out to be none is text. Some
    models leave the markers away, or write a fence of Markdown in their place: an answer that
    begins with an object that names one of the functions is a call, too.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        """Read calls; `names` are those of the functions."""
        self.num_calls = 0
        self._names = frozenset(names)
        self._state: Callable[[list[Piece]], bool] = self._start
        self._held = ""  # not told yet
        self._blank = ""  # behind the text that was told
        self._end = END  # of the call that is being read
        self._is_behind_call = False  # and no text was told since
        self._depth = 0  # of the arguments
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` brings."""
        self._held += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, as there is no more text."""
        rest, self._held = self._blank + self._held, ""
        self._blank = ""
        if self._state in (self._arguments, self._tail):
            return []
        if self._state == self._head:
            rest = BEGIN + rest
        elif self.num_calls and not rest.strip():
            rest = ""
        return [TextPiece(rest)] if rest else []

    def _start(self, pieces: list[Piece]) -> bool:
        """Look for a call without markers."""
        if not self._held:
            return False
        found = _BARE.match(self._held, partial=True)
        if found and found.partial and len(self._held) <= _MAX_HEAD:
            return False
        self._state = self._text
        if found and not found.partial and (name := json.loads(found["name"])) in self._names:
            self._begin(name, found.end(), "```" if found["fence"] else "}", pieces)
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        """Take text up to the next marker, or to what may be the beginning of one."""
        at = self._held.find(BEGIN)
        if at >= 0:
            self._tell(self._held[:at], pieces)
            self._held, self._blank = self._held[at + len(BEGIN) :], ""
            self._state = self._head
            return True
        kept = _overlap(self._held, BEGIN)
        self._tell(self._held[: len(self._held) - kept], pieces)
        self._held = self._held[len(self._held) - kept :]
        return False

    def _tell(self, text: str, pieces: list[Piece]) -> None:
        """Tell text, but not the blanks behind it: a call may follow; nor those behind a call."""
        text = self._blank + text
        shown = text.rstrip() if len(self._blank) <= _MAX_HEAD else text
        self._blank = text[len(shown) :]
        if shown:
            pieces.append(TextPiece(shown.lstrip() if self._is_behind_call else shown))
            self._is_behind_call = False

    def _head(self, pieces: list[Piece]) -> bool:
        """Take a call's name."""
        found = _HEAD.match(self._held)
        if found:
            self._begin(json.loads(found[1]), found.end(), END, pieces)
            return True
        if len(self._held) > _MAX_HEAD:
            pieces.append(TextPiece(BEGIN + self._held))
            self._held, self._state = "", self._text
        return False

    def _begin(self, name: str, at: int, end: str, pieces: list[Piece]) -> None:
        """Go on with arguments, which begin at a place of the held text, up to `end`."""
        pieces.append(CallBegin(self.num_calls, name))
        self._held, self._end = self._held[at:], end
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.num_calls += 1
        self._state = self._arguments

    def _arguments(self, pieces: list[Piece]) -> bool:
        """Take arguments, up to the bracket that closes the first one."""
        for at, char in enumerate(self._held):
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
                    pieces.append(ArgumentsPiece(self.num_calls - 1, self._held[: at + 1]))
                    self._held, self._state = self._held[at + 1 :], self._tail
                    return True
        if self._held:
            pieces.append(ArgumentsPiece(self.num_calls - 1, self._held))
            self._held = ""
        return False

    def _tail(self, pieces: list[Piece]) -> bool:
        """Pass over the end of a call."""
        del pieces
        at = self._held.find(self._end)
        if at < 0:
            return False
        self._held, self._state = self._held[at + len(self._end) :], self._text
        self._is_behind_call = True
        return True


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    for count in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:count]):
            return count
    return 0
