"""The protocol-independent events of answers, made from the engine's outputs.

A choice starts, has content blocks one after the other (each opens, grows and closes), and ends.
The encoder of a protocol writes these events as a stream, or collects them into a whole response.
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
    """The kind of content in a block of an answer: text, reasoning or a tool call."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


class ContentBlock(msgspec.Struct, eq=False):
    """One part of an answer: text, reasoning, or a tool call with its arguments as JSON.

    Attributes:
        choice: the index of the answer among the request's choices.
        index: the block's index among the answer's blocks.
        kind: the kind of content.
        name: the name of the called tool.
        is_custom: whether the called tool is a custom tool, whose input is text instead of
            JSON.
        call_index: the call's index among the answer's calls.
        texts: the content so far, as a list of strings to join.
        is_cut: whether the token limit ended the answer inside this block; set when it closes.
        id: the protocol's id of a call; the encoder sets it.
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
        """The block's content so far, as one text."""
        return "".join(self.texts)


class ChoiceStarted(msgspec.Struct, frozen=True):
    """Event: the first output of an answer (a choice of the request) has arrived.

    `usage` is None if log-probabilities of the prompt precede the answer. `tokens` has the ids of
    the answer's tokens so far; this list grows with the answer, and includes tokens without text.
    """

    choice: int
    usage: Usage | None
    tokens: list[int]


class PrefillAdvanced(msgspec.Struct, frozen=True):
    """Event: `num_read` tokens of an answer's prompt have been prefilled.

    Only jobs with `shows_progress` have such events.
    """

    choice: int
    num_read: int
    usage: Usage


class BlockOpened(msgspec.Struct, frozen=True):
    """Event: an answer begins a new content block, which is still empty."""

    block: ContentBlock


class ContentAdded(msgspec.Struct, frozen=True):
    """Event: a content block of an answer grew by `text`.

    `scored` has the token ids and log-probabilities since the last event. They may arrive before
    the tokens' text, so `text` can be empty. The first `num_reasoning` of them belong to reasoning.
    """

    block: ContentBlock
    text: str
    scored: list[tuple[int, TokenLogprobs]] = []
    num_reasoning: int = 0


class BlockClosed(msgspec.Struct, frozen=True):
    """Event: a content block of an answer is complete."""

    block: ContentBlock


class PromptScored(msgspec.Struct, frozen=True):
    """Event: log-probabilities of the next tokens of an answer's prompt have arrived.

    The first such event starts at the prompt's second token.
    """

    choice: int
    logprobs: tuple[TokenLogprobs | None, ...]


class ChoiceEnded(msgspec.Struct, frozen=True):
    """Event: an answer (a choice of the request) has ended.

    `stop` is the stop string or token id that ended the answer, or None. `has_calls` says that the
    answer calls tools and that no call was cut off. `schema_miss` names the rule of the JSON schema
    that the answer breaks, and is empty for a valid answer.
    """

    choice: int
    reason: FinishReason
    stop: str | int | None
    has_calls: bool
    usage: Usage
    timings: Timings
    schema_miss: str = ""


class AnswerFinished(msgspec.Struct, frozen=True):
    """Event: all answers of a job have ended; `usage` is their total.

    `num_reasoning` is the number of reasoning tokens in all answers.
    """

    usage: Usage
    num_reasoning: int


class StreamFailed(msgspec.Struct, frozen=True):
    """Event: an error has ended the stream of a job's answers."""

    error: TwostrokeError
    request_id: str


Event = (
    ChoiceStarted
    | PrefillAdvanced
    | BlockOpened
    | ContentAdded
    | BlockClosed
    | PromptScored
    | ChoiceEnded
    | AnswerFinished
    | StreamFailed
)


class EventReader:
    """Turns the engine's outputs for one job into the events that protocol encoders write."""

    def __init__(
        self,
        reading: AnswerFormat,
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
    ) -> None:
        """Prepare to read the outputs of one job.

        Args:
            reading: how to find reasoning and tool calls in the answers.
            tokenizer: the model's tokenizer.
            has_logprobs: whether events have log-probabilities.
        """
        self._reading = reading
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._answers: dict[int, _ChoiceState] = {}  # by choice

    def read(self, output: Output | Completion) -> list[Event]:
        """Return the events for one output of the engine, which may be a complete answer."""
        answer = self._answers.get(output.index)
        if answer is not None:
            return answer.read(output)
        reader = None if self._reading.is_plain else self._reading.reader(self._tokenizer)
        answer = _ChoiceState(output.index, reader, has_logprobs=self._has_logprobs)
        self._answers[output.index] = answer
        return [ChoiceStarted(output.index, output.usage, answer.tokens), *answer.read(output)]

    def finish(self, usage: Usage) -> AnswerFinished:
        """Return the last event of a job; `usage` is the total of all answers."""
        return AnswerFinished(usage, sum(answer.num_reasoning for answer in self._answers.values()))

    def read_whole(self, answers: Iterable[Completion], usage: Usage) -> Iterator[Event]:
        """Yield all events of a job whose answers are complete, answer by answer."""
        for answer in answers:
            yield from self.read(answer)
        yield self.finish(usage)


class _ChoiceState:
    """One answer while its outputs are read: its open content block, and its parser."""

    def __init__(self, choice: int, reader: AnswerReader | None, *, has_logprobs: bool) -> None:
        """Begin an answer. `reader` finds reasoning and calls; without it all output is text."""
        self.num_reasoning = 0  # tokens
        self.tokens: list[int] = []
        self._choice = choice
        self._reader = reader
        self._has_logprobs = has_logprobs
        self._block: ContentBlock | None = None
        self._num_calls = 0
        self._scored: list[tuple[int, TokenLogprobs]] = []  # not sent yet, as text is missing
        self._num_scored = 0  # sent
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
        """Yield events about the prefill of the prompt; `num_read` of its tokens are prefilled.

        The first event reports the tokens that were found in the prefix cache.
        """
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
        events.append(self._added(block, text) if self._scored else ContentAdded(block, text))

    def _added(self, block: ContentBlock, text: str) -> ContentAdded:
        """Return the event that adds `text` to a block, with the log-probabilities for the text.

        If `text` is empty, the event has all log-probabilities that have not been sent.
        """
        num_reasoning = max(0, self.num_reasoning - self._num_scored)
        is_part = text and block.kind is BlockKind.REASONING
        scored = self._scored[:num_reasoning] if is_part else self._scored
        self._scored = self._scored[len(scored) :]
        self._num_scored += len(scored)
        return ContentAdded(block, text, scored, min(num_reasoning, len(scored)))

    def _open(self, kind: BlockKind, events: list[Event], name: str = "") -> ContentBlock:
        """Open the answer's next content block, after closing the open block.

        The events for both are appended to `events`.
        """
        index = 0
        if self._block is not None:
            events.append(BlockClosed(self._block))
            index = self._block.index + 1
        self._block = ContentBlock(
            self._choice, index, kind=kind, name=name, call_index=self._num_calls, texts=[]
        )
        self._num_calls += kind is BlockKind.CALL
        events.append(BlockOpened(self._block))
        return self._block

    def _score(self, output: Output | Completion, events: list[Event]) -> None:
        """Collect the log-probabilities of the prompt and of the answer, except of a stop token.

        Log-probabilities of the prompt are appended to `events` at once; those for the answer wait
        for their text.
        """
        if output.prompt_logprobs:
            events.append(PromptScored(self._choice, output.prompt_logprobs))
        tokens = output.token_ids
        if output.finish_reason is FinishReason.STOP and isinstance(output.stop, int):
            tokens = tokens[:-1]
        for token, logprobs in zip(tokens, output.logprobs, strict=False):
            if logprobs is not None:
                self._scored.append((token, logprobs))

    def _end(self, output: Output | Completion, reason: FinishReason, events: list[Event]) -> None:
        """End the answer: close its last block, and report the finish reason and the usage.

        An answer without any output gets an empty text block.
        """
        block = self._block or self._open(BlockKind.TEXT, events)
        if self._scored:
            events.append(self._added(block, ""))
        block.is_cut = reason is FinishReason.LENGTH
        events.append(BlockClosed(block))
        assert output.usage is not None
        assert output.timings is not None
        has_calls = self._reader is not None and self._reader.has_whole_calls
        events.append(
            ChoiceEnded(
                self._choice,
                reason,
                stop=output.stop,
                has_calls=has_calls,
                usage=output.usage,
                timings=output.timings,
            )
        )
