"""Reads tool calls from a streamed answer: text, names, and arguments in pieces."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import regex

from twostroke.core.frozen import Frozen
from twostroke.engine.chat.argument_readers import MAX_HELD_CHARS, JsonReader, reader_of
from twostroke.engine.chat.call_forms import HERMES, INDEX, PLACEHOLDERS, Unmarked
from twostroke.engine.structured_output.notations import TagNotation
from twostroke.model.tokenizer.preface import partial_match_length

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from twostroke.engine.chat.argument_readers import ArgumentReader
    from twostroke.engine.chat.call_forms import CallForm

    Schemas = Mapping[str, Mapping[str, Any]]

_MAX_NAME_CHARS: Final = 257  # a namespace and a tool with 128 each, and a dot
_NAME_CHARACTER: Final = r"[\w.:/\-]"  # of a name without quotes
_FENCE_END: Final = regex.compile(r"\s*+```")
_BRACES: Final = (regex.compile(r"\s*+\}"), regex.compile(r"\}"))  # the second may be missing
_TAILS: Final = (*_BRACES, _FENCE_END)
# An object that is a call without marks; `;` or `,` may separate it from the previous call.
_BARE: Final = regex.compile(
    r'\s*+(?:[;,]\s*+)?(?<fence>```(json)?\s*+)?\{\{?+\s*+"name"\s*+:\s*+'
    rf'"(?<name>{_NAME_CHARACTER}{{1,{_MAX_NAME_CHARS}}}+)"'
    r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?<arguments>\{)',
    regex.ASCII,
)
# The beginning of such an object, up to its name.
_BARE_BEGIN: Final = regex.compile(
    r'\s*+(?:[;,]\s*+)?(?:```(?:json)?\s*+)?\{\{?+\s*+"name"\s*+:\s*+'
    rf'"(?<name>{_NAME_CHARACTER}*+)',
    regex.ASCII,
)
# The beginning of a list of calls without marks, up to the first name.
_BARE_LIST_BEGIN: Final = regex.compile(
    rf"\s*+\[\s*+(?<name>{_NAME_CHARACTER}++)\s*+\(?+\Z", regex.ASCII
)
_DOUBLED: Final = {"{": r"\{?+", "}": r"\}?+"}
_TOKENS: Final = regex.compile(r'\s+|"\w+"|[{}\[\]:,;]|(?:(?!\s|"\w+"|[{}\[\]:,;]).)+')


_FREE_TEXT_BEGIN: Final = regex.compile(r'\s*+\{\s*+"input"\s*+:\s*+"')
# Text up to its last complete escape; the first half of a surrogate pair waits for the second.
_HIGH_SURROGATE: Final = r"[dD][89abAB][0-9a-fA-F]{2}"
_HEX: Final = "[0-9a-fA-F]{4}"
_TEXT: Final = regex.compile(
    rf'(?:[^"\\]|\\[^u]|\\u(?!{_HIGH_SURROGATE}){_HEX}'
    rf"|\\u{_HIGH_SURROGATE}(?:\\u{_HEX}|(?=[^\\]|\\[^u])))*+"
)


_NO_SCHEMAS: Final[Schemas] = {}


class TextPiece(Frozen):
    """A piece of a streamed answer: text outside the reasoning and the tool calls."""

    text: str


class ReasoningPiece(Frozen):
    """A piece of a streamed answer: text of the model's reasoning."""

    text: str


class CallBegin(Frozen):
    """A piece of a streamed answer: the beginning of a tool call, with the function's name.

    `index` is the number of the call in the answer. The arguments of an `is_custom` call are text,
    not JSON.
    """

    index: int
    name: str
    is_custom: bool = False


class ArgumentsPiece(Frozen):
    """A piece of a streamed answer: the next part of a tool call's JSON arguments."""

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallBegin | ArgumentsPiece


class CallReader:
    """Separates a streamed answer's text from the tool calls in it.

    Each piece of text or of a call is returned as soon as it is certain. White space around calls
    is dropped. Some models leave out the call mark (such as `<tool_call>`), or write a Markdown
    fence instead: an answer that begins with a JSON object that names a function is then a call,
    too. Braces around a call may be doubled, as in the examples of some templates. Text that begins
    like a call, but is no call, stays text. Reading takes linear time.
    """

    def __init__(
        self,
        names: Collection[str] = (),
        form: CallForm = HERMES,
        *,
        is_forced: bool = False,
        is_pure: bool = False,
        unmarked: Unmarked = Unmarked.ALL,
        schemas: Schemas = _NO_SCHEMAS,
    ) -> None:
        """Read tool calls that are written in `form`.

        Args:
            names: the names of the functions.
            form: how the model writes calls.
            is_forced: whether the answer has calls only. A call that ends before its name is
                dropped.
            is_pure: whether the answer has either calls or text, not both. Then a call mark within
                text is text.
            unmarked: which answers count as calls without call marks.
            schemas: the JSON schemas of the functions' arguments, by name; forms in which strings
                have no quotes need them.
        """
        self._is_forced = is_forced
        self._is_pure = is_pure
        self._unmarked = unmarked if form.has_json else Unmarked.NONE
        self._schemas = schemas
        self.num_calls = 0
        self._names = frozenset(names)
        self._form = form
        self._patterns = _patterns_of(form)
        self._marks = (form.mark, form.loose_begin) if form.loose_begin else (form.mark,)
        self._state: Callable[[list[Piece]], bool] = self._start
        self._pending_text = ""  # text that was not returned yet, except the text before `_offset`
        self._offset = 0
        self._text_of_call = ""  # it is text if no call follows
        self._trim = BlankTrimmer()
        self._tails: list[regex.Pattern[str]] = []  # may follow the arguments of this call
        self._is_bare = False  # whether this call has no marks
        self._arguments_reader: ArgumentReader = JsonReader()

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has tool calls, and all of them are complete."""
        return self.num_calls > 0 and self._state != self._arguments

    def feed(self, text: str) -> list[Piece]:
        """Read more text of the answer, and return the pieces that are certain now."""
        self._pending_text += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        self._pending_text = self._pending_text[self._offset :]
        self._offset = 0
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the answer, and return the text that was held back as a possible tool call.

        If the answer `is_cut` (by its token limit or a stop string), an incomplete call is dropped.
        """
        pending_text, self._pending_text = self._pending_text, ""
        if self._state == self._arguments:
            return self._finish_arguments(pending_text, is_cut=is_cut)
        if is_cut and self._is_begun_call(pending_text):
            return []
        in_call = self._state in (self._after, self._next)
        only_calls = self._is_forced or (self._is_pure and self.num_calls > 0)
        if in_call or only_calls:
            return []  # the rest of a call, or of marks
        rest = self._trim.feed(self._text_of_call + pending_text) + self._trim.finish()
        if self.num_calls and not rest.strip():
            return []
        return [TextPiece(rest)] if rest else []

    def _finish_arguments(self, rest: str, *, is_cut: bool) -> list[Piece]:
        """End an answer inside a call's arguments, which may be complete without closing marks.

        `rest` is the text that was not read.
        """
        json_end = self._arguments_reader.finish(rest, is_cut=is_cut)
        if json_end is None:
            return []
        self._state = self._after
        return [ArgumentsPiece(self.num_calls - 1, json_end)]

    def _is_begun_call(self, text: str) -> bool:
        """Whether the unread end of a cut answer begins a tool call, or a call mark.

        Such an end is dropped rather than returned as text.
        """
        if self._state == self._head or self.num_calls > 0:
            return True
        begin = text.lstrip()
        if begin and any(mark.startswith(begin) for mark in self._marks):
            return len(begin) > 1
        if self._state != self._start:
            return False
        match = None
        if self._unmarked is not Unmarked.NONE:
            match = _BARE_BEGIN.match(text)
        elif self._form.is_bare:
            match = _BARE_LIST_BEGIN.match(text)
        return match is not None and any(name.startswith(match["name"]) for name in self._names)

    def _match(self, pattern: regex.Pattern[str]) -> tuple[regex.Match[str] | None, bool]:
        """Match a regular expression with the part of the answer that was not read yet.

        Returns the match (None without one), and whether more text could still lead to a match. At
        most `MAX_HELD_CHARS` characters are matched, so that the result does not depend on how the
        stream is cut.
        """
        end = self._offset + MAX_HELD_CHARS + 1
        match = pattern.match(self._pending_text, pos=self._offset, endpos=end, partial=True)
        if match and match.partial:
            return None, len(self._pending_text) < end
        return match, False

    def _start(self, pieces: list[Piece]) -> bool:
        """Read the beginning of an answer, or of the text after a call without call marks.

        Looks for a tool call without call marks. An answer that has either calls or text
        (`is_pure`) has calls only if it begins with a call mark. Returns False to wait for more
        text.
        """
        match, is_open = None, False
        if self._unmarked is not Unmarked.NONE:
            match, is_open = self._match(_BARE)
        if is_open:
            return False
        if match and self._unmarked is Unmarked.FENCED and not match["fence"]:
            match = None
        if match and match["name"] in self._names:
            self._is_bare = True
            self._tails = [*_BRACES, _FENCE_END] if match["fence"] else [*_BRACES]
            self._begin(match["name"], match.start("arguments"), pieces)
            return True
        if self._form.is_bare and not self._form.has_json and not self._is_pure:
            match, is_open = self._match(self._patterns.bare)
            if is_open:
                return False
            if match and match["name"] in self._names:
                self._tails = [*self._patterns.tails]
                self._begin(match["name"], match.start("arguments"), pieces)
                return True
        mark = self._form.mark
        begin = self._pending_text[self._offset : self._offset + len(self._form.mark)]
        if self._is_pure and not self.num_calls and begin != mark:
            if mark.startswith(begin):
                return False
            self._state = self._only_text
            return True
        self._state = self._text
        return True

    def _only_text(self, pieces: list[Piece]) -> bool:
        """Read the rest of the answer as text: it was decided that the answer has no tool calls."""
        if text := self._trim.feed(self._pending_text[self._offset :]):
            pieces.append(TextPiece(text))
        self._offset = len(self._pending_text)
        return False

    def _text(self, pieces: list[Piece]) -> bool:
        """Read text up to the next tool call's mark, or up to text that may begin a mark.

        Returns False to wait for more text.
        """
        pending_text = self._pending_text
        match = self._patterns.marks.search(pending_text, self._offset)
        if match:
            end = match.start()
        else:
            size = max(map(len, self._marks))
            tail = pending_text[max(self._offset, len(pending_text) - size) :]
            end = len(pending_text) - max(partial_match_length(tail, mark) for mark in self._marks)
        if text := self._trim.feed(pending_text[self._offset : end]):
            pieces.append(TextPiece(text))
        self._offset = end
        if match:
            self._offset = match.end()
            self._text_of_call = match.group()
            self._state = self._head
        return match is not None

    def _head(self, pieces: list[Piece]) -> bool:
        """Read the text from a call mark to the end of the first tool call's name.

        Returns False to wait for more text.
        """
        is_loose = self._text_of_call != self._form.mark
        return self._name(self._patterns.loose if is_loose else self._patterns.first, pieces)

    def _next(self, pieces: list[Piece]) -> bool:
        """Read the next call's name in a list of tool calls, or the end of the list.

        Returns False to wait for more text.
        """
        if self._form.end:
            match, is_open = self._match(self._patterns.end)
            if is_open:
                return False
            if match:
                self._offset = match.end()
                self._leave()
                return True
        return self._name(self._patterns.next_call, pieces)

    def _name(self, pattern: regex.Pattern[str], pieces: list[Piece]) -> bool:
        """Read a tool call up to its arguments; `pattern` matches this text with the name.

        Returns False to wait for more text.
        """
        match, is_open = self._match(pattern)
        if is_open:
            return False
        name = None if match is None else self._read_name(match["name"])
        if pattern is self._patterns.loose and name not in self._names:
            name = None
        if match and name is not None:
            self._is_bare = False
            self._tails = [*self._patterns.tails]
            self._begin(name, match.start("arguments"), pieces)
            return True
        text = self._trim.feed(self._text_of_call)
        self._text_of_call = ""
        self._state = self._only_text if self._is_pure and not self.num_calls else self._text
        if text:
            pieces.append(TextPiece(text))
        return True

    def _read_name(self, written: str) -> str | None:
        if self._form.is_quoted:
            return _parse_json_string(written)
        return written if written in self._names else written.removeprefix(self._form.name_prefix)

    def _begin(self, name: str, offset: int, pieces: list[Piece]) -> None:
        """Begin a tool call: add a piece with its name.

        The arguments begin at `offset` of the text that was not read yet.
        """
        self._trim = BlankTrimmer(skips_first=True)  # blanks around a call are dropped
        self._text_of_call = ""
        pieces.append(CallBegin(self.num_calls, name))
        self._offset = offset
        self._arguments_reader = (
            JsonReader()
            if self._is_bare
            else reader_of(self._form.notation, self._schemas.get(name, {}))
        )
        self.num_calls += 1
        self._state = self._arguments

    def _arguments(self, pieces: list[Piece]) -> bool:
        """Read a tool call's arguments, up to their end.

        Returns False to wait for more text.
        """
        end, text, is_complete = self._arguments_reader.read(self._pending_text, self._offset)
        if text:
            pieces.append(ArgumentsPiece(self.num_calls - 1, text))
        self._offset = end
        if is_complete:
            self._state = self._after
        return is_complete

    def _after(self, pieces: list[Piece]) -> bool:
        """Skip the closing text after a tool call's arguments; parts of this text may be missing.

        Returns False to wait for more text.
        """
        del pieces
        while self._tails:
            tail = self._tails.pop(0)
            match, is_open = self._match(tail)
            if is_open:
                self._tails.insert(0, tail)
                return False
            if match:
                self._offset = match.end()
            elif self._form.is_quoted and tail not in _TAILS:
                self._tails = [*_BRACES]  # at least the object may end
        if self._form.is_list and not self._is_bare:
            self._state = self._next
        else:
            self._leave()
        return True

    def _leave(self) -> None:
        """After a tool call, switch to the state that reads text or further calls."""
        self._state = self._start if self._is_bare else self._text


class BlankTrimmer:
    """Removes white space at the end of a streamed text and, with `skips_first`, at its start."""

    def __init__(self, *, skips_first: bool = False) -> None:
        self._skips = skips_first
        self._blank = ""  # blanks after the returned text

    def feed(self, text: str) -> str:
        """Read more text; return the text up to the last character that is not white space."""
        if self._skips:
            text = text.lstrip()
            self._skips = not text
        text = self._blank + text
        num_blanks = (len(text) - len(text.rstrip())) % (
            MAX_HELD_CHARS + 1
        )  # longer runs of blanks are returned
        end = len(text) - num_blanks
        self._blank = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Return the white space at the end of the text, which was not returned before."""
        blank, self._blank = self._blank, ""
        return blank


class _FormPatterns(Frozen):
    """Regular expressions for the text around the arguments of tool calls in one form.

    Their quantifiers are possessive (no backtracking), so that reading takes linear time.
    """

    marks: regex.Pattern[str]  # of all texts that begin calls
    first: regex.Pattern[str]  # of the first call, after the mark
    loose: regex.Pattern[str]  # of a call after `loose_begin`
    bare: regex.Pattern[str]  # of the first call of an answer, perhaps without the mark
    next_call: regex.Pattern[str]  # of another call in a list
    tails: tuple[regex.Pattern[str], ...]  # each may be missing
    end: regex.Pattern[str]


@cache
def _patterns_of(form: CallForm) -> _FormPatterns:
    """Return the regular expressions for reading tool calls in one form."""
    name = (
        rf'"(?:[^"\\]|\\.){{1,{_MAX_NAME_CHARS}}}+"'
        if form.is_quoted
        else rf"{_NAME_CHARACTER}{{1,{_MAX_NAME_CHARS}}}+"
    )
    if form.middle.startswith(f":{INDEX}"):  # names may have colons, too
        rest = regex.escape(form.middle.partition(INDEX)[2].strip())
        num_chars = len(form.name_prefix) + _MAX_NAME_CHARS
        name = rf"(?:(?!:\d++\s*+{rest}){_NAME_CHARACTER}){{1,{num_chars}}}+"
    named = rf"\s*+(?<name>{name})\s*+"
    if form.id_mark:
        named += rf"(?:{regex.escape(form.id_mark)}\w*+)?+"
    if form.has_json:
        named += _loose_pattern(form.middle) + r"\s*+(?<arguments>\{)"
        tails = [regex.compile(_loose_pattern(form.tail))]
        tails += [_BRACES[1]] * form.tail.endswith("}")
    else:
        named += _loose_pattern(form.middle) + rf"(?<arguments>){_arguments_begin(form)}"
        tails = [regex.compile(_loose_pattern(tail)) for tail in form.tail.split()]
    named = named.replace('"arguments"', '"(?:arguments|parameters)"')
    named = named.replace('"parameters"', '"(?:arguments|parameters)"')
    opening = form.opening.removeprefix(form.mark)
    marks = [form.mark, form.loose_begin] if form.loose_begin else [form.mark]
    return _FormPatterns(
        marks=regex.compile("|".join(map(regex.escape, marks))),
        first=regex.compile(_loose_pattern(opening) + named),
        loose=regex.compile(named),
        bare=regex.compile(rf"\s*+(?:{regex.escape(form.mark)})?+{_loose_pattern(opening)}{named}"),
        next_call=regex.compile(_loose_pattern(form.between.strip() + form.head) + named),
        tails=tuple(tails),
        end=regex.compile(_loose_pattern(form.end)),
    )


def _arguments_begin(form: CallForm) -> str:
    """Return a lookahead pattern for the text that must follow a call's name.

    Empty if a text of the form ends the name.
    """
    if form.middle.strip() or not isinstance(form.notation, TagNotation):
        return ""
    tail = form.tail.split()[0]
    return rf"(?=\s*+(?:{_loose_pattern(form.notation.key_begin)}|{_loose_pattern(tail)}))"


def _loose_pattern(text: str) -> str:
    """Return a regular expression of a call mark that also matches variants that models write.

    Any white space may stand between words and signs, and braces may be doubled. A brace at the end
    may not, because the pattern would match before the second brace has arrived.
    """
    for placeholder, character in PLACEHOLDERS.items():
        if placeholder in text:
            before, _, after = text.partition(placeholder)
            return rf"{_loose_pattern(before)}\s*+{character}++{_loose_pattern(after)}"
    *signs, last = [part for part in _TOKENS.findall(text) if not part.isspace()] or [""]
    before = "".join(rf"\s*+{regex.escape(sign)}{_DOUBLED.get(sign, '')}" for sign in signs)
    return before + (rf"\s*+{regex.escape(last)}" if last else "")


def _parse_json_string(written: str) -> str | None:
    """Return the text of a JSON string literal.

    None if the literal is not valid or has lone surrogates.
    """
    try:
        text: str = json.loads(written)
        text.encode()
    except ValueError:
        return None
    return text


class FreeTextReader:
    """Reads the text of a custom tool call from its streamed JSON arguments, `{"input": "..."}`."""

    def __init__(self) -> None:
        self._pending_text = ""
        self._is_open = False
        self._is_over = False

    def feed(self, arguments: str) -> str:
        """Read more of the call's JSON arguments; return the text that is certain now."""
        if self._is_over:
            return ""
        self._pending_text += arguments
        if not self._is_open:
            begin = _FREE_TEXT_BEGIN.match(self._pending_text)
            if not begin:
                return ""
            self._pending_text = self._pending_text[begin.end() :]
            self._is_open = True
        match = _TEXT.match(self._pending_text)
        assert match
        self._pending_text = self._pending_text[match.end() :]
        self._is_over = self._pending_text.startswith('"')
        text: str = json.loads(f'"{match[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
