"""Reads calls of tools out of an answer while it comes: text, names, and arguments in pieces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import regex

from twostroke.engine.call_forms import HERMES
from twostroke.tokenize.preface import overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from twostroke.engine.call_forms import CallForm

_MAX_HELD: Final = 500  # characters of what may become a call, and of blanks
_MAX_NAME: Final = 64
_FENCE: Final = "```"
# An object that stands for a call without any marks; behind another one something may part them.
_BARE: Final = regex.compile(
    r'\s*+(?:[;,]\s*+)?(?<fence>```(json)?\s*+)?\{\s*+"name"\s*+:\s*+(?<name>"(?:[^"\\]|\\.){1,64}+")'
    r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)
_TOKENS: Final = regex.compile(r'\s+|"\w+"|[{}\[\]:,;]|(?:(?!\s|"\w+"|[{}\[\]:,;]).)+')


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer besides calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the reasoning before the answer."""

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


Piece = TextPiece | ReasoningPiece | CallBegin | ArgumentsPiece


class CallReader:
    """Takes an answer's text apart; the pieces come as soon as it is clear what they are.

    Blanks around calls are dropped. What looks like a call and turns out to be none is text. Some
    models leave the marks away, or write a fence of Markdown in their place: an answer that begins
    with an object that names one of the functions is a call, too. Reading takes linear time.
    """

    def __init__(self, names: Collection[str] = (), form: CallForm = HERMES) -> None:
        """Read calls that are written in a form; `names` are those of the functions."""
        self.num_calls = 0
        self._names = frozenset(names)
        self._form = form
        self._shapes = _shapes_of(form)
        self._state: Callable[[list[Piece]], bool] = self._start
        self._held = ""  # not told yet
        self._text_of_call = ""  # what was passed over and is text if no call comes of it
        self._trim = Trim()
        self._tail = self._shapes.tail  # of the call that is being read
        self._is_bare = self._is_fenced = False  # whether that call has no marks, or a fence
        self._depth = 0  # of the arguments
        self._in_string = self._is_escaped = False

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, none of which was cut."""
        return self.num_calls > 0 and self._state != self._arguments

    def feed(self, text: str) -> list[Piece]:
        """Return what `text` brings."""
        self._held += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, as there is no more text."""
        held, self._held = self._held, ""
        if self._state in (self._arguments, self._behind, self._fence, self._next):
            return []  # of a call that was cut, or of marks that were
        rest = self._trim.finish() + self._text_of_call + held
        if self.num_calls and not rest.strip():
            return []
        return [TextPiece(rest)] if rest else []

    def _start(self, pieces: list[Piece]) -> bool:
        """Look for a call without marks."""
        if not self._held:
            return False
        found = _BARE.match(self._held, partial=True)
        if found and found.partial and len(self._held) <= _MAX_HELD:
            return False
        self._state = self._text
        if found and not found.partial and (name := json.loads(found["name"])) in self._names:
            self._is_bare = True
            self._tail, self._is_fenced = _BARE_TAIL, found["fence"] is not None
            self._begin(name, found.end(), pieces)
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        """Take text up to the next mark, or to what may be the beginning of one."""
        mark = self._form.mark
        at = self._held.find(mark)
        kept = 0 if at >= 0 else overlap(self._held, mark)
        end = at if at >= 0 else len(self._held) - kept
        if text := self._trim.feed(self._held[:end]):
            pieces.append(TextPiece(text))
        self._held = self._held[end + (len(mark) if at >= 0 else 0) :]
        if at < 0:
            return False
        self._text_of_call, self._state = mark, self._head
        return True

    def _head(self, pieces: list[Piece]) -> bool:
        """Take the name of the first call behind a mark."""
        return self._name(self._shapes.first, pieces)

    def _next(self, pieces: list[Piece]) -> bool:
        """Take the name of another call in a list, or the list's end."""
        found = self._shapes.end.match(self._held, partial=True)
        if found and found.partial and len(self._held) <= _MAX_HELD:
            return False
        if found and not found.partial:
            self._held = self._held[found.end() :]
            self._leave()
            return True
        return self._name(self._shapes.more, pieces)

    def _name(self, shape: regex.Pattern[str], pieces: list[Piece]) -> bool:
        """Take what stands before the arguments of a call."""
        if not self._held:
            return False
        found = shape.match(self._held, partial=True)
        if found and found.partial and len(self._held) <= _MAX_HELD:
            return False
        if found and not found.partial and (name := self._read_name(found["name"])):
            self._is_bare, self._tail = False, self._shapes.tail
            self._begin(name, found.end(), pieces)
            return True
        text = self._trim.feed(self._text_of_call)
        self._text_of_call, self._state = "", self._text
        if text:
            pieces.append(TextPiece(text))
        return True

    def _read_name(self, written: str) -> str | None:
        if not self._form.is_quoted:
            return written
        try:
            name = json.loads(written)
        except ValueError:
            return None
        return name if isinstance(name, str) else None

    def _begin(self, name: str, at: int, pieces: list[Piece]) -> None:
        """Go on with arguments, which begin at a place of the held text."""
        self._trim = Trim()  # blanks before a call are dropped
        self._text_of_call = ""
        pieces.append(CallBegin(self.num_calls, name))
        self._held = self._held[at:]
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
                    self._held, self._state = self._held[at + 1 :], self._behind
                    return True
        if self._held:
            pieces.append(ArgumentsPiece(self.num_calls - 1, self._held))
            self._held = ""
        return False

    def _behind(self, pieces: list[Piece]) -> bool:
        """Pass over the end of a call, as far as it is there."""
        del pieces
        found = self._tail.match(self._held, partial=True)
        if found and found.partial and len(self._held) <= _MAX_HELD:
            return False
        if (not found or found.partial) and self._form.is_quoted:
            found = _BARE_TAIL.match(self._held)  # the object ends, if nothing else does
        if found and not found.partial:
            self._held = self._held[found.end() :]
        if self._is_bare and self._is_fenced:
            self._state = self._fence
        elif self._form.is_list and not self._is_bare:
            self._state = self._next
        else:
            self._leave()
        return True

    def _fence(self, pieces: list[Piece]) -> bool:
        """Pass over the end of a fence, if it is there."""
        del pieces
        rest = self._held.lstrip()
        if len(rest) < len(_FENCE) and _FENCE.startswith(rest) and len(self._held) <= _MAX_HELD:
            return False
        self._held = rest.removeprefix(_FENCE)
        self._leave()
        return True

    def _leave(self) -> None:
        """Go on with text, or with what may be another call without marks."""
        self._trim = Trim(skips_first=True)
        self._state = self._start if self._is_bare else self._text


class Trim:
    """Passes text on without the blanks at its end, and without those at its start if it is to."""

    def __init__(self, *, skips_first: bool = False) -> None:
        """Begin with nothing."""
        self._skips = skips_first
        self._blank = ""  # behind the text that was passed on

    def feed(self, text: str) -> str:
        """Return what is no blank at the end as far as that is known."""
        if self._skips:
            text = text.lstrip()
            self._skips = not text
        text = self._blank + text
        shown = text.rstrip() if len(self._blank) <= _MAX_HELD else text
        self._blank = text[len(shown) :]
        return shown

    def finish(self) -> str:
        """Return the blanks at the end, for those who want them."""
        blank, self._blank = self._blank, ""
        return blank


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What stands around arguments, but for blanks; possessive, so that reading is linear."""

    first: regex.Pattern[str]  # behind the mark
    more: regex.Pattern[str]  # in a list
    tail: regex.Pattern[str]
    end: regex.Pattern[str]


@cache
def _shapes_of(form: CallForm) -> _Shapes:
    """Return how a form is read; there are few."""
    name = (
        rf'"(?:[^"\\]|\\.){{1,{_MAX_NAME}}}+"' if form.is_quoted else rf"[\w.\-]{{1,{_MAX_NAME}}}+"
    )
    named = rf"\s*+(?<name>{name})\s*+"
    if form.id_mark:
        named += rf"(?:{regex.escape(form.id_mark)}\w*+)?+"
    named += _loosely(form.middle) + r"(?=\{)"
    named = named.replace('"arguments"', '"(?:arguments|parameters)"')
    named = named.replace('"parameters"', '"(?:arguments|parameters)"')
    opening = form.opening.removeprefix(form.mark)
    return _Shapes(
        regex.compile(_loosely(opening) + named),
        regex.compile(_loosely(form.between.strip() + form.head) + named),
        regex.compile(_loosely(form.tail)),
        regex.compile(_loosely(form.end)),
    )


def _loosely(text: str) -> str:
    """Return a pattern of a text with or without blanks around its signs."""
    parts = _TOKENS.findall(text)
    return r"\s*+" + "".join(
        "" if part.isspace() else rf"{regex.escape(part)}\s*+" for part in parts
    )


_BARE_TAIL: Final = regex.compile(r"\s*+\}")
