"""How callers use an engine: they submit prompts and read outputs, blocking or not."""

from __future__ import annotations

import itertools
import math
import secrets
from functools import cached_property
from typing import TYPE_CHECKING, Final

from twostroke.core.embedding import Pooling
from twostroke.core.errors import RequestError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.request import DEFAULT_SERVICE_TIER, NO_HINTS, Hints, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.embedding import Embedder, check_token_values, choose_pooling, in_order
from twostroke.engine.generation import AsyncGeneration, Generation
from twostroke.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.embedding import EmbeddingParams
    from twostroke.engine.disaggregation_stats import DisaggregationStats
    from twostroke.engine.embedding import Embedding
    from twostroke.engine.generation import Outputs
    from twostroke.engine.loop import EngineLoop
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.structured_output.grammar import GrammarMatcher, Grammars

_MAX_SHOWN: Final = 40  # characters of a wrong word that an error repeats


class Caller(Frozen):
    """Who asks. A lower `priority` goes first; tenants do not share cached prefixes.

    Tenants that compete at one priority get computed tokens in proportion to their `weight`.
    `prompt_field` is what errors call the prompt: "prompt", "messages" for a conversation, or
    "input" for texts to embed. `service` is the class of service that requests are counted under,
    one of `core.request.SERVICE_TIERS`; `names_class` is whether the request asks for it by name.
    `cuts_limit` lowers a `max_tokens` above what fits. A request is refused, or ended, if it does
    not start within `start_within_s` or end within `timeout_s`, of which `spent_s` are over.
    """

    priority: int = 0
    tenant: str = ""
    prompt_field: str = "prompt"
    service: str = DEFAULT_SERVICE_TIER
    names_class: bool = False
    cuts_limit: bool = False
    weight: float = 1.0
    start_within_s: float = math.inf
    timeout_s: float = math.inf
    spent_s: float = 0.0


_ANYONE: Final = Caller()
UNDRAWN: Final = SamplingParams()  # of requests that draw no token
_serial = itertools.count(1)


class Client:
    """Submits requests to the engine in this process."""

    def __init__(self, card: ModelCard, loop: EngineLoop) -> None:
        """Submit to `loop`, which runs the model of `card`."""
        self.card = card
        self.loop = loop
        self.disaggregation_stats: Callable[[], DisaggregationStats] | None = None

    @cached_property
    def grammars(self) -> Grammars:
        """The compiled constraints of this model; imported with the first constraint."""
        from twostroke.engine.structured_output.grammar import Grammars

        return Grammars(self.card.tokenizer, self._vocab_size)

    def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        caller: Caller = _ANYONE,
        hints: Hints = NO_HINTS,
    ) -> Generation:
        """Queue a prompt and return its outputs, which any thread may read.

        Raises:
            RequestError: the prompt is empty, has an unknown token, or can never fit, or the
                constraint cannot be used.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        generation = Generation(self.loop)
        self.queue(generation, [tokens], params, caller, hints, None)
        return generation

    def generate_many_async(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller = _ANYONE,
        hints: Hints = NO_HINTS,
        grammar: GrammarMatcher | None = None,
    ) -> AsyncGeneration:
        """Queue prompts, all or none, and return outputs to read in the running event loop.

        Choice `i` of prompt `p` has index `p * n + i`. `grammar` is the constraint of `params`,
        compiled by `grammars` in another thread; without it the event loop is blocked while the
        constraint is compiled.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `generate`.
        """
        generation = AsyncGeneration(self.loop)
        self.queue(generation, prompts, params, caller, hints, grammar)
        return generation

    def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller = _ANYONE
    ) -> Iterator[Embedding]:
        """Yield the embeddings of texts (token ids) in order; leaving early cancels the others.

        The first texts are queued at once; the others wait for room in the queue.

        Raises:
            RequestError: a text is empty, has an unknown token, or can never fit, or the model
                cannot embed in this way.
            OverloadedError: the queue has no room for the first text.
            EngineStoppedError: the engine no longer runs.
            TwostrokeError: the engine failed on a text.
        """
        generation = Generation(self.loop)
        self.queue_texts(generation, texts, params, caller)
        return in_order(generation)

    def embed_async(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller = _ANYONE
    ) -> AsyncGeneration:
        """Queue texts as `embed` does; each has one output, for `Embedding.of`.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `embed`.
        """
        generation = AsyncGeneration(self.loop)
        self.queue_texts(generation, texts, params, caller)
        return generation

    def queue(
        self,
        generation: Outputs,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        grammar: GrammarMatcher | None,
    ) -> None:
        """Queue prompts, whose outputs go to `generation`; the rest as `generate_many_async`."""
        params = self.card.sampling.fill(params)
        self._check_hints(hints)
        self._check_prompts(prompts, params, caller)
        self._check_params(params)
        if grammar is None and params.constraint is not None:
            grammar = self.grammars.compile(params.constraint)
        tokenizer, mailbox = self.card.tokenizer, generation.mailbox
        choices: list[OutputProcessor] = []
        for tokens in prompts:
            for request in self._requests(tokens, params, caller, hints, grammar):
                choices.append(
                    OutputProcessor(request, len(choices), mailbox, tokenizer, caller.service)
                )
        generation.submit(choices)

    def queue_texts(
        self,
        generation: Outputs,
        texts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        caller: Caller,
    ) -> None:
        """Queue texts, whose embeddings go to `generation`; the rest as `embed_async`."""
        card, mailbox = self.card, generation.mailbox
        pooling = choose_pooling(params, card.name, card.pooling, card.embedding_width)
        self._check_prompts(texts, UNDRAWN, caller, pooling)
        if pooling is Pooling.NONE:
            check_token_values(texts, params.dimensions or card.embedding_width)
        embedders = []
        for index, tokens in enumerate(texts):
            request = new_request(tokens, UNDRAWN, caller, pooling)
            embedders.append(Embedder(request, index, mailbox, params.dimensions, caller.service))
        generation.submit_gradually(embedders)

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
            request = new_request(tokens, params, caller)
            request.seed = (first_seed + index) % 2**64
            request.end_ids = ends
            request.hints = hints
            request.matcher = grammar.another(constraint) if grammar and constraint else None
            yield request

    def _check_hints(self, hints: Hints) -> None:
        known = ("auto", "off", *self.loop.speculator.methods)
        if hints.speculate not in known:
            word = hints.speculate[:_MAX_SHOWN]
            reason = f"must be one of {', '.join(known)} here, got {{word!r}}."
            raise RequestError(reason + nearest(word, known), field="speculate", word=word)
        if hints.prediction:
            self._check_ids(hints.prediction, "prediction")

    def _check_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        pooling: Pooling | None = None,
    ) -> None:
        """Refuse prompts that can never run."""
        for place, tokens in enumerate(prompts):
            self.loop.check(new_request(tokens, params, caller, pooling))
            field = caller.prompt_field
            self._check_ids(tokens, field if len(prompts) == 1 else f"{field}[{place}]")

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        limit = self._vocab_size
        if min(tokens) < 0 or max(tokens) >= limit:
            place = next(i for i, token in enumerate(tokens) if not 0 <= token < limit)
            wrong = f"the first is {tokens[place]}, at index {place}."
            raise RequestError(f"has token ids outside 0 to {limit - 1}: {wrong}", field=field)

    def _check_params(self, params: SamplingParams) -> None:
        limit = self._vocab_size
        for field in ("logit_bias", "stop_token_ids"):
            wrong = next((token for token in getattr(params, field) if token >= limit), None)
            if wrong is not None:
                reason = f"has token ids outside 0 to {limit - 1}: the first is {wrong}."
                raise RequestError(reason, field=field)

    @property
    def _vocab_size(self) -> int:
        return self.card.cost.program.vocab_size


def new_request(
    tokens: Sequence[int], params: SamplingParams, caller: Caller, pooling: Pooling | None = None
) -> Request:
    """Return a prompt's request, or that of a text to embed."""
    return Request(
        id=f"r{next(_serial)}",
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=params,
        seed=0,
        priority=caller.priority,
        tenant=caller.tenant,
        weight=caller.weight,
        salt=caller.tenant.encode(),
        prompt_field=caller.prompt_field,
        cuts_limit=caller.cuts_limit,
        start_within_s=caller.start_within_s,
        timeout_s=caller.timeout_s,
        spent_s=caller.spent_s,
        pooling=pooling,
    )
