"""GET /api/state: everything that the dashboard shows, in one piece of JSON.

It tells counts, sizes and times; no prompt, no tenant, nothing that a client has named.
"""

from __future__ import annotations

import time
from math import prod
from typing import TYPE_CHECKING, Any, Final

from twostroke.program.ops import Attention, Embed, MixtureOfExperts
from twostroke.serve.dialect import encode_json
from twostroke.serve.observe.objectives import ALL
from twostroke.serve.observe.pages import Pages, page_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.hardware import Hardware
    from twostroke.engine.client import Client, ModelCard
    from twostroke.engine.histogram import Distribution
    from twostroke.engine.ledger import Totals
    from twostroke.engine.limits import Limits
    from twostroke.engine.meter import Stroke
    from twostroke.engine.seconds import Span
    from twostroke.engine.tally import ServiceTotals
    from twostroke.engine.view import RequestView, View
    from twostroke.serve.observe.objectives import Goodput

WINDOWS: Final = (10, 60)  # seconds

_FRESH_S = 0.5
_ENOUGH: Final = {"p50": (0.5, 1), "p90": (0.9, 10), "p99": (0.99, 100)}  # and samples for it


class State:
    """Describes a server. A description stands for half a second, however many ask."""

    def __init__(
        self,
        client: Client,
        limits: Limits | None,
        goodput: Goodput,
        names: Sequence[str],
        version: str,
    ) -> None:
        """Describe `client`'s engine, which clients call by `names`."""
        self._client = client
        self._goodput = goodput
        self._limits = limits
        self._model = _model(client.card, names)
        self._version = version
        self._groups = client.card.cost.program.cache_groups
        self._body = b""
        self._made_s = 0.0

    def body(self, health: str) -> bytes:
        """Return the JSON."""
        now_s = time.monotonic()
        if now_s - self._made_s > _FRESH_S:
            self._body = encode_json(self._describe(health, now_s))
            self._made_s = now_s
        return self._body

    def _describe(self, health: str, now_s: float) -> dict[str, Any]:
        loop = self._client.loop
        view, totals = loop.view(), loop.totals()
        pages = Pages.of(view)
        hardware = self._limits.seen(totals.strokes) if self._limits else None
        windows = {
            str(seconds): _window(loop.span(seconds), hardware) | self._kept(seconds)
            for seconds in WINDOWS
        }
        return {
            "version": self._version,
            "uptime_s": loop.age_s,
            "health": health,
            "model": self._model,
            "hardware": None if hardware is None else _hardware(hardware),
            "engine": self._engine(),
            "objectives": [
                {"class": service, "objective": measure, "limit_s": limit_s}
                for service, limits in self._goodput.limits.items()
                for measure, limit_s in limits.items()
            ],
            "requests": _requests(view, pages, now_s),
            "steps": list(loop.meter.recent),
            "pages": self._pages(view, pages),
            "window": windows,
            "totals": _totals(totals, view),
        }

    def _engine(self) -> dict[str, Any]:
        loop = self._client.loop
        return {
            "backend": loop.facts.detail,
            "speculation": loop.methods,
            "max_running": loop.config.max_running,
            "token_budget": loop.config.token_budget,
        }

    def _kept(self, seconds: int) -> dict[str, Any]:
        """Return how objectives were kept in the last seconds."""
        goodput = self._goodput
        if not goodput.is_asked:
            return {"objectives": {}, "goodput": None}
        kept, elapsed = goodput.recent(seconds)
        objectives: dict[str, dict[str, Any]] = {}
        for service, limits in goodput.limits.items():
            for measure in (*limits, ALL):
                met, missed = (c.get((service, measure), 0) for c in (kept.met, kept.missed))
                if met + missed:
                    counts = {"met": met, "missed": missed}
                    objectives.setdefault(service, {})[measure] = counts
        good = sum(of[ALL]["met"] for of in objectives.values())
        bad = sum(of[ALL]["missed"] for of in objectives.values())
        return {
            "objectives": objectives,
            "goodput": {
                "requests_per_s": good / max(1, elapsed),
                "tokens_per_s": sum(kept.good_tokens.values()) / max(1, elapsed),
                "share": good / (good + bad) if good + bad else None,
            },
        }

    def _pages(self, view: View, pages: Pages) -> dict[str, Any]:
        facts, stats = self._client.loop.facts, view.stats
        return {
            "total": facts.num_pages,
            "tokens_per_page": facts.page_size,
            "bytes_per_page": facts.cache_bytes // facts.num_pages,
            "free": stats.num_free_pages,
            "cached": stats.num_cached_pages,
            "held": stats.num_referenced_pages,
            "shared": pages.num_shared,
            "groups": [{"window": g.window, "layers": len(g.layers)} for g in self._groups],
            **page_map(pages, view.cached, len(self._groups)),
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
        "context_length": card.context_length,
        "parameters": sum(map(prod, program.weight_shapes.values())),
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


def _hardware(hardware: Hardware) -> dict[str, Any]:
    return {
        "name": hardware.name,
        "cores": hardware.num_threads,
        "memory_bytes": hardware.memory_bytes,
        "bandwidth": hardware.bandwidth,
        "peak": hardware.peak,
        "peak_kind": hardware.peak_kind,
        "source": hardware.source,
    }


def _requests(view: View, pages: Pages, now_s: float) -> dict[str, Any]:
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


def _totals(totals: Totals, view: View) -> dict[str, Any]:
    services = totals.services.values()
    return {
        "prompt_tokens": sum(service.prompt_tokens for service in services),
        "cached_tokens": sum(service.cached_tokens for service in services),
        "completion_tokens": sum(service.completion_tokens for service in services),
        "answers": sum(service.answers for service in services),
        "preemptions": view.stats.num_preemptions,
    }


def _window(span: Span[Totals], hardware: Hardware | None) -> dict[str, Any]:
    first, last = span.first, span.last
    pairs = {name: (first.services[name], service) for name, service in last.services.items()}
    strokes = last.strokes - first.strokes
    both = {"prefill": strokes.prefill, "decode": strokes.decode}
    prompt = sum(late.prompt_tokens - early.prompt_tokens for early, late in pairs.values())
    cached = sum(late.cached_tokens - early.cached_tokens for early, late in pairs.values())
    made = sum(late.completion_tokens - early.completion_tokens for early, late in pairs.values())
    answers = sum(late.answers - early.answers for early, late in pairs.values())
    seconds = max(1, span.seconds)
    latencies = {name: _latencies(*pair) for name, pair in pairs.items()}
    return {
        "seconds": span.seconds,
        "prompt_tokens_per_s": prompt / seconds,
        "cached_tokens_per_s": cached / seconds,
        "completion_tokens_per_s": made / seconds,
        "answers_per_s": answers / seconds,
        "latency": {name: found for name, found in latencies.items() if found},
        "cache_hit_rate": cached / prompt if prompt else None,
        "speculation": {
            source: {
                "proposed": count - first.proposed.get(source, 0),
                "accepted": last.accepted.get(source, 0) - first.accepted.get(source, 0),
            }
            for source, count in last.proposed.items()
        },
        "strokes": {name: _stroke(stroke, seconds, hardware) for name, stroke in both.items()},
    }


def _latencies(early: ServiceTotals, late: ServiceTotals) -> dict[str, Any]:
    """Return the latencies of one class; nothing if nothing was measured."""
    found = {name: late.latencies[name] - early.latencies[name] for name in late.latencies}
    if not any(distribution.count for distribution in found.values()):
        return {}
    return {name: _summary(distribution) for name, distribution in found.items()}


def _summary(distribution: Distribution) -> dict[str, Any]:
    """Return percentiles; those of too few samples would be their largest, and are left out."""
    count = distribution.count
    return {
        "count": count,
        "mean": distribution.mean,
        **{
            name: distribution.percentile(share) if count >= enough else None
            for name, (share, enough) in _ENOUGH.items()
        },
    }


def _stroke(stroke: Stroke, seconds: int, hardware: Hardware | None) -> dict[str, Any]:
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
