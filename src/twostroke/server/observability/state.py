"""GET /api/state: the JSON that the dashboard shows.

It has counts, sizes and times, and nothing that a client sent: no text, no tenant.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from twostroke.core.json_io import encode_json
from twostroke.model.program.ops import Attention, Embed, MixtureOfExperts
from twostroke.server.models.about import VERSION
from twostroke.server.models.residency import ModelResidency
from twostroke.server.observability.disaggregation import describe_handover
from twostroke.server.observability.objectives import ALL, GOOD_TOKENS, MET, MISSED
from twostroke.server.observability.pages import PageUsage, page_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from twostroke.backends.interface import RankState
    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.core.hardware import Hardware
    from twostroke.engine.counters import PhaseTotals, ServiceTotals, Snapshot, TimeSpan
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import EngineStatus, ServedEngine
    from twostroke.engine.status import RequestView, RunningRequests
    from twostroke.server.models.registry import ModelRegistry
    from twostroke.server.observability.objectives import Goodput

WINDOWS: Final = (10, 60)  # seconds
PAST_S: Final = range(120, 0, -2)  # the seconds ago that charts begin with

_MAX_AGE_S: Final = 0.5
_PERCENTILES: Final = {"p50": (0.5, 1), "p90": (0.9, 10), "p99": (0.99, 100)}  # least samples


class DashboardStates:
    """Describes a server's models, each with its engine."""

    def __init__(
        self, models: ModelRegistry, limits: MachineLimits | None, goodput: Goodput
    ) -> None:
        """Describe `models`; the machine has `limits`."""
        self._models = models
        names: dict[str, list[str]] = {}
        for name, served in models:
            names.setdefault(served.name, []).append(name)
        self._states = {
            one: DashboardState(models, models.find(one)[1].engine, limits, goodput, all_)
            for one, all_ in names.items()
        }

    def of(self, asked: str | None) -> DashboardState:
        """Return a model's state; without a name, that of the first loaded one.

        Raises:
            ModelNotFoundError: there is no such model.
        """
        if asked:
            return self._states[self._models.find(asked)[1].name]
        loaded = (one for one in self._states if self._models.state(one) == ModelResidency.IN.value)
        return self._states[next(loaded, self._models.default.name)]


class DashboardState:
    """Describes a server with one of its engines. A description is kept for half a second."""

    def __init__(
        self,
        models: ModelRegistry,
        engine: ServedEngine,
        limits: MachineLimits | None,
        goodput: Goodput,
        names: Sequence[str],
    ) -> None:
        """Describe `engine`, which serves its model under `names`."""
        self._models, self._engine = models, engine
        self._goodput = goodput
        self._limits = limits
        self._model = _model(engine.card, names)
        self._kept: dict[bool, tuple[float, bytes]] = {}  # when it was made, by `has_past`

    async def body(self, health: str, *, has_past: bool = False) -> bytes:
        """Return the JSON; with `has_past`, also what charts show of the last two minutes."""
        now_s = time.monotonic()
        made_s, body = self._kept.get(has_past, (-math.inf, b""))
        if now_s - made_s > _MAX_AGE_S:
            ends = [(WINDOWS[0], ago_s) for ago_s in PAST_S] if has_past else []
            reading = await self._engine.read([*((seconds, 0) for seconds in WINDOWS), *ends])
            past = {"past": [*self._past(reading.spans[len(WINDOWS) :])]} if has_past else {}
            body = encode_json(self._describe(health, now_s, reading) | past)
            self._kept[has_past] = now_s, body
        return body

    def _past(self, spans: Iterable[TimeSpan[Snapshot]]) -> Iterator[dict[str, Any]]:
        """Yield requests and rates of earlier moments, in the form of the present ones."""
        for ago_s, span in zip(PAST_S, spans, strict=True):
            if not span.seconds:
                continue
            stats = span.last.scheduler
            yield {
                "ago_s": ago_s,
                "requests": {"num_running": stats.num_running, "num_waiting": stats.num_waiting},
                "window": _rates(span) | _objectives(self._goodput, WINDOWS[0], ago_s),
            }

    def _describe(self, health: str, now_s: float, reading: EngineStatus) -> dict[str, Any]:
        facts = self._engine.facts
        view, snapshot, backend = reading.view, reading.snapshot, facts.backend
        pages, totals = PageUsage.of(view), _sums(snapshot.services.values())
        limits_now, hardware = self._limits or getattr(self._engine, "limits", None), None
        if limits_now:
            hardware = limits_now.above(
                bytes_per_s=snapshot.phases.max_bytes_per_s,
                flops_per_s=snapshot.phases.max_flops_per_s,
                may_measure=False,
            )
        limits = asdict(hardware) if hardware else None
        return {
            "version": VERSION,
            "uptime_s": snapshot.age_s,
            "health": health,
            "model": self._model,
            "models": self._residents(),
            "hardware": limits and limits | {"cores": limits.pop("num_threads")},
            "engine": {
                "backend": backend.detail,
                "speculation": facts.methods,
                "max_running": facts.config.max_running,
                "token_budget": facts.config.token_budget,
                "threads": backend.num_threads,
            },
            "memory": {"used_bytes": self._engine.memory_bytes, "kv_bytes": backend.cache_bytes},
            "handover": describe_handover(reading, self._engine.card),
            "ranks": [_rank(rank, backend.link) for rank in reading.ranks],
            "objectives": [
                {"class": service, "objective": measure, "limit_s": limit_s}
                for service, limits in self._goodput.limits.items()
                for measure, limit_s in limits.items()
            ],
            "requests": _requests(view, pages, now_s),
            "steps": snapshot.recent_steps,
            "pages": self._pages(view, pages),
            "tiers": [asdict(tier) for tier in snapshot.tiers],
            "window": {
                str(seconds): _window(span, hardware) | _objectives(self._goodput, seconds)
                for seconds, span in zip(WINDOWS, reading.spans, strict=False)
            },
            "totals": totals
            | {
                "preemptions": snapshot.scheduler.num_preemptions,
                "recoveries": snapshot.scheduler.num_recoveries,
            },
        }

    def _residents(self) -> list[dict[str, Any]]:
        """Return where each model of a roster is; nothing for one model."""
        pool = self._models.pool
        if pool is None:
            return []
        return [
            {
                "name": name,
                "state": engine.residency.value,
                "num_bytes": engine.num_bytes,
                "num_waiting": engine.num_waiting,
                "loads": engine.num_loads,
                "load_s": engine.load_s,
            }
            for name, engine in pool.engines.items()
        ]

    def _pages(self, view: RunningRequests, pages: PageUsage) -> dict[str, Any]:
        facts, stats = self._engine.facts.backend, view.stats
        groups = self._engine.card.cost.program.cache_groups
        return {
            "total": facts.num_pages,
            "tokens_per_page": facts.page_size,
            "bytes_per_page": facts.cache_bytes // facts.num_pages,
            "free": stats.num_free_pages,
            "cached": stats.num_cached_pages,
            "held": stats.num_referenced_pages,
            "shared": pages.num_shared,
            "groups": [{"window": g.window, "layers": len(g.layers)} for g in groups],
            **page_map(pages, view.cached, len(groups)),
        }


def _objectives(goodput: Goodput, seconds: int, ago_s: int = 0) -> dict[str, Any]:
    """Return how objectives were met in the last seconds up to `ago_s`."""
    if not goodput.has_objectives:
        return {"objectives": {}, "goodput": None}
    recent, elapsed = goodput.recent(seconds, ago_s)
    objectives: dict[str, dict[str, Any]] = {}
    for service, limits in goodput.limits.items():
        for measure in (*limits, ALL):
            counts = {result: recent[service, measure, result] for result in (MET, MISSED)}
            if any(counts.values()):
                objectives.setdefault(service, {})[measure] = counts
    good = sum(of[ALL][MET] for of in objectives.values())
    bad = sum(of[ALL][MISSED] for of in objectives.values())
    tokens = sum(recent[service, ALL, GOOD_TOKENS] for service in goodput.limits)
    return {
        "objectives": objectives,
        "goodput": {
            "requests_per_s": good / max(1, elapsed),
            "tokens_per_s": tokens / max(1, elapsed),
            "share": good / (good + bad) if good + bad else None,
        },
    }


def _model(card: ModelCard, names: Sequence[str]) -> dict[str, Any]:
    program = card.cost.program
    attention = next((op for op in program.ops if isinstance(op, Attention)), None)
    mixture = next((op for op in program.ops if isinstance(op, MixtureOfExperts)), None)
    return {
        "name": names[0],
        "names": list(names),
        "architecture": card.architecture,
        "format": card.format,
        "identity": card.identity,
        "context_length": card.context_length,
        "parameters": card.num_parameters,
        "file_bytes": card.file_bytes,
        "layers": len(program.cache_layers),
        "width": next((op.width for op in program.ops if isinstance(op, Embed)), None),
        "heads": attention and attention.num_heads,
        "kv_heads": attention and attention.num_kv_heads,
        "head_dim": attention and attention.head_dim,
        "vocab_size": program.vocab_size,
        "experts": len(mixture.experts) if mixture else 0,
        "experts_used": mixture.num_used if mixture else 0,
        "licence": card.licence,
    }


def _rank(rank: RankState, link: str) -> dict[str, Any]:
    facts = rank.facts
    return {
        "rank": facts.rank,
        "state": rank.state,
        "host": facts.host,
        **asdict(facts.coordinate),
        "link": link,
        "threads": facts.num_threads,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes": facts.cache_bytes,
        "collective_s": rank.collective_s,
        "restarts": rank.num_restarts,
    }


def _requests(view: RunningRequests, pages: PageUsage, now_s: float) -> dict[str, Any]:
    held, shared = pages.per_request(len(view.running))
    since_s = view.waiting_since_s
    return {
        "num_running": view.stats.num_running,
        "num_waiting": view.stats.num_waiting,
        "waiting_tokens": view.stats.num_waiting_tokens,
        "oldest_waiting_s": None if since_s is None else now_s - since_s,
        "running": [
            _request(request, num_pages, num_shared, now_s)
            for request, num_pages, num_shared in zip(view.running, held, shared, strict=True)
        ],
    }


def _request(request: RequestView, num_pages: int, num_shared: int, now_s: float) -> dict[str, Any]:
    elapsed_s = request.last_token_s - request.first_token_s
    return {
        "id": request.id,
        "class": request.service,
        "prompt_tokens": request.num_prompt,
        "computed_tokens": request.num_computed,
        "output_tokens": request.num_output,
        "cached_tokens": request.num_cached,
        "age_s": now_s - request.arrival_s,
        "ttft_s": request.first_token_s - request.arrival_s if request.first_token_s else None,
        "tokens_per_s": (request.num_output - 1) / elapsed_s if elapsed_s > 0 else None,
        "drafted_tokens": request.num_drafted,
        "accepted_tokens": request.num_accepted,
        "pages": num_pages,
        "shared_pages": num_shared,
        "preemptions": request.num_preemptions,
    }


def _sums(services: Iterable[ServiceTotals]) -> dict[str, int]:
    return {
        name: sum(getattr(service, name) for service in services)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "answers")
    }


def _rates(span: TimeSpan[Snapshot]) -> dict[str, Any]:
    first, last, seconds = span.first, span.last, max(1, span.seconds)
    early, late = _sums(first.services.values()), _sums(last.services.values())
    added = {name: late[name] - early[name] for name in late}
    latencies = {
        name: _latencies(first.services[name], service) for name, service in last.services.items()
    }
    return {
        "seconds": span.seconds,
        **{f"{name}_per_s": count / seconds for name, count in added.items()},
        "latency": {name: found for name, found in latencies.items() if found},
        "cache_hit_rate": (
            added["cached_tokens"] / added["prompt_tokens"] if added["prompt_tokens"] else None
        ),
    }


def _window(span: TimeSpan[Snapshot], hardware: Hardware | None) -> dict[str, Any]:
    first, last, seconds = span.first, span.last, max(1, span.seconds)
    strokes = last.phases - first.phases
    return {
        **_rates(span),
        "speculation": {
            source: {
                "proposed": count - first.speculation.proposed.get(source, 0),
                "accepted": last.speculation.accepted.get(source, 0)
                - first.speculation.accepted.get(source, 0),
            }
            for source, count in last.speculation.proposed.items()
        },
        "strokes": {
            "prefill": _stroke(strokes.prefill, seconds, hardware),
            "decode": _stroke(strokes.decode, seconds, hardware),
        },
    }


def _latencies(early: ServiceTotals, late: ServiceTotals) -> dict[str, Any]:
    """Return the latencies of one class, without percentiles of too few samples; empty if none."""
    found = {name: late.latencies[name] - early.latencies[name] for name in late.latencies}
    if not any(one.count for one in found.values()):
        return {}
    return {
        name: {"count": one.count, "mean": one.mean}
        | {
            key: one.percentile(share) if one.count >= least else None
            for key, (share, least) in _PERCENTILES.items()
        }
        for name, one in found.items()
    }


def _stroke(stroke: PhaseTotals, seconds: int, hardware: Hardware | None) -> dict[str, Any]:
    has_run = stroke.time_s > 0
    return {
        "steps": stroke.steps,
        "rows": stroke.rows,
        "busy": stroke.time_s / seconds,
        "flops_per_s": stroke.flops_per_s if has_run else None,
        "bytes_per_s": stroke.bytes_per_s if has_run else None,
        "intensity": stroke.flops / stroke.bytes if stroke.bytes else None,
        "mfu": stroke.mfu(hardware) if hardware and has_run else None,
        "mbu": stroke.mbu(hardware) if hardware and has_run else None,
    }
