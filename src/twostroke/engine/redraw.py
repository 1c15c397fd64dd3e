"""Generates an answer again if it breaks its JSON schema, for Python and the command line.

An answer is checked if its grammar does not enforce the whole schema. To settle an answer is to
check it, and to replace it by a new answer if it breaks the schema. `engine/settling.py` has the
rules, which the server shares. The server works with events instead of outputs
(`server/generation/redraw.py`).
"""

from __future__ import annotations

import json
import logging
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.reader import PLAIN
from twostroke.engine.chat_answer import CallCollector
from twostroke.engine.output import Completion, Output, join
from twostroke.engine.settling import (
    CheckedPart,
    CheckPart,
    DrawAgain,
    miss_error,
    redrawn_params,
    replace_answer,
    settling,
)
from twostroke.engine.structured_output.schema.spans import HoldBackDetector, checked_paths
from twostroke.engine.structured_output.schema.verify import UncheckedError
from twostroke.model.tokenizer.preface import ReasoningSplitter, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.reader import AnswerFormat
    from twostroke.engine.chat.tools import Function
    from twostroke.engine.chat_answer import WrittenCall
    from twostroke.engine.client import Caller, Client
    from twostroke.engine.generation import Generation
    from twostroke.engine.settling import Miss, Settled
    from twostroke.engine.structured_output.grammar import GrammarMatcher
    from twostroke.engine.structured_output.schema.spans import PathPattern
    from twostroke.engine.structured_output.schema.verify import SchemaViolation

_SEED_BITS: Final = 62
_logger = logging.getLogger("twostroke.engine")


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return sampling parameters that have a seed, so that an answer can be generated again."""
    if params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(_SEED_BITS))


class EncodedPrompt(Frozen):
    """A prompt as token ids, with the parameters and the format of its answers.

    Attributes:
        tokens: the prompt.
        params, caller, hints: as in `Client.generate`.
        reading: the format in which the answers are read.
        functions: the functions that an answer may call.
    """

    tokens: list[int]
    params: SamplingParams
    caller: Caller
    hints: Hints
    reading: AnswerFormat = PLAIN
    functions: tuple[Function, ...] = ()

    def submit(self, client: Client) -> Generation:
        """Submit the prompt to the engine, and return its outputs without checking JSON schemas.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `Client.generate`.
        """
        return client.generate(self.tokens, self.params, self.caller, self.hints)

    def redrawer(self, client: Client, grammar: GrammarMatcher | None = None) -> Redrawer | None:
        """Return an object that checks answers against their JSON schema; None if not needed.

        The grammar that constrains an answer enforces most rules of a JSON schema. No check is
        needed if the grammar enforces all rules. `grammar` is the compiled constraint of the
        parameters; without it, the constraint is compiled here.

        Raises:
            RequestError: the constraint cannot be used.
        """
        constraint = self.params.constraint
        if constraint is not None and grammar is None:
            grammar = client.grammars.compile(constraint)
        unenforced_keywords = () if grammar is None else grammar.unenforced_keywords
        return Redrawer(client, self, unenforced_keywords) if unenforced_keywords else None

    def settle(self, client: Client, answers: list[Completion]) -> list[Completion]:
        """Check answers against their JSON schema, and generate wrong answers again.

        An answer that still breaks its schema has the broken rule in `schema_miss`.

        Raises:
            SchemaMissError: an answer still breaks a strict schema.
        """
        redrawer = self.redrawer(client)
        return answers if redrawer is None else [redrawer.settle(answer) for answer in answers]

    def stream(self, client: Client) -> Iterator[Output]:
        """Submit the prompt and yield its outputs; cancel its requests if the reader stops early.

        Outputs are held back while their answer may be generated again because of its JSON schema.

        Raises:
            SchemaMissError: an answer still breaks a strict schema.
            TwostrokeError: the engine refused the prompt, or failed on it.
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
        for get_last_output in stream.last_outputs():
            yield get_last_output()


class _PartRule(NamedTuple):
    """The JSON schema of an answer's text, or of a tool call's arguments.

    If `is_strict`, an answer that breaks the schema is an error.
    """

    schema: str
    is_strict: bool


class Redrawer:
    """Checks the answers to one prompt against their JSON schema; generates wrong answers again."""

    def __init__(
        self, client: Client, prompt: EncodedPrompt, unenforced_keywords: tuple[str, ...]
    ) -> None:
        """Check answers to `prompt`, whose parameters have a seed.

        `unenforced_keywords` are the rules of the JSON schema that the grammar does not enforce.
        """
        form = prompt.params.constraint
        assert form is not None
        self._client = client
        self._prompt = prompt
        self._tokenizer = client.card.tokenizer
        self._calls = {
            function.name: _PartRule(json.dumps(function.schema), function.is_strict)
            for function in prompt.functions
        }
        self._preface = form.preface
        if form.notation != "json_schema" and form.alternative is not None:
            form = form.alternative  # of calls: the text is the other choice
        self._text = None
        # Paths of values that a stream holds back; an empty path stands for the whole answer.
        self._held_paths: tuple[PathPattern, ...] = ((),)
        if form.notation == "json_schema":
            self._text = _PartRule(form.text, form.is_strict)
            if not prompt.functions:
                self._held_paths = checked_paths(unenforced_keywords, form.text)

    def new_sent_part(self) -> SentPart:
        """Return a new `SentPart`, to record the outputs of one answer that a stream sends."""
        preface = None if self._preface is None else ReasoningSplitter(self._preface)
        return SentPart(HoldBackDetector(self._held_paths), preface)

    def settle(self, answer: Completion, sent: SentPart | None = None) -> Completion:
        """Check an answer against its JSON schema; generate it again while it breaks the schema.

        An answer that still breaks its schema has the broken rule in `schema_miss`. `sent` is the
        part of the answer that a stream has sent, which must not change. This blocks while the
        answer is generated again.

        Raises:
            SchemaMissError: the answer still breaks a strict schema.
        """
        work = settling(answer, self._parts, self._tokenizer, sent)
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
                result = self._check(step.part) if isinstance(step, CheckPart) else self._draw(step)
            except TwostrokeError as step_error:
                error = step_error
        if settled.miss is None:
            return settled.answer
        if settled.miss.part.is_strict:
            raise miss_error(settled.miss.fault)
        return replace(settled.answer, schema_miss=str(settled.miss.fault))

    def _draw(self, work: DrawAgain) -> Completion:
        """Generate another answer in place of an answer that breaks its JSON schema.

        `work` has the answer and the texts that the new answer must not begin with. This blocks
        until the new answer is complete.
        """
        params = redrawn_params(self._prompt.params, work)
        hints = replace(self._prompt.hints, prediction=work.answer.token_ids, shows_progress=False)
        generation = self._client.generate(self._prompt.tokens, params, self._prompt.caller, hints)
        self._client.loop.flush()
        [other] = generation.wait()
        return replace_answer(work.answer, other)

    def _check(self, part: CheckedPart) -> SchemaViolation | None:
        """Return the JSON schema's rule that a part of an answer breaks.

        Returns None if the part fits its schema, or cannot be checked.
        """
        try:
            return self._client.grammars.verifier.fault(part.schema, part.text)
        except UncheckedError as error:
            _logger.warning("An answer could not be checked against its schema: %s.", error)
            return None

    def _parts(self, answer: Completion) -> list[CheckedPart]:
        """Return the parts of an answer that have a JSON schema: its calls, or else its text."""
        calls: list[WrittenCall] = []
        if self._prompt.reading.is_plain:
            text = answer.text
            if self._preface is not None:
                cutter = ReasoningSplitter(self._preface)
                parts = [*cutter.feed(answer.text), *cutter.finish()]
                text = "".join(stretch for part, stretch in parts if part is SegmentKind.AFTER)
        else:
            collector = CallCollector(self._prompt.reading.reader(self._tokenizer))
            text, _, calls = collector.take(answer)
        if calls:
            return [
                CheckedPart(call.arguments, *self._calls[call.name], kind="call")
                for call in calls
                if call.name in self._calls
            ]
        return [] if self._text is None else [CheckedPart(text, *self._text)]


class SentPart:
    """One answer's outputs, and how many of them a stream has sent.

    Outputs that were sent must stay the beginning of the answer if it is generated again.
    """

    def __init__(self, held_back: HoldBackDetector, preface: ReasoningSplitter | None) -> None:
        self.outputs: list[Output] = []
        self._held_back = held_back
        self._preface = preface
        self._num_sent = 0  # outputs

    def release(self, output: Output) -> list[Output]:
        """Add an engine output of the answer; return the outputs that the stream can send now."""
        self.outputs.append(output)
        text = output.text
        if self._preface is not None:
            text = "".join(
                stretch for part, stretch in self._preface.feed(text) if part is SegmentKind.AFTER
            )
        has_begun = self._preface is None or self._preface.segment is SegmentKind.AFTER
        self._held_back.feed(text)
        is_held = has_begun and (self._held_back.is_held or self._held_back.is_in_name)
        if is_held or output.finish_reason is not None:
            return []
        ready = self.outputs[self._num_sent :]
        self._num_sent = len(self.outputs)
        return ready

    @property
    def text(self) -> str:
        """The text of the answer that the stream has sent."""
        return "".join(output.text for output in self.outputs[: self._num_sent])

    def may_change(self, part: CheckedPart, start: int) -> bool:
        """Return True: every part of the answer may be generated again.

        If a new answer would change text that the stream has sent, `is_continued_by` rejects it.
        """
        del part, start
        return True

    def num_shown(self, miss: Miss) -> int:
        """Return the number of characters of the answer that the stream has sent.

        `miss` is not used: a stream sends the text of an answer from its beginning.
        """
        del miss
        return len(self.text)

    def is_continued_by(self, answer: Completion) -> bool:
        """Whether a new answer begins with the tokens and the text that the stream has sent."""
        sent = self.outputs[: self._num_sent]
        tokens = tuple(token for output in sent for token in output.token_ids)
        return answer.token_ids[: len(tokens)] == tokens and answer.text.startswith(self.text)

    def rest(self, settled: Completion) -> Output:
        """Return the answer's last output, with the text and tokens that were not sent before."""
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
    """Holds back outputs of a prompt's answers that may change because of their JSON schema.

    An answer that breaks its schema is generated again, so text is sent once it cannot change.
    """

    def __init__(self, redrawer: Redrawer) -> None:
        self._redrawer = redrawer
        self._sent: dict[int, SentPart] = {}  # by choice

    def read(self, output: Output) -> list[Output]:
        """Add an engine output; return the outputs that the stream can send now."""
        if output.index not in self._sent:
            self._sent[output.index] = self._redrawer.new_sent_part()
        return self._sent[output.index].release(output)

    def last_outputs(self) -> Iterator[Callable[[], Output]]:
        """Yield, for each answer, a function that returns the answer's last output.

        Call this after all answers have ended. The function checks the answer against its JSON
        schema, can block to generate it again, and raises as `Redrawer.settle`.
        """
        for sent in self._sent.values():
            yield lambda sent=sent: sent.rest(  # type: ignore[misc]
                self._redrawer.settle(join(sent.outputs), sent)
            )
