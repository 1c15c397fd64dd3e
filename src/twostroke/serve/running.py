"""What runs in the engine for a client: answers to a job, or embeddings of texts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from twostroke.core.errors import (
    EngineStoppedError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.request import FinishReason
from twostroke.engine.embedding import Embedding
from twostroke.engine.loop import Health
from twostroke.engine.output import Usage, join

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from twostroke.engine.client import Client
    from twostroke.engine.output import Completion, Output, Timings
    from twostroke.serve.job import EmbeddingJob, Encoded, Job
    from twostroke.serve.observe.metrics import Metrics


class Running(Protocol):
    """Work that runs in the engine for a client."""

    def cancel(self) -> None:
        """Stop the work at once; does nothing after its end."""


class Answers:
    """The outputs of a running job. It runs until its end, or until `cancel`, read or not.

    Attributes:
        ended: finish reason, usage and timings of the choices that have ended, by index.
        error: the code of the error that ended the job, if one did.
        num_prompt: tokens in all prompts.
        num_tokens: tokens generated so far.
        cached_tokens: prompt tokens found in the prefix cache, by a prompt's first choice.
        ttft_s: time to first token, seen from here; None before it.
    """

    def __init__(
        self,
        client: Client,
        job: Job,
        encoded: Encoded,
        metrics: Metrics,
        running: set[Running],
    ) -> None:
        """Queue the job in the engine; it is in `running` until `cancel`.

        Raises:
            RequestError: a prompt is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
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
        """Yield outputs as they come, until all choices have ended.

        Raises:
            EngineStoppedError: the engine or the server stopped.
            RequestError: no token can satisfy the job's constraint.
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
                raise EngineStoppedError(str(error)) from error
            raise

    async def whole(self) -> list[Completion]:
        """Return all answers in the order of their index; raises as iterating does."""
        outputs: list[list[Output]] = [[] for _ in range(self._num_choices)]
        async for output in self:
            outputs[output.index].append(output)
        return [join(one) for one in outputs]

    def cancel(self) -> None:
        """Stop the work at once; does nothing after its end."""
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
        """Outputs that the engine has made and nobody has read."""
        return self._generation.num_unread

    @property
    def usage(self) -> Usage:
        """The usage of the ended choices together; a prompt with several answers counts once."""
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
        if reason is FinishReason.CANCEL:  # by the server: the client still reads
            raise EngineStoppedError("The server is shutting down.")
        self.ended[output.index] = (reason, usage, output.timings)
        self._metrics.goodput.judge(self._service, usage, output.timings)


class Vectors:
    """The embeddings of a running job.

    Attributes:
        num_texts: the number of texts.
        num_tokens: tokens in all texts.
        num_cached: tokens found in the prefix cache, of the texts that are done.
    """

    def __init__(
        self,
        client: Client,
        job: EmbeddingJob,
        texts: list[list[int]],
        metrics: Metrics,
        running: set[Running],
    ) -> None:
        """Begin; the work is in `running` until `cancel`.

        Raises:
            RequestError: a text is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        self.num_texts = len(texts)
        self.num_tokens = sum(map(len, texts))
        self.num_cached = 0
        self._client, self._job, self._metrics = client, job, metrics
        self._generation = client.embed_async(texts, job.params, job.caller)
        self._running = running
        running.add(self)

    async def whole(self) -> list[msgspec.Raw]:
        """Return the encoded embeddings, in the order of the texts.

        Raises:
            EngineStoppedError: the engine or the server stopped.
            TwostrokeError: the engine failed on the job.
        """
        parts = [msgspec.Raw()] * self.num_texts
        try:
            async for output in self._generation:
                embedding = Embedding.of(output)
                self.num_cached += embedding.usage.cached_tokens
                parts[embedding.index] = self._job.write(embedding)
        except TwostrokeError as error:
            self._metrics.failures.inc()
            if self._client.loop.health is Health.STOPPED:
                raise EngineStoppedError(str(error)) from error
            raise
        return parts

    def cancel(self) -> None:
        """Stop the work at once; does nothing after its end."""
        self._running.discard(self)
        self._generation.cancel()
