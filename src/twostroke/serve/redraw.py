"""Generates an answer again if it breaks its JSON schema, without its wrong value.

The new answer has the same seed, and the wrong value is excluded from it, so the text before the
value does not change. If new answers break the schema at the same offset several times, shorter and
shorter prefixes of the value are excluded. A stream holds back events that may still change, until
the answer is final.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import (
    DeadlineError,
    OverloadedError,
    RequestError,
)
from twostroke.core.request import FinishReason
from twostroke.engine.output import join
from twostroke.engine.redraw import (
    MAX_REDRAW_S,
    MAX_REDRAWN_SHARE,
    MAX_REDRAWS,
    MIN_REDRAWN_TOKENS,
    MISSES_AT_LEVEL,
    exclusions,
    miss_error,
    redrawn_params,
    written_text,
)
from twostroke.schema.spans import HeldBack, checked_places, wrong_span
from twostroke.schema.verify import UncheckedError
from twostroke.serve.callers import begun
from twostroke.serve.events import (
    Added,
    Began,
    BlockKind,
    Closed,
    Ended,
    Finished,
    Opened,
    PromptScored,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from twostroke.core.constraint import Excluded
    from twostroke.engine.output import Completion, Output
    from twostroke.http.served import ServedRequest
    from twostroke.schema.spans import PathPattern
    from twostroke.schema.verify import Fault
    from twostroke.serve.checking import AnswerChecks
    from twostroke.serve.encoder import Reply
    from twostroke.serve.events import ContentBlock, Event, EventReader
    from twostroke.serve.job import Encoded
    from twostroke.serve.running import Answers

HEADER: Final = "twostroke-schema-miss"
_MAX_HEADER: Final = 1000  # characters


@dataclasses.dataclass(slots=True)
class _Miss:
    """A schema rule that a block of an answer breaks; the block begins after `num_before` chars."""

    block: ContentBlock
    fault: Fault
    num_before: int
    is_strict: bool


@dataclasses.dataclass(slots=True)
class _Rule:
    """The schema of a block, and the paths whose values only the final check can judge."""

    schema: str
    is_strict: bool
    paths: tuple[PathPattern, ...]


class AnswerGuard:
    """Checks the answers of one job against their schemas, and generates wrong ones again.

    An answer that is still wrong after that is an error if its schema is strict; otherwise the
    response names the rule that it breaks.
    """

    def __init__(
        self, checks: AnswerChecks, reply: Reply, encoded: Encoded, request: ServedRequest
    ) -> None:
        self.faults: dict[int, Fault] = {}  # rules that the final answers break, by choice
        self._checks = checks
        self._reply = reply
        self._encoded = encoded
        self._request = request
        job, gaps = reply.job, encoded.gaps
        self._calls = {}
        for tool in job.tools.functions if job.tools is not None else ():
            schema = json.dumps(tool.schema)
            self._calls[tool.name] = _Rule(schema, tool.is_strict, checked_places(gaps, schema))
        form = job.params.constraint
        self._text: _Rule | None = None
        if form is not None and form.notation == "json_schema":
            paths = checked_places(gaps, form.text)
            self._text = _Rule(form.text, form.is_strict, paths)

    @property
    def headers(self) -> dict[str, str]:
        """The response header that names the rules that the answers break; empty if none."""
        faults = "; ".join(map(str, self.faults.values())).encode("ascii", "replace").decode()
        return {HEADER: faults[:_MAX_HEADER]} if faults else {}

    async def settled(self, answers: Answers) -> list[Completion]:
        """Return all answers when they are final; raises as `settle` and `Answers.whole`."""
        return [await self.settle(answers, answer) for answer in await answers.whole()]

    async def stream(self, answers: Answers, reader: EventReader) -> AsyncGenerator[list[Event]]:
        """Yield the events of answers as they arrive; events that may change wait for the check.

        Raises as `settle` and iterating over answers do.
        """
        sent: dict[int, _Sent] = {}
        num_reasoning = 0
        async for output in answers:
            choice = sent.setdefault(output.index, _Sent(self))
            choice.outputs.append(output)
            if not choice.is_held:
                yield choice.release(reader.read(output), is_last=output.finish_reason is not None)
        for choice in sent.values():
            settled = await self.settle(answers, join(choice.outputs), choice)
            rereader = self._reply.reader()
            yield list(self.marked(choice.rest(rereader.read(settled), settled)))
            num_reasoning += rereader.finish(answers.usage).num_reasoning
        yield [Finished(answers.usage, num_reasoning)]

    async def settle(
        self, answers: Answers, answer: Completion, sent: _Sent | None = None
    ) -> Completion:
        """Return the final answer: the given one if it matches its schema, else a new one.

        If all new answers break the schema, too, `faults` has the rule that the last one breaks.
        `sent` is the part of the answer that the stream has sent: a new answer begins with it.

        Raises:
            SchemaMissError: the answer and all new answers break a strict schema.
        """
        excluded: list[Excluded] = []
        num_left = max(MIN_REDRAWN_TOKENS, MAX_REDRAWN_SHARE * len(answer.token_ids))
        end_s = time.monotonic() + MAX_REDRAW_S
        miss, last_start, num_misses, is_widened = await self._miss(answer), -1, 0, False
        for _ in range(MAX_REDRAWS):
            if miss is None or num_left <= 0 or time.monotonic() > end_s:
                break
            start, _ = wrong_span(miss.block.text, miss.fault)
            if sent is not None and not sent.may_change(miss.block, start):
                break
            num_misses = num_misses + 1 if miss.num_before + start == last_start else 0
            last_start = miss.num_before + start
            exclusions = list(self._exclusions(answer, miss, num_misses // MISSES_AT_LEVEL))
            if not exclusions:
                break
            excluded += exclusions
            try:
                other = await self._draw(answers, answer, excluded)
            except RequestError:  # no other value fits there: let the text before it change, too
                if is_widened:
                    break
                num_sent = 0 if sent is None else miss.num_before + sent.num_sent(miss.block)
                num_bytes = len((self._written(answer) or "")[:num_sent].encode())
                excluded = [dataclasses.replace(value, start=num_bytes) for value in excluded]
                is_widened = True
                continue
            except (DeadlineError, OverloadedError):
                break
            num_left -= len(other.token_ids)
            if sent is None or sent.goes_on(self._reply.reader().read(other)):
                answer = other
                answers.accept(answer)
                miss = await self._miss(answer)
        if miss is not None:
            self._checks.report(miss.fault, miss.block, self._request.request_id)
            if miss.is_strict:
                raise miss_error(miss.fault)
            self.faults[answer.index] = miss.fault
        return answer

    def marked(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events, with the broken rule added to each event that ends a wrong answer."""
        for event in events:
            if isinstance(event, Ended) and (fault := self.faults.get(event.choice)):
                yield replace(event, schema_miss=str(fault))
            else:
                yield event

    def rule(self, block: ContentBlock) -> _Rule | None:
        """Return the schema of a block with its checked paths; None for a block without one."""
        if block.kind is BlockKind.CALL:
            return None if block.is_custom else self._calls.get(block.name)
        return self._text if block.kind is BlockKind.TEXT else None

    async def _miss(self, answer: Completion) -> _Miss | None:
        """Return the first rule that an answer breaks; None if it breaks none or was cut off."""
        has_ended = answer.stop is None or answer.stop in self._reply.tokenizer.eos_ids
        if answer.finish_reason is not FinishReason.STOP or not has_ended:
            return None
        events = self._reply.reader().read(answer)
        blocks = [event.block for event in events if isinstance(event, Closed)]
        has_calls = any(block.kind is BlockKind.CALL for block in blocks)
        text, num_before = self._written(answer) or "", 0
        for block in blocks:
            rule = self.rule(block)
            if rule is None or (has_calls and block.kind is BlockKind.TEXT):
                continue
            num_before = max(0, text.find(block.text, num_before))
            try:
                fault = await self._checks.fault(rule.schema, block)
            except UncheckedError as error:
                self._checks.report_unchecked(str(error), block, self._request.request_id)
                fault = None
            if fault is not None:
                return _Miss(block, fault, num_before, rule.is_strict)
            num_before += len(block.text)
        return None

    def _written(self, answer: Completion) -> str | None:
        return written_text(answer, self._reply.tokenizer)

    def _exclusions(self, answer: Completion, miss: _Miss, level: int) -> Iterator[Excluded]:
        """Yield the texts to exclude: the wrong value at level 0, its prefixes at higher levels."""
        written = self._written(answer)
        return exclusions(written, miss.num_before, miss.block.text, miss.fault, level)

    async def _draw(
        self, answers: Answers, answer: Completion, excluded: list[Excluded]
    ) -> Completion:
        """Generate an answer again, without the excluded texts."""
        params = redrawn_params(self._encoded.params, answer.index, excluded)
        self._checks.count_redraw()
        hints = replace(self._encoded.hints, prediction=answer.token_ids, shows_progress=False)
        caller = begun(self._reply.job, self._request).caller
        return await answers.draw_again(answer, params, caller, hints)


class _Sent:
    """The part of one answer that a stream has sent."""

    def __init__(self, guard: AnswerGuard) -> None:
        self.outputs: list[Output] = []
        self.is_held = False
        self._guard = guard
        self._begin_event: Began | None = None
        self._num_scored = 0
        self._has_prompt_scores = False
        self._blocks: list[ContentBlock] = []
        self._num_closed = 0
        self._num_sent: list[int] = []  # characters sent of each block
        self._readers: list[HeldBack | None] = []
        self._waiting: list[Event] = []  # their text may be a name that occurs twice

    def release(self, events: list[Event], *, is_last: bool) -> list[Event]:
        """Return the events that can be sent now.

        After the first event that may change, all events are held back.
        """
        ready: list[Event] = []
        for event in events:
            match event:
                case Began():
                    self._begin_event = event
                case PromptScored():
                    self._has_prompt_scores = True
                case Opened():
                    self._open(event.block)
                case Added():
                    reader = self._readers[event.block.index]
                    if reader is not None:
                        reader.feed(event.text)
                        if reader.is_held:
                            self._hold()
                            return ready
                        if reader.is_in_name:
                            self._waiting.append(event)
                            continue
                case Closed() | Ended() if is_last:
                    self._hold()
                    return ready
            ready += [*self._waiting, event]
            self._waiting = []
        for event in ready:
            self._note(event)
        return ready

    def _hold(self) -> None:
        self.is_held = True

    def _open(self, block: ContentBlock) -> None:
        rule = self._guard.rule(block)
        self._blocks.append(block)
        self._num_sent.append(0)
        self._readers.append(None if rule is None else HeldBack(rule.paths))

    def _note(self, event: Event) -> None:
        if isinstance(event, Added):
            self._num_sent[event.block.index] += len(event.text)
            self._num_scored += len(event.scored)
        elif isinstance(event, Closed):
            self._num_closed += 1

    def may_change(self, block: ContentBlock, start: int) -> bool:
        """Return whether the text of a block after an offset, and all later blocks, are unsent."""
        if block.index >= len(self._num_sent):
            return True
        is_open = block.index == len(self._num_sent) - 1
        return is_open and start >= self._num_sent[block.index]

    def num_sent(self, block: ContentBlock) -> int:
        """Return how many characters of a block have been sent."""
        return self._num_sent[block.index] if block.index < len(self._num_sent) else 0

    def goes_on(self, events: list[Event]) -> bool:
        """Return whether a new answer begins with the text that the stream has sent."""
        blocks = [event.block for event in events if isinstance(event, Opened)]
        if len(blocks) < len(self._blocks):
            return False
        return all(
            (other.kind, other.name) == (block.kind, block.name)
            and other.text.startswith(block.text[:num_sent])
            for other, block, num_sent in zip(blocks, self._blocks, self._num_sent, strict=False)
        )

    def rest(self, events: list[Event], answer: Completion) -> Iterator[Event]:
        """Yield the events of the final answer that the stream has not sent."""
        num_scored = self._num_scored
        num_closed = self._num_closed
        left = list(self._num_sent)
        for event in events:
            match event:
                case Began() if self._begin_event is not None:
                    self._begin_event.tokens[:] = answer.token_ids
                    continue
                case PromptScored() if self._has_prompt_scores:
                    continue
                case Opened() if event.block.index < len(left):
                    event.block.id = self._blocks[event.block.index].id
                    continue
                case Closed() if event.block.index < num_closed:
                    continue
                case Added():
                    index = event.block.index
                    num_skipped = left[index] if index < len(left) else 0
                    if index < len(left):
                        left[index] = max(0, num_skipped - len(event.text))
                    scored = event.scored[num_scored:]
                    num_reasoning = max(0, event.num_reasoning - num_scored)
                    num_scored = max(0, num_scored - len(event.scored))
                    text = event.text[num_skipped:]
                    if text or scored:
                        yield Added(event.block, text, scored, num_reasoning)
                    continue
            yield event
