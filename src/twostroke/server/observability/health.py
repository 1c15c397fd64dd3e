"""GET /health and its three parts: does the server live, would it answer, do steps finish."""

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
from twostroke.server.models.about import VERSION, HealthBody, LoadBody, ProgressBody
from twostroke.server.models.model_pool import ModelPool
from twostroke.server.observability.disaggregation import prefill_per_decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.process.served import EngineStatus, ServedEngine
    from twostroke.server.http.model_names import ModelNames
    from twostroke.server.storage import Records

_RETRY: Final = {"retry-after": str(RETRY_AFTER_S)}
_FINE: Final = (Health.READY.value, "draining")
_logger = logging.getLogger("twostroke.serve")


class HealthReports:
    """Reports whether a server and its engine are well."""

    def __init__(
        self,
        engine: ServedEngine,
        names: ModelNames,
        is_draining: Callable[[], bool],
        records: Records | None,
    ) -> None:
        """Report on a server that calls its models `names`, and keeps files in its records."""
        self._engine, self._names, self._is_draining = engine, names, is_draining
        several = list(engine.engines.values()) if isinstance(engine, ModelPool) else []
        self._engines: list[ServedEngine] = [*several] or [engine]
        self._keeps_files = records is not None
        self._name, self._started = names.served_names[0], secrets.token_hex(8)
        self._last = Health.READY.value

    @property
    def is_well(self) -> bool:
        """Whether requests are computed, or will be: while another engine starts, they wait."""
        return self._engine.health in {Health.READY, Health.RECOVERING}

    def attach(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` in the running event loop if the engine ends by itself."""
        self._engine.attach(on_end)

    @property
    def status(self) -> str:
        """The engine's health, or "draining"."""
        health = self._engine.health
        return "draining" if self._is_draining() and health is Health.READY else health.value

    def routes(self) -> dict[str, Callable[[Request], Any]]:
        """Return the functions that answer, by path."""
        return {
            "/health": self._ready,
            "/health/live": self._live,
            "/health/ready": self._ready,
            "/health/progress": self._progress,
            "/api/load": self._load,
        }

    async def _ready(self, _request: Request) -> Response:
        """Return whether the server would answer a request now."""
        status = self.status
        if status != self._last:
            self._last = status
            level = logging.INFO if status in _FINE else logging.WARNING
            _logger.log(level, "GET /health reports %s from now on.", status)
        if status == Health.READY.value:
            return to_json(HealthBody("ok", self._name))
        return to_json(HealthBody(status, self._name), 503, _RETRY)

    async def _live(self, _request: Request) -> Response:
        """Return that the server's own process answers, whatever its engine does."""
        return to_json(HealthBody("ok", self._name))

    async def _progress(self, _request: Request) -> Response:
        """Return how many steps the engine has finished; 503 while it cannot finish any."""
        health, known = self._engine.health, self._engine.progress
        if health is Health.READY:
            return to_json(ProgressBody("ok", known.num_steps, known.step_s))
        return to_json(ProgressBody(health.value, known.num_steps, known.step_s), 503, _RETRY)

    async def _load(self, request: Request) -> Response:
        """Return what a router wants to know."""
        engine, status = self._engine, self.status
        readings = await asyncio.gather(*(one.read() for one in self._engines))
        stats = [one.snapshot.scheduler for one in readings]
        horizons = [one.horizon_s for one in stats if one.horizon_s is not None]
        if isinstance(engine, ModelPool) and engine.unloaded_s is not None:
            horizons.append(time.monotonic() - engine.unloaded_s)
        several = engine.engines if isinstance(engine, ModelPool) else {self._name: engine}
        numerics = {name: how for name, one in several.items() if (how := _numerics(one))}
        body = LoadBody(
            status="ok" if status == Health.READY.value else status,
            epoch=f"{self._started}-{engine.num_deaths}",
            models=list(self._names.served_names),
            version=VERSION,
            numerics=_numerics(engine),
            numerics_by_model=numerics,
            running=sum(one.num_running for one in stats),
            waiting=sum(one.num_waiting for one in stats),
            work_s=sum(map(_work_s, readings)),
            prompt_tokens=sum(one.num_prompt_tokens for one in stats),
            cached_tokens=sum(one.num_hit_tokens for one in stats),
            horizon_s=min(horizons, default=None),
            context_length=engine.card.context_length,
            prefill_per_decode=prefill_per_decode(readings[0], engine.card),
            keeps_files=self._keeps_files,
            trusts_sender=served_of(request.scope).is_from_router,
            takes_any_name=self._names.takes_any,
        )
        return to_json(body)


def _numerics(engine: ServedEngine) -> str:
    """Return what decides an engine's answers; empty before it was loaded."""
    backend = engine.facts.backend
    how = engine.card.identity[:16], backend.name, backend.level, backend.precision
    return " ".join(filter(None, how)) if backend.num_threads else ""


def _work_s(reading: EngineStatus) -> float:
    """Return how long an engine's queue takes, at the pace of past prefill."""
    stats, prefill = reading.snapshot.scheduler, reading.snapshot.phases.prefill
    pace_s = prefill.time_s / prefill.rows if prefill.rows else 0.0
    return pace_s * (stats.num_waiting_tokens + stats.num_uncomputed)
