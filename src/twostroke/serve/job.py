"""The internal request: what every protocol becomes, and the answers that it gets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.chat.reader import PLAIN, Reading
from twostroke.chat.reasoning import AS_IT_IS
from twostroke.chat.tools import ToolForm
from twostroke.core.errors import (
    EngineStoppedError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.request import FinishReason
from twostroke.engine.client import Caller
from twostroke.engine.loop import Health
from twostroke.engine.output import Usage, join
from twostroke.engine.prompts import (
    behind_preface,
    chat_of,
    encode_gap,
    encode_rendered,
    encode_text,
    ending_gaps,
    to_hints,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from twostroke.chat.reasoning import Thinking
    from twostroke.chat.tools import Tools
    from twostroke.core.preface import Preface
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Client, ModelCard
    from twostroke.engine.output import Completion, Output, Timings
    from twostroke.sample.grammar import GrammarMatcher
    from twostroke.serve.observe.metrics import Metrics
    from twostroke.tokenize import Prompt as Rendered


MAX_MESSAGES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the model's chat template; each has `role` and `content`.

    `tools` may be called in the answer; they are OpenAI's objects. `continues` lets the answer go
    on from the last message's text; `has_turn` begins the assistant's turn behind the messages
    otherwise. `thinking` is what is asked of the model's reasoning.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    continues: bool = False
    has_turn: bool = True
    thinking: Thinking = AS_IT_IS

    def encode(self, card: ModelCard) -> list[int]:
        """Return its token ids.

        Raises:
            RequestError: the chat template is missing or refuses the messages.
        """
        return card.tokenizer.encode_prompt(self.render(card))

    def render(self, card: ModelCard) -> Rendered:
        """Return what the chat template makes of it; raises as `encode` does."""
        return chat_of(card).render(
            self.messages,
            self.tools,
            add_generation_prompt=self.has_turn,
            continue_final_message=self.continues,
            thinking=self.thinking,
        )

    def preface(self, card: ModelCard, rendered: Rendered) -> Preface | None:
        """Return the reasoning that may come first in the answer."""
        continued = self.messages[-1].get("content") or "" if self.continues else ""
        return chat_of(card).preface(rendered, continued)


Prompt = str | list[int] | Conversation


@dataclass(slots=True)
class Encoded:
    """A job as it is for one model.

    `prompts` are its texts as token ids, a list a prompt. `params` have what the model adds to
    them; their constraint is that of `calls`, if there are any, and `grammar` is the same once it
    is compiled. `reading` says how the answers are to be read.
    """

    prompts: list[list[int]]
    params: SamplingParams
    hints: Hints
    reading: Reading = PLAIN
    calls: ToolForm | None = None
    grammar: GrammarMatcher | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts, and how each is to be continued; protocols translate into this and nothing else.

    `model` is the name that the client used, None for whichever there is. `echo` repeats each
    prompt before its answer. With a `suffix`, for texts and ids alone, answers stand between each
    prompt and that. `timings` wants to be told how long things took, and `tier` is what
    the response says of its class of service. `tools` may be called in the answers to a
    conversation, and hold them to their form. `speculate` and the text of `prediction`
    are the engine's `Hints`.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    caller: Caller = field(default_factory=Caller)
    speculate: str = "auto"
    prediction: str = ""
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    suffix: str = ""
    timings: bool = False
    tools: Tools | None = None
    tier: str | None = None

    @property
    def num_choices(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.params.n

    def encode(self, card: ModelCard, *, splits_reasoning: bool = True) -> Encoded:
        """Return it as it is for a model, whose reasoning may be told from the answers.

        Raises:
            RequestError: the chat template is missing or refuses the messages, or the model cannot
                fill in the middle.
            ContextLengthError: a prompt surely has more tokens than the context.
        """
        hints = to_hints(card, self.speculate, self.prediction)
        first = self.prompts[0]
        if isinstance(first, Conversation):
            return self._encode_chat(first, card, hints, splits_reasoning=splits_reasoning)
        params = ending_gaps(card, self.params) if self.suffix else self.params
        prompts = [self._encode(prompt, card) for prompt in self.prompts]
        return Encoded(prompts, params, hints)

    def _encode(self, prompt: Prompt, card: ModelCard) -> list[int]:
        assert not isinstance(prompt, Conversation)
        if self.suffix:
            return encode_gap(card, prompt, self.suffix)
        return encode_text(card, prompt)

    def _encode_chat(
        self, prompt: Conversation, card: ModelCard, hints: Hints, *, splits_reasoning: bool
    ) -> Encoded:
        rendered = prompt.render(card)
        params = self.params
        tokens = [encode_rendered(card, rendered, self.caller.prompt_field)]
        preface = prompt.preface(card, rendered)
        if preface is None and self.tools is None:
            return Encoded(tokens, params, hints)
        reading = Reading(preface=preface if splits_reasoning else None)
        if self.tools is None:
            params = behind_preface(params, preface, card.tokenizer)
            return Encoded(tokens, params, hints, reading)
        form = chat_of(card).manners.form
        calls = ToolForm(self.tools, form, card.tokenizer, preface)
        params = behind_preface(params, preface, card.tokenizer, form.all_marks)
        params = replace(params, constraint=calls.constraint())
        reading = replace(
            reading, functions=self.tools.names, form=form, is_forced=self.tools.is_forced
        )
        return Encoded(tokens, params, hints, reading, calls)


class Running(Protocol):
    """What still runs for a client."""

    def cancel(self) -> None:
        """Stop it, at once; harmless when it has ended."""


class Answers:
    """The outputs of a running job; leaving them unread does not stop it, `cancel` does.

    Attributes:
        ended: of the choices that have ended, by index, why, what they took, and when.
        error: the code of what cut them off, where something did.
        num_prompt: how many tokens the prompts have.
        num_tokens: how many tokens have come.
        cached_tokens: how many of a prompt's the prefix cache had, by its first choice's index.
        ttft_s: from here to the first token and back; None before it has come.
    """

    def __init__(
        self,
        client: Client,
        job: Job,
        encoded: Encoded,
        metrics: Metrics,
        running: set[Running],
    ) -> None:
        """Queue the job in the engine, and stand in `running` until the last output.

        Raises:
            RequestError: a prompt is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        self.ended: dict[int, tuple[FinishReason, Usage, Timings]] = {}
        self.error: str | None = None
        self.num_prompt = sum(map(len, encoded.prompts))
        self.num_tokens = 0
        self.cached_tokens: dict[int, int] = {}
        self.ttft_s: float | None = None
        self._client = client
        self._metrics = metrics
        self._num_choices = job.num_choices
        self._n = job.params.n
        self._service = job.caller.service
        self._began_s = time.monotonic()
        self._is_left = False
        try:
            self._generation = client.generate_many_async(
                encoded.prompts, encoded.params, job.caller, encoded.hints, encoded.grammar
            )
        except (OverloadedError, EngineStoppedError):
            metrics.goodput.miss(self._service, self._num_choices)
            raise
        self._running = running
        running.add(self)

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as they come, until every choice has had its last.

        Raises:
            EngineStoppedError: the engine or the server stopped under the job.
            RequestError: the job's constraint could not be followed further.
            TwostrokeError: the engine failed on the job.
        """
        try:
            async for output in self._generation:
                self.num_tokens += len(output.token_ids)
                if output.usage is not None:  # the first output of a choice, or its last
                    self._note(output, output.usage)
                yield output
        except EngineStoppedError as error:
            self._fail(error)
            raise
        except RequestError as error:  # the constraint's fault, not the engine's
            self.error = error.code
            raise
        except TwostrokeError as error:
            self._fail(error)
            if self._client.loop.health is Health.STOPPED:
                raise EngineStoppedError(error.message) from error
            raise

    async def whole(self) -> list[Completion]:
        """Return every answer, in the order of their index; raises as iterating does."""
        outputs: list[list[Output]] = [[] for _ in range(self._num_choices)]
        async for output in self:
            outputs[output.index].append(output)
        return [join(one) for one in outputs]

    def cancel(self) -> None:
        """Stop what still runs, at once; harmless when nothing does."""
        self._running.discard(self)
        num_left = self._num_choices - len(self.ended)
        if num_left:
            self._generation.cancel()
        if num_left and self.error is None and not self._is_left:
            self._is_left = True
            waited_s, has_begun = time.monotonic() - self._began_s, self.num_tokens > 0
            self._metrics.goodput.leave(self._service, num_left, waited_s, has_begun=has_begun)

    @property
    def num_unread(self) -> int:
        """How many outputs the engine is ahead of the reader."""
        return self._generation.num_unread

    @property
    def usage(self) -> Usage:
        """What the ended choices took; a prompt counts once, however many answers it has."""
        usages = [usage for _, usage, _ in self.ended.values()]
        firsts = [usage for index, (_, usage, _) in self.ended.items() if index % self._n == 0]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.accepted_tokens for usage in usages),
            sum(usage.rejected_tokens for usage in usages),
        )

    def _fail(self, error: TwostrokeError) -> None:
        self.error = error.code or "server_error"
        self._metrics.failures.inc()
        self._metrics.goodput.miss(self._service, self._num_choices - len(self.ended))

    def _note(self, output: Output, usage: Usage) -> None:
        if output.index % self._n == 0:
            self.cached_tokens[output.index] = usage.cached_tokens
        if output.finish_reason is not None:
            self._end(output, output.finish_reason, usage)
        elif self.ttft_s is None:
            self.ttft_s = time.monotonic() - self._began_s

    def _end(self, output: Output, reason: FinishReason, usage: Usage) -> None:
        assert output.timings is not None
        if reason is FinishReason.CANCEL:  # by nobody who still reads
            raise EngineStoppedError("The server is shutting down.")
        self.ended[output.index] = (reason, usage, output.timings)
        self._metrics.goodput.judge(self._service, usage, output.timings)


def check_messages(count: int, field: str) -> None:
    """Refuse a conversation of more messages, or items, than one may have.

    Raises:
        RequestError: too many.
    """
    if count > MAX_MESSAGES:
        message = f"{field} takes at most {MAX_MESSAGES} messages, not {count}."
        raise RequestError(message, param=field)


def check_choices(job: Job, limit: int) -> None:
    """Refuse a job of more answers than one request may ask for.

    Raises:
        RequestError: too many.
    """
    if job.num_choices > limit:
        message = f"A request may ask for {limit} answers (prompts times n), not {job.num_choices}."
        raise RequestError(message, param="prompt" if len(job.prompts) > 1 else "n")
