"""Separates an answer's reasoning section from the text after it, in a stream of text."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.constraint import ReasoningSection
    from twostroke.model.tokenizer.tokenizer import Tokenizer

MAX_BLANKS: Final = 100  # before the opening mark


class SegmentKind(Enum):
    """The kind of a segment of an answer: a delimiter, the reasoning, or the text after it."""

    MARK = "mark"  # opens or closes the reasoning
    INSIDE = "inside"
    AFTER = "after"


class ReasoningSplitter:
    """Divides an answer's text, as it arrives, into the reasoning section and the text after it.

    The joined segments are the whole text. Only text that may be the beginning of a delimiter is
    held back.
    """

    def __init__(self, preface: ReasoningSection) -> None:
        """Start at the beginning of an answer; `preface` delimits the reasoning section."""
        self._begin, self._end = preface.begin, preface.end
        self._buffer = ""
        self.segment = (
            SegmentKind.MARK if preface.begin else SegmentKind.INSIDE
        )  # of the text that comes next

    def feed(self, text: str) -> list[tuple[SegmentKind, str]]:
        """Add text of the answer; return the segments that are now certain, none of them empty."""
        self._buffer += text
        segments: list[tuple[SegmentKind, str]] = []
        if self.segment is SegmentKind.MARK:
            self._find_begin(segments)
        if self.segment is SegmentKind.INSIDE:
            self._find_end(segments)
        if self.segment is SegmentKind.AFTER:
            self._take(segments, SegmentKind.AFTER, len(self._buffer))
        return segments

    def finish(self) -> list[tuple[SegmentKind, str]]:
        """Return the text that was held back, as segments, at the end of the answer."""
        segments: list[tuple[SegmentKind, str]] = []
        kind = SegmentKind.AFTER if self.segment is SegmentKind.MARK else self.segment
        self._take(segments, kind, len(self._buffer))
        return segments

    def _find_begin(self, segments: list[tuple[SegmentKind, str]]) -> None:
        """Look for the text that opens the reasoning section; blanks may come before it."""
        body = self._buffer.lstrip()
        num_blanks = len(self._buffer) - len(body)
        if num_blanks > MAX_BLANKS:
            self.segment = SegmentKind.AFTER
        elif body.startswith(self._begin):
            self._take(segments, SegmentKind.MARK, num_blanks + len(self._begin))
            self.segment = SegmentKind.INSIDE
        elif not self._begin.startswith(body):
            self.segment = SegmentKind.AFTER

    def _find_end(self, segments: list[tuple[SegmentKind, str]]) -> None:
        """Look for the text that closes the reasoning section."""
        offset = self._buffer.find(self._end)
        if offset < 0:
            self._take(
                segments,
                SegmentKind.INSIDE,
                len(self._buffer) - partial_match_length(self._buffer, self._end),
            )
            return
        self._take(segments, SegmentKind.INSIDE, offset)
        self._take(segments, SegmentKind.MARK, len(self._end))
        self.segment = SegmentKind.AFTER

    def _take(self, segments: list[tuple[SegmentKind, str]], kind: SegmentKind, size: int) -> None:
        if size:
            segments.append((kind, self._buffer[:size]))
            self._buffer = self._buffer[size:]


def byte_splitter(preface: ReasoningSection) -> ReasoningSplitter:
    """Return a splitter for text in which each character stands for a byte (Latin-1).

    It can be fed token by token, although the bytes of a token may end inside a character.
    """
    begin, end = (mark.encode().decode("latin-1") for mark in (preface.begin, preface.end))
    return ReasoningSplitter(type(preface)(begin, end))


class ReasoningTokenCounter:
    """Counts the tokens of an answer's reasoning section, for the usage figures of a response.

    The tokens of the delimiters count, too.
    """

    def __init__(self, preface: ReasoningSection, tokenizer: Tokenizer) -> None:
        """Start at the beginning of an answer; `preface` delimits the reasoning section."""
        self._cutter = byte_splitter(preface)
        self._tokenizer = tokenizer
        self._num_undecided = 0
        self.count = 0

    def feed(self, tokens: Iterable[int]) -> None:
        """Add tokens of the answer to the count of reasoning tokens."""
        for token in tokens:
            if self._cutter.segment is SegmentKind.AFTER:
                return
            self._num_undecided += 1
            text = self._tokenizer.token_bytes(token).decode("latin-1")
            segments = self._cutter.feed(text)
            if self._cutter.segment is SegmentKind.INSIDE or (
                segments and segments[0][0] is not SegmentKind.AFTER
            ):
                self.count += self._num_undecided
                self._num_undecided = 0


def partial_match_length(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of the text `mark`.

    A stream holds these characters back until more text shows whether `mark` follows.
    """
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
