"""Reads answers in channels (the harmony format of gpt-oss): reasoning, text and tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import regex

from twostroke.engine.chat.call_reader import (
    ArgumentsPiece,
    BlankTrimmer,
    CallBegin,
    ReasoningPiece,
    TextPiece,
)
from twostroke.engine.chat.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START

if TYPE_CHECKING:
    from collections.abc import Collection

    from twostroke.engine.chat.call_reader import Piece

_MAX_HEADER_CHARS: Final = 500
_BETWEEN: Final = "\n\n"  # between the texts of two messages
# Ends the text of a message; the last two begin the next header without an end.
_BODY_END: Final = regex.compile("|".join(map(regex.escape, (END, CALL, RETURN, START, CHANNEL))))
_BEGIN_MARK: Final = regex.compile(rf"\s*+(?:{regex.escape(START)}|{regex.escape(CHANNEL)})")
_RECIPIENT: Final = regex.compile(r"to=(?:functions[.:])?(?<name>[\w.:/\-]+)", regex.ASCII)
_CHANNEL_NAME: Final = regex.compile(r"analysis|commentary|final")
# A header begins with a mark, a recipient, or a word with one of the two after it.
_HEADER_BEGIN: Final = regex.compile(
    r"\s*+(?:<\||to=|(?:assistant|analysis|commentary|final)(?:\s*+<|\s++to=|\s*+\Z))", regex.ASCII
)
_WORD_BEGIN: Final = regex.compile(r"\s*+[a-z]+\s*+", regex.ASCII)


class ChannelReader:
    """Separates the reasoning, the text and the tool calls of an answer in channels.

    Headers that models write wrongly are accepted: the recipient may stand before the channel,
    `json` may lack its mark, a message may lack its end, and an answer its first header.
    """

    def __init__(
        self, names: Collection[str], *, splits_reasoning: bool, continues_text: bool
    ) -> None:
        """Read an answer that may call functions with these names.

        Without `splits_reasoning`, reasoning is returned as text. An answer that `continues_text`
        begins within the text of a message.
        """
        self._names = frozenset(names)
        self._splits_reasoning = splits_reasoning
        self._pending_text = ""
        self._is_in_header = not continues_text
        self._has_message = continues_text
        self._reasoning = BlankTrimmer(skips_first=True)
        self._is_reasoning = False  # of the message
        self._call: int | None = None  # index of the call that the message is
        self._num_calls = 0
        self._is_cut_call = False
        self._has_text: dict[bool, bool] = {True: False, False: False}  # by `_is_reasoning`
        self._needs_break = False  # before the text of the message

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has tool calls, and all of them are complete."""
        return self._num_calls > 0 and not self._is_cut_call

    def feed(self, text: str) -> list[Piece]:
        """Read more text of the answer, and return the pieces that are certain now."""
        self._pending_text += text
        pieces: list[Piece] = []
        while self._read_header(pieces) if self._is_in_header else self._read_body(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the answer, and return the pieces of text that were held back."""
        pieces: list[Piece] = []
        rest, self._pending_text = self._pending_text, ""
        if not self._is_in_header:
            self._take(rest, pieces)
            self._is_cut_call = is_cut and self._call is not None
        elif not _may_be_header(rest) or self._is_only_word(rest):
            self._take(rest, pieces)
        return pieces

    def _is_only_word(self, rest: str) -> bool:
        """Whether the whole answer is only the beginning of a header's first word."""
        return not self._has_message and _WORD_BEGIN.fullmatch(rest) is not None

    def _read_header(self, pieces: list[Piece]) -> bool:
        """Read the header of a message; return False to wait for more text."""
        begin = self._pending_text[: _MAX_HEADER_CHARS + len(MESSAGE)]
        header, mark, _ = begin.partition(MESSAGE)
        is_long = not mark and len(begin) == _MAX_HEADER_CHARS + len(MESSAGE)
        if is_long or not _may_be_header(header + mark):
            if begin_mark := _BEGIN_MARK.match(self._pending_text):  # else a body ends there again
                self._pending_text = self._pending_text[begin_mark.end() :]
            self._begin_message("", pieces)  # text without a header
            return True
        if mark:
            self._pending_text = self._pending_text[len(header) + len(mark) :]
            self._begin_message(header, pieces)
        return bool(mark)

    def _begin_message(self, header: str, pieces: list[Piece]) -> None:
        """Begin a message, of the channel and with the recipient that its header names."""
        self._is_in_header, self._has_message, self._call = False, True, None
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._is_reasoning = (
            self._splits_reasoning and channel is not None and channel[0] == "analysis"
        )
        self._needs_break = self._has_text[self._is_reasoning]
        if self._is_reasoning:
            self._reasoning = BlankTrimmer(skips_first=True)
        if recipient is not None and recipient["name"] in self._names:
            self._call = self._num_calls
            self._num_calls += 1
            pieces.append(CallBegin(self._call, recipient["name"]))

    def _read_body(self, pieces: list[Piece]) -> bool:
        """Read the text of a message; return False to wait for more text."""
        end = _BODY_END.search(self._pending_text, partial=True)
        offset = len(self._pending_text) if end is None else end.start()
        text, self._pending_text = self._pending_text[:offset], self._pending_text[offset:]
        self._take(text, pieces)
        if end is None or end.partial:
            return False
        if end[0] not in (START, CHANNEL):
            self._pending_text = self._pending_text[len(end[0]) :]
        self._is_in_header = True
        return True

    def _take(self, text: str, pieces: list[Piece]) -> None:
        """Add a part of a message's text to the pieces."""
        if self._call is not None:
            pieces += [ArgumentsPiece(self._call, text)] if text else []
            return
        if self._is_reasoning:
            text = self._reasoning.feed(text)
        if not text:
            return
        if self._needs_break:
            text, self._needs_break = _BETWEEN + text, False
        self._has_text[self._is_reasoning] = True
        pieces.append(ReasoningPiece(text) if self._is_reasoning else TextPiece(text))


def _may_be_header(text: str) -> bool:
    """Return whether a text begins with a header, or may do so when more text comes."""
    return _HEADER_BEGIN.match(text, partial=True) is not None
