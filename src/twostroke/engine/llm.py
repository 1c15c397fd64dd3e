"""The Python interface: `LLM` blocks, `AsyncLLM` streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from os import PathLike, fspath
from typing import TYPE_CHECKING

from twostroke.core.config import PARTNER
from twostroke.core.embedding import AUTO, EmbeddingParams
from twostroke.core.errors import OverloadedError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.sampling import SamplingParams
from twostroke.engine.build import Engine, build
from twostroke.engine.client import Caller
from twostroke.engine.embedding import Embedding
from twostroke.engine.loading import pull
from twostroke.engine.prompts import (
    encode_gap,
    encode_text,
    encode_turn,
    ending_gaps,
    to_hints,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from twostroke.core.config import EngineOptions
    from twostroke.core.request import Hints
    from twostroke.engine.client import Client, ModelCard
    from twostroke.engine.generation import Generation
    from twostroke.engine.output import Completion, Output

    Message = Mapping[str, object]
    Text = str | Sequence[int]
    Model = str | PathLike[str]

_FOR_EMBEDDINGS = Caller(prompt_field="input")


class LLM(AbstractContextManager["LLM"]):
    """A model that answers in this process.

    >>> with LLM("smollm2") as llm:
    ...     llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))
    """

    def __init__(self, model: Model, options: EngineOptions | None = None) -> None:
        """Load `model`: a path, a short name or hf:owner/repo; fetched first if not here yet.

        Raises:
            TwostrokeError: the model cannot be found, read, or held in memory.
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
        parse_special: bool = True,
    ) -> list[list[Completion]]:
        """Continue prompts (texts, or lists of token ids), which share the engine's batches.

        Returns a list for each prompt, in order, with its `n` completions. `params` are for all
        prompts, or a list with one for each. With a `suffix` each answer is the text between its
        prompt and the suffix. `speculate` names the method that guesses tokens, and `prediction`
        is the text of the expected answer; both change the speed and never the answers.
        `parse_special` makes special tokens of their texts in prompts, except around a gap.

        Raises:
            RequestError: a prompt is empty or can never fit, or the model cannot fill in the
                middle.
        """
        many = _as_prompts(prompts)
        card = self.engine.card
        hints = to_hints(card, speculate, prediction)
        return self._answer(
            [
                _completion(card, prompt, one, suffix, hints, parse_special=parse_special)
                for prompt, one in zip(many, _as_params(params, len(many)), strict=True)
            ]
        )

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
            RequestError: the model has no chat template, or a message is not valid.
        """
        card = self.engine.card
        hints = to_hints(card, speculate, prediction)
        return self._answer([_turn(card, messages, params, hints)])[0]

    def stream(
        self,
        prompt: Text,
        params: SamplingParams | None = None,
        *,
        suffix: str = "",
        speculate: str = "auto",
        prediction: str = "",
        parse_special: bool = True,
    ) -> Iterator[Output]:
        """Continue one prompt and yield its outputs; leaving early cancels the rest.

        `suffix` and the other options as in `generate`.
        """
        card, client = self.engine.card, self.engine.client
        hints = to_hints(card, speculate, prediction)
        completion = _completion(card, prompt, params, suffix, hints, parse_special=parse_special)
        generation = completion.submit(client)
        client.loop.flush()
        yield from generation

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: str = AUTO,
        dimensions: int | None = None,
        parse_special: bool = True,
    ) -> list[Embedding]:
        """Return a vector of length 1 for each text (or list of token ids), in order.

        Texts of similar meaning have similar directions, best with models made for embeddings.
        `pooling` is "mean", "last", or "auto" for the model's own; `dimensions` keeps only that
        many first values. `parse_special` makes special tokens of their texts.

        Raises:
            RequestError: a text is empty or can never fit, or the model cannot embed in this way.
        """
        tokens = _texts(self.engine.card, texts, parse_special=parse_special)
        params = EmbeddingParams(pooling, dimensions)
        return list(self.engine.client.embed(tokens, params, _FOR_EMBEDDINGS))

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.engine.close()

    def __exit__(self, *exception: object) -> None:
        """Close the model at the end of a `with` block."""
        self.close()

    def _answer(self, prompts: list[_Prompt]) -> list[list[Completion]]:
        """Answer all prompts, as many at a time as the engine's queue takes."""
        client = self.engine.client
        running: deque[Generation] = deque()
        answers: list[list[Completion]] = []
        try:
            for prompt in prompts:
                while True:
                    try:
                        running.append(prompt.submit(client))
                        break
                    except OverloadedError:
                        if not running:
                            raise
                    client.loop.flush()
                    answers.append(running[0].wait())
                    running.popleft()
            client.loop.flush()
            answers += [generation.wait() for generation in running]
        except BaseException:  # an interrupt too must not leave the others running
            for generation in running:
                generation.cancel()
            raise
        return answers


class AsyncLLM(AbstractAsyncContextManager["AsyncLLM"]):
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
        from asyncio import to_thread  # blocking callers need no asyncio

        return cls(await to_thread(_fetch_and_build, model, options))

    def generate(
        self,
        prompt: Text,
        params: SamplingParams | None = None,
        *,
        suffix: str = "",
        speculate: str = "auto",
        prediction: str = "",
        parse_special: bool = True,
    ) -> AsyncIterator[Output]:
        """Continue a prompt and yield its outputs; leaving early cancels the rest.

        `suffix` and the other options as in `LLM.generate`.
        """
        card = self.engine.card
        hints = to_hints(card, speculate, prediction)
        return self._outputs(
            _completion(card, prompt, params, suffix, hints, parse_special=parse_special)
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        speculate: str = "auto",
        prediction: str = "",
    ) -> AsyncIterator[Output]:
        """Answer a conversation and yield its outputs; leaving early cancels the rest.

        `speculate` and `prediction` as in `LLM.generate`.
        """
        card = self.engine.card
        hints = to_hints(card, speculate, prediction)
        return self._outputs(_turn(card, messages, params, hints))

    async def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: str = AUTO,
        dimensions: int | None = None,
        parse_special: bool = True,
    ) -> list[Embedding]:
        """Return a vector of length 1 for each text, in order, as `LLM.embed`."""
        tokens = _texts(self.engine.card, texts, parse_special=parse_special)
        params = EmbeddingParams(pooling, dimensions)
        generation = self.engine.client.embed_async(tokens, params, _FOR_EMBEDDINGS)
        try:
            found = [Embedding.of(output) async for output in generation]
        finally:
            generation.cancel()
        return sorted(found, key=lambda embedding: embedding.index)

    async def close(self) -> None:
        """Stop the engine and free its memory."""
        from asyncio import to_thread

        await to_thread(self.engine.close)

    async def __aexit__(self, *exception: object) -> None:
        """Close the model at the end of an `async with` block."""
        await self.close()

    async def _outputs(self, prompt: _Prompt) -> AsyncIterator[Output]:
        from asyncio import to_thread

        client, constraint, grammar = self.engine.client, prompt.params.constraint, None
        if constraint is not None:
            grammar = await to_thread(client.grammars.compile, constraint)
        generation = client.generate_many_async(
            [prompt.tokens], prompt.params, prompt.caller, prompt.hints, grammar
        )
        client.loop.flush()
        try:
            async for output in generation:
                yield output
        finally:
            generation.cancel()


class _Prompt(Frozen):
    """A prompt as token ids, and how to answer it."""

    tokens: list[int]
    params: SamplingParams
    caller: Caller
    hints: Hints

    def submit(self, client: Client) -> Generation:
        return client.generate(self.tokens, self.params, self.caller, self.hints)


def _completion(
    card: ModelCard,
    prompt: Text,
    params: SamplingParams | None,
    suffix: str,
    hints: Hints,
    *,
    parse_special: bool,
) -> _Prompt:
    params = _checked(params)
    if suffix:
        tokens, params = encode_gap(card, prompt, suffix), ending_gaps(card, params)
    else:
        tokens = encode_text(card, prompt, parse_special=parse_special)
    return _Prompt(tokens, params, Caller(prompt_field="prompt"), hints)


def _turn(
    card: ModelCard, messages: Sequence[Message], params: SamplingParams | None, hints: Hints
) -> _Prompt:
    tokens, params = encode_turn(card, messages, _checked(params))
    return _Prompt(tokens, params, Caller(prompt_field="messages"), hints)


def _texts(
    card: ModelCard, texts: Text | Sequence[Text], *, parse_special: bool
) -> list[list[int]]:
    return [
        encode_text(card, text, field="input", parse_special=parse_special)
        for text in _as_prompts(texts)
    ]


def _fetch_and_build(model: Model, options: EngineOptions | None) -> Engine:
    name = fspath(model) if isinstance(model, PathLike) else model
    if not isinstance(name, str):
        raise UsageError(f"A model is given by a name or a path, not by {model!r}.")
    pull(name)
    draft = options.speculation.draft if options is not None else None
    if draft is not None and draft != PARTNER:
        pull(draft)
    return build(name, options)


def _as_prompts(prompts: Text | Sequence[Text]) -> list[Text]:
    """Return a list of prompts, with one prompt if only one was given."""
    is_list = not isinstance(prompts, str | bytes | Mapping) and hasattr(prompts, "__getitem__")
    if not is_list or (len(prompts) > 0 and hasattr(prompts[0], "__index__")):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [_checked(params)] * count
    if len(params) != count:
        reason = f"must have one entry for each prompt: {count}, got {len(params)}."
        raise UsageError(reason, field="params")
    return [_checked(one) for one in params]


def _checked(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        reason = f"params must be SamplingParams, as SamplingParams(max_tokens=64), not {kind}."
        raise UsageError(reason)
    return params
