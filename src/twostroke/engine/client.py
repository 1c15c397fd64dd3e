"""How callers speak to an engine: prompts in, outputs out, blocking or not."""

from __future__ import annotations

import itertools
import queue
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from twostroke.core.errors import RequestError, nearest
from twostroke.core.request import NO_HINTS, Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.service import DEFAULT_SERVICE
from twostroke.engine.choice import Choice
from twostroke.engine.mail import Mailbox
from twostroke.engine.output import Completion, Output, join

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Iterator, Sequence

    from twostroke.chat.conversation import Chat
    from twostroke.core.embedding import Pooling
    from twostroke.engine.loop import EngineLoop
    from twostroke.program.cost import CostModel
    from twostroke.sample.grammar import GrammarMatcher, Grammars
    from twostroke.tokenize import Tokenizer

_MOST_SHOWN = 40  # characters of a wrong word that an error repeats


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What callers may know of the model that an engine runs. Sizes are in bytes.

    `pooling` is how its files say that embeddings are made, None where they say nothing.
    """

    name: str
    architecture: str
    format: str
    context_length: int
    file_bytes: int
    created_s: int
    licence: str | None
    tokenizer: Tokenizer
    chat_template: Chat | None
    cost: CostModel
    pooling: str | None = None

    @property
    def embedding_width(self) -> int:
        """Values in an embedding."""
        program = self.cost.program
        return program.value_widths[program.last_states]


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request runs: its urgency (lower first), and its tenant.

    Tenants do not share cached prefixes. `prompt_field` is what errors call the prompt: "prompt",
    "messages" for a conversation, or "input" for what is to be embedded. `service` is the class of
    service that it is counted under, one of `core.service.SERVICES`.
    """

    priority: int = 0
    tenant: str = ""
    prompt_field: str = "prompt"
    service: str = DEFAULT_SERVICE


_ANYONE = Caller()
_UNDRAWN = SamplingParams()  # of requests that draw no token
_serial = itertools.count(1)


class Generation:
    """The outputs of one request (n choices) as a blocking iterator."""

    def __init__(self, loop: EngineLoop) -> None:
        """Wait for outputs of `loop`; the choices are added by `Client.generate`."""
        self._loop = loop
        self._queue: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._num_ended = 0
        self.mailbox = Mailbox(self._queue.put)
        self.request_ids: list[str] = []

    def __iter__(self) -> Iterator[Output]:
        """Yield outputs as `outputs` does; leaving early cancels what still runs."""
        try:
            yield from self.outputs()
        finally:
            self.cancel()

    def outputs(self) -> Iterator[Output]:
        """Yield outputs as they come, until every choice has had its last.

        May be left and taken up again.

        Raises:
            RequestError: its constraint could not be followed further.
            TwostrokeError: the engine failed under the request.
        """
        while self.num_open:
            yield self.next()

    def next(self) -> Output:
        """Return the next output; raises as `outputs` does."""
        output = self._queue.get()
        self._num_ended += output.finish_reason is not None
        if output.error is not None:
            raise output.error
        return output

    @property
    def num_open(self) -> int:
        """How many choices have not had their last output."""
        return len(self.request_ids) - self._num_ended

    def wait(self) -> list[Completion]:
        """Return the whole answers, in the order of their index."""
        return _join_all(list(self), len(self.request_ids))

    def cancel(self) -> None:
        """Stop whatever still runs; the last outputs say so."""
        self._loop.cancel(self.request_ids)


class AsyncGeneration:
    """The outputs of one request (n choices) as an asynchronous iterator."""

    def __init__(self, loop: EngineLoop) -> None:
        """Wait in the running event loop for outputs of `loop`."""
        from asyncio import Queue, get_running_loop  # blocking callers do without it

        self._loop = loop
        self._queue: asyncio.Queue[Output] = Queue()
        self._num_ended = 0
        wake = get_running_loop().call_soon_threadsafe
        self.mailbox = Mailbox(self._queue.put_nowait, wake)
        self.request_ids: list[str] = []

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as they come, until every choice has had its last.

        A caller that leaves early calls `cancel`, or takes up again where it left.

        Raises:
            RequestError: its constraint could not be followed further.
            TwostrokeError: the engine failed under the request.
        """
        while self.num_open:
            yield await self.next()

    async def next(self) -> Output:
        """Return the next output; raises as iterating does."""
        output = await self._queue.get()
        self._num_ended += output.finish_reason is not None
        if output.error is not None:
            raise output.error
        return output

    @property
    def num_open(self) -> int:
        """How many choices have not had their last output."""
        return len(self.request_ids) - self._num_ended

    async def wait(self) -> list[Completion]:
        """Return the whole answers, in the order of their index."""
        return _join_all([output async for output in self], len(self.request_ids))

    @property
    def num_unread(self) -> int:
        """How many outputs have come and were not read yet."""
        return self._queue.qsize()

    def cancel(self) -> None:
        """Stop whatever still runs; the last outputs say so."""
        self._loop.cancel(self.request_ids)


class Client:
    """Submits requests to the engine in this process."""

    def __init__(self, card: ModelCard, loop: EngineLoop) -> None:
        """Speak to `loop`, which runs the model of `card`."""
        self.card = card
        self.loop = loop

    @cached_property
    def grammars(self) -> Grammars:
        """The compiled constraints of this model; imported with the first constraint."""
        from twostroke.sample.grammar import Grammars

        return Grammars(self.card.tokenizer, self.card.cost.program.vocab_size)

    def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        caller: Caller = _ANYONE,
        hints: Hints = NO_HINTS,
    ) -> Generation:
        """Queue a prompt and return its outputs, to be read from any thread.

        Raises:
            RequestError: the prompt is empty, has an unknown token, or can never fit, or the
                constraint cannot be used.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        generation = Generation(self.loop)
        self._submit(generation, [tokens], params, caller, hints, None)
        return generation

    def generate_async(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        caller: Caller = _ANYONE,
        hints: Hints = NO_HINTS,
        grammar: GrammarMatcher | None = None,
    ) -> AsyncGeneration:
        """Queue a prompt and return its outputs, to be read in the running event loop.

        `grammar` is the constraint of `params`, compiled by `grammars` in another thread; without
        it the event loop waits until it is.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `generate`.
        """
        return self.generate_many_async([tokens], params, caller, hints, grammar)

    def generate_many_async(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller = _ANYONE,
        hints: Hints = NO_HINTS,
        grammar: GrammarMatcher | None = None,
    ) -> AsyncGeneration:
        """Queue several prompts, all or none; choice `i` of prompt `p` has index `p * n + i`.

        `grammar` as in `generate_async`.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `generate`.
        """
        generation = AsyncGeneration(self.loop)
        self._submit(generation, prompts, params, caller, hints, grammar)
        return generation

    def to_embed(
        self, texts: Sequence[Sequence[int]], pooling: Pooling, caller: Caller = _ANYONE
    ) -> list[Request]:
        """Return requests that read texts for their embeddings, for `loop.submit`.

        Raises:
            RequestError: a text is empty, has an unknown token, or can never fit.
        """
        requests = []
        for where, tokens in _named(texts, caller.prompt_field):
            self._check_tokens(tokens, _UNDRAWN, caller.prompt_field, pooling)
            self._check_ids(tokens, where)
            request = Request(
                id=f"r{next(_serial)}",
                tokens=list(tokens),
                num_prompt=len(tokens),
                params=_UNDRAWN,
                seed=0,
                priority=caller.priority,
                tenant=caller.tenant,
                salt=caller.tenant.encode(),
                prompt_field=caller.prompt_field,
                pooling=pooling,
            )
            requests.append(request)
        return requests

    def _submit(
        self,
        generation: Generation | AsyncGeneration,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        grammar: GrammarMatcher | None,
    ) -> None:
        self._check_hints(hints)
        for where, tokens in _named(prompts, caller.prompt_field):
            self._check_tokens(tokens, params, caller.prompt_field)
            self._check_ids(tokens, where)
        self._check_params(params)
        if grammar is None and params.constraint is not None:
            grammar = self.grammars.compile(params.constraint)
        choices: list[Choice] = []
        for tokens in prompts:
            for request in self._requests(tokens, params, caller, hints, grammar):
                generation.request_ids.append(request.id)
                index, mailbox = len(choices), generation.mailbox
                tokenizer = self.card.tokenizer
                choices.append(Choice.of(request, index, tokenizer, mailbox, caller.service))
        self.loop.submit(choices)

    def _requests(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        grammar: GrammarMatcher | None,
    ) -> Iterator[Request]:
        """Yield one prompt's n requests."""
        first_seed = secrets.randbits(64) if params.seed is None else params.seed
        constraint = params.constraint
        ends = frozenset() if params.ignore_eos else self.card.tokenizer.eos_ids
        if params.end_ids or params.stop_token_ids:  # otherwise all requests share one set
            ends = ends.union(params.end_ids, params.stop_token_ids)
        for index in range(params.n):
            yield Request(
                id=f"r{next(_serial)}",
                tokens=list(tokens),
                num_prompt=len(tokens),
                params=params,
                seed=(first_seed + index) % 2**64,
                end_ids=ends,
                priority=caller.priority,
                tenant=caller.tenant,
                salt=caller.tenant.encode(),
                prompt_field=caller.prompt_field,
                hints=hints,
                matcher=grammar.another(constraint) if grammar and constraint else None,
            )

    def _check_hints(self, hints: Hints) -> None:
        methods = self.loop.speculator.methods
        if hints.speculate not in {"auto", "off", *methods}:
            known, word = ("auto", "off", *methods), hints.speculate[:_MOST_SHOWN]
            reason = "must be one of {known} here, got {word!r}.{hint}"
            raise RequestError(
                reason,
                field="speculate",
                known=", ".join(known),
                word=word,
                hint=nearest(word, known),
            )
        if hints.prediction:
            self._check_ids(hints.prediction, "prediction")

    def _check_tokens(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        field: str,
        pooling: Pooling | None = None,
    ) -> None:
        """Refuse a prompt that can never run; one that cannot fit is not even read."""
        if not tokens:
            raise RequestError("is empty: give at least one token.", field=field)
        size = len(tokens)
        probe = Request("", list(tokens), size, params, 0, prompt_field=field, pooling=pooling)
        self.loop.check(probe)

    def _check_ids(self, tokens: Sequence[int], where: str) -> None:
        vocab_size = self.card.cost.program.vocab_size
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            place = next(i for i, id_ in enumerate(tokens) if not 0 <= id_ < vocab_size)
            reason = (
                f"has token ids outside 0 to {vocab_size - 1}: "
                f"the first is {tokens[place]}, at index {place}."
            )
            raise RequestError(reason, field=where)

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size = self.card.cost.program.vocab_size
        for field, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            wrong = next((token for token in ids if token >= vocab_size), None)
            if wrong is not None:
                limits = f"outside 0 to {vocab_size - 1}: the first is {wrong}."
                raise RequestError(f"has token ids {limits}", field=field)


def _named(prompts: Sequence[Sequence[int]], field: str) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield prompts behind what errors call them: their places, where there are several."""
    for place, tokens in enumerate(prompts):
        yield field if len(prompts) == 1 else f"{field}[{place}]", tokens


def _join_all(outputs: list[Output], count: int) -> list[Completion]:
    return [join([o for o in outputs if o.index == index]) for index in range(count)]
