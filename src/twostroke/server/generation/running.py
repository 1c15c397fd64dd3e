"""Work that runs in the engine for a client: answers to a job, or embeddings of texts."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from twostroke.core.errors import (
    DeadlineError,
    EngineStoppedError,
    OverloadedError,
    RequestError,
    TwostrokeError,
)
from twostroke.core.request import FinishReason
from twostroke.engine.embedding import Embedding
from twostroke.engine.output import Timings, Usage, join
from twostroke.engine.settling import in_place_of
from twostroke.engine.status import Health
from twostroke.server.http.errors import ServerStoppingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.output import Completion, Output
    from twostroke.engine.process.served import ServedEngine, ServedOutputs
    from twostroke.server.generation.job import EmbeddingJob, Encoded, Job
    from twostroke.server.http.retry_after import RetryAfter
    from twostroke.server.observability.metrics import ServerMetrics

_MANY_VALUES: Final = 4096  # of an embedding; encoding more takes milliseconds


class Accepting:
    """A request, in a `with` block, that the engine has not accepted yet, as while it starts."""

    def __init__(self, service: str, running: set[Open], returns: RetryAfter) -> None:
        """Be in `running` during the block; `service` is the request's class.

        If the engine refuses it, `returns` say when to come back.
        """
        self.service, self._returns = service, returns
        self._running, self._task = running, asyncio.current_task()
        self._is_cut = False
        self._num_cancellations = 0 if self._task is None else self._task.cancelling()

    def cancel(self) -> None:
        """End the block with a ServerStoppingError."""
        self._running.discard(self)
        if self._task is not None:
            self._is_cut = self._task.cancel()

    def __enter__(self) -> None:
        """Begin."""
        self._running.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """End; what was cut off fails."""
        self._running.discard(self)
        if isinstance(error, OverloadedError):
            self._returns.put_off(error, self.service)
        if self._is_cut and self._task is not None:
            is_left = self._task.uncancel() > self._num_cancellations  # another caller's
            if is_left or kind is not asyncio.CancelledError:
                return
            raise ServerStoppingError("The server is stopping: this request has not begun.")


class Answers:
    """The outputs of a running job. It runs until its end, or until `cancel`, read or not.

    `params` are the job's, `num_open` counts the answers that have not ended.
    """

    @classmethod
    async def start(
        cls,
        engine: ServedEngine,
        job: Job,
        encoded: Encoded,
        metrics: ServerMetrics,
        running: set[Open],
    ) -> Self:
        """Queue the job in the engine; it is in `running` until `cancel`.

        Raises:
            RequestError: a prompt is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        params, hints = encoded.params, encoded.hints
        try:
            outputs = await engine.generate(encoded.prompts, params, job.caller, hints)
        except (OverloadedError, EngineStoppedError):
            metrics.goodput.miss(job.caller.service, job.num_choices)
            raise
        return cls(engine, job, encoded, metrics, running, outputs)

    def __init__(
        self,
        engine: ServedEngine,
        job: Job,
        encoded: Encoded,
        metrics: ServerMetrics,
        running: set[Open],
        outputs: ServedOutputs,
    ) -> None:
        """Read the outputs of a job that is queued."""
        self.params = job.params
        self.num_open = job.num_choices
        self._prompts = encoded.prompts
        self._num_prompt = sum(map(len, encoded.prompts))
        self._redrawn_outputs: ServedOutputs | None = None  # of an answer that is generated again
        self._num_tokens = 0
        self._num_cached: dict[int, int] = {}  # by a prompt's first choice
        self._ended: dict[int, tuple[FinishReason, Usage, Timings]] = {}  # by choice
        self._ttft_s: float | None = None  # measured here
        self._engine, self._job, self._metrics, self._outputs = engine, job, metrics, outputs
        self._running = running
        running.add(self)
        self._began_s = time.monotonic()
        self._is_over = False  # failed or cancelled
        self._is_unrun = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as they come, until all choices have ended.

        Raises:
            EngineStoppedError: the engine or the server stopped.
            RequestError: no token can satisfy the job's constraint.
            TwostrokeError: the engine failed on the job.
        """
        try:
            async for output in self._outputs:
                self._num_tokens += len(output.token_ids)
                if output.usage is not None:  # the first output of a choice, or its last
                    self._note(output, output.usage)
                yield output
        except TwostrokeError as error:
            self._is_over = True
            self._is_unrun = not self._num_tokens and _is_unrun(error)
            if not isinstance(error, RequestError):  # the engine's fault, not the constraint's
                self._metrics.goodput.miss(self._job.caller.service, self.num_open)
            _count_failure(error, self._engine, self._metrics)
            raise

    async def whole(self) -> list[Completion]:
        """Return all answers in the order of their index; raises as iterating does."""
        outputs: list[list[Output]] = [[] for _ in range(self._job.num_choices)]
        async for output in self:
            outputs[output.index].append(output)
        return [join(one) for one in outputs]

    async def draw_again(
        self, answer: Completion, params: SamplingParams, caller: Caller, hints: Hints
    ) -> Completion:
        """Return another answer to an answer's prompt; its times begin with the first answer's.

        Raises as `start` and iterating do, also if the job was cancelled meanwhile.
        """
        if self not in self._running:
            raise ServerStoppingError("This answer was cancelled.")
        prompt = self._prompts[answer.index // self.params.n]
        outputs = await self._engine.generate([prompt], params, caller, hints)
        self._redrawn_outputs = outputs
        try:
            other = join([output async for output in outputs])
        finally:
            outputs.cancel()
        if other.finish_reason is FinishReason.CANCEL:
            raise ServerStoppingError("The server is stopping: this answer was cut off.")
        return in_place_of(answer, other)

    def accept(self, answer: Completion) -> None:
        """Count an answer in place of the answer with its index."""
        self._ended[answer.index] = (answer.finish_reason, answer.usage, answer.timings)

    def cancel(self) -> None:
        """Stop the work at once; does nothing after its end."""
        self._running.discard(self)
        if self._redrawn_outputs is not None:
            self._redrawn_outputs.cancel()
        if not self.num_open:
            return
        self._outputs.cancel()
        if not self._is_over:
            self._is_over = True
            waited_s, has_begun = time.monotonic() - self._began_s, self._num_tokens > 0
            service = self._job.caller.service
            self._metrics.goodput.leave(service, self.num_open, waited_s, has_begun=has_begun)

    @property
    def service(self) -> str:
        """The class of service."""
        return self._job.caller.service

    @property
    def num_unread(self) -> int:
        """Outputs of the engine that have not been read."""
        return self._outputs.num_unread

    @property
    def usage(self) -> Usage:
        """The usage of the ended choices together; a prompt with several answers counts once."""
        usages = [usage for _, usage, _ in self._ended.values()]
        firsts = [usage for index, (_, usage, _) in self._ended.items() if self._is_first(index)]
        return Usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(usage.cached_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.accepted_tokens for usage in usages),
            sum(usage.rejected_tokens for usage in usages),
        )

    @property
    def used(self) -> Usage | None:
        """The usage of all choices; while some run, what they took so far, whole prompts included.

        Prompts are counted from the beginning, since they are computed before anything is seen;
        None if the time of all was over before that.
        """
        if self._is_unrun:
            return None
        if not self.num_open:
            return self.usage
        return Usage(self._num_prompt, sum(self._num_cached.values()), self._num_tokens)

    @property
    def timings(self) -> Timings | None:
        """From the first answer's beginning to the last one's end; None before any has ended."""
        all_ = [timings for _, _, timings in self._ended.values()]
        if not all_:
            return None
        return Timings(
            arrival_s=min(timings.arrival_s for timings in all_),
            started_s=min(timings.started_s for timings in all_),
            first_token_s=min(timings.first_token_s for timings in all_),
            last_token_s=max(timings.last_token_s for timings in all_),
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures so far for logs and traces, those of unfinished answers included."""
        usage, timings = self.usage, self.timings
        ended = self._ended.values()
        tpots = [timings.tpot_s(usage.completion_tokens) for _, usage, timings in ended]
        known = [tpot_s for tpot_s in tpots if tpot_s is not None]
        return {
            "class": self._job.caller.service,
            "stream": self._job.stream,
            "choices": self._job.num_choices,
            "prompt_tokens": self._num_prompt,
            "cached_tokens": sum(self._num_cached.values()),
            "completion_tokens": self._num_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "rejected_tokens": usage.rejected_tokens,
            "finish_reasons": [reason.value for reason, _, _ in ended],
            "queue_s": timings and timings.queue_s,
            "ttft_s": timings.ttft_s if timings else self._ttft_s,
            "tpot_s": sum(known) / len(known) if known else None,
            "e2e_s": timings and timings.e2e_s,
        }

    def _is_first(self, index: int) -> bool:
        """Whether a choice is the first of its prompt."""
        return index % self.params.n == 0

    def _note(self, output: Output, usage: Usage) -> None:
        if self._is_first(output.index):
            self._num_cached[output.index] = usage.cached_tokens
        reason = output.finish_reason
        if reason is None:
            if self._ttft_s is None and output.token_ids:
                self._ttft_s = time.monotonic() - self._began_s
            return
        if reason is FinishReason.CANCEL:  # by the server: the client still reads
            raise ServerStoppingError("The server is stopping: this answer was cut off.")
        assert output.timings is not None
        self._ended[output.index] = (reason, usage, output.timings)
        self.num_open -= 1
        self._metrics.goodput.judge(self._job.caller.service, usage, output.timings)


class Vectors:
    """The embeddings of a running job.

    `num_tokens` counts those of all texts, `num_open` the texts whose embedding is not ready.
    """

    @classmethod
    async def start(
        cls,
        engine: ServedEngine,
        job: EmbeddingJob,
        texts: list[list[int]],
        metrics: ServerMetrics,
        running: set[Open],
    ) -> Self:
        """Begin; the work is in `running` until `cancel`.

        Raises:
            RequestError: a text is empty, has unknown ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        outputs = await engine.embed(texts, job.params, job.caller)
        return cls(engine, job, texts, metrics, running, outputs)

    def __init__(
        self,
        engine: ServedEngine,
        job: EmbeddingJob,
        texts: list[list[int]],
        metrics: ServerMetrics,
        running: set[Open],
        outputs: ServedOutputs,
    ) -> None:
        """Read the vectors of texts that are queued."""
        self.num_open = len(texts)
        self.num_tokens = sum(map(len, texts))
        self._num_cached = 0
        self._is_unrun = False
        self._engine, self._job, self._metrics, self._outputs = engine, job, metrics, outputs
        self._running = running
        running.add(self)

    async def encoded_vectors(
        self, run_in_thread: Callable[..., Awaitable[Any]]
    ) -> list[msgspec.Raw]:
        """Return the encoded embeddings, in the order of the texts; threads encode large ones.

        Raises:
            EngineStoppedError: the engine or the server stopped.
            TwostrokeError: the engine failed on the job.
        """
        parts = [msgspec.Raw()] * len(self._job.texts)
        try:
            async for output in self._outputs:
                if output.finish_reason is FinishReason.CANCEL:
                    raise ServerStoppingError("The server is stopping: this work was cut off.")
                embedding = Embedding.of(output)
                self._num_cached += embedding.usage.cached_tokens
                self.num_open -= 1
                if embedding.vector.size <= _MANY_VALUES:
                    part = self._job.write(embedding)
                else:
                    part = await run_in_thread(self._job.write, embedding)
                parts[embedding.index] = part
        except TwostrokeError as error:
            self._is_unrun = self.num_open == len(parts) and _is_unrun(error)
            _count_failure(error, self._engine, self._metrics)
            raise
        return parts

    def cancel(self) -> None:
        """Stop the work at once; does nothing after its end."""
        self._running.discard(self)
        self._outputs.cancel()

    @property
    def service(self) -> str:
        """The class of service."""
        return self._job.caller.service

    @property
    def used(self) -> Usage | None:
        """The tokens of all texts; None if their time was over before any was computed."""
        return None if self._is_unrun else Usage(self.num_tokens, self._num_cached, 0)

    def figures(self) -> dict[str, Any]:
        """Return the figures so far for logs and traces."""
        return {
            "class": self._job.caller.service,
            "texts": len(self._job.texts),
            "prompt_tokens": self.num_tokens,
            "cached_tokens": self._num_cached,
        }


Running = Answers | Vectors
Open = Running | Accepting


def _is_unrun(error: TwostrokeError) -> bool:
    """Return whether a request's time was over before anything was computed for it."""
    return bool(error.facts.get("is_unrun"))


def _count_failure(error: TwostrokeError, engine: ServedEngine, metrics: ServerMetrics) -> None:
    """Count a failure of the engine.

    Raises:
        EngineStoppedError: the engine has stopped, whatever its error was.
    """
    if isinstance(error, (RequestError, DeadlineError)):
        return
    metrics.failures.inc()
    if engine.health is Health.STOPPED and not isinstance(error, EngineStoppedError):
        raise EngineStoppedError(str(error)) from error
