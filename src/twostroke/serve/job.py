"""The internal request: what every protocol becomes, and the answers that it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import EngineStoppedError, RequestError, TwostrokeError
from twostroke.core.request import FinishReason
from twostroke.engine.client import Caller
from twostroke.engine.loop import Health
from twostroke.engine.output import Usage, join
from twostroke.engine.prompts import (
    encode_chat,
    encode_gap,
    encode_text,
    ending_gaps,
    to_hints,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Client, ModelCard
    from twostroke.engine.output import Completion, Output
    from twostroke.sample.grammar import GrammarMatcher
    from twostroke.serve.observe.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the model's chat template; each has `role` and `content`.

    `tools` may be called in the answer; they are OpenAI's objects. `continues` lets the answer go
    on from the last message's text; `has_turn` begins the assistant's turn behind the messages
    otherwise.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    continues: bool = False
    has_turn: bool = True

    def encode(self, card: ModelCard) -> list[int]:
        """Return its token ids.

        Raises:
            RequestError: the chat template is missing or refuses the messages.
        """
        return encode_chat(
            card,
            self.messages,
            self.tools,
            add_generation_prompt=self.has_turn,
            continue_final_message=self.continues,
        )


Prompt = str | list[int] | Conversation


@dataclass(slots=True)
class Encoded:
    """A job's texts as token ids, a list a prompt, and what the model adds to its parameters.

    `grammar` is the constraint of `params`, once it is compiled.
    """

    prompts: list[list[int]]
    params: SamplingParams
    hints: Hints
    grammar: GrammarMatcher | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts, and how each is to be continued; protocols translate into this and nothing else.

    `model` is the name that the client used, None for whichever there is. `echo` repeats each
    prompt before its answer. With a `suffix`, for texts and ids alone, answers stand between each
    prompt and that. `timings` wants to be told how long things took;
    `functions` are those whose calls are to be read out of the answers. `speculate` and the
    text of `prediction` are the engine's `Hints`.
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
    functions: tuple[str, ...] = ()

    @property
    def num_choices(self) -> int:
        """How many answers there will be."""
        return len(self.prompts) * self.params.n

    def encode(self, card: ModelCard) -> Encoded:
        """Return its texts as token ids.

        Raises:
            RequestError: the chat template is missing or refuses the messages, or the model cannot
                fill in the middle.
        """
        params = ending_gaps(card, self.params) if self.suffix else self.params
        prompts = [self._encode(prompt, card) for prompt in self.prompts]
        return Encoded(prompts, params, to_hints(card, self.speculate, self.prediction))

    def _encode(self, prompt: Prompt, card: ModelCard) -> list[int]:
        if isinstance(prompt, Conversation):
            return prompt.encode(card)
        if self.suffix:
            return encode_gap(card, prompt, self.suffix)
        return encode_text(card, prompt)


class Answers:
    """The outputs of a running job; leaving them unread does not stop it, `cancel` does."""

    def __init__(
        self,
        client: Client,
        job: Job,
        encoded: Encoded,
        metrics: Metrics,
        running: set[Answers],
    ) -> None:
        """Queue the job in the engine, and stand in `running` until the last output.

        Raises:
            RequestError: a prompt is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        self._client = client
        self._metrics = metrics
        self._num_choices = job.num_choices
        self._n = job.params.n
        self._usages: dict[int, Usage] = {}
        self._generation = client.generate_many_async(
            encoded.prompts, encoded.params, job.caller, encoded.hints, encoded.grammar
        )
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
                if output.finish_reason is not None:
                    self._end(output)
                yield output
        except EngineStoppedError:
            self._metrics.failures.inc()
            raise
        except RequestError:  # the constraint's fault, not the engine's
            raise
        except TwostrokeError as error:
            self._metrics.failures.inc()
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
        if len(self._usages) < self._num_choices:
            self._generation.cancel()

    @property
    def num_unread(self) -> int:
        """How many outputs the engine is ahead of the reader."""
        return self._generation.num_unread

    @property
    def usage(self) -> Usage:
        """What the ended choices took; a prompt counts once, however many answers it has."""
        firsts = [usage for index, usage in self._usages.items() if index % self._n == 0]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in self._usages.values()),
            sum(usage.accepted_tokens for usage in self._usages.values()),
            sum(usage.rejected_tokens for usage in self._usages.values()),
        )

    def _end(self, output: Output) -> None:
        assert output.usage is not None
        assert output.timings is not None
        if output.finish_reason is FinishReason.CANCEL:  # by nobody who still reads
            raise EngineStoppedError("The server is shutting down.")
        self._usages[output.index] = output.usage
        self._metrics.observe(output.usage, output.timings)


def check_choices(job: Job, limit: int) -> None:
    """Refuse a job of more answers than one request may ask for.

    Raises:
        RequestError: too many.
    """
    if job.num_choices > limit:
        message = f"A request may ask for {limit} answers (prompts times n), not {job.num_choices}."
        raise RequestError(message, param="prompt" if len(job.prompts) > 1 else "n")
