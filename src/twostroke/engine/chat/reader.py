"""Reads an answer: its reasoning, its text, and its calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason
from twostroke.engine.chat.call_forms import HERMES, Unmarked
from twostroke.engine.chat.call_reader import (
    ArgumentsPiece,
    CallBegin,
    CallReader,
    FreeTextReader,
    ReasoningPiece,
    TextPiece,
    Trim,
)
from twostroke.model.tokenizer.preface import PrefaceCounter, PrefaceCutter, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.chat.call_forms import CallForm
    from twostroke.engine.chat.call_reader import Piece
    from twostroke.model.tokenizer import Tokenizer


class AnswerPart(Protocol):
    """A part of an answer, or all of it; the last has a finish reason."""

    @property
    def text(self) -> str: ...  # noqa: D102

    @property
    def token_ids(self) -> Iterable[int]: ...  # noqa: D102

    @property
    def finish_reason(self) -> FinishReason | None: ...  # noqa: D102

    @property
    def stop(self) -> str | int | None: ...  # noqa: D102


class AnswerFormat(Frozen):
    """How to read the answers of a job.

    `functions` are the names of those that may be called, written in `form`; one must be called if
    `is_forced`. A pure answer has either calls or text. `unmarked` says which calls may lack
    their marks. Arguments of functions among `customs` are read as text, which is their only one.
    `preface` is the reasoning that may come first, if it is separated from the answer.
    """

    functions: tuple[str, ...] = ()
    form: CallForm = HERMES
    is_forced: bool = False
    is_pure: bool = False
    unmarked: Unmarked = Unmarked.ALL
    customs: frozenset[str] = frozenset()
    preface: ReasoningSection | None = None

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but text."""
        return not self.functions and self.preface is None

    def reader(self, tokenizer: Tokenizer) -> AnswerReader:
        """Return a reader for one answer."""
        return AnswerReader(self, tokenizer)


PLAIN: Final = AnswerFormat()


class AnswerReader:
    """Separates reasoning, text and calls of one answer; blanks between them are dropped."""

    def __init__(self, reading: AnswerFormat, tokenizer: Tokenizer) -> None:
        preface = reading.preface
        self._calls = None
        if reading.functions:
            self._calls = CallReader(
                reading.functions,
                reading.form,
                is_forced=reading.is_forced,
                is_pure=reading.is_pure,
                unmarked=reading.unmarked,
            )
        self._customs = reading.customs
        self._free_text: FreeTextReader | None = None  # of the newest call
        self._cutter = PrefaceCutter(preface) if preface else None
        self._counter = PrefaceCounter(preface, tokenizer) if preface else None
        self._reasoning = Trim(skips_first=True)
        self._is_after_preface = False  # and only blanks came since

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, none of which was cut."""
        return self._calls is not None and self._calls.has_whole_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """How many tokens the reasoning has."""
        return 0 if self._counter is None else self._counter.count

    def take(self, answer: AnswerPart) -> list[Piece]:
        """Return the pieces that a part of the answer makes certain."""
        if self._counter is not None:
            self._counter.feed(answer.token_ids)
        pieces = self.feed(answer.text) if answer.text else []
        if answer.finish_reason is None:
            return pieces
        is_cut = answer.finish_reason is FinishReason.LENGTH or isinstance(answer.stop, str)
        return pieces + self.finish(is_cut=is_cut)

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that `text` makes certain."""
        if self._cutter is None:
            return self._answer(text)
        return self._pieces_of(self._cutter.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces that are still held back when the answer ends.

        If the answer `is_cut` (by its token limit or a stop string), an incomplete call is dropped.
        """
        pieces = [] if self._cutter is None else self._pieces_of(self._cutter.finish())
        rest = self._calls.finish(is_cut=is_cut) if self._calls else []
        return pieces + self._with_free_text(rest)

    def _pieces_of(self, cuts: list[tuple[SegmentKind, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for part, text in cuts:
            if part is SegmentKind.INSIDE:
                if shown := self._reasoning.feed(text):
                    pieces.append(ReasoningPiece(shown))
            elif part is SegmentKind.MARK:
                self._is_after_preface = True
            else:
                pieces += self._answer(text)
        return pieces

    def _answer(self, text: str) -> list[Piece]:
        """Return the pieces of text after the reasoning."""
        if self._is_after_preface:
            text = text.lstrip()
            self._is_after_preface = not text
        if self._calls is not None:
            return self._with_free_text(self._calls.feed(text))
        return [TextPiece(text)] if text else []

    def _with_free_text(self, pieces: list[Piece]) -> list[Piece]:
        """Return pieces with the text of custom tools in place of their arguments."""
        if not self._customs:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegin):
                is_custom = piece.name in self._customs
                self._free_text = FreeTextReader() if is_custom else None
                found.append(replace(piece, is_custom=is_custom))
            elif isinstance(piece, ArgumentsPiece) and self._free_text is not None:
                if text := self._free_text.feed(piece.text):
                    found.append(replace(piece, text=text))
            else:
                found.append(piece)
        return found
