"""GET /health, /health/live, /health/ready and /health/progress, and GET /api/load for routers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.status import Health
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.http.retry_after import RETRY_AFTER_S
from twostroke.server.http.router_messages import ServerLoad
from twostroke.server.models.about import VERSION, HealthBody, ProgressBody
from twostroke.server.models.model_pool import ModelPool
from twostroke.server.observability.disaggregation import prefill_per_decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.process.served import EngineStatus, ServedEngine
    from twostroke.server.http.model_names import ModelNames
    from twostroke.server.storage import Records

_RETRY_HEADERS: Final = {"retry-after": str(RETRY_AFTER_S)}
_GOOD_STATUSES: Final = (Health.READY.value, "draining")
_logger = logging.getLogger("twostroke.serve")


class HealthReports:
    """Answers health checks, and reports the load of the server and its engines to routers."""

    def __init__(
        self,
        engine: ServedEngine,
        names: ModelNames,
        is_draining: Callable[[], bool],
        records: Records | None,
        *,
        coalesces: bool = True,
    ) -> None:
        """Prepare the reports of a server.

        Args:
            engine: the server's engine, or the pool of its engines.
            names: the names of the served models.
            is_draining: returns whether the server refuses new requests, as it stops.
            records: the server's database and file folder; None if it stores no files and
                batches.
            coalesces: whether equal requests in flight are computed once.
        """
        self._engine = engine
        self._names = names
        self._is_draining = is_draining
        pool_engines = list(engine.engines.values()) if isinstance(engine, ModelPool) else []
        self._engines: list[ServedEngine] = [*pool_engines] or [engine]
        self._keeps_files = records is not None
        self._coalesces = coalesces
        self._name = names.served_names[0]
        self._start_id = secrets.token_hex(8)
        self._last_status = Health.READY.value

    @property
    def is_well(self) -> bool:
        """Whether requests are answered now, or will be answered once the engine has restarted."""
        return self._engine.health in {Health.READY, Health.RECOVERING}

    def attach(self, on_end: Callable[[], None]) -> None:
        """Register `on_end`, which is called if the engine ends by itself.

        The call comes in the running event loop.
        """
        self._engine.attach(on_end)

    @property
    def status(self) -> str:
        """The engine's health as text, or "draining" while the server stops."""
        health = self._engine.health
        return "draining" if self._is_draining() and health is Health.READY else health.value

    def routes(self) -> dict[str, Callable[[Request], Any]]:
        """Return the handlers of the health and load endpoints, by path."""
        return {
            "/health": self._ready,
            "/health/live": self._live,
            "/health/ready": self._ready,
            "/health/progress": self._progress,
            "/api/load": self._load,
        }

    async def _ready(self, _request: Request) -> Response:
        """Answer GET /health or /health/ready: whether the server would answer a request now."""
        status = self.status
        if status != self._last_status:
            self._last_status = status
            level = logging.INFO if status in _GOOD_STATUSES else logging.WARNING
            _logger.log(level, "GET /health reports %s from now on.", status)
        if status == Health.READY.value:
            return to_json(HealthBody("ok", self._name))
        return to_json(HealthBody(status, self._name), 503, _RETRY_HEADERS)

    async def _live(self, _request: Request) -> Response:
        """Answer GET /health/live with `ok`, in any state of the engine: the process runs."""
        return to_json(HealthBody("ok", self._name))

    async def _progress(self, _request: Request) -> Response:
        """Answer GET /health/progress with the number of finished steps.

        The HTTP status is 503 while the engine cannot finish steps.
        """
        health = self._engine.health
        progress = self._engine.progress
        if health is Health.READY:
            return to_json(ProgressBody("ok", progress.num_steps, progress.step_s))
        return to_json(
            ProgressBody(health.value, progress.num_steps, progress.step_s), 503, _RETRY_HEADERS
        )

    async def _load(self, request: Request) -> Response:
        """Answer GET /api/load with the facts and the load by which a router chooses a server."""
        engine = self._engine
        status = self.status
        statuses = await asyncio.gather(*(served_engine.read() for served_engine in self._engines))
        stats = [engine_status.snapshot.scheduler for engine_status in statuses]
        horizons = [scheduler.horizon_s for scheduler in stats if scheduler.horizon_s is not None]
        if isinstance(engine, ModelPool) and engine.unloaded_s is not None:
            horizons.append(time.monotonic() - engine.unloaded_s)
        engines = engine.engines if isinstance(engine, ModelPool) else {self._name: engine}
        numerics = {name: numerics_of(model_engine) for name, model_engine in engines.items()}
        body = ServerLoad(
            status="ok" if status == Health.READY.value else status,
            epoch=f"{self._start_id}-{engine.num_deaths}",
            models=tuple(self._names.served_names),
            version=VERSION,
            numerics=numerics_of(engine),
            numerics_by_model={name: value for name, value in numerics.items() if value},
            running=sum(scheduler.num_running for scheduler in stats),
            waiting=sum(scheduler.num_waiting for scheduler in stats),
            work_s=sum(map(_work_s, statuses)),
            prompt_tokens=sum(scheduler.num_prompt_tokens for scheduler in stats),
            cached_tokens=sum(scheduler.num_hit_tokens for scheduler in stats),
            horizon_s=min(horizons, default=None),
            context_length=engine.card.context_length,
            prefill_per_decode=prefill_per_decode(statuses[0], engine.card),
            keeps_files=self._keeps_files,
            trusts_sender=served_of(request.scope).is_from_router,
            takes_any_name=self._names.takes_any,
            coalesces=self._coalesces,
        )
        return to_json(body)


def numerics_of(engine: ServedEngine) -> str:
    """Return a text that is equal for engines that give equal answers to equal requests.

    It has the identity of the weights, the backend, its instruction set and its precision. The text
    is empty before an engine's model is loaded for the first time.
    """
    backend = engine.facts.backend
    if not backend.num_threads:
        return ""
    facts = (engine.card.identity[:16], backend.name, backend.level, backend.precision)
    return " ".join(filter(None, facts))


def _work_s(status: EngineStatus) -> float:
    """Estimate the seconds to prefill all prompts in an engine's queue, from its speed so far."""
    stats = status.snapshot.scheduler
    prefill = status.snapshot.phases.prefill
    s_per_token = prefill.time_s / prefill.rows if prefill.rows else 0.0
    return s_per_token * (stats.num_waiting_tokens + stats.num_uncomputed)
