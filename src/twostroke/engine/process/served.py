"""The engine interface that a server uses, and its implementation in the server's own process."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from twostroke.backends.interface import BackendFacts, RankState
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_used
from twostroke.engine.counters import Snapshot, TimeSpan
from twostroke.engine.disaggregation_stats import DisaggregationStats
from twostroke.engine.resumption import ResumptionTotals
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.status import Health, RunningRequests, StepProgress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.request import EmbeddingParams, Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller, Client
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Output
    from twostroke.engine.resumption import AnswerProgress, ResumptionLimits
    from twostroke.engine.structured_output.grammar import GrammarMatcher


class EngineFacts(Frozen):
    """Facts about an engine. While it runs, only the limits in `config` can be changed.

    `methods` are the names of the engine's speculation methods. `keeps_pages` says whether it keeps
    KV pages on disk or in a store (KV offload).
    """

    backend: BackendFacts
    config: SchedulerConfig
    methods: tuple[str, ...]
    keeps_pages: bool = False


class EngineStatus(Frozen):
    """The state of an engine at one moment.

    `spans` has the counts of each requested time span, in the order of the request. `memory_bytes`
    is the memory of the engine's process. `disaggregation` is None in the role "mixed".
    """

    snapshot: Snapshot
    view: RunningRequests
    ranks: tuple[RankState, ...]
    spans: tuple[TimeSpan[Snapshot], ...]
    memory_bytes: int
    disaggregation: DisaggregationStats | None = None


class ServedOutputs(Protocol):
    """The outputs of one call to an engine, to read in the running event loop."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the call's outputs and raise errors as `AsyncGeneration` does."""

    def cancel(self) -> None:
        """Cancel all unfinished requests of the call.

        Their last outputs have the finish reason `CANCEL`.
        """

    def redirect(self, deliver: Callable[[Output], None]) -> None:
        """Pass all outputs to `deliver` instead of the iterator, also outputs that have arrived.

        An output with an error is passed on as it is.
        """

    @property
    def num_unread(self) -> int:
        """The number of outputs that have arrived and were not read yet."""


class UnreadOutputs:
    """The outputs of one call that have arrived and were not read yet; base class of readers."""

    def __init__(self, num_ends: int) -> None:
        """Expect outputs until `num_ends` answers have ended."""
        self._unread: asyncio.Queue[Output] = asyncio.Queue()
        self._deliver: Callable[[Output], None] = self._unread.put_nowait
        self._num_unread_ends = num_ends

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the outputs as they arrive, until every answer has ended.

        Raises:
            RequestError: the request's constraint leaves no token to sample.
            EngineStoppedError: the engine died.
            TwostrokeError: the engine failed on an answer.
        """
        while self._num_unread_ends:
            output = await self._unread.get()
            self._num_unread_ends -= output.finish_reason is not None
            if output.error is not None:
                raise output.error
            yield output

    @property
    def num_unread(self) -> int:
        """The number of outputs that have arrived and were not read yet."""
        return self._unread.qsize()

    def redirect(self, deliver: Callable[[Output], None]) -> None:
        """Pass all outputs to `deliver` instead of the iterator, also outputs that have arrived."""
        while not self._unread.empty():
            deliver(self._unread.get_nowait())
        self._deliver = deliver


class ServedEngine(Protocol):
    """The engine as a server uses it: in the server's own process, or in another process."""

    card: ModelCard

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine: the same object until its limits are changed, or the engine
        process is started again.
        """

    @property
    def health(self) -> Health:
        """Whether the engine can answer requests."""

    @property
    def progress(self) -> StepProgress:
        """The progress of the engine's steps at the last report."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of the engine's process (at its last status) and of the server's now."""

    @property
    def num_deaths(self) -> int:
        """The number of times that the engine process has died."""

    @property
    def resumptions(self) -> ResumptionTotals:
        """Counts of the calls that continued after a death of the engine process."""

    def limit_resumption(self, limits: ResumptionLimits) -> None:
        """Set how long calls continue after deaths of the engine process."""

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        progress: Sequence[AnswerProgress] = (),
    ) -> ServedOutputs:
        """Submit prompts, all or none; errors are as in `Client.generate_many_async`.

        `caller` has the priority, tenant and deadlines. With `progress`, which has an entry for
        each answer, the answers continue after the part that another server has delivered.
        """

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> ServedOutputs:
        """Submit texts to embed; errors are as in `Client.embed_async`."""

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile and cache a constraint for later requests.

        Returns the rules of its JSON schema that the grammar does not enforce.

        Raises:
            RequestError: the constraint cannot be used, or takes longer than `limit_s` to compile.
            EngineStoppedError: the engine no longer runs.
        """

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return the engine's status, as of now or shortly before.

        Each of `spans` is a time span for counts: its length in seconds, and how many seconds ago
        it ended. The engine remembers the last `MAX_SECONDS`.
        """

    def flush(self) -> None:
        """Start a waiting batch that is not full, since no more requests come now."""

    def attach(self, on_end: Callable[[], None]) -> None:
        """Start to serve calls in the running event loop.

        `on_end` is called if the engine ends for good.
        """


class LocalEngine:
    """An engine in the server's process: a crash of the engine ends the server, too."""

    def __init__(self, client: Client) -> None:
        """Serve the engine of `client`."""
        self.card = client.card
        self._facts = engine_facts(client)
        self._client = client
        self._loop = client.loop
        self._compiler = ThreadPoolExecutor(1, "twostroke-compile")
        self._resumptions = ResumptionTotals()

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine's backend, scheduler and speculator."""
        return self._facts

    @property
    def health(self) -> Health:
        """Whether the engine can answer requests."""
        return self._loop.health

    @property
    def progress(self) -> StepProgress:
        """The progress of the engine's steps."""
        return self._loop.progress

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of this process, in which the engine runs."""
        return memory_used()

    @property
    def num_deaths(self) -> int:
        """Always 0: a crash of the engine would have ended this process, too."""
        return 0

    @property
    def resumptions(self) -> ResumptionTotals:
        """Counts that stay 0, since the engine process has no deaths."""
        return self._resumptions

    def limit_resumption(self, limits: ResumptionLimits) -> None:
        """Do nothing, since the engine process has no deaths."""

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        caller: Caller,
        hints: Hints,
        progress: Sequence[AnswerProgress] = (),
    ) -> ServedOutputs:
        """Submit prompts to the engine in this process, all or none."""
        grammar = None
        if params.constraint is not None:
            grammar = self._client.grammars.cached(params.constraint)
            grammar = grammar or await self._matcher(params.constraint)
        return self._client.generate_many_async(
            prompts, params, caller=caller, hints=hints, grammar=grammar, progress=progress
        )

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> ServedOutputs:
        """Submit texts to embed to the engine in this process."""
        return self._client.embed_async(texts, params, caller)

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile and cache a constraint in another thread, one constraint at a time.

        Returns the rules of its JSON schema that the grammar does not enforce.
        """
        return (await self._matcher(constraint, limit_s)).unenforced_keywords

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return the engine's status at this moment."""
        return read_status(self._client, spans)

    def flush(self) -> None:
        """Start a waiting batch that is not full."""
        self._loop.flush()

    def change_limits(self, token_budget: int, max_running: int) -> None:
        """Change the limits of later steps; raise UsageError as `Scheduler.change_limits`."""
        self._loop.change_limits(token_budget, max_running)
        self._facts = engine_facts(self._client)

    def attach(self, on_end: Callable[[], None]) -> None:
        """Do nothing: the engine loop has its own thread, and needs no event loop."""

    async def _matcher(self, constraint: Constraint, limit_s: float = math.inf) -> GrammarMatcher:
        compile_ = self._client.grammars.compile
        return await asyncio.get_running_loop().run_in_executor(
            self._compiler, compile_, constraint, limit_s
        )

    def close(self) -> None:
        """End the thread that compiles constraints, after its present constraint."""
        self._compiler.shutdown(wait=False, cancel_futures=True)


def engine_facts(client: Client) -> EngineFacts:
    """Return the facts about an engine in this process."""
    loop = client.loop
    return EngineFacts(
        loop.facts, loop.config, loop.speculator.methods, keeps_pages=bool(loop.pages.totals())
    )


def read_status(client: Client, spans: Sequence[tuple[int, int]]) -> EngineStatus:
    """Return the status of an engine in this process at this moment."""
    loop = client.loop
    return EngineStatus(
        snapshot=loop.snapshot(),
        view=loop.view(),
        ranks=tuple(loop.ranks()),
        spans=tuple(loop.span(seconds, ago_s) for seconds, ago_s in spans),
        memory_bytes=memory_used(),
        disaggregation=client.disaggregation_stats() if client.disaggregation_stats else None,
    )
