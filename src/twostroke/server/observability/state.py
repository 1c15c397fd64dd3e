"""GET /api/state: the JSON data that the dashboard shows."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from twostroke.core.json_io import encode_json
from twostroke.model.program.ops import Attention, Embed, MixtureOfExperts
from twostroke.server.models.about import VERSION
from twostroke.server.models.residency import ModelResidency
from twostroke.server.observability.disaggregation import describe_disaggregation
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
CHART_OFFSETS_S: Final = range(
    120, 0, -2
)  # the times of the earlier points in charts, in seconds ago

_MAX_AGE_S: Final = 0.5
_PERCENTILES: Final = {
    "p50": (0.5, 1),
    "p90": (0.9, 10),
    "p99": (0.99, 100),
}  # quantile, and minimum number of samples


class DashboardStates:
    """The dashboard's data for each model of a server."""

    def __init__(
        self,
        models: ModelRegistry,
        limits: MachineLimits | None,
        goodput: Goodput,
        *,
        has_prompt_doctor: bool,
    ) -> None:
        """Prepare the data of each model.

        `limits` are the machine's measured limits; None if not measured. `goodput` has the counts
        of latency objectives. `has_prompt_doctor` says whether `/api/prompts` answers.
        """
        self._models = models
        names: dict[str, list[str]] = {}
        for name, model in models:
            names.setdefault(model.name, []).append(name)
        self._states = {
            own_name: DashboardState(
                models,
                models.find(own_name)[1].engine,
                limits=limits,
                goodput=goodput,
                names=aliases,
                has_prompt_doctor=has_prompt_doctor,
            )
            for own_name, aliases in names.items()
        }

    def of(self, requested_name: str | None) -> DashboardState:
        """Return the dashboard's data for a model.

        Without a name, this is the first model that is loaded, or else the default model.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        if requested_name:
            return self._states[self._models.find(requested_name)[1].name]
        loaded_names = (
            name for name in self._states if self._models.state(name) == ModelResidency.LOADED.value
        )
        return self._states[next(loaded_names, self._models.default.name)]


class DashboardState:
    """The dashboard's data for one model: the state of the server and of the model's engine.

    The JSON is cached for half a second.
    """

    def __init__(
        self,
        models: ModelRegistry,
        engine: ServedEngine,
        limits: MachineLimits | None,
        goodput: Goodput,
        names: Sequence[str],
        *,
        has_prompt_doctor: bool,
    ) -> None:
        """Prepare the data of `engine`, which serves its model under `names`."""
        self._models = models
        self._engine = engine
        self._goodput = goodput
        self._limits = limits
        self._has_prompt_doctor = has_prompt_doctor
        self._model_facts = _describe_model(engine.card, names)
        self._bodies: dict[bool, tuple[float, bytes]] = {}  # time and JSON, by `has_past`

    async def body(self, health: str, *, has_past: bool = False) -> bytes:
        """Return the dashboard's JSON; with `has_past`, also the charts' last two minutes.

        `health` is the server's health, which the JSON includes.
        """
        now_s = time.monotonic()
        encoded_s, body = self._bodies.get(has_past, (-math.inf, b""))
        if now_s - encoded_s > _MAX_AGE_S:
            ends = [(WINDOWS[0], ago_s) for ago_s in CHART_OFFSETS_S] if has_past else []
            status = await self._engine.read([*((seconds, 0) for seconds in WINDOWS), *ends])
            past = {"past": [*self._past(status.spans[len(WINDOWS) :])]} if has_past else {}
            body = encode_json(self._describe(health, now_s, status) | past)
            self._bodies[has_past] = (now_s, body)
        return body

    def _past(self, spans: Iterable[TimeSpan[Snapshot]]) -> Iterator[dict[str, Any]]:
        """Yield the points of the charts at earlier times, in the form of the current point.

        `spans` has the statistics of the window before each of `CHART_OFFSETS_S`.
        """
        for ago_s, span in zip(CHART_OFFSETS_S, spans, strict=True):
            if not span.seconds:
                continue
            stats = span.last.scheduler
            yield {
                "ago_s": ago_s,
                "requests": {"num_running": stats.num_running, "num_waiting": stats.num_waiting},
                "window": _rates(span) | _objective_results(self._goodput, WINDOWS[0], ago_s),
            }

    def _describe(self, health: str, now_s: float, status: EngineStatus) -> dict[str, Any]:
        facts = self._engine.facts
        backend = facts.backend
        view = status.view
        snapshot = status.snapshot
        pages = PageUsage.of(view)
        totals = _total_counts(snapshot.services.values())
        machine_limits = self._limits or getattr(self._engine, "limits", None)
        hardware = None
        if machine_limits:
            hardware = machine_limits.above(
                bytes_per_s=snapshot.phases.max_bytes_per_s,
                flops_per_s=snapshot.phases.max_flops_per_s,
                may_measure=False,
            )
        limits = asdict(hardware) if hardware else None
        return {
            "version": VERSION,
            "uptime_s": snapshot.age_s,
            "health": health,
            "model": self._model_facts,
            "models": self._models_state(),
            "hardware": limits and limits | {"cores": limits.pop("num_threads")},
            "engine": {
                "backend": backend.detail,
                "speculation": facts.methods,
                "max_running": facts.config.max_running,
                "token_budget": facts.config.token_budget,
                "threads": backend.num_threads,
            },
            "memory": {"used_bytes": self._engine.memory_bytes, "kv_bytes": backend.cache_bytes},
            "handover": describe_disaggregation(status, self._engine.card),
            "ranks": [_describe_rank(rank, backend.link) for rank in status.ranks],
            "objectives": [
                {"class": service_tier, "objective": measure, "limit_s": limit_s}
                for service_tier, limits in self._goodput.limits.items()
                for measure, limit_s in limits.items()
            ],
            "requests": _describe_requests(view, pages, now_s),
            "steps": snapshot.recent_steps,
            "pages": self._pages(view, pages),
            "tiers": [asdict(tier) for tier in snapshot.tiers],
            "prompt_doctor": self._has_prompt_doctor,
            "window": {
                str(seconds): _window(span, hardware) | _objective_results(self._goodput, seconds)
                for seconds, span in zip(WINDOWS, status.spans, strict=False)
            },
            "totals": totals
            | {
                "preemptions": snapshot.scheduler.num_preemptions,
                "recoveries": snapshot.scheduler.num_recoveries,
            },
        }

    def _models_state(self) -> list[dict[str, Any]]:
        """Return the state of each model of a pool; empty for a server with one model."""
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
            "groups": [{"window": group.window, "layers": len(group.layers)} for group in groups],
            **page_map(pages, view.cached, len(groups)),
        }


def _objective_results(goodput: Goodput, seconds: int, ago_s: int = 0) -> dict[str, Any]:
    """Return how many answers met and missed each objective in a recent period, and the goodput.

    The period has `seconds` seconds, and ended `ago_s` seconds ago.
    """
    if not goodput.has_objectives:
        return {"objectives": {}, "goodput": None}
    recent, elapsed = goodput.recent(seconds, ago_s)
    objectives: dict[str, dict[str, Any]] = {}
    for service_tier, limits in goodput.limits.items():
        for measure in (*limits, ALL):
            counts = {result: recent[service_tier, measure, result] for result in (MET, MISSED)}
            if any(counts.values()):
                objectives.setdefault(service_tier, {})[measure] = counts
    num_good = sum(results[ALL][MET] for results in objectives.values())
    num_bad = sum(results[ALL][MISSED] for results in objectives.values())
    tokens = sum(recent[service_tier, ALL, GOOD_TOKENS] for service_tier in goodput.limits)
    return {
        "objectives": objectives,
        "goodput": {
            "requests_per_s": num_good / max(1, elapsed),
            "tokens_per_s": tokens / max(1, elapsed),
            "share": num_good / (num_good + num_bad) if num_good + num_bad else None,
        },
    }


def _describe_model(card: ModelCard, names: Sequence[str]) -> dict[str, Any]:
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


def _describe_rank(rank: RankState, link: str) -> dict[str, Any]:
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


def _describe_requests(view: RunningRequests, pages: PageUsage, now_s: float) -> dict[str, Any]:
    num_pages, num_shared = pages.per_request(len(view.running))
    since_s = view.waiting_since_s
    return {
        "num_running": view.stats.num_running,
        "num_waiting": view.stats.num_waiting,
        "waiting_tokens": view.stats.num_waiting_tokens,
        "oldest_waiting_s": None if since_s is None else now_s - since_s,
        "running": [
            _describe_request(request, num_pages, num_shared, now_s)
            for request, num_pages, num_shared in zip(
                view.running, num_pages, num_shared, strict=True
            )
        ],
    }


def _describe_request(
    request: RequestView, num_pages: int, num_shared: int, now_s: float
) -> dict[str, Any]:
    elapsed_s = request.last_token_s - request.first_token_s
    return {
        "id": request.id,
        "class": request.service_tier,
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


def _total_counts(services: Iterable[ServiceTotals]) -> dict[str, int]:
    return {
        name: sum(getattr(totals, name) for totals in services)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "answers")
    }


def _rates(span: TimeSpan[Snapshot]) -> dict[str, Any]:
    first = span.first
    last = span.last
    seconds = max(1, span.seconds)
    first_totals = _total_counts(first.services.values())
    last_totals = _total_counts(last.services.values())
    added = {name: last_totals[name] - first_totals[name] for name in last_totals}
    latencies = {
        name: _latencies(first.services[name], totals) for name, totals in last.services.items()
    }
    return {
        "seconds": span.seconds,
        **{f"{name}_per_s": count / seconds for name, count in added.items()},
        "latency": {name: values for name, values in latencies.items() if values},
        "cache_hit_rate": (
            added["cached_tokens"] / added["prompt_tokens"] if added["prompt_tokens"] else None
        ),
    }


def _window(span: TimeSpan[Snapshot], hardware: Hardware | None) -> dict[str, Any]:
    first = span.first
    last = span.last
    seconds = max(1, span.seconds)
    phases = last.phases - first.phases
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
            "prefill": _phase(phases.prefill, seconds, hardware),
            "decode": _phase(phases.decode, seconds, hardware),
        },
    }


def _latencies(first_totals: ServiceTotals, last_totals: ServiceTotals) -> dict[str, Any]:
    """Return the latencies of a service tier's answers that ended between two readings, by name.

    Each latency, such as `ttft`, has a count, and its mean and percentiles in seconds.

    The result is empty if no answer ended. Percentiles are None if there are too few answers.
    """
    distributions = {
        name: last_totals.latencies[name] - first_totals.latencies[name]
        for name in last_totals.latencies
    }
    if not any(distribution.count for distribution in distributions.values()):
        return {}
    return {
        name: {"count": distribution.count, "mean": distribution.mean}
        | {
            key: distribution.percentile(share) if distribution.count >= min_samples else None
            for key, (share, min_samples) in _PERCENTILES.items()
        }
        for name, distribution in distributions.items()
    }


def _phase(phase: PhaseTotals, seconds: int, hardware: Hardware | None) -> dict[str, Any]:
    has_run = phase.time_s > 0
    return {
        "steps": phase.steps,
        "rows": phase.rows,
        "busy": phase.time_s / seconds,
        "flops_per_s": phase.flops_per_s if has_run else None,
        "bytes_per_s": phase.bytes_per_s if has_run else None,
        "intensity": phase.flops / phase.bytes if phase.bytes else None,
        "mfu": phase.mfu(hardware) if hardware and has_run else None,
        "mbu": phase.mbu(hardware) if hardware and has_run else None,
    }
