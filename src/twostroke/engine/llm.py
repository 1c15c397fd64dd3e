"""The Python interface: `LLM` blocks, `AsyncLLM` streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Self

from twostroke.core.config import PARTNER
from twostroke.core.embedding import AUTO, EmbeddingParams
from twostroke.core.errors import OverloadedError, RequestError, UsageError
from twostroke.core.sampling import SamplingParams
from twostroke.engine.build import Engine, build
from twostroke.engine.client import Caller
from twostroke.engine.embedding import Embeddings, embed
from twostroke.engine.loading import pull
from twostroke.engine.prompts import (
    encode_gap,
    encode_text,
    encode_turn,
    ending_gaps,
    to_hints,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from twostroke.core.config import EngineOptions
    from twostroke.core.request import Hints
    from twostroke.engine.client import AsyncGeneration, Client, Generation, ModelCard
    from twostroke.engine.embedding import Embedding
    from twostroke.engine.output import Completion, Output

    Message = Mapping[str, object]
    Text = str | Sequence[int]
    Model = str | PathLike[str]

_WRITER, _SPEAKER = Caller(prompt_field="prompt"), Caller(prompt_field="messages")
_READER = Caller(prompt_field="input")


class LLM:
    """A model that answers in this process.

    >>> with LLM("smollm2") as llm:
    ...     llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))
    """

    def __init__(self, model: Model, options: EngineOptions | None = None) -> None:
        """Load `model`: a path, a short name or hf:owner/repo; fetched first if not here yet.

        Raises:
            TwostrokeError: it cannot be found, read, or held in memory.
        """
        self.engine: Engine = _fetch_and_build(model, options)

    def generate(
        self,
        prompts: Text | Sequence[Text],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        suffix: str = "",
        speculate: str = "auto",
        prediction: str = "",
    ) -> list[list[Completion]]:
        """Continue each prompt (a text, or token ids); all of them share the engine's batches.

        Returns one list a prompt, in order, with its `n` completions. One `params` serves all
        prompts, or there is one for each. With a `suffix` each answer fills what is missing between
        its prompt and that. `speculate` says who may guess tokens ahead, and `prediction` what the
        answers will be like, as far as that is known: both change the time that answers take, never
        the answers.

        Raises:
            RequestError: a prompt is empty or can never fit, the counts differ, or the model cannot
                fill in the middle.
        """
        many = _as_prompts(prompts)
        card, each = self.engine.card, _as_params(params, len(many))
        written = [_written(card, *pair, suffix) for pair in zip(many, each, strict=True)]
        tokens, each = [tokens for tokens, _ in written], [one for _, one in written]
        return self._run(tokens, each, _WRITER, self._hints(speculate, prediction))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        speculate: str = "auto",
        prediction: str = "",
    ) -> list[Completion]:
        """Answer a conversation of messages with `role` and `content`; returns `n` completions.

        `speculate` and `prediction` as in `generate`.

        Raises:
            RequestError: the model has no chat template, or a message is not as it should be.
        """
        tokens, params = encode_turn(self.engine.card, messages, _as_one(params))
        hints = self._hints(speculate, prediction)
        return self._run([tokens], [params], _SPEAKER, hints)[0]

    def stream(
        self,
        prompt: Text,
        params: SamplingParams | None = None,
        *,
        suffix: str = "",
        speculate: str = "auto",
        prediction: str = "",
    ) -> Iterator[Output]:
        """Continue one prompt and yield its outputs; leaving early cancels what still runs.

        `suffix`, `speculate` and `prediction` as in `generate`.
        """
        client = self.engine.client
        tokens, params = _written(client.card, prompt, _as_one(params), suffix)
        hints = self._hints(speculate, prediction)
        generation = client.generate(tokens, params, _WRITER, hints)
        client.loop.flush()
        yield from generation

    def embed(
        self, texts: Text | Sequence[Text], *, pooling: str = AUTO, dimensions: int | None = None
    ) -> list[Embedding]:
        """Return a vector of length 1 for each text (or token ids), in order.

        Texts of one meaning point the same way, as far as the model was taught to. `pooling` is
        "mean" or "last", or what suits the model; `dimensions` keeps only the first so many values.

        Raises:
            RequestError: a text is empty or can never fit, or the model does not embed so.
        """
        card = self.engine.card
        tokens = [encode_text(card, text, field="input") for text in _as_prompts(texts)]
        params = EmbeddingParams(pooling, dimensions)
        return list(embed(self.engine.client, tokens, params, _READER))

    def close(self) -> None:
        """Stop the engine and give back its memory."""
        self.engine.close()

    def __enter__(self) -> Self:
        """Use the model in a `with` block, which closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the model."""
        self.close()

    def _hints(self, speculate: str, prediction: str) -> Hints:
        return to_hints(self.engine.card, speculate, prediction)

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        caller: Caller,
        hints: Hints,
    ) -> list[list[Completion]]:
        """Answer all prompts, as many at a time as the engine's queue takes."""
        client = self.engine.client
        submit = partial(_queued, client, caller, hints)
        open_generations: deque[Generation] = deque()
        answers: list[list[Completion]] = []
        try:
            for tokens, one in zip(prompts, params, strict=True):
                while (generation := submit(tokens, one, open_generations)) is None:
                    client.loop.flush()
                    answers.append(open_generations[0].wait())
                    open_generations.popleft()
                open_generations.append(generation)
            client.loop.flush()
            answers += [generation.wait() for generation in open_generations]
        except BaseException:  # an interrupt too must not leave the rest running
            for generation in open_generations:
                generation.cancel()
            raise
        return answers


class AsyncLLM:
    """A model that answers in this process, for asynchronous callers.

    >>> llm = await AsyncLLM.load("smollm2")
    >>> async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...     print(output.text, end="", flush=True)
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap a running engine; `load` makes one."""
        self.engine = engine

    @classmethod
    async def load(cls, model: Model, options: EngineOptions | None = None) -> AsyncLLM:
        """Load `model` without blocking the event loop."""
        from asyncio import to_thread  # those who block do without it

        return cls(await to_thread(_fetch_and_build, model, options))

    async def generate(
        self,
        prompt: Text,
        params: SamplingParams | None = None,
        *,
        suffix: str = "",
        speculate: str = "auto",
        prediction: str = "",
    ) -> AsyncIterator[Output]:
        """Continue a prompt and yield its outputs; leaving early cancels what still runs.

        `suffix`, `speculate` and `prediction` as in `LLM.generate`.
        """
        card, hints = self.engine.card, to_hints(self.engine.card, speculate, prediction)
        tokens, params = _written(card, prompt, _as_one(params), suffix)
        async for output in self._outputs(tokens, params, _WRITER, hints):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        speculate: str = "auto",
        prediction: str = "",
    ) -> AsyncIterator[Output]:
        """Answer a conversation and yield its outputs; leaving early cancels what still runs.

        `speculate` and `prediction` as in `LLM.generate`.
        """
        card = self.engine.card
        tokens, params = encode_turn(card, messages, _as_one(params))
        hints = to_hints(card, speculate, prediction)
        async for output in self._outputs(tokens, params, _SPEAKER, hints):
            yield output

    async def embed(
        self, texts: Text | Sequence[Text], *, pooling: str = AUTO, dimensions: int | None = None
    ) -> list[Embedding]:
        """Return a vector of length 1 for each text, in order, as `LLM.embed`."""
        card, client = self.engine.card, self.engine.client
        tokens = [encode_text(card, text, field="input") for text in _as_prompts(texts)]
        params = EmbeddingParams(pooling, dimensions)
        embeddings = Embeddings(client, tokens, params, _READER)
        try:
            found = [one async for one in embeddings]
        finally:
            embeddings.cancel()
        return sorted(found, key=lambda one: one.index)

    async def close(self) -> None:
        """Stop the engine and give back its memory."""
        from asyncio import to_thread

        await to_thread(self.engine.close)

    async def __aenter__(self) -> Self:
        """Use the model in an `async with` block, which closes it."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the model."""
        await self.close()

    async def _outputs(
        self, tokens: list[int], params: SamplingParams | None, caller: Caller, hints: Hints
    ) -> AsyncIterator[Output]:
        from asyncio import to_thread

        client, params = self.engine.client, params or SamplingParams()
        grammar = None
        if params.constraint is not None:
            grammar = await to_thread(client.grammars.compile, params.constraint)
        generation: AsyncGeneration = client.generate_async(tokens, params, caller, hints, grammar)
        client.loop.flush()
        try:
            async for output in generation:
                yield output
        finally:
            generation.cancel()


def _fetch_and_build(model: Model, options: EngineOptions | None) -> Engine:
    name = fspath(model) if isinstance(model, PathLike) else model
    if not isinstance(name, str):
        raise UsageError(f"A model is given by a name or a path, not by {model!r}.")
    pull(name)
    draft = options.speculation.draft if options is not None else None
    if draft is not None and draft != PARTNER:
        pull(draft)
    return build(name, options)


def _queued(
    client: Client,
    caller: Caller,
    hints: Hints,
    tokens: list[int],
    params: SamplingParams,
    earlier: deque[Generation],
) -> Generation | None:
    """Submit a prompt; None if the queue is full of `earlier` ones, which will make room."""
    try:
        return client.generate(tokens, params, caller, hints)
    except OverloadedError:
        if not earlier:
            raise
        return None


def _written(
    card: ModelCard, prompt: Text, params: SamplingParams, suffix: str
) -> tuple[list[int], SamplingParams]:
    """Return a prompt's ids, also where it is to be joined to a suffix, and its parameters."""
    if not suffix:
        return encode_text(card, prompt), params
    return encode_gap(card, prompt, suffix), ending_gaps(card, params)


def _as_prompts(prompts: Text | Sequence[Text]) -> list[Text]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not hasattr(prompts, "__getitem__"):
        kind = type(prompts).__name__
        reason = f"must be a text, a list of token ids, or a list of these, got {kind}."
        raise RequestError(reason, field="prompt")
    is_one = len(prompts) > 0 and hasattr(prompts[0], "__index__")
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, bytes, Mapping)) or not hasattr(params, "__getitem__"):
        raise _no_params(params)
    if len(params) != count:
        reason = f"must have one entry for each prompt: {count}, got {len(params)}."
        raise UsageError(reason, field="params")
    return [_as_one(one) for one in params]


def _as_one(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise _no_params(params)
    return params


def _no_params(given: object) -> UsageError:
    kind = type(given).__name__
    return UsageError(
        f"params must be SamplingParams, as SamplingParams(max_tokens=64), not {kind}."
    )
