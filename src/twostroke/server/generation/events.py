"""The events of an answer, for every protocol, and the reader that makes them of outputs.

A choice's answer begins, has content blocks one after the other (each opens, grows and closes),
and ends. An encoder of a protocol writes these events as its stream, or collects them into its
whole response.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, UnsetType

from twostroke.core.errors import TwostrokeError
from twostroke.core.request import FinishReason
from twostroke.core.step import TokenLogprobs
from twostroke.engine.chat.call_reader import ArgumentsPiece, CallBegin, ReasoningPiece, TextPiece
from twostroke.engine.output import Output, Timings, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.engine.chat.call_reader import Piece
    from twostroke.engine.chat.reader import AnswerFormat, AnswerReader
    from twostroke.engine.output import Completion
    from twostroke.model.tokenizer import Tokenizer


SchemaMiss = Annotated[
    str | UnsetType,
    Meta(description="The rule of its schema that the answer breaks, if it breaks one."),
]


class BlockKind(Enum):
    """The kinds of content in an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class ContentBlock(msgspec.Struct, eq=False):
    """A stretch of one answer: text, reasoning, or a call with its arguments as JSON.

    Attributes:
        choice: the index of the answer among the choices.
        index: its place among the answer's blocks.
        kind: which kind of content it has.
        name: the called function.
        is_custom: whether it is a custom tool, which takes text instead of JSON.
        call_index: its place among the answer's calls.
        texts: its content so far, in pieces.
        is_cut: whether the answer ended inside it at the token limit; set when it closes.
        id: the protocol's id of a call, which the encoder gives it.
    """

    choice: int
    index: int
    kind: BlockKind
    name: str = ""
    call_index: int = 0
    texts: list[str] = []
    is_custom: bool = False
    is_cut: bool = False
    id: str = ""

    @property
    def text(self) -> str:
        """The content so far."""
        return "".join(self.texts)


class ChoiceStarted(msgspec.Struct, frozen=True):
    """A choice has its first output; `usage` is known unless prompt logprobs come first.

    `tokens` are the ids of the answer's tokens so far; the list grows with the answer, also by
    tokens without text.
    """

    choice: int
    usage: Usage | None
    tokens: list[int]


class PrefillAdvanced(msgspec.Struct, frozen=True):
    """So many tokens of a choice's prompt are read, if the job asks for progress."""

    choice: int
    num_read: int
    usage: Usage


class BlockOpened(msgspec.Struct, frozen=True):
    """A block begins, without content."""

    block: ContentBlock


class Added(msgspec.Struct, frozen=True):
    """A block grew by `text`, which is empty where only the scores of its tokens are new.

    `scored` are the tokens with log-probabilities since the last piece, which may run ahead of
    their text; the first `num_reasoning` of them are reasoning.
    """

    block: ContentBlock
    text: str
    scored: list[tuple[int, TokenLogprobs]] = []
    num_reasoning: int = 0


class Closed(msgspec.Struct, frozen=True):
    """A block is complete."""

    block: ContentBlock


class PromptScored(msgspec.Struct, frozen=True):
    """Log-probabilities of the next tokens of a prompt, from its second one on."""

    choice: int
    logprobs: tuple[TokenLogprobs | None, ...]


class Ended(msgspec.Struct, frozen=True):
    """A choice ended; `stop` is the stop string or token id that was met.

    `has_calls` says that it makes calls and that none of them was cut. `schema_miss` names the rule
    of its schema that it breaks, if it breaks one.
    """

    choice: int
    reason: FinishReason
    stop: str | int | None
    has_calls: bool
    usage: Usage
    timings: Timings
    schema_miss: str = ""


class AnswerFinished(msgspec.Struct, frozen=True):
    """All choices ended; `usage` is their sum, `num_reasoning` of its tokens were reasoning."""

    usage: Usage
    num_reasoning: int


class StreamFailed(msgspec.Struct, frozen=True):
    """The stream ends here because of an error."""

    error: TwostrokeError
    request_id: str


Event = (
    ChoiceStarted
    | PrefillAdvanced
    | BlockOpened
    | Added
    | Closed
    | PromptScored
    | Ended
    | AnswerFinished
    | StreamFailed
)


class EventReader:
    """Turns the outputs of a job into events."""

    def __init__(
        self,
        reading: AnswerFormat,
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
    ) -> None:
        """Read answers in the form that `reading` describes.

        `has_logprobs` adds the log-probabilities of tokens.
        """
        self._reading = reading
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._answers: dict[int, _ChoiceState] = {}  # by choice

    def read(self, output: Output | Completion) -> list[Event]:
        """Return the events of an output, or of a whole answer."""
        answer = self._answers.get(output.index)
        if answer is not None:
            return answer.read(output)
        reader = None if self._reading.is_plain else self._reading.reader(self._tokenizer)
        answer = _ChoiceState(output.index, reader, has_logprobs=self._has_logprobs)
        self._answers[output.index] = answer
        return [ChoiceStarted(output.index, output.usage, answer.tokens), *answer.read(output)]

    def finish(self, usage: Usage) -> AnswerFinished:
        """Return the event after the last output; `usage` is that of all choices."""
        return AnswerFinished(usage, sum(answer.num_reasoning for answer in self._answers.values()))

    def read_whole(self, answers: Iterable[Completion], usage: Usage) -> Iterator[Event]:
        """Yield all events of a job from its whole answers."""
        for answer in answers:
            yield from self.read(answer)
        yield self.finish(usage)


class _ChoiceState:
    """One choice: its open block, and the reader that finds blocks in its text."""

    def __init__(self, choice: int, reader: AnswerReader | None, *, has_logprobs: bool) -> None:
        """Begin; without a reader an answer is one block of text."""
        self.num_reasoning = 0  # tokens
        self.tokens: list[int] = []
        self._choice = choice
        self._reader = reader
        self._has_logprobs = has_logprobs
        self._block: ContentBlock | None = None
        self._num_calls = 0
        self._scored: list[tuple[int, TokenLogprobs]] = []  # ahead of their text
        self._num_scored = 0  # up to the last piece
        self._has_progress = False

    def read(self, output: Output | Completion) -> list[Event]:
        events: list[Event] = []
        self.tokens += output.token_ids
        if isinstance(output, Output) and output.num_read:
            events += self._progress(output.num_read, output.usage)
        if self._has_logprobs:
            self._score(output, events)
        if self._reader is None:
            if output.text:
                self._add(BlockKind.TEXT, output.text, events)
        else:
            pieces = self._reader.take(output)
            self.num_reasoning = self._reader.num_reasoning_tokens
            for piece in pieces:
                self._take(piece, events)
        if output.finish_reason is not None:
            self._end(output, output.finish_reason, events)
        return events

    def _progress(self, num_read: int, usage: Usage | None) -> Iterator[PrefillAdvanced]:
        """Yield events about prefill progress; the first event has the number of cached tokens."""
        assert usage is not None
        if not self._has_progress and num_read > usage.cached_tokens:
            yield PrefillAdvanced(self._choice, usage.cached_tokens, usage)
        self._has_progress = True
        yield PrefillAdvanced(self._choice, num_read, usage)

    def _take(self, piece: Piece, events: list[Event]) -> None:
        match piece:
            case TextPiece():
                self._add(BlockKind.TEXT, piece.text, events)
            case ReasoningPiece():
                self._add(BlockKind.REASONING, piece.text, events)
            case CallBegin():
                self._open(BlockKind.CALL, events, piece.name).is_custom = piece.is_custom
            case ArgumentsPiece():
                self._add(BlockKind.CALL, piece.text, events)

    def _add(self, kind: BlockKind, text: str, events: list[Event]) -> None:
        block = self._block
        if block is None or block.kind is not kind:
            block = self._open(kind, events)
        block.texts.append(text)
        events.append(self._added(block, text) if self._scored else Added(block, text))

    def _added(self, block: ContentBlock, text: str) -> Added:
        """Return a piece with the scores of its tokens; the last piece, without text, has all."""
        num_reasoning = max(0, self.num_reasoning - self._num_scored)
        is_part = text and block.kind is BlockKind.REASONING
        scored = self._scored[:num_reasoning] if is_part else self._scored
        self._scored = self._scored[len(scored) :]
        self._num_scored += len(scored)
        return Added(block, text, scored, min(num_reasoning, len(scored)))

    def _open(self, kind: BlockKind, events: list[Event], name: str = "") -> ContentBlock:
        """Begin the next block, after the end of the one that is open."""
        index = 0
        if self._block is not None:
            events.append(Closed(self._block))
            index = self._block.index + 1
        self._block = ContentBlock(self._choice, index, kind, name, self._num_calls, [])
        self._num_calls += kind is BlockKind.CALL
        events.append(BlockOpened(self._block))
        return self._block

    def _score(self, output: Output | Completion, events: list[Event]) -> None:
        """Take the log-probabilities of the tokens that have text: all but one that stops."""
        if output.prompt_logprobs:
            events.append(PromptScored(self._choice, output.prompt_logprobs))
        tokens = output.token_ids
        if output.finish_reason is FinishReason.STOP and isinstance(output.stop, int):
            tokens = tokens[:-1]
        for token, found in zip(tokens, output.logprobs, strict=False):
            if found is not None:
                self._scored.append((token, found))

    def _end(self, output: Output | Completion, reason: FinishReason, events: list[Event]) -> None:
        """Close the last block, which is an empty text where there was none, and the answer."""
        block = self._block or self._open(BlockKind.TEXT, events)
        if self._scored:
            events.append(self._added(block, ""))
        block.is_cut = reason is FinishReason.LENGTH
        events.append(Closed(block))
        assert output.usage is not None
        assert output.timings is not None
        has_calls = self._reader is not None and self._reader.has_whole_calls
        usage, timings = output.usage, output.timings
        events.append(Ended(self._choice, reason, output.stop, has_calls, usage, timings))
