"""The client of an engine in this process: submits prompts and texts, and returns their outputs."""

from __future__ import annotations

import itertools
import math
import secrets
from functools import cached_property
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import RequestError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.request import DEFAULT_SERVICE_TIER, NO_HINTS, Hints, Pooling, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.embedding import (
    Embedder,
    check_token_values,
    choose_pooling,
    embeddings_in_order,
)
from twostroke.engine.generation import AsyncGeneration, Generation
from twostroke.engine.output_processor import OutputProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.request import EmbeddingParams
    from twostroke.engine.disaggregation_stats import DisaggregationStats
    from twostroke.engine.embedding import Embedding
    from twostroke.engine.generation import Outputs
    from twostroke.engine.loop import EngineLoop
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.resumption import AnswerProgress
    from twostroke.engine.structured_output.grammar import GrammarMatcher, Grammars
    from twostroke.engine.structured_output.reasoning_budget import ReasoningBudget

_MAX_QUOTED_CHARS: Final = 40  # of a wrong value, in an error


class Caller(Frozen):
    """The sender of requests: their priority, tenant, service tier and deadlines.

    Attributes:
        priority: requests with a lower number start earlier.
        tenant: tenants do not share cached prefixes.
        prompt_field: the name of the prompt in errors: "prompt", "messages" for a conversation, or
            "input" for texts to embed.
        service_tier: the service tier under which requests are counted, one of `SERVICE_TIERS`.
        names_service_tier: whether the request names its service tier.
        cuts_limit: whether a `max_tokens` that does not fit into the context is lowered instead of
            refused.
        weight: tenants of equal priority get computed tokens in proportion to their weights.
        start_within_s: maximum number of seconds from arrival to the first step; a request that
            does not start in time is refused.
        timeout_s: maximum number of seconds from arrival to the end; a request that takes longer is
            ended.
        spent_s: seconds of `timeout_s` that were used before the engine got the request.
        is_admitted: whether another engine, which has died since, had admitted the requests.
        continues_elsewhere: whether requests that have started fail at once if the engine dies,
            since a router continues them at another server.
    """

    priority: int = 0
    tenant: str = ""
    prompt_field: str = "prompt"
    service_tier: str = DEFAULT_SERVICE_TIER
    names_service_tier: bool = False
    cuts_limit: bool = False
    weight: float = 1.0
    start_within_s: float = math.inf
    timeout_s: float = math.inf
    spent_s: float = 0.0
    is_admitted: bool = False
    continues_elsewhere: bool = False


_DEFAULT_CALLER: Final = Caller()
UNSAMPLED: Final = SamplingParams()  # of requests that sample no token
_request_numbers = itertools.count(1)


class Client:
    """Submits prompts and texts to the engine in this process, and returns their outputs."""

    def __init__(self, card: ModelCard, loop: EngineLoop) -> None:
        """Submit requests to `loop`, the engine loop that runs the model of `card`."""
        self.card = card
        self.loop = loop
        # Set by `engine/disaggregation`: returns its counts.
        self.disaggregation_stats: Callable[[], DisaggregationStats] | None = None

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of constraints, such as JSON schemas, on this model's answers.

        Its module is imported at the first use.
        """
        from twostroke.engine.structured_output.grammar import Grammars

        return Grammars(self.card.tokenizer, self._vocab_size)

    def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        caller: Caller = _DEFAULT_CALLER,
        hints: Hints = NO_HINTS,
    ) -> Generation:
        """Submit a prompt and return its outputs, which any thread may read.

        Raises:
            RequestError: the prompt is empty, has an unknown token, or is longer than the context,
                or the constraint cannot be used.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        generation = Generation(self.loop)
        self.submit_prompts(generation, [tokens], params, caller=caller, hints=hints, grammar=None)
        return generation

    def generate_many_async(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller = _DEFAULT_CALLER,
        hints: Hints = NO_HINTS,
        grammar: GrammarMatcher | None = None,
        progress: Sequence[AnswerProgress] = (),
    ) -> AsyncGeneration:
        """Submit prompts, all or none, and return outputs to read in the running event loop.

        Choice `i` of prompt `p` has index `p * n + i`. `grammar` is the compiled constraint of
        `params`. Compile it with `grammars` in another thread: without `grammar` it is compiled
        here, which blocks the event loop. `progress` is as in `submit_prompts`.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `generate`.
        """
        generation = AsyncGeneration(self.loop)
        self.submit_prompts(
            generation,
            prompts,
            params,
            caller=caller,
            hints=hints,
            grammar=grammar,
            progress=progress,
        )
        return generation

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        caller: Caller = _DEFAULT_CALLER,
    ) -> Iterator[Embedding]:
        """Yield the embeddings of texts (token ids) in order; stopping early cancels the others.

        The first texts are submitted at once, the others as the queue has room.

        Raises:
            RequestError: a text is empty, has an unknown token, or is longer than the context, or
                the model does not support the pooling or the dimensions.
            OverloadedError: the queue has no room for the first text.
            EngineStoppedError: the engine no longer runs.
            TwostrokeError: the engine failed on a text.
        """
        generation = Generation(self.loop)
        self.submit_texts(generation, texts, params, caller)
        return embeddings_in_order(generation)

    def embed_async(
        self,
        texts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        caller: Caller = _DEFAULT_CALLER,
    ) -> AsyncGeneration:
        """Submit texts to embed, and return an output for each, to read in the running event loop.

        The first texts are submitted at once, the others as the queue has room. `Embedding.of`
        returns the embedding in an output.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `embed`.
        """
        generation = AsyncGeneration(self.loop)
        self.submit_texts(generation, texts, params, caller)
        return generation

    def submit_prompts(
        self,
        generation: Outputs,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        caller: Caller,
        hints: Hints,
        grammar: GrammarMatcher | None,
        progress: Sequence[AnswerProgress] = (),
    ) -> None:
        """Submit prompts, all or none; `generation` gets their outputs.

        A prompt has a request for each of its `n` choices. With `progress`, which has an entry for
        each answer (prompt by prompt), answers continue after the part that another engine has
        delivered. `generate_many_async` describes the other arguments.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `generate`.
        """
        params = self.card.sampling.fill(params)
        self._check_hints(hints)
        self._check_prompts(prompts, params, caller)
        self._check_params(params, cuts_limit=caller.cuts_limit)
        if grammar is None and params.constraint is not None:
            grammar = self.grammars.compile(params.constraint)
        processors: list[OutputProcessor] = []
        for tokens in prompts:
            requests = self._requests(tokens, params, caller=caller, hints=hints, grammar=grammar)
            for request in requests:
                processors.append(
                    OutputProcessor(
                        request,
                        index=len(processors),
                        mailbox=generation.mailbox,
                        tokenizer=self.card.tokenizer,
                        service_tier=caller.service_tier,
                    )
                )
        if progress:
            pairs = list(zip(processors, progress, strict=True))
            for processor, delivered in pairs:
                if delivered.tokens:
                    self._check_ids(delivered.tokens, caller.prompt_field)
                processor.resume(delivered)
            processors = [processor for processor, delivered in pairs if not delivered.has_ended]
        generation.submit(processors)

    def submit_texts(
        self,
        generation: Outputs,
        texts: Sequence[Sequence[int]],
        params: EmbeddingParams,
        caller: Caller,
        progress: Sequence[AnswerProgress] = (),
    ) -> None:
        """Submit texts to embed as the queue has room; `generation` gets their embeddings.

        With `progress`, texts whose embeddings another engine has delivered are left out.
        `embed_async` describes the other arguments.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `embed`.
        """
        card = self.card
        pooling = choose_pooling(params, card.name, card.pooling, card.embedding_width)
        self._check_prompts(texts, UNSAMPLED, caller, pooling)
        if pooling is Pooling.NONE:
            check_token_values(texts, params.dimensions or card.embedding_width)
        embedders = []
        for index, tokens in enumerate(texts):
            if progress and progress[index].has_ended:
                continue
            request = new_request(tokens, UNSAMPLED, caller, pooling)
            embedders.append(
                Embedder(
                    request,
                    index=index,
                    mailbox=generation.mailbox,
                    dimensions=params.dimensions,
                    service_tier=caller.service_tier,
                )
            )
        generation.submit_gradually(embedders)

    def _requests(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        caller: Caller,
        hints: Hints,
        grammar: GrammarMatcher | None,
    ) -> Iterator[Request]:
        """Yield the requests of one prompt, one for each of its `n` choices."""
        first_seed = secrets.randbits(64) if params.seed is None else params.seed
        constraint = params.constraint
        budget = self._reasoning_budget(new_request(tokens, params, caller))
        end_ids = frozenset() if params.ignore_eos else self.card.tokenizer.eos_ids
        if params.end_ids or params.stop_token_ids:  # otherwise all requests share one set
            end_ids = end_ids.union(params.end_ids, params.stop_token_ids)
        for index in range(params.n):
            request = new_request(tokens, params, caller)
            request.seed = (first_seed + index) % 2**64
            request.end_ids = end_ids
            request.hints = hints
            request.matcher = grammar.for_request(constraint) if grammar and constraint else None
            if budget is not None:
                request.matcher = budget.matcher(request.matcher)
            yield request

    def _reasoning_budget(self, request: Request) -> ReasoningBudget | None:
        """Return the token limit of a request's reasoning; None if none applies."""
        params = request.params
        if params.preface is None or params.reasoning_budget in {None, -1}:
            return None
        from twostroke.engine.structured_output.reasoning_budget import ReasoningBudget

        return ReasoningBudget(
            params.preface,
            params.reasoning_budget or 0,
            max_output=self.loop.max_output(request),
            tokenizer=self.card.tokenizer,
            vocab_size=self._vocab_size,
        )

    def _check_hints(self, hints: Hints) -> None:
        methods = ("auto", "off", *self.loop.speculator.methods)
        if hints.speculate not in methods:
            word = hints.speculate[:_MAX_QUOTED_CHARS]
            reason = f"must be one of {', '.join(methods)} here, got {{word!r}}."
            raise RequestError(reason + nearest(word, methods), field="speculate", word=word)
        if hints.prediction:
            self._check_ids(hints.prediction, "prediction")

    def _check_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        pooling: Pooling | None = None,
    ) -> None:
        """Refuse prompts that are empty, longer than the context, or have unknown tokens."""
        for index, tokens in enumerate(prompts):
            self.loop.check(new_request(tokens, params, caller, pooling))
            field = caller.prompt_field
            self._check_ids(tokens, field if len(prompts) == 1 else f"{field}[{index}]")

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        limit = self._vocab_size
        if min(tokens) < 0 or max(tokens) >= limit:
            index = next(i for i, token in enumerate(tokens) if not 0 <= token < limit)
            first_wrong = f"the first is {tokens[index]}, at index {index}."
            raise RequestError(
                f"has token ids outside 0 to {limit - 1}: {first_wrong}", field=field
            )

    def _check_params(self, params: SamplingParams, *, cuts_limit: bool) -> None:
        """Refuse token ids that the model lacks, and a reasoning budget longer than the context."""
        budget, context_length = params.reasoning_budget, self.card.context_length
        if budget is not None and budget >= context_length and not cuts_limit:
            reason = f"must be less than the context length of {context_length}, got {budget}."
            raise RequestError(reason, field="reasoning_budget")
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
    """Return a request for the engine that continues a prompt, or embeds a text.

    `tokens` is the prompt, or with a `pooling` the text to embed.
    """
    return Request(
        id=f"r{next(_request_numbers)}",
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
        is_admitted=caller.is_admitted,
        pooling=pooling,
    )
