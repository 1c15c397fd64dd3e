"""An engine as a server uses it: in the server's process, or in one of its own."""

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
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.status import Health, RunningRequests, StepProgress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.embedding import EmbeddingParams
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.client import Caller, Client
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Output
    from twostroke.engine.structured_output.grammar import GrammarMatcher


class EngineFacts(Frozen):
    """An engine's backend, its scheduler's limits, and its methods of guessing tokens.

    With `keeps_pages` it has a page cache.
    """

    backend: BackendFacts
    config: SchedulerConfig
    methods: tuple[str, ...]
    keeps_pages: bool = False


class EngineStatus(Frozen):
    """An engine at one moment: counts, running requests, pages, ranks, and the spans asked for.

    `memory_bytes` is what the engine's process uses. `handover` is None in the role "mixed".
    """

    snapshot: Snapshot
    view: RunningRequests
    ranks: tuple[RankState, ...]
    spans: tuple[TimeSpan[Snapshot], ...]
    memory_bytes: int
    handover: DisaggregationStats | None = None


class ServedOutputs(Protocol):
    """The outputs of what was asked for, to read in the running event loop."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """Yield outputs as `AsyncGeneration` does, and raise its errors."""

    def cancel(self) -> None:
        """Stop all that still runs; its last outputs say so."""

    @property
    def num_unread(self) -> int:
        """How many outputs have come and were not read yet."""


class ServedEngine(Protocol):
    """What a server needs of an engine."""

    card: ModelCard

    @property
    def facts(self) -> EngineFacts:
        """What stays the same, and the same object, as long as the engine is not started again."""

    @property
    def health(self) -> Health:
        """Whether the engine can answer."""

    @property
    def progress(self) -> StepProgress:
        """What it has computed, as far as is known."""

    @property
    def memory_bytes(self) -> int:
        """What all of its processes used when they were last asked, and this one now."""

    @property
    def num_deaths(self) -> int:
        """How often its process has died."""

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, caller: Caller, hints: Hints
    ) -> ServedOutputs:
        """Queue prompts, all or none; arguments and errors as `Client.generate_many_async`."""

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> ServedOutputs:
        """Queue texts; errors as `Client.embed_async`."""

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile a constraint, and return its `gaps`; requests with it then start at once.

        Raises:
            RequestError: it cannot be used, or takes longer than `limit_s`.
            EngineStoppedError: the engine no longer runs.
        """

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return counts and `spans` (seconds, how long ago they ended), as of now or just before.

        Only the last `MAX_SECONDS` are known.
        """

    def flush(self) -> None:
        """Start a batch that is not full: no more requests come now."""

    def attach(self, on_end: Callable[[], None]) -> None:
        """Begin in the running event loop; `on_end` is called if the engine is given up."""


class LocalEngine:
    """An engine in the server's process: if one of them crashes, so does the other."""

    def __init__(self, client: Client) -> None:
        """Serve through `client`."""
        self.card, self._facts = client.card, facts_of(client)
        self._client, self._loop = client, client.loop
        self._compiler = ThreadPoolExecutor(1, "twostroke-compile")

    @property
    def facts(self) -> EngineFacts:
        """The backend's, the scheduler's and the speculator's."""
        return self._facts

    @property
    def health(self) -> Health:
        """Whether the engine can answer."""
        return self._loop.health

    @property
    def progress(self) -> StepProgress:
        """What it has computed."""
        return self._loop.progress

    @property
    def memory_bytes(self) -> int:
        """What this process uses."""
        return memory_used()

    @property
    def num_deaths(self) -> int:
        """Zero: who could count them has died, too."""
        return 0

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, caller: Caller, hints: Hints
    ) -> ServedOutputs:
        """Queue prompts, all or none."""
        grammar = None
        if params.constraint is not None:
            grammar = self._client.grammars.known(params.constraint)
            grammar = grammar or await self._matcher(params.constraint)
        return self._client.generate_many_async(prompts, params, caller, hints, grammar)

    async def embed(
        self, texts: Sequence[Sequence[int]], params: EmbeddingParams, caller: Caller
    ) -> ServedOutputs:
        """Queue texts."""
        return self._client.embed_async(texts, params, caller)

    async def compile(self, constraint: Constraint, limit_s: float = math.inf) -> tuple[str, ...]:
        """Compile a constraint in another thread, one at a time."""
        return (await self._matcher(constraint, limit_s)).gaps

    async def read(self, spans: Sequence[tuple[int, int]] = ()) -> EngineStatus:
        """Return counts and spans as of now."""
        return take_reading(self._client, spans)

    def flush(self) -> None:
        """Start a batch that is not full."""
        self._loop.flush()

    def attach(self, on_end: Callable[[], None]) -> None:
        """Do nothing: the engine has its own thread."""

    async def _matcher(self, constraint: Constraint, limit_s: float = math.inf) -> GrammarMatcher:
        compile_ = self._client.grammars.compile
        return await asyncio.get_running_loop().run_in_executor(
            self._compiler, compile_, constraint, limit_s
        )

    def close(self) -> None:
        """End the compiling thread after its present constraint."""
        self._compiler.shutdown(wait=False, cancel_futures=True)


def facts_of(client: Client) -> EngineFacts:
    """Return what stays the same about an engine in this process."""
    loop = client.loop
    return EngineFacts(
        loop.facts, loop.config, loop.speculator.methods, keeps_pages=bool(loop.pages.totals())
    )


def take_reading(client: Client, spans: Sequence[tuple[int, int]]) -> EngineStatus:
    """Return counts and spans of an engine in this process, as of now."""
    loop = client.loop
    found = tuple(loop.span(seconds, ago_s) for seconds, ago_s in spans)
    handover = client.disaggregation_stats() if client.disaggregation_stats else None
    ranks, used = tuple(loop.ranks()), memory_used()
    return EngineStatus(loop.snapshot(), loop.view(), ranks, found, used, handover)
