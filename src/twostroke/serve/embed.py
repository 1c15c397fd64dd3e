"""Embeddings as the server's requests: neutral of any protocol, as jobs are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from twostroke.core.errors import EngineStoppedError, RequestError, TwostrokeError
from twostroke.engine.embedding import Embeddings
from twostroke.engine.loop import Health
from twostroke.engine.prompts import encode_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.core.embedding import EmbeddingParams
    from twostroke.engine.client import Caller, Client, ModelCard
    from twostroke.engine.embedding import Embedding
    from twostroke.serve.job import Running
    from twostroke.serve.observe.metrics import Metrics
    from twostroke.serve.store import Tenant

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """Texts, or token ids, of which each becomes a vector.

    `model` is the name that the client used, None for whichever there is. `write` makes of an
    embedding what stands in the response.
    """

    model: str | None
    texts: tuple[str | list[int], ...]
    params: EmbeddingParams
    caller: Caller
    write: Callable[[Embedding], msgspec.Raw]

    def encode(self, card: ModelCard) -> list[list[int]]:
        """Return the texts as token ids, a list each.

        Raises:
            ContextLengthError: one surely has more tokens than the context.
        """
        return [encode_text(card, text, field=self.caller.prompt_field) for text in self.texts]


@dataclass(frozen=True, slots=True)
class EmbeddingDialect(Generic[T]):
    """One protocol's way to ask for embeddings.

    Attributes:
        request: the struct that its bodies are; it has a field `model`.
        read: a tenant's checked request to a job; raises RequestError.
        whole: the response, of the model's name, each text's part of it, and the prompts' tokens.
    """

    request: type[T]
    read: Callable[[T, Tenant], EmbeddingJob]
    whole: Callable[[str, list[msgspec.Raw], int], Any]


class Vectors:
    """The embeddings of a running job; `cancel` stops it, wherever it is.

    Attributes:
        num_texts: how many texts there are.
        num_tokens: how many tokens they have.
        num_cached: how many of these the prefix cache had, as far as the texts are done.
    """

    def __init__(
        self,
        client: Client,
        job: EmbeddingJob,
        texts: list[list[int]],
        metrics: Metrics,
        running: set[Running],
    ) -> None:
        """Begin, and stand in `running` until the end.

        Raises:
            RequestError: a text is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine no longer runs.
        """
        self.num_texts = len(texts)
        self.num_tokens = sum(map(len, texts))
        self.num_cached = 0
        self._client, self._job, self._metrics = client, job, metrics
        self._embeddings = Embeddings(client, texts, job.params, job.caller)
        self._running = running
        running.add(self)

    async def whole(self) -> list[msgspec.Raw]:
        """Return each text's part of the response, in order; it is written as they come.

        Raises:
            EngineStoppedError: the engine or the server stopped under the job.
            TwostrokeError: the engine failed on the job.
        """
        parts = [msgspec.Raw()] * self.num_texts
        try:
            async for embedding in self._embeddings:
                self.num_cached += embedding.usage.cached_tokens
                parts[embedding.index] = self._job.write(embedding)
        except TwostrokeError as error:
            self._metrics.failures.inc()
            if self._client.loop.health is Health.STOPPED:
                raise EngineStoppedError(error.message) from error
            raise
        return parts

    def cancel(self) -> None:
        """Stop what still runs, at once; harmless when nothing does."""
        self._running.discard(self)
        self._embeddings.cancel()


def check_texts(job: EmbeddingJob, limit: int) -> None:
    """Refuse a job of more texts than one request may have.

    Raises:
        RequestError: too many.
    """
    if len(job.texts) > limit:
        message = f"A request may have {limit} inputs, not {len(job.texts)}."
        raise RequestError(message, param="input")
