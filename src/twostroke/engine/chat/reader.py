"""Reads an answer: separates its reasoning, its text and its tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import field
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason
from twostroke.engine.chat.call_forms import HERMES, Unmarked
from twostroke.engine.chat.call_reader import (
    ArgumentsPiece,
    BlankTrimmer,
    CallBegin,
    CallReader,
    FreeTextReader,
    ReasoningPiece,
    TextPiece,
)
from twostroke.engine.chat.channel_reader import ChannelReader
from twostroke.engine.chat.content_marks import ContentReader
from twostroke.model.tokenizer.preface import ReasoningSplitter, ReasoningTokenCounter, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.chat.call_forms import CallForm
    from twostroke.engine.chat.call_reader import Piece
    from twostroke.engine.chat.content_marks import ContentMarks
    from twostroke.model.tokenizer import Tokenizer


class AnswerPart(Protocol):
    """The interface of a part of a model's answer, or a whole answer, for `AnswerReader.take`.

    The last part has a finish reason.
    """

    @property
    def text(self) -> str: ...  # noqa: D102

    @property
    def token_ids(self) -> Iterable[int]: ...  # noqa: D102

    @property
    def finish_reason(self) -> FinishReason | None: ...  # noqa: D102

    @property
    def stop(self) -> str | int | None: ...  # noqa: D102


class AnswerFormat(Frozen):
    """How to separate the reasoning, the text and the tool calls of a model's answer.

    Attributes:
        functions: the names of the functions that may be called.
        schemas: the JSON schemas of their arguments, by name.
        form: how the model writes calls.
        is_forced: whether the answer must call a function.
        is_pure: whether an answer has either calls or text.
        unmarked: which JSON objects without call marks count as calls.
        customs: the custom tools: functions whose only argument is text.
        preface: the reasoning section, if it is separated from the answer.
        section_after_calls: further reasoning that may follow a call, if reasoning is separated.
        content_marks: the texts around the text of an answer, if the model writes such marks.
        has_channels: whether answers are messages in channels (harmony).
        continues_text: whether an answer in channels begins within the text of a message.
    """

    functions: tuple[str, ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    form: CallForm = HERMES
    is_forced: bool = False
    is_pure: bool = False
    unmarked: Unmarked = Unmarked.ALL
    customs: frozenset[str] = frozenset()
    preface: ReasoningSection | None = None
    section_after_calls: ReasoningSection | None = None
    content_marks: ContentMarks | None = None
    has_channels: bool = False
    continues_text: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether answers have only text, without reasoning and tool calls to separate."""
        return not (self.functions or self.preface or self.content_marks or self.has_channels)

    def reader(self, tokenizer: Tokenizer) -> AnswerReader:
        """Return a reader that separates the parts of one answer."""
        return AnswerReader(self, tokenizer)


PLAIN: Final = AnswerFormat()


class AnswerReader:
    """Separates the reasoning, the text and the tool calls of one answer.

    White space between these parts is dropped.
    """

    def __init__(self, reading: AnswerFormat, tokenizer: Tokenizer) -> None:
        preface = reading.preface
        self._calls: CallReader | ChannelReader | None = None
        if reading.has_channels:
            self._calls = ChannelReader(
                reading.functions,
                splits_reasoning=preface is not None,
                continues_text=reading.continues_text,
            )
        elif reading.functions:
            self._calls = CallReader(
                reading.functions,
                reading.form,
                is_forced=reading.is_forced,
                is_pure=reading.is_pure,
                unmarked=reading.unmarked,
                schemas=reading.schemas,
            )
        self._customs = reading.customs
        self._free_text: FreeTextReader | None = None  # of the newest call
        self._cutter = ReasoningSplitter(preface) if preface and not reading.has_channels else None
        marks = reading.content_marks
        self._content = None if marks is None else ContentReader(marks)
        self._counter = ReasoningTokenCounter(preface, tokenizer) if preface else None
        self._reasoning = BlankTrimmer(skips_first=True)
        self._is_after_preface = False  # with only blanks since the end of the reasoning
        self._section_after_calls = reading.section_after_calls
        self._later_cutter: ReasoningSplitter | None = None  # of the text after the newest call
        self._is_after_later = False  # with only blanks since the end of such reasoning
        self._tokenizer = tokenizer
        self._later_texts: list[str] = []  # of the newest section of such reasoning, with its marks
        self._num_later_tokens = 0  # of complete sections

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has tool calls, and all of them are complete."""
        return self._calls is not None and self._calls.has_whole_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of the answer's reasoning.

        Reasoning after a call is counted when the text after this call has ended; its tokens are
        found by encoding the text again.
        """
        num_first = 0 if self._counter is None else self._counter.count
        return num_first + self._num_later_tokens

    def take(self, answer: AnswerPart) -> list[Piece]:
        """Read a part of the answer; return the pieces of text and of calls that are certain now.

        The last part, which has a finish reason, also ends the answer.
        """
        if self._counter is not None:
            self._counter.feed(answer.token_ids)
        pieces = self.feed(answer.text) if answer.text else []
        if answer.finish_reason is None:
            return pieces
        is_cut = answer.finish_reason is FinishReason.LENGTH or isinstance(answer.stop, str)
        return pieces + self.finish(is_cut=is_cut)

    def feed(self, text: str) -> list[Piece]:
        """Read more text of the answer, and return the pieces that are certain now."""
        if self._cutter is None:
            return self._answer(text)
        return self._pieces_of(self._cutter.feed(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """End the answer, and return the pieces of text and calls that were held back.

        If the answer `is_cut` (by its token limit or a stop string), an incomplete call is dropped.
        """
        pieces = [] if self._cutter is None else self._pieces_of(self._cutter.finish())
        if self._content is not None:
            pieces += self._after_content(self._content.finish(is_cut=is_cut))
        rest = self._calls.finish(is_cut=is_cut) if self._calls else []
        pieces += self._with_free_text(self._with_later_reasoning(rest))
        return pieces + self._end_later_text()

    def _pieces_of(self, cuts: list[tuple[SegmentKind, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for part, text in cuts:
            if part is SegmentKind.INSIDE:
                if reasoning := self._reasoning.feed(text):
                    pieces.append(ReasoningPiece(reasoning))
            elif part is SegmentKind.MARK:
                self._is_after_preface = True
            else:
                pieces += self._answer(text)
        return pieces

    def _answer(self, text: str) -> list[Piece]:
        """Split text after the reasoning into pieces of text and of tool calls."""
        if self._is_after_preface:
            text = text.lstrip()
            self._is_after_preface = not text
        return self._after_content(text if self._content is None else self._content.feed(text))

    def _after_content(self, text: str) -> list[Piece]:
        """Split text, whose content marks were removed, into pieces of text and of tool calls."""
        if self._calls is not None:
            return self._with_free_text(self._with_later_reasoning(self._calls.feed(text)))
        return [TextPiece(text)] if text else []

    def _with_later_reasoning(self, pieces: list[Piece]) -> list[Piece]:
        """Separate reasoning at the start of the text after a tool call from this text."""
        if self._section_after_calls is None:
            return pieces
        result: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegin):
                result += [*self._end_later_text(), piece]
                self._later_cutter = ReasoningSplitter(self._section_after_calls)
            elif isinstance(piece, TextPiece) and self._later_cutter is not None:
                result += self._later_pieces(self._later_cutter.feed(piece.text))
            else:
                result.append(piece)
        return result

    def _end_later_text(self) -> list[Piece]:
        """End the text after a call, and return its pieces that were held back."""
        pieces: list[Piece] = []
        if self._later_cutter is not None:
            pieces = self._later_pieces(self._later_cutter.finish())
        if self._later_texts:
            text = "".join(self._later_texts)
            self._num_later_tokens += len(self._tokenizer.encode(text, add_special=False))
        self._later_cutter, self._later_texts = None, []
        self._is_after_later = False
        self._reasoning = BlankTrimmer(skips_first=True)
        return pieces

    def _later_pieces(self, segments: list[tuple[SegmentKind, str]]) -> list[Piece]:
        """Return segments of the text after a tool call as pieces of reasoning and of text."""
        pieces: list[Piece] = []
        for kind, text in segments:
            if kind is not SegmentKind.AFTER:
                self._later_texts.append(text)
            if kind is SegmentKind.INSIDE:
                if reasoning := self._reasoning.feed(text):
                    pieces.append(ReasoningPiece(reasoning))
            elif kind is SegmentKind.MARK:
                self._is_after_later = True
            else:
                answer_text = text.lstrip() if self._is_after_later else text
                self._is_after_later = self._is_after_later and not answer_text
                pieces += [TextPiece(answer_text)] if answer_text else []
        return pieces

    def _with_free_text(self, pieces: list[Piece]) -> list[Piece]:
        """Replace the JSON arguments of calls of custom tools by the text in the arguments."""
        if not self._customs:
            return pieces
        result: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegin):
                is_custom = piece.name in self._customs
                self._free_text = FreeTextReader() if is_custom else None
                result.append(replace(piece, is_custom=is_custom))
            elif isinstance(piece, ArgumentsPiece) and self._free_text is not None:
                if text := self._free_text.feed(piece.text):
                    result.append(replace(piece, text=text))
            else:
                result.append(piece)
        return result
