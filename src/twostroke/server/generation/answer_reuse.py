"""Computes equal requests once: requests in flight share one computation, and answers are cached.

Two requests are equal if they must get the same tokens: the same model with the same numerics, the
same prompts and sampling parameters, and no randomness, because the temperature is 0 or the request
has a seed. Tenants never share answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.structs import replace
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from twostroke.core.errors import EngineStoppedError, RequestError, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.request import BATCH_SERVICE_TIER, FinishReason
from twostroke.engine.output import Output, Timings, Usage
from twostroke.engine.process.messages import encode
from twostroke.engine.process.served import UnreadOutputs
from twostroke.server.models.residency import ModelResidency
from twostroke.server.observability.health import numerics_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry, Metric

    from twostroke.engine.client import Caller
    from twostroke.engine.process.served import ServedEngine, ServedOutputs
    from twostroke.engine.resumption import AnswerProgress
    from twostroke.server.generation.job import EncodedJob, Job
    from twostroke.server.options import ServeOptions

Submitted: TypeAlias = "tuple[ServedOutputs, AnswerSource]"

_BATCH_STORE_BYTES: Final = 32 * 1024 * 1024  # of answers to batch requests, for equal ones
_NO_USAGE: Final = Usage(0, 0, 0)
# Estimated bytes of stored outputs.
_OUTPUT_BYTES: Final = 500
_TOKEN_BYTES: Final = 36
_SCORE_BYTES: Final = 120


class AnswerSource(StrEnum):
    """Where the answers to a request come from."""

    COMPUTED = "computed"  # by the engine, for this request
    SHARED = "shared"  # by the engine, for an equal request that was in flight
    STORED = "stored"  # by the engine, for an equal request that has ended


class ReuseRule(Frozen):
    """Which answers of other requests a request may get, and whether others may get its answers.

    Attributes:
        may_read: whether this request may get answers of equal requests.
        may_store: whether equal requests may get the answers of this request.
    """

    may_read: bool = True
    may_store: bool = True


def reuse_rule(headers: Iterable[tuple[bytes, bytes]]) -> ReuseRule:
    """Return the rule that a request's `Cache-Control` header asks for.

    With `no-cache`, the request's own answers are computed now. With `no-store`, other requests do
    not get these answers, either. Other directives have no effect.
    """
    values = [value for name, value in headers if name == b"cache-control"]
    directives = {directive.strip().lower() for value in values for directive in value.split(b",")}
    may_store = b"no-store" not in directives
    return ReuseRule(may_read=may_store and b"no-cache" not in directives, may_store=may_store)


class StoredAnswers:
    """An LRU cache of the answers to finished requests, by the digest of the request.

    Attributes:
        num_bytes: the estimated memory of all stored answers.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Store answers in at most `max_bytes`, each for at most `ttl_s` seconds of `clock`."""
        self._clock = clock
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._answers: dict[bytes, tuple[list[Output], int, float]] = {}  # oldest use first

    def __len__(self) -> int:
        """Return the number of stored requests, expired ones included."""
        return len(self._answers)

    def get(self, key: bytes) -> list[Output] | None:
        """Return the outputs of a finished request, one for each of its choices, if stored."""
        if key not in self._answers:
            return None
        outputs, num_bytes, expires_at_s = self._answers.pop(key)
        if self._clock() >= expires_at_s:
            self.num_bytes -= num_bytes
            return None
        self._answers[key] = (outputs, num_bytes, expires_at_s)
        return outputs

    def put(self, key: bytes, outputs: list[Output]) -> None:
        """Store the outputs of a finished request, unless they are larger than the whole store."""
        num_bytes = sum(map(_size, outputs))
        if num_bytes > self._max_bytes:
            return
        if key in self._answers:
            self.num_bytes -= self._answers.pop(key)[1]
        self._answers[key] = (outputs, num_bytes, self._clock() + self._ttl_s)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self._answers))
            self.num_bytes -= self._answers.pop(oldest)[1]


class ReaderOutputs(UnreadOutputs):
    """The outputs of a `SharedRun` for one of its requests; implements `ServedOutputs`.

    Attributes:
        source: where the outputs come from.
    """

    def __init__(
        self, num_choices: int, source: AnswerSource, run: SharedRun | None = None
    ) -> None:
        """Wait for the outputs of `num_choices` answers; `run` is None for stored answers."""
        super().__init__(num_choices)
        self.source = source
        self._run = run
        self._arrival_s = time.monotonic()
        self._first_token_s: dict[int, float] = {}  # by choice
        self._open_choices = set(range(num_choices))

    def put(self, output: Output) -> None:
        """Add an output of the run, with the token counts and times of this request."""
        if self.source is not AnswerSource.COMPUTED:
            output = self._as_reused(output)
        if output.finish_reason is not None:
            if output.error is not None:  # it ends all answers
                self._open_choices.clear()
            self._open_choices.discard(output.index)
        self._deliver(output)

    def cancel(self) -> None:
        """End the answers for this request; the run continues for other requests, if any.

        Without other requests, the call to the engine is cancelled.
        """
        open_choices, self._open_choices = self._open_choices, set()
        if not open_choices:
            return
        if self._run is not None and self._run.leave(self):
            self._open_choices = open_choices  # the engine ends them
            return
        for index in sorted(open_choices):
            reason = FinishReason.CANCEL
            self._deliver(
                Output(index, "", (), finish_reason=reason, usage=_NO_USAGE, timings=None)
            )

    def _as_reused(self, output: Output) -> Output:
        """Return a copy of an output of another request, with this request's usage and times.

        All prompt tokens count as cached and all answer tokens as reused, since they were not
        computed for this request.
        """
        now_s = time.monotonic()
        if output.token_ids:
            self._first_token_s.setdefault(output.index, now_s)
        usage, timings = output.usage, None
        if usage is not None:
            usage = Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                reused_tokens=usage.completion_tokens,
            )
        if output.timings is not None:
            first_token_s = self._first_token_s.get(output.index, now_s)
            timings = Timings(self._arrival_s, self._arrival_s, first_token_s, now_s)
        return replace(output, usage=usage, timings=timings)


class SharedRun:
    """A call to the engine whose outputs one or several equal requests read.

    Attributes:
        accepted: a future that is done when the engine has accepted the call or refused it.
        has_failed: whether the run has ended without all answers, so that no request may join.
    """

    def __init__(self, num_choices: int) -> None:
        """Create a run of `num_choices` answers, which the engine has not accepted yet."""
        self.accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.has_failed = False
        self._outputs: ServedOutputs | None = None
        self._num_choices = num_choices
        self._received: list[list[Output]] = [[] for _ in range(num_choices)]
        self._num_open = num_choices
        self._readers: list[ReaderOutputs] = []
        self._on_end: Callable[[list[Output] | None], None] | None = None

    def begin(
        self, outputs: ServedOutputs, on_end: Callable[[list[Output] | None], None]
    ) -> ReaderOutputs:
        """Start to receive the outputs of the accepted call.

        Returns the outputs for the request that made the call. `on_end(answers)` is called
        at the end, with an output for each choice, or None if the run failed or was cancelled.
        """
        self._outputs = outputs
        self._on_end = on_end
        reader = ReaderOutputs(self._num_choices, AnswerSource.COMPUTED, self)
        self._readers.append(reader)
        outputs.redirect(self._receive)
        self.accepted.set_result(True)
        return reader

    def join(self) -> ReaderOutputs:
        """Let another request read the outputs, from the beginning; return them."""
        reader = ReaderOutputs(self._num_choices, AnswerSource.SHARED, self)
        for outputs in self._received:
            if outputs:
                reader.put(merged_output(outputs))
        if self._num_open:
            self._readers.append(reader)
        return reader

    def leave(self, reader: ReaderOutputs) -> bool:
        """Stop passing outputs to a reader whose request was cancelled.

        If it was the only reader, cancels the call to the engine, and returns True: the engine then
        sends the last outputs. Otherwise returns False.
        """
        assert self._outputs is not None
        if len(self._readers) == 1:
            self._outputs.cancel()
            self._end(None)
            return True
        self._readers.remove(reader)
        return False

    def _receive(self, output: Output) -> None:
        """Pass an output of the engine to all readers."""
        if output.error is None:
            self._received[output.index].append(output)
        for reader in tuple(self._readers):
            reader.put(output)
        if output.finish_reason is None:
            return
        self._num_open = 0 if output.error is not None else self._num_open - 1
        if output.error is not None or output.finish_reason is FinishReason.CANCEL:
            self._end(None)
        elif not self._num_open:
            self._end([merged_output(outputs) for outputs in self._received])

    def _end(self, answers: list[Output] | None) -> None:
        """Report the end of the run, once."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self.has_failed = answers is None
            on_end(answers)


class JoinedOutputs:
    """The outputs of a request that joined another request's run; implements `ServedOutputs`.

    The run may fail before its first output for a reason of the other request, such as its
    deadline. The request that joined is then submitted again, within the rest of its own deadline.
    """

    def __init__(
        self,
        outputs: ReaderOutputs,
        caller: Caller,
        submit: Callable[[float], Awaitable[Submitted]],
    ) -> None:
        """Read `outputs` for a request of `caller`.

        `submit(start_within_s)` submits the request again.
        """
        self._source = AnswerSource.SHARED
        self._outputs: ServedOutputs = outputs
        self._caller = caller
        self._submit = submit
        self._joined_s = time.monotonic()
        self._is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the outputs as they arrive, until every answer has ended.

        Raises:
            TwostrokeError: the engine failed on an answer.
        """
        has_begun = False
        try:
            async for output in self._outputs:
                has_begun = True
                yield output
        except TwostrokeError as error:
            left_s = self._caller.start_within_s - (time.monotonic() - self._joined_s)
            is_lost = self._caller.continues_elsewhere and isinstance(error, EngineStoppedError)
            is_over = has_begun or self._is_cancelled or left_s <= 0.0 or is_lost
            if is_over or isinstance(error, RequestError):
                raise
        else:
            return
        self._outputs, self._source = await self._submit(left_s)
        if self._is_cancelled:
            self._outputs.cancel()
        async for output in self._outputs:
            yield output

    @property
    def source(self) -> AnswerSource:
        """Where the outputs come from; a request that is submitted again may be computed."""
        if isinstance(self._outputs, JoinedOutputs):
            return self._outputs.source
        return self._source

    @property
    def num_unread(self) -> int:
        """The number of outputs that have arrived and were not read yet."""
        return self._outputs.num_unread

    def redirect(self, deliver: Callable[[Output], None]) -> None:
        """Pass outputs to `deliver` in place of the iterator."""
        self._outputs.redirect(deliver)

    def cancel(self) -> None:
        """End the answers for this request; the run continues for other requests, if any."""
        self._is_cancelled = True
        self._outputs.cancel()


class AnswerReuse:
    """Submits requests to engines, and computes equal requests once.

    Attributes:
        num_requests: the number of requests without randomness, by the source of their answers.
    """

    def __init__(self, *, coalesces: bool, store_bytes: int, ttl_s: float) -> None:
        """Set for which requests answers are reused.

        Args:
            coalesces: whether equal requests in flight share a run, and equal batch requests share
                their answers.
            store_bytes: the maximum memory for answers of finished requests; 0 stores no answers.
            ttl_s: the seconds for which answers are stored.
        """
        self.num_requests: Counter[AnswerSource] = Counter()
        self._coalesces = coalesces
        self._stored = StoredAnswers(store_bytes, ttl_s)
        self._stored_of_batches = StoredAnswers(_BATCH_STORE_BYTES if coalesces else 0, ttl_s)
        self._runs: dict[bytes, SharedRun] = {}
        self._is_active = coalesces or store_bytes > 0

    @property
    def stored_bytes(self) -> int:
        """The estimated memory of all stored answers."""
        return self._stored.num_bytes + self._stored_of_batches.num_bytes

    @property
    def num_stored(self) -> int:
        """The number of finished requests whose answers are stored."""
        return len(self._stored) + len(self._stored_of_batches)

    async def generate(
        self,
        engine: ServedEngine,
        job: Job,
        encoded: EncodedJob,
        rule: ReuseRule,
        progress: Sequence[AnswerProgress] = (),
    ) -> Submitted:
        """Return the outputs of a job's answers, and where they come from.

        Answers that continue after the part `progress` are always computed.

        Raises:
            RequestError, OverloadedError, EngineStoppedError: as `ServedEngine.generate`.
        """
        is_reusable = self._is_active and rule.may_store and not progress
        if not (is_reusable and _is_repeatable(job, encoded) and _is_loaded(engine)):
            outputs = await engine.generate(
                encoded.prompts, encoded.params, job.caller, encoded.hints, progress
            )
            return outputs, AnswerSource.COMPUTED
        key = _content_key(engine, job, encoded)
        stores = [self._stored]
        if job.caller.service_tier == BATCH_SERVICE_TIER:
            stores.append(self._stored_of_batches)
        if rule.may_read:
            for store in stores:
                if (answers := store.get(key)) is not None:
                    return self._replay(answers), AnswerSource.STORED
        run_key = b""
        if self._coalesces and rule.may_read and math.isinf(job.caller.timeout_s):
            run_key = key + _urgency_key(job)

            def submit_again(start_within_s: float) -> Awaitable[Submitted]:
                caller = replace(job.caller, start_within_s=start_within_s)
                return self.generate(engine, replace(job, caller=caller), encoded, rule)

            if (joined := await self._join(run_key, job.caller, submit_again)) is not None:
                return joined, AnswerSource.SHARED
        run = SharedRun(job.num_choices)

        def on_end(answers: list[Output] | None) -> None:
            self._forget(run_key, run)
            if answers is not None:
                for store in stores:
                    store.put(key, answers)

        outputs = await self._begin(run, run_key, engine, job, encoded)
        return run.begin(outputs, on_end), AnswerSource.COMPUTED

    async def _join(
        self,
        run_key: bytes,
        caller: Caller,
        submit_again: Callable[[float], Awaitable[Submitted]],
    ) -> JoinedOutputs | None:
        """Return the outputs of an equal request in flight; None if there is no such request."""
        while (run := self._runs.get(run_key)) is not None:
            if await asyncio.shield(run.accepted) and not run.has_failed:
                self.num_requests[AnswerSource.SHARED] += 1
                return JoinedOutputs(run.join(), caller, submit_again)
        return None

    async def _begin(
        self, run: SharedRun, run_key: bytes, engine: ServedEngine, job: Job, encoded: EncodedJob
    ) -> ServedOutputs:
        """Submit a job to the engine, and let equal requests wait until it is accepted."""
        if run_key:
            self._runs[run_key] = run
        try:
            outputs = await engine.generate(
                encoded.prompts, encoded.params, job.caller, encoded.hints
            )
        except BaseException:  # also if the client leaves: equal requests that wait try again
            self._forget(run_key, run)
            run.accepted.set_result(False)
            raise
        self.num_requests[AnswerSource.COMPUTED] += 1
        return outputs

    def _replay(self, answers: list[Output]) -> ReaderOutputs:
        """Return stored outputs, one for each choice, for another request."""
        self.num_requests[AnswerSource.STORED] += 1
        reader = ReaderOutputs(len(answers), AnswerSource.STORED)
        for output in answers:
            reader.put(output)
        return reader

    def _forget(self, run_key: bytes, run: SharedRun) -> None:
        """Make sure that no more requests join a run."""
        if self._runs.get(run_key) is run:
            del self._runs[run_key]


class ReuseMetrics(Collector):
    """The Prometheus metrics of an `AnswerReuse`."""

    def __init__(self, reuse: AnswerReuse) -> None:
        """Report the counts of `reuse`."""
        self._reuse = reuse

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as of now."""
        text = "Requests without randomness: computed, shared with one in flight, or stored before."
        requests = CounterMetricFamily("twostroke_repeatable_requests", text, labels=("source",))
        for source in AnswerSource:
            requests.add_metric((source.value,), self._reuse.num_requests[source])
        yield requests
        for name, text, value in (
            ("answers", "Finished requests whose answers are kept.", self._reuse.num_stored),
            ("bytes", "Estimated memory of kept answers.", self._reuse.stored_bytes),
        ):
            yield GaugeMetricFamily(f"twostroke_answer_cache_{name}", text, value)


def create_answer_reuse(options: ServeOptions, registry: CollectorRegistry) -> AnswerReuse:
    """Return a server's `AnswerReuse`, whose metrics are in `registry`."""
    reuse = AnswerReuse(
        coalesces=options.coalesces,
        store_bytes=options.answer_cache_bytes,
        ttl_s=options.answer_cache_ttl_s,
    )
    registry.register(ReuseMetrics(reuse))
    return reuse


def merged_output(outputs: Sequence[Output]) -> Output:
    """Join the outputs of one choice so far to one output."""
    first, last = outputs[0], outputs[-1]
    usages = [output.usage for output in outputs if output.usage is not None]
    return Output(
        first.index,
        "".join(output.text for output in outputs),
        tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        prompt_logprobs=tuple(score for output in outputs for score in output.prompt_logprobs),
        finish_reason=last.finish_reason,
        stop=last.stop,
        usage=usages[-1] if usages else None,
        timings=last.timings,
        schema_miss=last.schema_miss,
    )


def _size(output: Output) -> int:
    """Estimate the memory of a stored output in bytes."""
    scores = (*output.logprobs, *output.prompt_logprobs)
    num_scores = sum(1 + len(score.top_ids) for score in scores if score is not None)
    num_bytes = len(output.text) + _TOKEN_BYTES * len(output.token_ids)
    return _OUTPUT_BYTES + num_bytes + _SCORE_BYTES * num_scores


def _is_repeatable(job: Job, encoded: EncodedJob) -> bool:
    """Return whether a request equal to this one must get the same answers."""
    params = job.params
    is_random = params.temperature != 0.0 and params.seed is None
    return not is_random and not encoded.hints.shows_progress


def _is_loaded(engine: ServedEngine) -> bool:
    """Return whether the engine's model is in memory.

    The files of a model that is not loaded may change, so its answers must not be reused.
    """
    residency = getattr(engine, "residency", ModelResidency.LOADED)
    return residency is ModelResidency.LOADED and bool(numerics_of(engine))


def _content_key(engine: ServedEngine, job: Job, encoded: EncodedJob) -> bytes:
    """Return a digest of everything on which a request's answers depend, and of its tenant."""
    params = replace(encoded.params, seed=job.params.seed)  # `fix_seed` may have chosen another
    caller = job.caller
    facts = (engine.card.name, numerics_of(engine), caller.tenant, caller.cuts_limit)
    return hashlib.sha256(encode((facts, params, encoded.prompts))).digest()


def _urgency_key(job: Job) -> bytes:
    """Return a key of a request's priority, service tier and deadline.

    Only requests with equal keys share a run. Otherwise a request could wait for a run with a lower
    priority than its own.
    """
    caller = job.caller
    times = (caller.start_within_s, job.keep_s, caller.continues_elsewhere)
    return encode((caller.priority, caller.service_tier, caller.weight, times))
