"""Checks answers against JSON schemas, and generates an answer that breaks its schema again."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError
from twostroke.engine.output import join
from twostroke.engine.settling import (
    CheckedPart,
    CheckPart,
    DrawAgain,
    miss_error,
    redrawn_params,
    settling,
)
from twostroke.engine.structured_output.schema.spans import HoldBackDetector, checked_paths
from twostroke.engine.structured_output.schema.verify import UncheckedError
from twostroke.server.generation.events import (
    AnswerFinished,
    BlockClosed,
    BlockKind,
    BlockOpened,
    ChoiceEnded,
    ChoiceStarted,
    ContentAdded,
    PromptScored,
)
from twostroke.server.generation.job import with_spent_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from twostroke.engine.output import Completion, Output
    from twostroke.engine.settling import Miss, Settled
    from twostroke.engine.structured_output.schema.spans import PathPattern
    from twostroke.engine.structured_output.schema.verify import SchemaViolation
    from twostroke.server.generation.checks import AnswerChecks
    from twostroke.server.generation.events import ContentBlock, Event, EventReader
    from twostroke.server.generation.job import EncodedJob
    from twostroke.server.generation.protocol import ResponseInfo
    from twostroke.server.generation.running import RunningAnswers
    from twostroke.server.http.request_context import ServedRequest

HEADER: Final = "twostroke-schema-miss"
_MAX_HEADER_LENGTH: Final = 1000  # characters


@dataclasses.dataclass(slots=True)
class _BlockSchema:
    """The JSON schema that an answer's content block, such as a tool call, must fit.

    Attributes:
        schema: the schema as JSON.
        is_strict: whether an answer that breaks the schema is an error.
        paths: the paths in the answer whose values the grammar cannot enforce, so that only the
            check of the finished answer can judge them.
    """

    schema: str
    is_strict: bool
    paths: tuple[PathPattern, ...]


class AnswerGuard:
    """Checks the answers of one job against JSON schemas, and generates wrong answers again.

    A grammar constrains sampling, but some schema rules cannot be put into a grammar.

    An answer that is still wrong after that is an error if its schema is strict; otherwise the
    response names the rule that the answer breaks.
    """

    def __init__(
        self, checks: AnswerChecks, reply: ResponseInfo, encoded: EncodedJob, request: ServedRequest
    ) -> None:
        self.faults: dict[int, SchemaViolation] = {}  # rules that final answers break, by choice
        self._checks = checks
        self._reply = reply
        self._encoded = encoded
        self._request = request
        job, unenforced_keywords = reply.job, encoded.unenforced_keywords
        self._calls = {}
        for tool in job.tools.functions if job.tools is not None else ():
            schema = json.dumps(tool.schema)
            self._calls[tool.name] = _BlockSchema(
                schema, tool.is_strict, checked_paths(unenforced_keywords, schema)
            )
        constraint = job.params.constraint
        self._text: _BlockSchema | None = None
        if constraint is not None and constraint.notation == "json_schema":
            paths = checked_paths(unenforced_keywords, constraint.text)
            self._text = _BlockSchema(constraint.text, constraint.is_strict, paths)

    @property
    def headers(self) -> dict[str, str]:
        """The response header that names the schema rules that answers break; else no header."""
        faults = "; ".join(map(str, self.faults.values())).encode("ascii", "replace").decode()
        return {HEADER: faults[:_MAX_HEADER_LENGTH]} if faults else {}

    async def checked_completions(self, answers: RunningAnswers) -> list[Completion]:
        """Return the job's final answers after their schema checks, for a response without stream.

        Raises:
            SchemaMissError: an answer and all new answers in its place break a strict schema.
            EngineStoppedError: the engine or the server stopped.
        """
        return [await self.settle(answers, answer) for answer in await answers.completions()]

    async def stream(
        self, answers: RunningAnswers, reader: EventReader
    ) -> AsyncGenerator[list[Event]]:
        """Yield the events of the job's answers as they arrive, in groups, for a streamed response.

        Events of content that the schema check may still change are held back until the check.

        Raises:
            SchemaMissError: an answer and all new answers in its place break a strict schema.
            EngineStoppedError: the engine or the server stopped.
        """
        sent: dict[int, _StreamedAnswer] = {}
        num_reasoning = 0
        async for output in answers:
            choice = sent.setdefault(output.index, _StreamedAnswer(self))
            choice.outputs.append(output)
            if not choice.is_held:
                yield choice.release(reader.read(output), is_last=output.finish_reason is not None)
        for choice in sent.values():
            settled = await self.settle(answers, join(choice.outputs), choice)
            reader_of_final = self._reply.reader()
            yield list(self.marked(choice.unsent_events(reader_of_final.read(settled), settled)))
            num_reasoning += reader_of_final.finish(answers.usage).num_reasoning
        yield [AnswerFinished(answers.usage, num_reasoning)]

    async def settle(
        self, answers: RunningAnswers, answer: Completion, sent: _StreamedAnswer | None = None
    ) -> Completion:
        """Return an answer if it fits its JSON schema, else generate and return a new answer.

        If all new answers break the schema, too, `faults` has the rule that the last answer breaks.
        `sent` is the part of the answer that the client already has, for a streamed response: every
        new answer begins with this part.

        Raises:
            SchemaMissError: the answer and all new answers break a strict schema.
        """
        work = settling(answer, self._parts, self._reply.tokenizer, sent)
        result: SchemaViolation | Completion | None = None
        error: TwostrokeError | None = None
        while True:
            try:
                step = work.send(result) if error is None else work.throw(error)
            except StopIteration as end:
                settled: Settled = end.value
                break
            result = error = None
            try:
                if isinstance(step, CheckPart):
                    result = await self._check(step.part)
                else:
                    result = await self._generate_again(answers, step)
            except TwostrokeError as step_error:
                error = step_error
        if settled.answer is not answer:
            answers.use_new_answer(settled.answer)
        if (miss := settled.miss) is not None:
            self._checks.report(miss.fault, miss.part.kind, self._request.request_id)
            if miss.part.is_strict:
                raise miss_error(miss.fault)
            self.faults[answer.index] = miss.fault
        return settled.answer

    def marked(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield events, and add to each `ChoiceEnded` the schema rule that its answer breaks.

        Answers for which `settle` was not called are not marked.
        """
        for event in events:
            if isinstance(event, ChoiceEnded) and (fault := self.faults.get(event.choice)):
                yield replace(event, schema_miss=str(fault))
            else:
                yield event

    def read(self, answer: Completion) -> list[Event]:
        """Return all events of a complete answer."""
        return self._reply.reader().read(answer)

    def rule(self, block: ContentBlock) -> _BlockSchema | None:
        """Return the JSON schema that a content block must fit; None if it has no schema."""
        if block.kind is BlockKind.CALL:
            return None if block.is_custom else self._calls.get(block.name)
        return self._text if block.kind is BlockKind.TEXT else None

    def _parts(self, answer: Completion) -> list[CheckedPart]:
        """Return the parts of an answer that must fit JSON schemas: its tool calls, or its text."""
        blocks = [event.block for event in self.read(answer) if isinstance(event, BlockClosed)]
        has_calls = any(block.kind is BlockKind.CALL for block in blocks)
        parts: list[CheckedPart] = []
        for block in blocks:
            rule = self.rule(block)
            if rule is not None and not (has_calls and block.kind is BlockKind.TEXT):
                parts.append(
                    CheckedPart(
                        block.text,
                        rule.schema,
                        is_strict=rule.is_strict,
                        kind=block.kind.value,
                        index=block.index,
                    )
                )
        return parts

    async def _check(self, part: CheckedPart) -> SchemaViolation | None:
        """Check one part of an answer, and return the schema rule that it breaks.

        Returns None if the part is valid, or could not be checked.
        """
        try:
            return await self._checks.find_violation(part.schema, part.text)
        except UncheckedError as error:
            self._checks.report_unchecked(str(error), part.kind, self._request.request_id)
            return None

    async def _generate_again(self, answers: RunningAnswers, work: DrawAgain) -> Completion:
        """Generate an answer again, without the values that broke the JSON schema.

        `work` names the answer and these values.
        """
        params = redrawn_params(self._encoded.params, work)
        self._checks.count_regeneration()
        hints = replace(self._encoded.hints, prediction=work.answer.token_ids, shows_progress=False)
        caller = with_spent_time(self._reply.job, self._request).caller
        return await answers.generate_again(work.answer, params, caller, hints)


class _StreamedAnswer:
    """One answer of a stream: the part that was sent, and events that wait for its schema check."""

    def __init__(self, guard: AnswerGuard) -> None:
        self.outputs: list[Output] = []
        self.is_held = False
        self._guard = guard
        self._begin_event: ChoiceStarted | None = None
        self._num_scored = 0
        self._has_prompt_scores = False
        self._blocks: list[ContentBlock] = []
        self._num_closed = 0
        self._num_sent: list[int] = []  # characters sent of each block
        self._readers: list[HoldBackDetector | None] = []
        self._waiting: list[
            Event
        ] = []  # held until a JSON member's name is complete, as it may repeat

    def release(self, events: list[Event], *, is_last: bool) -> list[Event]:
        """Return the events of the answer that can be sent before the schema check.

        After the first event whose content the schema check may change, all events are held back.
        `is_last` says that the answer has ended.
        """
        ready = self._ready_events(events, is_last=is_last)
        for event in ready:
            self._note(event)
        return ready

    def _ready_events(self, events: list[Event], *, is_last: bool) -> list[Event]:
        """Return the result of `release`; hold the answer from the first event that must wait."""
        ready: list[Event] = []
        for event in events:
            match event:
                case ChoiceStarted():
                    self._begin_event = event
                case PromptScored():
                    self._has_prompt_scores = True
                case BlockOpened():
                    self._open(event.block)
                case ContentAdded():
                    reader = self._readers[event.block.index]
                    if reader is not None:
                        reader.feed(event.text)
                        if reader.is_held:
                            self._hold()
                            return ready
                        if reader.is_in_name:
                            self._waiting.append(event)
                            continue
                case BlockClosed() | ChoiceEnded() if is_last:
                    self._hold()
                    return ready
            ready += [*self._waiting, event]
            self._waiting = []
        return ready

    def _hold(self) -> None:
        self.is_held = True

    def _open(self, block: ContentBlock) -> None:
        rule = self._guard.rule(block)
        self._blocks.append(block)
        self._num_sent.append(0)
        self._readers.append(None if rule is None else HoldBackDetector(rule.paths))

    def _note(self, event: Event) -> None:
        if isinstance(event, ContentAdded):
            self._num_sent[event.block.index] += len(event.text)
            self._num_scored += len(event.scored)
        elif isinstance(event, BlockClosed):
            self._num_closed += 1

    def may_change(self, part: CheckedPart, start: int) -> bool:
        """Return whether a new answer may differ in a part's text from the offset `start` on.

        `start` is in characters. The new answer may differ if the client has not seen the text from
        that offset yet.
        """
        if part.index >= len(self._num_sent):
            return True
        is_open = part.index == len(self._num_sent) - 1
        return is_open and start >= self._num_sent[part.index]

    def num_shown(self, miss: Miss) -> int:
        """Return how many characters of the answer's raw text the client has seen.

        The raw text includes the syntax of tool calls. `miss` names the part that breaks a schema.
        """
        index = miss.part.index
        return miss.num_before + (self._num_sent[index] if index < len(self._num_sent) else 0)

    def is_continued_by(self, answer: Completion) -> bool:
        """Return whether a new answer begins with the text that the client has already seen."""
        events = self._guard.read(answer)
        blocks = [event.block for event in events if isinstance(event, BlockOpened)]
        if len(blocks) < len(self._blocks):
            return False
        return all(
            (other.kind, other.name) == (block.kind, block.name)
            and other.text.startswith(block.text[:num_sent])
            for other, block, num_sent in zip(blocks, self._blocks, self._num_sent, strict=False)
        )

    def unsent_events(self, events: list[Event], answer: Completion) -> Iterator[Event]:
        """Yield the events of the final answer that the stream has not sent to the client yet."""
        num_scored = self._num_scored
        num_closed = self._num_closed
        num_left = list(self._num_sent)  # characters of each block to skip
        for event in events:
            match event:
                case ChoiceStarted() if self._begin_event is not None:
                    self._begin_event.tokens[:] = answer.token_ids
                    continue
                case PromptScored() if self._has_prompt_scores:
                    continue
                case BlockOpened() if event.block.index < len(num_left):
                    event.block.id = self._blocks[event.block.index].id
                    continue
                case BlockClosed() if event.block.index < num_closed:
                    continue
                case ContentAdded():
                    index = event.block.index
                    num_skipped = num_left[index] if index < len(num_left) else 0
                    if index < len(num_left):
                        num_left[index] = max(0, num_skipped - len(event.text))
                    scored = event.scored[num_scored:]
                    num_reasoning = max(0, event.num_reasoning - num_scored)
                    num_scored = max(0, num_scored - len(event.scored))
                    text = event.text[num_skipped:]
                    if text or scored:
                        yield ContentAdded(event.block, text, scored, num_reasoning)
                    continue
            yield event
