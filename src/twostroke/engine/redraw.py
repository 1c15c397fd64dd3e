"""Generates an answer again if it breaks its JSON schema, for Python and the command line.

An answer is checked if the grammar does not hold all of its schema. The new answer has the same
seed, and the wrong value is excluded from it, so the text before the value does not change. The
server does the same with events (serve/redraw.py), and shares the rules of this file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.chat.call_reader import ArgumentsPiece, CallBegin, TextPiece
from twostroke.chat.reader import PLAIN
from twostroke.core.constraint import Excluded
from twostroke.core.errors import (
    DeadlineError,
    OverloadedError,
    RequestError,
    SchemaMissError,
)
from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason
from twostroke.core.sampling import MAX_SEED
from twostroke.engine.output import Completion, Output, Timings, join
from twostroke.schema.spans import HeldBack, checked_places, wrong_span
from twostroke.schema.verify import UncheckedError
from twostroke.tokenize.preface import Part, PrefaceCutter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.chat.reader import Reading
    from twostroke.chat.tools import Function
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller, Client
    from twostroke.engine.generation import Generation
    from twostroke.sample.grammar import GrammarMatcher
    from twostroke.schema.spans import PathPattern
    from twostroke.schema.verify import Fault
    from twostroke.tokenize import Tokenizer

MAX_REDRAWS: Final = 8  # new answers in place of one answer
MAX_REDRAW_S: Final = 60.0
MISSES_AT_LEVEL: Final = 2  # misses at one offset before a prefix of half the length is excluded
# The new answers may have this many tokens together, or this many times the first answer's tokens
# if that is more.
MIN_REDRAWN_TOKENS: Final = 2048
MAX_REDRAWN_SHARE: Final = 4
_SEED_BITS: Final = 62
_logger = logging.getLogger("twostroke.engine")
_AFTER_NUMBER: Final = ",}]"


def miss_error(fault: Fault) -> SchemaMissError:
    """Return the error of an answer that breaks a strict schema."""
    return SchemaMissError(
        f"The answer breaks the rule {fault} of its schema, even after it was generated again "
        f"(up to {MAX_REDRAWS} times). Describe the rule in the prompt, or relax it."
    )


def written_text(answer: Completion, tokenizer: Tokenizer) -> str | None:
    """Return the text of an answer's tokens, without special ones; None if it is not UTF-8."""
    special_ids = tokenizer.special_ids
    tokens = [token for token in answer.token_ids if token not in special_ids]
    try:
        return b"".join(map(tokenizer.token_bytes, tokens)).decode()
    except UnicodeDecodeError:
        return None


def exclusions(
    written: str | None, num_before: int, part: str, fault: Fault, level: int
) -> Iterator[Excluded]:
    """Yield the texts to exclude: the wrong value at level 0, its prefixes at higher levels.

    `part` is the text with the fault, which `num_before` characters of the `written` text precede.
    """
    start, end = wrong_span(part, fault)
    begin = num_before + start
    if written is None or written[begin:].find(part[start:end]) != 0:
        return
    before, value = written[:begin], part[start:end]
    num_bytes = len(before.encode())
    length = max(min(2, len(value)), len(value) >> level)
    if length < len(value):
        yield Excluded(before + value[:length], num_bytes)
    elif value[-1] in '"}]':
        yield Excluded(before + value, num_bytes)
    elif begin + len(value) == len(written):
        yield Excluded(before + value, num_bytes, is_whole=True)
    else:
        for sign in _AFTER_NUMBER:
            yield Excluded(before + value + sign, num_bytes)


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return parameters with a seed, so that an answer can be drawn again."""
    if params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(_SEED_BITS))


def redrawn_params(params: SamplingParams, index: int, excluded: list[Excluded]) -> SamplingParams:
    """Return the parameters that draw the answer `index` again, without the excluded texts."""
    assert params.constraint is not None
    assert params.seed is not None
    return replace(
        params,
        n=1,
        seed=(params.seed + index % params.n) % (MAX_SEED + 1),  # as the engine's
        prompt_logprobs=None,
        constraint=dataclasses.replace(params.constraint, excluded=tuple(excluded)),
    )


def in_place_of(answer: Completion, other: Completion) -> Completion:
    """Return an answer that was drawn again, with index and first times of the answer before."""
    first = answer.timings
    return replace(
        other,
        index=answer.index,
        usage=replace(other.usage, cached_tokens=answer.usage.cached_tokens),
        timings=Timings(
            arrival_s=first.arrival_s,
            started_s=first.started_s,
            first_token_s=first.first_token_s,
            last_token_s=other.timings.last_token_s,
        ),
        prompt_logprobs=answer.prompt_logprobs,
    )


class EncodedPrompt(Frozen):
    """A prompt as token ids, and how to answer it; the answer may call `functions`."""

    tokens: list[int]
    params: SamplingParams
    caller: Caller
    hints: Hints
    reading: Reading = PLAIN
    functions: tuple[Function, ...] = ()

    def submit(self, client: Client) -> Generation:
        """Queue it; raises as `Client.generate`. Its answers are not settled yet."""
        return client.generate(self.tokens, self.params, self.caller, self.hints)

    def redrawer(self, client: Client, grammar: GrammarMatcher | None = None) -> Redrawer | None:
        """Return the check of the answers; None if the grammar holds their whole schema.

        The constraint is compiled here if `grammar`, its compiled form, is not given.

        Raises:
            RequestError: the constraint cannot be used.
        """
        constraint = self.params.constraint
        if constraint is not None and grammar is None:
            grammar = client.grammars.compile(constraint)
        gaps = () if grammar is None else grammar.gaps
        return Redrawer(client, self, gaps) if gaps else None

    def settled(self, client: Client, answers: list[Completion]) -> list[Completion]:
        """Return answers that keep to their schema, or have a `schema_miss`.

        Raises:
            SchemaMissError: an answer breaks a strict schema, also after it was drawn again.
        """
        redrawer = self.redrawer(client)
        return answers if redrawer is None else [redrawer.settle(answer) for answer in answers]

    def stream(self, client: Client) -> Iterator[Output]:
        """Yield the outputs of the answers; leaving early cancels them.

        What may change is held back until its answer has ended and was settled.

        Raises:
            SchemaMissError: an answer breaks a strict schema, also after it was drawn again.
            TwostrokeError: as `Client.generate`, and as reading its outputs.
        """
        redrawer = self.redrawer(client)
        generation = self.submit(client)
        client.loop.flush()
        if redrawer is None:
            yield from generation
            return
        stream = SettledStream(redrawer)
        for output in generation:
            yield from stream.read(output)
        for settle in stream.endings():
            yield settle()


@dataclasses.dataclass(slots=True)
class _PartRule:
    """A schema of a part of the answer."""

    schema: str
    is_strict: bool


@dataclasses.dataclass(slots=True)
class _PartMiss:
    """A rule that a part of an answer breaks; `num_before` characters precede the part."""

    part: str
    fault: Fault
    num_before: int
    is_strict: bool


class Redrawer:
    """Checks the answers to one prompt against their schemas, and generates wrong ones again."""

    def __init__(self, client: Client, prompt: EncodedPrompt, gaps: tuple[str, ...]) -> None:
        """Settle answers to a prompt whose parameters have a seed; a grammar has these gaps."""
        form = prompt.params.constraint
        assert form is not None
        self._client, self._prompt = client, prompt
        self._tokenizer = client.card.tokenizer
        self._calls = {
            function.name: _PartRule(json.dumps(function.schema), function.is_strict)
            for function in prompt.functions
        }
        self._preface = form.preface
        if form.notation != "json_schema" and form.alternative is not None:
            form = form.alternative  # of calls: the text is the other choice
        self._text = None
        self._held_paths: tuple[PathPattern, ...] = (
            (),
        )  # paths of values that a stream holds back
        if form.notation == "json_schema":
            self._text = _PartRule(form.text, form.is_strict)
            if not prompt.functions:
                self._held_paths = checked_places(gaps, form.text)

    def sent(self) -> SentPart:
        """Return an empty record of the outputs that a stream sends of one answer."""
        preface = None if self._preface is None else PrefaceCutter(self._preface)
        return SentPart(HeldBack(self._held_paths), preface)

    def settle(self, answer: Completion, sent: SentPart | None = None) -> Completion:
        """Return an answer that keeps to its schema, or has its `schema_miss`.

        A stream has `sent` a part of it, which stays as it is. Blocks while it is drawn again.

        Raises:
            SchemaMissError: it breaks a strict schema, also after it was drawn again.
        """
        excluded: list[Excluded] = []
        num_left = max(MIN_REDRAWN_TOKENS, MAX_REDRAWN_SHARE * len(answer.token_ids))
        end_s = time.monotonic() + MAX_REDRAW_S
        miss, last_start, num_misses, is_widened = self._miss(answer), -1, 0, False
        for _ in range(MAX_REDRAWS):
            if miss is None or num_left <= 0 or time.monotonic() > end_s:
                break
            start = miss.num_before + wrong_span(miss.part, miss.fault)[0]
            num_misses = num_misses + 1 if start == last_start else 0
            last_start, level = start, num_misses // MISSES_AT_LEVEL
            written = written_text(answer, self._tokenizer)
            added = list(exclusions(written, miss.num_before, miss.part, miss.fault, level))
            if not added:
                break
            excluded += added
            try:
                other = self._draw(answer, excluded)
            except RequestError:  # no other value fits there: let the text before it change, too
                if is_widened:
                    break
                num_bytes = 0 if sent is None else len(sent.text.encode())
                excluded = [dataclasses.replace(value, start=num_bytes) for value in excluded]
                is_widened = True
                continue
            except (DeadlineError, OverloadedError):
                break
            num_left -= len(other.token_ids)
            if sent is None or sent.begins(other):
                answer, miss = other, self._miss(other)
        if miss is None:
            return answer
        if miss.is_strict:
            raise miss_error(miss.fault)
        return replace(answer, schema_miss=str(miss.fault))

    def _draw(self, answer: Completion, excluded: list[Excluded]) -> Completion:
        params = redrawn_params(self._prompt.params, answer.index, excluded)
        hints = replace(self._prompt.hints, prediction=answer.token_ids, shows_progress=False)
        generation = self._client.generate(self._prompt.tokens, params, self._prompt.caller, hints)
        self._client.loop.flush()
        [other] = generation.wait()
        return in_place_of(answer, other)

    def _miss(self, answer: Completion) -> _PartMiss | None:
        """Return the first rule that an answer breaks; an answer that was cut is not checked."""
        if answer.finish_reason is not FinishReason.STOP or isinstance(answer.stop, str):
            return None
        written, num_before = written_text(answer, self._tokenizer) or "", 0
        for rule, part in self._parts(answer):
            num_before = max(0, written.find(part, num_before))
            try:
                fault = self._client.grammars.verifier.fault(rule.schema, part)
            except UncheckedError as error:
                _logger.warning("An answer could not be checked against its schema: %s.", error)
                fault = None
            if fault is not None:
                return _PartMiss(part, fault, num_before, rule.is_strict)
            num_before += len(part)
        return None

    def _parts(self, answer: Completion) -> list[tuple[_PartRule, str]]:
        """Return the parts of an answer that have rules: its calls, or else its text."""
        if self._prompt.reading.is_plain:
            if self._preface is None:
                return [] if self._text is None else [(self._text, answer.text)]
            cutter = PrefaceCutter(self._preface)
            parts = [*cutter.feed(answer.text), *cutter.finish()]
            text = "".join(stretch for part, stretch in parts if part is Part.AFTER)
            return [] if self._text is None else [(self._text, text)]
        text, calls = "", list[tuple[str, str]]()
        for piece in self._prompt.reading.reader(self._tokenizer).take(answer):
            if isinstance(piece, TextPiece):
                text += piece.text
            elif isinstance(piece, CallBegin):
                calls.append((piece.name, ""))
            elif isinstance(piece, ArgumentsPiece) and calls:
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + piece.text)
        if calls:
            return [(self._calls[name], part) for name, part in calls if name in self._calls]
        return [] if self._text is None else [(self._text, text)]


class SentPart:
    """The outputs of one answer; a stream sends the first ones, which cannot change any more."""

    def __init__(self, held_back: HeldBack, preface: PrefaceCutter | None) -> None:
        self.outputs: list[Output] = []
        self._held_back, self._preface = held_back, preface
        self._num_sent = 0  # outputs

    def release(self, output: Output) -> list[Output]:
        """Take an output; return the outputs that can be sent now."""
        self.outputs.append(output)
        text = output.text
        if self._preface is not None:
            text = "".join(
                stretch for part, stretch in self._preface.feed(text) if part is Part.AFTER
            )
        has_begun = self._preface is None or self._preface.place is Part.AFTER
        self._held_back.feed(text)
        is_held = has_begun and (self._held_back.is_held or self._held_back.is_in_name)
        if is_held or output.finish_reason is not None:
            return []
        ready = self.outputs[self._num_sent :]
        self._num_sent = len(self.outputs)
        return ready

    @property
    def text(self) -> str:
        """The text that was sent."""
        return "".join(output.text for output in self.outputs[: self._num_sent])

    def begins(self, answer: Completion) -> bool:
        """Return whether an answer begins with all that was sent."""
        sent = self.outputs[: self._num_sent]
        tokens = tuple(token for output in sent for token in output.token_ids)
        return answer.token_ids[: len(tokens)] == tokens and answer.text.startswith(self.text)

    def rest(self, settled: Completion) -> Output:
        """Return the unsent rest of a final answer as its last output."""
        sent = self.outputs[: self._num_sent]
        num_scores = sum(len(output.prompt_logprobs) for output in sent)
        num_tokens = sum(len(output.token_ids) for output in sent)
        return Output(
            index=settled.index,
            text=settled.text[len(self.text) :],
            token_ids=settled.token_ids[num_tokens:],
            logprobs=settled.logprobs[num_tokens:],
            prompt_logprobs=() if num_scores else settled.prompt_logprobs,
            finish_reason=settled.finish_reason,
            stop=settled.stop,
            usage=settled.usage,
            timings=settled.timings,
            schema_miss=settled.schema_miss,
        )


class SettledStream:
    """Holds back the outputs of a prompt's answers that may still change."""

    def __init__(self, redrawer: Redrawer) -> None:
        self._redrawer = redrawer
        self._sent: dict[int, SentPart] = {}  # by choice

    def read(self, output: Output) -> list[Output]:
        """Take an output; return the outputs that can be shown now."""
        if output.index not in self._sent:
            self._sent[output.index] = self._redrawer.sent()
        return self._sent[output.index].release(output)

    def endings(self) -> Iterator[Callable[[], Output]]:
        """Yield, once all answers have ended, what settles each: it blocks, and returns its rest.

        Settling raises as `Redrawer.settle`.
        """
        for sent in self._sent.values():
            yield lambda sent=sent: sent.rest(  # type: ignore[misc]
                self._redrawer.settle(join(sent.outputs), sent)
            )
