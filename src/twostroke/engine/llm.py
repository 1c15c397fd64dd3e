"""The Python interface: `LLM` blocks until answers are complete, `AsyncLLM` is for asyncio."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from operator import index
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, overload

from twostroke.core.errors import OverloadedError, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.option_schema import from_mapping
from twostroke.core.options import PARTNER, EngineOptions
from twostroke.core.request import AUTO_POOLING, EmbeddingParams
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat_answer import (
    ChatOptions,
    ChunkReader,
    check_options,
    encode_conversation,
    read_completion,
)
from twostroke.engine.client import Caller
from twostroke.engine.embedding import Embedding
from twostroke.engine.engine import Engine, build
from twostroke.engine.progress_bar import ProgressBar
from twostroke.engine.prompts import (
    encode_infill_prompt,
    encode_text,
    to_hints,
    with_infill_end_ids,
)
from twostroke.engine.redraw import EncodedPrompt, SettledStream, with_seed
from twostroke.model.loader import pull

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator
    from typing import Unpack

    from twostroke.core.request import Hints
    from twostroke.engine.generation import Generation
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import AnswerChunk, Completion, Output

    Message = Mapping[str, Any]
    Text = str | Sequence[int]
    Model = str | PathLike[str]
    ParamsOfEach = SamplingParams | Sequence[SamplingParams] | None

_NOT_PICKLED: Final = "A loaded model cannot be pickled or copied: load it in each process."
_EMBEDDING_CALLER = Caller(prompt_field="input")


class LLM(AbstractContextManager["LLM"]):
    """A language model that runs in this process and answers prompts and conversations.

    >>> with LLM("smollm2") as llm:
    ...     llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions | None = None,
        *,
        progress: bool | None = None,
        **fields: Any,
    ) -> None:
        """Load `model`: a path, a short name or hf:owner/repo. A missing model is downloaded.

        Pass options as `options`, or by field name, such as `num_threads=2` or
        `context_length=4096`. `progress` says whether to show a bar during a download; None shows
        it on a terminal or in a notebook only.

        Raises:
            TwostrokeError: the model cannot be found, read, or held in memory.
        """
        self.engine: Engine = _fetch_and_build(model, options, fields, progress=progress)

    def __repr__(self) -> str:
        """Show the model's name, its size, and the backend that runs it."""
        return _describe("LLM", self.engine)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(_NOT_PICKLED)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that sets none of them itself."""
        return self.engine.card.sampling.fill(SamplingParams())

    def generate(
        self,
        prompts: Text | Sequence[Text],
        params: ParamsOfEach = None,
        *,
        suffix: str = "",
        speculate: str = "auto",
        prediction: str = "",
        parse_special: bool = True,
        progress: bool | None = None,
    ) -> list[list[Completion]]:
        """Continue prompts, each a text or a list of token ids; the engine batches them.

        Args:
            prompts: one prompt, or a list of prompts.
            params: sampling parameters of all prompts, or a list with one entry for each
                prompt.
            suffix: fill in the middle: each answer is the text between its prompt and the
                suffix.
            speculate: the speculation method. It changes the speed and never the answers.
            prediction: the text of the expected answer, from which tokens are drafted. It
                changes the speed and never the answers.
            parse_special: whether the text of a special token in a prompt becomes that token.
                With a `suffix` it never does.
            progress: whether to show a bar. None shows it for several prompts, on a terminal or
                in a notebook.

        Returns:
            A list for each prompt, in order, with its `n` completions.

        Raises:
            RequestError: a prompt is empty or can never fit, or the model cannot fill in the
                middle.
        """
        prompt_list = _as_prompts(prompts)
        params_list = _as_params(params, len(prompt_list))
        card = self.engine.card
        hints = to_hints(card, speculate, prediction)
        requests = [
            _encode_completion(
                card,
                prompt,
                params=prompt_params,
                suffix=suffix,
                hints=hints,
                parse_special=parse_special,
            )
            for prompt, prompt_params in zip(prompt_list, params_list, strict=True)
        ]
        return self._answer(requests, progress=progress)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[False] = ...,
        progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> list[Completion]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: ParamsOfEach = ...,
        *,
        stream: Literal[False] = ...,
        progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> list[list[Completion]]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = ...,
        *,
        stream: Literal[True],
        progress: bool | None = ...,
        **options: Unpack[ChatOptions],
    ) -> Iterator[AnswerChunk]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: ParamsOfEach = None,
        *,
        stream: bool = False,
        progress: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Completion] | list[list[Completion]] | Iterator[AnswerChunk]:
        """Answer a conversation of messages with `role` and `content`, or a list of conversations.

        Returns a list of `n` completions for one conversation, and a list of these lists, in order,
        for several conversations. With `stream`, yields the chunks of the answers to one
        conversation as they are generated; a reader that stops early cancels the answers.
        `ChatOptions` describes the options, `generate` describes `progress`.

        Raises:
            RequestError: the model has no chat template, or a message is not valid.
        """
        check_options(options)
        card = self.engine.card
        if not _are_conversations(messages):
            if isinstance(params, Sequence):
                reason = "must be one SamplingParams for one conversation."
                raise UsageError(reason, field="params")
            request = _encode_chat(card, messages, params, options)  # type: ignore[arg-type]
            return (
                self._stream_chunks(request)
                if stream
                else self._answer([request], progress=progress)[0]
            )
        if stream:
            raise UsageError("takes one conversation at a time.", field="stream")
        requests = [
            _encode_chat(card, conversation, conversation_params, options)  # type: ignore[arg-type]
            for conversation, conversation_params in zip(
                messages, _as_params(params, len(messages)), strict=True
            )
        ]
        return self._answer(requests, progress=progress)

    def _stream_chunks(self, request: EncodedPrompt) -> Iterator[AnswerChunk]:
        reader = ChunkReader(request.reading, self.engine.card.tokenizer)
        for output in request.stream(self.engine.client):
            yield reader.read(output)

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
        """Continue one prompt and yield its outputs; a reader that stops early cancels it.

        `generate` describes the options.
        """
        card = self.engine.card
        request = _encode_completion(
            card,
            prompt,
            params=params,
            suffix=suffix,
            hints=to_hints(card, speculate, prediction),
            parse_special=parse_special,
        )
        yield from request.stream(self.engine.client)

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: str = AUTO_POOLING,
        dimensions: int | None = None,
        parse_special: bool = True,
    ) -> list[Embedding]:
        """Return an embedding of each text (or list of token ids), in order: a vector of length 1.

        Texts of similar meaning have similar directions, best with models made for embeddings.
        `pooling` is "mean", "last", or "auto" for the pooling that the model's files name.
        `dimensions` truncates vectors to their first values. With `parse_special`, the text of a
        special token becomes that token.

        Raises:
            RequestError: a text is empty or longer than the context, or the model does not support
                the pooling or the dimensions.
        """
        tokens = _encode_texts(self.engine.card, texts, parse_special=parse_special)
        params = EmbeddingParams(pooling, dimensions)
        return list(self.engine.client.embed(tokens, params, _EMBEDDING_CALLER))

    def close(self) -> None:
        """Stop the engine and free the model's memory."""
        self.engine.close()

    def __exit__(self, *exception: object) -> None:
        """Close the model at the end of a `with` block."""
        self.close()

    def _answer(
        self, prompts: list[EncodedPrompt], *, progress: bool | None = None
    ) -> list[list[Completion]]:
        """Submit encoded prompts as the engine's queue has room; return their answers in order."""
        client = self.engine.client
        tokenizer = self.engine.card.tokenizer
        running: deque[tuple[EncodedPrompt, Generation]] = deque()
        answers: list[list[Completion]] = []
        if progress is None and len(prompts) < 2:
            progress = False
        start_s = time.monotonic()
        num_tokens = 0

        def finish_first() -> None:
            nonlocal num_tokens
            prompt, generation = running[0]
            completions = prompt.settle(client, generation.wait())
            running.popleft()
            answers.append(
                [
                    read_completion(completion, prompt.reading, tokenizer)
                    for completion in completions
                ]
            )
            num_tokens += sum(len(completion.token_ids) for completion in completions)
            rate = num_tokens / max(time.monotonic() - start_s, 1e-9)
            bar.show("Answering", len(answers), len(prompts), f"{rate:.0f} tokens/s")

        try:
            with ProgressBar(is_on=progress) as bar:
                for prompt in prompts:
                    while True:
                        try:
                            running.append((prompt, prompt.submit(client)))
                            break
                        except OverloadedError:
                            if not running:
                                raise
                        client.loop.flush()
                        finish_first()
                client.loop.flush()
                while running:
                    finish_first()
        except BaseException:  # also after Ctrl-C, no generation stays in the engine
            for _, generation in running:
                generation.cancel()
            raise
        return answers


class AsyncLLM(AbstractAsyncContextManager["AsyncLLM"]):
    """A language model that runs in this process, for asyncio.

    >>> async with AsyncLLM("smollm2") as llm:
    ...     async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...         print(output.text, end="", flush=True)
    """

    def __init__(
        self,
        model: Model | Engine,
        options: EngineOptions | None = None,
        *,
        progress: bool | None = None,
        **fields: Any,
    ) -> None:
        """Load a model as `LLM` does, or use a running engine.

        This blocks until the model is loaded; `await AsyncLLM.load(...)` does not.

        Raises:
            TwostrokeError: the model cannot be found, read, or held in memory.
        """
        if isinstance(model, Engine):
            self.engine: Engine = model
        else:
            self.engine = _fetch_and_build(model, options, fields, progress=progress)

    @classmethod
    async def load(
        cls,
        model: Model,
        options: EngineOptions | None = None,
        *,
        progress: bool | None = None,
        **fields: Any,
    ) -> AsyncLLM:
        """Load `model` in another thread, so that the event loop is not blocked."""
        from asyncio import to_thread  # blocking callers need no asyncio

        return cls(await to_thread(_fetch_and_build, model, options, fields, progress=progress))

    def __repr__(self) -> str:
        """Show the model's name, its size, and the backend that runs it."""
        return _describe("AsyncLLM", self.engine)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise TypeError(_NOT_PICKLED)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a request that sets none of them itself."""
        return self.engine.card.sampling.fill(SamplingParams())

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
        """Continue a prompt and yield its outputs; a reader that stops early cancels it.

        `LLM.generate` describes the options.
        """
        card = self.engine.card
        request = _encode_completion(
            card,
            prompt,
            params=params,
            suffix=suffix,
            hints=to_hints(card, speculate, prediction),
            parse_special=parse_special,
        )
        return self._outputs(request)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[AnswerChunk]:
        """Answer a conversation and yield its chunks; a reader that stops early cancels the answer.

        `ChatOptions` describes the options.
        """
        check_options(options)
        request = _encode_chat(self.engine.card, messages, params, options)
        reader = ChunkReader(request.reading, self.engine.card.tokenizer)
        outputs = self._outputs(request)
        async with aclosing(outputs):
            async for output in outputs:
                yield reader.read(output)

    async def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: str = AUTO_POOLING,
        dimensions: int | None = None,
        parse_special: bool = True,
    ) -> list[Embedding]:
        """Return an embedding of each text, in order; `LLM.embed` describes the options."""
        tokens = _encode_texts(self.engine.card, texts, parse_special=parse_special)
        params = EmbeddingParams(pooling, dimensions)
        generation = self.engine.client.embed_async(tokens, params, _EMBEDDING_CALLER)
        try:
            embeddings = [Embedding.of(output) async for output in generation]
        finally:
            generation.cancel()
        return sorted(embeddings, key=lambda embedding: embedding.index)

    async def close(self) -> None:
        """Stop the engine and free the model's memory."""
        from asyncio import to_thread

        await to_thread(self.engine.close)

    async def __aexit__(self, *exception: object) -> None:
        """Close the model at the end of an `async with` block."""
        await self.close()

    async def _outputs(self, prompt: EncodedPrompt) -> AsyncGenerator[Output]:
        """Yield the outputs that answer an encoded prompt.

        If the grammar allows answers that the JSON schema forbids, each answer is checked, and
        generated again if it breaks the schema.
        """
        from asyncio import to_thread

        client = self.engine.client
        constraint = prompt.params.constraint
        grammar = None
        if constraint is not None:
            grammar = await to_thread(client.grammars.compile, constraint)
        redrawer = prompt.redrawer(client, grammar)
        generation = client.generate_many_async(
            [prompt.tokens],
            prompt.params,
            caller=prompt.caller,
            hints=prompt.hints,
            grammar=grammar,
        )
        client.loop.flush()
        try:
            if redrawer is None:
                async for output in generation:
                    yield output
                return
            stream = SettledStream(redrawer)
            async for output in generation:
                for final_output in stream.read(output):
                    yield final_output
            for get_last_output in stream.last_outputs():
                yield await to_thread(get_last_output)
        finally:
            generation.cancel()


def _encode_completion(
    card: ModelCard,
    prompt: Text,
    *,
    params: SamplingParams | None,
    suffix: str,
    hints: Hints,
    parse_special: bool,
) -> EncodedPrompt:
    """Encode a prompt to continue, or with a `suffix` a fill-in-the-middle prompt.

    Returns the token ids with the sampling parameters of their answer.
    """
    params = _check_params(params)
    if suffix:
        tokens = encode_infill_prompt(card, prompt, suffix)
        params = with_infill_end_ids(card, params)
    else:
        tokens = encode_text(card, prompt, parse_special=parse_special)
    return EncodedPrompt(
        tokens=tokens,
        params=with_seed(params),
        caller=Caller(prompt_field="prompt"),
        hints=hints,
    )


def _encode_chat(
    card: ModelCard,
    messages: Sequence[Message],
    params: SamplingParams | None,
    options: ChatOptions,
) -> EncodedPrompt:
    tokens, params, hints, reading, functions = encode_conversation(
        card, messages, _check_params(params), options
    )
    return EncodedPrompt(
        tokens=tokens,
        params=with_seed(params),
        caller=Caller(prompt_field="messages"),
        hints=hints,
        reading=reading,
        functions=functions,
    )


def _are_conversations(messages: Sequence[object]) -> bool:
    """Whether the argument of `chat` is a list of conversations, not a list of messages."""
    if isinstance(messages, (str, bytes, Mapping)) or not hasattr(messages, "__getitem__"):
        return False
    return bool(messages) and all(
        isinstance(entry, Sequence) and not isinstance(entry, str) for entry in messages
    )


def _encode_texts(
    card: ModelCard, texts: Text | Sequence[Text], *, parse_special: bool
) -> list[list[int]]:
    return [
        encode_text(card, text, field="input", parse_special=parse_special)
        for text in _as_prompts(texts)
    ]


def _fetch_and_build(
    model: Model,
    options: EngineOptions | None,
    fields: Mapping[str, Any],
    *,
    progress: bool | None,
) -> Engine:
    name = fspath(model) if isinstance(model, PathLike) else model
    if not isinstance(name, str):
        raise UsageError(f"The model must be a name or a path, got {model!r}.")
    if not isinstance(options, EngineOptions | None):
        reason = (
            f"must be an EngineOptions, got {type(options).__name__}. Or pass its fields by name."
        )
        raise UsageError(reason, field="options")
    if fields:
        if options is not None:
            reason = (
                f"must have these values in its fields, not beside it: {', '.join(fields)}. "
                "Pass either an EngineOptions or its fields by name."
            )
            raise UsageError(reason, field="options")
        options = from_mapping(EngineOptions, fields)
    draft = options.speculation.draft if options is not None else None
    with ProgressBar(is_on=progress, is_bytes=True) as bar:
        pull(name, bar.show_fetch)
        if draft is not None and draft != PARTNER:
            pull(draft, bar.show_fetch)
    return build(name, options)


def _describe(kind: str, engine: Engine) -> str:
    card, detail = engine.card, engine.facts.detail
    size = f"{card.file_bytes / 1e6:.0f} MB"
    context = f"context of {counted_noun(engine.context_length, 'token')}"
    return f"<{kind} {card.name}: {card.architecture}, {card.format}, {size}, {context}, {detail}>"


def _as_prompts(prompts: Text | Sequence[Text]) -> list[Text]:
    """Return the argument of `generate` or `embed` as a list; a single prompt becomes a list."""
    is_list = not isinstance(prompts, str | bytes | Mapping) and hasattr(prompts, "__getitem__")
    if not is_list or (len(prompts) > 0 and _is_token_id(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_token_id(value: object) -> bool:
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:  # such as a row of an array
        return False
    return True


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [_check_params(params)] * count
    if len(params) != count:
        reason = f"must have one entry for each prompt: {count}, got {len(params)}."
        raise UsageError(reason, field="params")
    return [_check_params(params_of_prompt) for params_of_prompt in params]


def _check_params(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise UsageError(
            "params must be a SamplingParams, such as SamplingParams(max_tokens=64), "
            f"got {type(params).__name__}."
        )
    return params
