"""Reads tool calls out of a streamed answer: text, names, and arguments in pieces."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Final

import regex

from twostroke.core.frozen import Frozen
from twostroke.engine.chat.call_forms import HERMES, Unmarked
from twostroke.model.tokenizer.preface import overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from twostroke.engine.chat.call_forms import CallForm

_MAX_HELD: Final = 500  # characters of what may become a call, and of blanks
_MAX_NAME: Final = 257  # of a namespace and a tool, 128 each, with a dot between them
_SIGN: Final = r"[\w.:/\-]"  # of a name without quotes
_FENCE_END: Final = regex.compile(r"\s*+```")
_BRACES: Final = (regex.compile(r"\s*+\}"), regex.compile(r"\}"))  # the second may be missing
_TAILS: Final = (*_BRACES, _FENCE_END)
# An object that is a call without marks; `;` or `,` may separate it from the one before.
_BARE: Final = regex.compile(
    r'\s*+(?:[;,]\s*+)?(?<fence>```(json)?\s*+)?\{\{?+\s*+"name"\s*+:\s*+'
    rf'"(?<name>{_SIGN}{{1,{_MAX_NAME}}}+)"'
    r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?<arguments>\{)',
    regex.ASCII,
)
# The beginning of such an object, up to its name.
_BARE_BEGIN: Final = regex.compile(
    r'\s*+(?:[;,]\s*+)?(?:```(?:json)?\s*+)?\{\{?+\s*+"name"\s*+:\s*+'
    rf'"(?<name>{_SIGN}*+)',
    regex.ASCII,
)
_TWICE: Final = {"{": r"\{?+", "}": r"\}?+"}
_TOKENS: Final = regex.compile(r'\s+|"\w+"|[{}\[\]:,;]|(?:(?!\s|"\w+"|[{}\[\]:,;]).)+')


class TextPiece(Frozen):
    """Text of the answer outside calls."""

    text: str


class ReasoningPiece(Frozen):
    """Text of the reasoning before the answer."""

    text: str


class CallBegin(Frozen):
    """A call of a function begins; `index` counts those of the answer.

    The arguments of an `is_custom` one are its text, not JSON.
    """

    index: int
    name: str
    is_custom: bool = False


class ArgumentsPiece(Frozen):
    """More of the JSON of a call's arguments."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallBegin | ArgumentsPiece


class CallReader:
    """Separates an answer's text from its calls; each piece is returned as soon as it is certain.

    Blanks around calls are dropped. Text that begins like a call but is none stays text. Some
    models leave out the marks, or write a fence of Markdown in their place: an answer that begins
    with an object that names one of the functions is a call, too. Braces around a call may be
    doubled, as the examples in some templates are. Reading takes linear time.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        form: CallForm = HERMES,
        *,
        is_forced: bool = False,
        is_pure: bool = False,
        unmarked: Unmarked = Unmarked.ALL,
    ) -> None:
        """Read calls in one form; `names` are those of the functions.

        Where calls are forced there is no other text; a call that ends before its name is dropped.
        A pure answer is either calls or text, which may contain what looks like calls. `unmarked`
        says which calls may lack their marks.
        """
        self._is_forced = is_forced
        self._is_pure = is_pure
        self._unmarked = unmarked
        self.num_calls = 0
        self._names = frozenset(names)
        self._form = form
        self._shapes = _shapes_of(form)
        self._state: Callable[[list[Piece]], bool] = self._start
        self._held = ""  # not returned yet, except the text before `_at`
        self._at = 0
        self._text_of_call = ""  # is text if no call follows
        self._trim = Trim()
        self._tails: list[regex.Pattern[str]] = []  # that may follow the arguments of this call
        self._is_bare = False  # whether this call has no marks
        self._depth = 0  # of the arguments
        self._in_string = self._is_escaped = False

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, none of which was cut."""
        return self.num_calls > 0 and self._state != self._arguments

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that `text` makes certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        self._held, self._at = self._held[self._at :], 0
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the text that is still held back when the answer ends.

        If the answer `is_cut` (by its token limit or a stop string), an incomplete call is dropped.
        """
        held, self._held = self._held, ""
        if is_cut and self._is_begun_call(held):
            return []
        in_call = self._state in (self._arguments, self._after, self._next)
        only_calls = self._is_forced or (self._is_pure and self.num_calls > 0)
        if in_call or only_calls:
            return []  # the rest of a call, or of marks
        rest = self._trim.feed(self._text_of_call + held) + self._trim.finish()
        if self.num_calls and not rest.strip():
            return []
        return [TextPiece(rest)] if rest else []

    def _is_begun_call(self, text: str) -> bool:
        """Return whether a text is the start of a call, or of the mark before a call."""
        if self._state == self._head or self.num_calls > 0:
            return True
        if text.lstrip() and self._form.mark.startswith(text.lstrip()):
            return len(text.lstrip()) > 1
        match = _BARE_BEGIN.match(text) if self._state == self._start else None
        return match is not None and any(name.startswith(match["name"]) for name in self._names)

    def _match(self, shape: regex.Pattern[str]) -> tuple[regex.Match[str] | None, bool]:
        """Match the held text; return the match, and whether more text could make one.

        At most `_MAX_HELD` characters count, so that the result does not depend on cuts.
        """
        end = self._at + _MAX_HELD + 1
        found = shape.match(self._held, pos=self._at, endpos=end, partial=True)
        if found and found.partial:
            return None, len(self._held) < end
        return found, False

    def _start(self, pieces: list[Piece]) -> bool:
        """Look for a call without marks; in a pure answer, for a mark too."""
        found, is_open = None, False
        if self._unmarked is not Unmarked.NONE:
            found, is_open = self._match(_BARE)
        if is_open:
            return False
        if found and self._unmarked is Unmarked.FENCED and not found["fence"]:
            found = None
        if found and found["name"] in self._names:
            self._is_bare = True
            self._tails = [*_BRACES, _FENCE_END] if found["fence"] else [*_BRACES]
            self._begin(found["name"], found.start("arguments"), pieces)
            return True
        mark, begin = self._form.mark, self._held[self._at : self._at + len(self._form.mark)]
        if self._is_pure and not self.num_calls and begin != mark:
            if mark.startswith(begin):
                return False
            self._state = self._only_text
            return True
        self._state = self._text
        return True

    def _only_text(self, pieces: list[Piece]) -> bool:
        """Take all text."""
        if text := self._trim.feed(self._held[self._at :]):
            pieces.append(TextPiece(text))
        self._at = len(self._held)
        return False

    def _text(self, pieces: list[Piece]) -> bool:
        """Take text up to the next mark, or to text that may begin one."""
        mark, held = self._form.mark, self._held
        end = held.find(mark, self._at)
        is_marked = end >= 0
        if not is_marked:
            end = len(held) - overlap(held[max(self._at, len(held) - len(mark)) :], mark)
        if text := self._trim.feed(held[self._at : end]):
            pieces.append(TextPiece(text))
        self._at = end
        if is_marked:
            self._at += len(mark)
            self._text_of_call, self._state = mark, self._head
        return is_marked

    def _head(self, pieces: list[Piece]) -> bool:
        """Take the name of the first call after a mark."""
        return self._name(self._shapes.first, pieces)

    def _next(self, pieces: list[Piece]) -> bool:
        """Take the name of another call in a list, or the list's end."""
        found, is_open = self._match(self._shapes.end)
        if is_open:
            return False
        if found:
            self._at = found.end()
            self._leave()
            return True
        return self._name(self._shapes.more, pieces)

    def _name(self, shape: regex.Pattern[str], pieces: list[Piece]) -> bool:
        """Take the text before the arguments of a call."""
        found, is_open = self._match(shape)
        if is_open:
            return False
        if found and (name := self._read_name(found["name"])) is not None:
            self._is_bare, self._tails = False, [self._shapes.tail]
            if self._form.tail.endswith("}"):
                self._tails.append(_BRACES[1])
            self._begin(name, found.start("arguments"), pieces)
            return True
        text = self._trim.feed(self._text_of_call)
        self._text_of_call = ""
        self._state = self._only_text if self._is_pure and not self.num_calls else self._text
        if text:
            pieces.append(TextPiece(text))
        return True

    def _read_name(self, written: str) -> str | None:
        return _unquoted(written) if self._form.is_quoted else written

    def _begin(self, name: str, at: int, pieces: list[Piece]) -> None:
        """Continue with arguments, which begin at an offset of the held text."""
        self._trim = Trim(skips_first=True)  # blanks around a call are dropped
        self._text_of_call = ""
        pieces.append(CallBegin(self.num_calls, name))
        self._at = at
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.num_calls += 1
        self._state = self._arguments

    def _arguments(self, pieces: list[Piece]) -> bool:
        """Take arguments, up to the bracket that closes the first one."""
        held = self._held
        for at in range(self._at, len(held)):
            char = held[at]
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
                    self._argue(at + 1, pieces)
                    self._state = self._after
                    return True
        if self._at < len(held):
            self._argue(len(held), pieces)
        return False

    def _argue(self, end: int, pieces: list[Piece]) -> None:
        """Take arguments up to an offset of the held text."""
        pieces.append(ArgumentsPiece(self.num_calls - 1, self._held[self._at : end]))
        self._at = end

    def _after(self, pieces: list[Piece]) -> bool:
        """Skip the end of a call, as far as it is there."""
        del pieces
        while self._tails:
            tail = self._tails.pop(0)
            found, is_open = self._match(tail)
            if is_open:
                self._tails.insert(0, tail)
                return False
            if found:
                self._at = found.end()
            elif self._form.is_quoted and tail not in _TAILS:
                self._tails = [*_BRACES]  # the object ends, if nothing else does
        if self._form.is_list and not self._is_bare:
            self._state = self._next
        else:
            self._leave()
        return True

    def _leave(self) -> None:
        """Continue with text, or with another call without marks."""
        self._state = self._start if self._is_bare else self._text


class Trim:
    """Removes the blanks at the end of streamed text, and with `skips_first` at its start."""

    def __init__(self, *, skips_first: bool = False) -> None:
        self._skips = skips_first
        self._blank = ""  # after the text that was passed on

    def feed(self, text: str) -> str:
        """Return text up to the last character that is not blank."""
        if self._skips:
            text = text.lstrip()
            self._skips = not text
        text = self._blank + text
        num_blanks = (len(text) - len(text.rstrip())) % (_MAX_HELD + 1)  # more are returned
        end = len(text) - num_blanks
        self._blank = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return the blanks at the end."""
        blank, self._blank = self._blank, ""
        return blank


class _Shapes(Frozen):
    """Patterns of the text around arguments; possessive, so that reading is linear."""

    first: regex.Pattern[str]  # after the mark
    more: regex.Pattern[str]  # in a list
    tail: regex.Pattern[str]
    end: regex.Pattern[str]


@cache
def _shapes_of(form: CallForm) -> _Shapes:
    """Return the patterns of a form."""
    name = (
        rf'"(?:[^"\\]|\\.){{1,{_MAX_NAME}}}+"' if form.is_quoted else rf"{_SIGN}{{1,{_MAX_NAME}}}+"
    )
    named = rf"\s*+(?<name>{name})\s*+"
    if form.id_mark:
        named += rf"(?:{regex.escape(form.id_mark)}\w*+)?+"
    named += _loosely(form.middle) + r"\s*+(?<arguments>\{)"
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
    """Return a pattern of a text, with any blanks between its words and signs.

    Braces before the last sign may be doubled: what may follow a pattern cannot be a part of it,
    for the pattern would match without it before more text has come.
    """
    *signs, last = [part for part in _TOKENS.findall(text) if not part.isspace()] or [""]
    before = "".join(rf"\s*+{regex.escape(sign)}{_TWICE.get(sign, '')}" for sign in signs)
    return before + (rf"\s*+{regex.escape(last)}" if last else "")


def _unquoted(written: str) -> str | None:
    """Return a JSON string's value; None if it is not valid, or has lone surrogates."""
    try:
        text: str = json.loads(written)
        text.encode()
    except ValueError:
        return None
    return text


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
