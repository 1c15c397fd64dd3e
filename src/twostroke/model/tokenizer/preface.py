"""Separates an answer's preface from the text after it, however the text is split."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.constraint import ReasoningSection
    from twostroke.model.tokenizer.tokenizer import Tokenizer

MAX_BLANKS: Final = 100  # before the opening mark


class SegmentKind(Enum):
    """The kinds of stretches of an answer."""

    MARK = "mark"  # opens or closes the preface
    INSIDE = "inside"
    AFTER = "after"


class PrefaceCutter:
    """Cuts text into its preface and the rest; the stretches joined are the text.

    Only text that may be part of a mark is held back.
    """

    def __init__(self, preface: ReasoningSection) -> None:
        """Begin at the beginning of an answer."""
        self._begin, self._end = preface.begin, preface.end
        self._held = ""
        self.place = SegmentKind.MARK if preface.begin else SegmentKind.INSIDE  # of the next text

    def feed(self, text: str) -> list[tuple[SegmentKind, str]]:
        """Return the stretches that `text` makes certain; none is empty."""
        self._held += text
        found: list[tuple[SegmentKind, str]] = []
        if self.place is SegmentKind.MARK:
            self._open(found)
        if self.place is SegmentKind.INSIDE:
            self._close(found)
        if self.place is SegmentKind.AFTER:
            self._take(found, SegmentKind.AFTER, len(self._held))
        return found

    def finish(self) -> list[tuple[SegmentKind, str]]:
        """Return the text that was held back."""
        found: list[tuple[SegmentKind, str]] = []
        part = SegmentKind.AFTER if self.place is SegmentKind.MARK else self.place
        self._take(found, part, len(self._held))
        return found

    def _open(self, found: list[tuple[SegmentKind, str]]) -> None:
        """Look for the opening mark; blanks may come before it."""
        body = self._held.lstrip()
        num_blanks = len(self._held) - len(body)
        if num_blanks > MAX_BLANKS:
            self.place = SegmentKind.AFTER
        elif body.startswith(self._begin):
            self._take(found, SegmentKind.MARK, num_blanks + len(self._begin))
            self.place = SegmentKind.INSIDE
        elif not self._begin.startswith(body):
            self.place = SegmentKind.AFTER

    def _close(self, found: list[tuple[SegmentKind, str]]) -> None:
        """Look for the closing mark."""
        at = self._held.find(self._end)
        if at < 0:
            self._take(found, SegmentKind.INSIDE, len(self._held) - overlap(self._held, self._end))
            return
        self._take(found, SegmentKind.INSIDE, at)
        self._take(found, SegmentKind.MARK, len(self._end))
        self.place = SegmentKind.AFTER

    def _take(self, found: list[tuple[SegmentKind, str]], part: SegmentKind, size: int) -> None:
        if size:
            found.append((part, self._held[:size]))
            self._held = self._held[size:]


class PrefaceCounter:
    """Counts the tokens of an answer that belong to its preface, marks included."""

    def __init__(self, preface: ReasoningSection, tokenizer: Tokenizer) -> None:
        """Begin at the beginning of an answer."""
        # Bytes are read as characters: a token may be a part of one.
        marks = (mark.encode().decode("latin-1") for mark in (preface.begin, preface.end))
        self._cutter = PrefaceCutter(type(preface)(*marks))
        self._tokenizer = tokenizer
        self._num_undecided = 0
        self.count = 0

    def feed(self, tokens: Iterable[int]) -> None:
        """Take more tokens of the answer."""
        for token in tokens:
            if self._cutter.place is SegmentKind.AFTER:
                return
            self._num_undecided += 1
            text = self._tokenizer.token_bytes(token).decode("latin-1")
            found = self._cutter.feed(text)
            if self._cutter.place is SegmentKind.INSIDE or (
                found and found[0][0] is not SegmentKind.AFTER
            ):
                self.count += self._num_undecided
                self._num_undecided = 0


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0
