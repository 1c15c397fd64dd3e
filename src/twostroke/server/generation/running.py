"""Requests that run in the engine for HTTP clients: generated answers, or embeddings."""

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
from twostroke.engine.settling import replace_answer
from twostroke.engine.status import Health
from twostroke.server.generation.answer_reuse import AnswerSource, JoinedOutputs
from twostroke.server.http.errors import ServerStoppingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller
    from twostroke.engine.output import Completion, Output
    from twostroke.engine.process.served import ServedEngine, ServedOutputs
    from twostroke.server.generation.answer_reuse import Submitted
    from twostroke.server.generation.job import EmbeddingJob, EncodedJob, Job
    from twostroke.server.generation.stream_records import StreamRecorder
    from twostroke.server.http.retry_after import RetryAfter
    from twostroke.server.observability.metrics import ServerMetrics

_MAX_INLINE_VALUES: Final = 4096  # larger embeddings are encoded in a thread: it takes ms
_REPLAYED_TOGETHER: Final = 32  # outputs of other servers that are read in one event loop round


class Submission:
    """A context manager around the wait until the engine accepts a request.

    A request waits while its model loads, for example. A server that stops calls `cancel`, which
    ends the `with` block.
    """

    def __init__(self, service_tier: str, running: set[Open], returns: RetryAfter) -> None:
        """Prepare to wait for a request of the service tier `service_tier`.

        `running` is the set of the server's open requests. If the engine is overloaded, `returns`
        chooses when the client should retry.
        """
        self.service_tier = service_tier
        self._returns = returns
        self._running = running
        self._task = asyncio.current_task()
        self._is_cut = False
        self._num_cancellations = 0 if self._task is None else self._task.cancelling()

    def cancel(self) -> None:
        """End the `with` block with a ServerStoppingError, because the server stops."""
        self._running.discard(self)
        if self._task is not None:
            self._is_cut = self._task.cancel()

    def __enter__(self) -> None:
        """Add this object to the server's open requests."""
        self._running.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Remove this object from the server's open requests; set the retry time of an overload.

        Raises:
            ServerStoppingError: `cancel` ended the block.
        """
        self._running.discard(self)
        if isinstance(error, OverloadedError):
            self._returns.put_off(error, self.service_tier)
        if self._is_cut and self._task is not None:
            is_cancelled_elsewhere = self._task.uncancel() > self._num_cancellations
            if is_cancelled_elsewhere or kind is not asyncio.CancelledError:
                return
            raise ServerStoppingError("The server is stopping: this request has not begun.")


class RunningAnswers:
    """The answers to a job that runs in the engine; iterating yields the engine's outputs.

    The job runs until its end or `cancel`, whether its outputs are read or not.

    Attributes:
        params: the job's sampling parameters.
        num_open: the number of answers that have not ended.
    """

    @classmethod
    async def start(
        cls,
        engine: ServedEngine,
        job: Job,
        *,
        encoded: EncodedJob,
        metrics: ServerMetrics,
        running: set[Open],
        submit: Callable[[], Awaitable[Submitted]],
        recorder: StreamRecorder | None = None,
    ) -> Self:
        """Submit a job by calling `submit`, and return its running answers.

        A `recorder` records the outputs; if it has outputs that another server has already sent,
        these come first. The answers are in `running`, the server's open requests, until `cancel`.

        Raises:
            RequestError: a prompt is empty, has unknown token ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        try:
            outputs, source = await submit()
        except (OverloadedError, EngineStoppedError):
            metrics.goodput.miss(job.caller.service_tier, job.num_choices)
            raise
        answers = cls(
            engine,
            job,
            encoded=encoded,
            metrics=metrics,
            running=running,
            outputs=outputs,
            source=source,
        )
        answers._recorder = recorder
        return answers

    def __init__(
        self,
        engine: ServedEngine,
        job: Job,
        *,
        encoded: EncodedJob,
        metrics: ServerMetrics,
        running: set[Open],
        outputs: ServedOutputs,
        source: AnswerSource,
    ) -> None:
        """Wrap the `outputs` of a job that the engine has accepted; see `start`."""
        self._source = source
        self.params = job.params
        self.num_open = job.num_choices
        self._prompts = encoded.prompts
        self._num_prompt = sum(map(len, encoded.prompts))
        self._recorder: StreamRecorder | None = None
        self._redrawn_outputs: ServedOutputs | None = None  # of an answer generated again
        self._num_tokens = 0
        self._num_cached: dict[int, int] = {}  # by the index of a prompt's first choice
        self._results: dict[int, tuple[FinishReason, Usage, Timings]] = {}  # of ended choices
        self._ttft_s: float | None = None  # as the server measures it
        self._engine = engine
        self._job = job
        self._metrics = metrics
        self._outputs = outputs
        self._running = running
        running.add(self)
        self._began_s = time.monotonic()
        self._is_over = False  # failed or cancelled
        self._is_unrun = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the engine's outputs as they arrive, until all answers have ended.

        Raises:
            EngineStoppedError: the engine or the server stopped.
            RequestError: no token can satisfy the job's constraint.
            TwostrokeError: the engine failed on the job.
        """
        try:
            async for output in self._all_outputs():
                self._num_tokens += len(output.token_ids)
                if output.usage is not None:  # the first output of a choice, or its last
                    self._note(output, output.usage)
                yield output
        except TwostrokeError as error:
            self._is_over = True
            self._is_unrun = not self._num_tokens and _is_unrun(error)
            if not isinstance(error, RequestError):  # the engine failed, not the constraint
                self._metrics.goodput.miss(self._job.caller.service_tier, self.num_open)
            _count_failure(error, self._engine, self._metrics)
            raise

    async def _all_outputs(self) -> AsyncIterator[Output]:
        """Yield the outputs that other servers have sent, then the outputs of the engine."""
        recorder = self._recorder
        if recorder is None:
            async for output in self._outputs:
                yield output
            return
        for number, output in enumerate(recorder.replayed_outputs()):
            if number % _REPLAYED_TOGETHER == _REPLAYED_TOGETHER - 1:
                await asyncio.sleep(0)  # other streams continue meanwhile
            recorder.add(output)
            yield output
        async for output in self._outputs:
            recorder.add(output)
            yield output

    async def completions(self) -> list[Completion]:
        """Wait until all answers have ended, and return them, ordered by index.

        Raises:
            EngineStoppedError: the engine or the server stopped.
            RequestError: no token can satisfy the job's constraint.
        """
        outputs: list[list[Output]] = [[] for _ in range(self._job.num_choices)]
        async for output in self:
            outputs[output.index].append(output)
        return [join(choice_outputs) for choice_outputs in outputs]

    async def generate_again(
        self, answer: Completion, params: SamplingParams, caller: Caller, hints: Hints
    ) -> Completion:
        """Generate another answer to the prompt of `answer`, and return it with the same index.

        The timings of the new answer begin with the start of `answer`.

        Raises:
            ServerStoppingError: the job was cancelled meanwhile.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        if self not in self._running:
            raise ServerStoppingError("This answer was cancelled.")
        prompt = self._prompts[answer.index // self.params.n]
        outputs = await self._engine.generate([prompt], params, caller, hints)
        self._redrawn_outputs = outputs
        try:
            new_answer = join([output async for output in outputs])
        finally:
            outputs.cancel()
        if new_answer.finish_reason is FinishReason.CANCEL:
            raise ServerStoppingError("The server is stopping: this answer was cut off.")
        return replace_answer(answer, new_answer)

    def use_new_answer(self, answer: Completion) -> None:
        """Report an answer that was generated again in place of the answer with the same index."""
        self._results[answer.index] = (answer.finish_reason, answer.usage, answer.timings)

    def cancel(self) -> None:
        """Stop generating the answers at once; does nothing if they have ended."""
        self._running.discard(self)
        if self._redrawn_outputs is not None:
            self._redrawn_outputs.cancel()
        if not self.num_open:
            return
        self._outputs.cancel()
        if not self._is_over:
            self._is_over = True
            self._metrics.goodput.leave(
                self._job.caller.service_tier,
                self.num_open,
                time.monotonic() - self._began_s,
                has_begun=self._num_tokens > 0,
            )

    @property
    def service_tier(self) -> str:
        """The service tier of the request."""
        return self._job.caller.service_tier

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        return self._prompts

    @property
    def results(self) -> Mapping[int, tuple[FinishReason, Usage, Timings]]:
        """The results of the answers that have ended, by index."""
        return self._results

    @property
    def source(self) -> AnswerSource:
        """Where the answers come from.

        If a request shares the run of an equal request that fails, its own answers are computed
        after all, and the source changes.
        """
        if isinstance(self._outputs, JoinedOutputs):
            return self._outputs.source
        return self._source

    @property
    def num_unread(self) -> int:
        """The number of the engine's outputs that a slow client has not read yet."""
        return self._outputs.num_unread

    @property
    def usage(self) -> Usage:
        """The total usage of the answers that have ended.

        The tokens of a prompt with several answers count once.
        """
        usages = {index: usage for index, (_, usage, _) in self._results.items()}
        first_usages = [usage for index, usage in usages.items() if self._is_first(index)]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in first_usages),
            cached_tokens=sum(usage.cached_tokens for usage in first_usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages.values()),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages.values()),
            rejected_tokens=sum(usage.rejected_tokens for usage in usages.values()),
            reused_tokens=sum(usage.reused_tokens for usage in usages.values()),
        )

    @property
    def used(self) -> Usage | None:
        """The tokens that all answers have used so far, which the API key's limits count.

        While answers are generated, their whole prompts count, since prefill precedes the first
        output. If the answers come from an equal request, all prompt and answer tokens count, and
        cost, as cached prompt tokens. None if the job timed out before its start.
        """
        if self._is_unrun:
            return None
        if self.source is not AnswerSource.COMPUTED:
            num_tokens = self._num_prompt + self._num_tokens
            return Usage(num_tokens, num_tokens, 0)
        if not self.num_open:
            return self.usage
        return Usage(self._num_prompt, sum(self._num_cached.values()), self._num_tokens)

    @property
    def timings(self) -> Timings | None:
        """Times from the first answer's arrival to the last answer's end.

        None while no answer has ended.
        """
        choice_timings = [timings for _, _, timings in self._results.values()]
        if not choice_timings:
            return None
        return Timings(
            arrival_s=min(timings.arrival_s for timings in choice_timings),
            started_s=min(timings.started_s for timings in choice_timings),
            first_token_s=min(timings.first_token_s for timings in choice_timings),
            last_token_s=max(timings.last_token_s for timings in choice_timings),
        )

    def figures(self) -> dict[str, Any]:
        """Return the job's token counts and times for logs and traces.

        Answers that have not ended count, too.
        """
        usage = self.usage
        timings = self.timings
        results = self._results.values()
        tpots_s = [timings.tpot_s(usage.completion_tokens) for _, usage, timings in results]
        measured_tpots_s = [tpot_s for tpot_s in tpots_s if tpot_s is not None]
        return {
            "class": self._job.caller.service_tier,
            "stream": self._job.stream,
            "choices": self._job.num_choices,
            "prompt_tokens": self._num_prompt,
            "cached_tokens": sum(self._num_cached.values()),
            "completion_tokens": self._num_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "rejected_tokens": usage.rejected_tokens,
            "reused_tokens": usage.reused_tokens,
            "finish_reasons": [reason.value for reason, _, _ in results],
            "queue_s": timings and timings.queue_s,
            "ttft_s": timings.ttft_s if timings else self._ttft_s,
            "tpot_s": (sum(measured_tpots_s) / len(measured_tpots_s) if measured_tpots_s else None),
            "e2e_s": timings and timings.e2e_s,
        }

    def _is_first(self, index: int) -> bool:
        """Return whether the answer `index` is the first answer to its prompt."""
        return index % self.params.n == 0

    def _note(self, output: Output, usage: Usage) -> None:
        if self._is_first(output.index):
            self._num_cached[output.index] = usage.cached_tokens
        reason = output.finish_reason
        if reason is None:
            if self._ttft_s is None and output.token_ids:
                self._ttft_s = time.monotonic() - self._began_s
            return
        if reason is FinishReason.CANCEL:  # the server cancelled, since the client still reads
            raise ServerStoppingError("The server is stopping: this answer was cut off.")
        assert output.timings is not None
        self._results[output.index] = (reason, usage, output.timings)
        self.num_open -= 1
        self._metrics.goodput.judge(self._job.caller.service_tier, usage, output.timings)


class RunningEmbeddings:
    """The embeddings of a job that runs in the engine.

    Attributes:
        num_tokens: the number of tokens of all texts.
        num_open: the number of texts whose embeddings are not ready.
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
        """Submit texts to the engine, and return their running embeddings.

        They are in `running`, the server's open requests, until `cancel`.

        Raises:
            RequestError: a text is empty, has unknown token ids, or can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        outputs = await engine.embed(texts, job.params, job.caller)
        return cls(engine, job, texts=texts, metrics=metrics, running=running, outputs=outputs)

    def __init__(
        self,
        engine: ServedEngine,
        job: EmbeddingJob,
        texts: list[list[int]],
        metrics: ServerMetrics,
        running: set[Open],
        outputs: ServedOutputs,
    ) -> None:
        """Wrap the `outputs` of texts that the engine has accepted; see `start`."""
        self.num_open = len(texts)
        self.num_tokens = sum(map(len, texts))
        self._num_cached = 0
        self._is_unrun = False
        self._engine = engine
        self._job = job
        self._metrics = metrics
        self._outputs = outputs
        self._running = running
        running.add(self)

    async def encoded_vectors(
        self, run_in_thread: Callable[..., Awaitable[Any]]
    ) -> list[msgspec.Raw]:
        """Wait for all embeddings, and return each as JSON for the response, in order of the texts.

        `run_in_thread` encodes large embeddings, so that they do not block the event loop.

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
                if embedding.vector.size <= _MAX_INLINE_VALUES:
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
        """Stop computing the embeddings at once; does nothing if they are ready."""
        self._running.discard(self)
        self._outputs.cancel()

    @property
    def service_tier(self) -> str:
        """The service tier of the request."""
        return self._job.caller.service_tier

    @property
    def used(self) -> Usage | None:
        """The tokens of all texts, which the API key's limits count.

        None if the job timed out before any text was computed.
        """
        return None if self._is_unrun else Usage(self.num_tokens, self._num_cached, 0)

    def figures(self) -> dict[str, Any]:
        """Return the job's counts of texts and tokens, for logs and traces."""
        return {
            "class": self._job.caller.service_tier,
            "texts": len(self._job.texts),
            "prompt_tokens": self.num_tokens,
            "cached_tokens": self._num_cached,
        }


Running = RunningAnswers | RunningEmbeddings
Open = Running | Submission


def _is_unrun(error: TwostrokeError) -> bool:
    """Return whether an error says that a request timed out before anything was computed.

    Such a request does not count against the limits of its API key.
    """
    return bool(error.facts.get("is_unrun"))


def _count_failure(error: TwostrokeError, engine: ServedEngine, metrics: ServerMetrics) -> None:
    """Count an error as an engine failure, unless the request or its deadline caused it.

    Raises:
        EngineStoppedError: the engine has stopped, and `error` is of another type.
    """
    if isinstance(error, (RequestError, DeadlineError)):
        return
    metrics.failures.inc()
    if engine.health is Health.STOPPED and not isinstance(error, EngineStoppedError):
        raise EngineStoppedError(str(error)) from error
