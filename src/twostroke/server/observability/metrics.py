"""GET /metrics for Prometheus: engines' counts, HTTP responses, goodput, llama-server's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.core.request import FinishReason
from twostroke.engine.status import Health
from twostroke.server.models.about import VERSION
from twostroke.server.models.residency import ModelResidency
from twostroke.server.observability.disaggregation import disaggregation_metrics
from twostroke.server.observability.objectives import ALL, GOOD_TOKENS, MET, MISSED, Goodput
from twostroke.server.observability.state import WINDOWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from twostroke.backends.interface import RankState
    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.engine.counters import (
        Distribution,
        ServiceTotals,
        Snapshot,
        SpeculationTotals,
        TierTotals,
        TimeSpan,
    )
    from twostroke.engine.process.served import EngineStatus, ServedEngine
    from twostroke.engine.resumption import ResumptionTotals
    from twostroke.server.models.model_pool import ModelPool
    from twostroke.server.models.registry import ModelRegistry
    from twostroke.server.options import Objective

    Samples = Iterable[tuple[tuple[str, ...], float]]


Family = CounterMetricFamily | GaugeMetricFamily

_TOKEN_BOUNDS_S: Final = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
_REQUEST_BOUNDS_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
_LATENCIES: Final = (
    ("queue", "queue", "From arrival to the first computed row.", _REQUEST_BOUNDS_S),
    ("ttft", "time_to_first_token", "From arrival to the first token.", _REQUEST_BOUNDS_S),
    ("e2e", "request", "From arrival to the last token.", _REQUEST_BOUNDS_S),
    (
        "tpot",
        "time_per_output_token",
        "Mean time between the tokens of one answer.",
        _TOKEN_BOUNDS_S,
    ),
    ("itl", "inter_token_latency", "Time between two steps of an answer.", _TOKEN_BOUNDS_S),
)
_SERVICE_COUNTERS: Final = (
    ("prompt_tokens", "Prompt tokens of answers that have begun."),
    ("cached_tokens", "Prompt tokens found in the prefix cache, of answers that have begun."),
    ("completion_tokens", "Generated tokens."),
    ("embedded_texts", "Texts that were embedded."),
    ("embedded_tokens", "Tokens of the texts that were embedded."),
)
_PHASE_COUNTERS: Final = (
    ("steps", "steps", "Steps, by what most of their rows were."),
    ("rows", "rows", "Tokens computed."),
    ("flops", "flops", "Floating-point operations."),
    ("bytes", "bytes", "Bytes of memory traffic that the steps require."),
    ("time_s", "time_seconds", "Seconds in steps."),
    ("kernel_s", "kernel_seconds", "Seconds inside kernels."),
    ("collective_s", "collective_seconds", "Seconds of these in which rank 0 met other ranks."),
    ("crowded_s", "crowded_seconds", "Seconds in steps with fewer threads, beside other programs."),
)
_SCHEDULER_METRICS: Final[tuple[tuple[str, type[Family], str, str], ...]] = (
    ("num_running", GaugeMetricFamily, "requests_running", "Answers that hold pages."),
    ("num_waiting", GaugeMetricFamily, "requests_waiting", "Answers in the queue."),
    ("num_waiting_tokens", GaugeMetricFamily, "waiting_tokens", "Tokens of answers in the queue."),
    ("num_free_pages", GaugeMetricFamily, "free_pages", "Empty pages."),
    ("num_cached_pages", GaugeMetricFamily, "cached_pages", "Pages that only the cache holds."),
    ("num_referenced_pages", GaugeMetricFamily, "referenced_pages", "Pages that requests hold."),
    ("num_preemptions", CounterMetricFamily, "preemptions", "Times a request lost its pages."),
    ("num_recoveries", CounterMetricFamily, "recoveries", "Times that lost ranks were replaced."),
    (
        "num_prompt_tokens",
        CounterMetricFamily,
        "prefix_cache_asked_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    ("num_hit_tokens", CounterMetricFamily, "prefix_cache_hit_tokens", "Prompt tokens it had."),
)
_ENGINE_METRICS: Final[tuple[tuple[str, type[Family], str, str], ...]] = (
    ("num_compiled", CounterMetricFamily, "late_compilations", "Kernels made after the start."),
    ("num_shortages", CounterMetricFamily, "memory_shortages", "Steps too large for the memory."),
    ("max_step_tokens", GaugeMetricFamily, "step_token_limit", "Tokens that a step may compute."),
)

_TIER_METRICS: Final[tuple[tuple[type[Family], str, str, str], ...]] = (
    (CounterMetricFamily, "lookups", "lookups", "Prompts that a tier of pages was asked for."),
    (CounterMetricFamily, "hits", "hits", "Prompts for which pages were read."),
    (CounterMetricFamily, "slow", "slow", "Prompts that were computed because that was faster."),
    (CounterMetricFamily, "pages_read", "pages_read", "Pages that were read."),
    (CounterMetricFamily, "pages_written", "pages_written", "Pages that were written."),
    (CounterMetricFamily, "bytes_read", "bytes_read", "Bytes of pages that were read."),
    (CounterMetricFamily, "bytes_written", "bytes_written", "Bytes of pages that were written."),
    (CounterMetricFamily, "read_s", "read_seconds", "Seconds in which pages were read."),
    (CounterMetricFamily, "write_s", "write_seconds", "Seconds in which pages were written."),
    (GaugeMetricFamily, "saved_s", "saved_seconds", "Computing saved, less the time for pages."),
    (GaugeMetricFamily, "pages_stored", "pages", "Pages that a tier holds."),
    (GaugeMetricFamily, "bytes_stored", "bytes", "Bytes that a tier holds."),
)


_POOL_GAUGES: Final = (
    ("num_bytes", "model_bytes", "Memory that a model takes while it is loaded."),
    ("num_waiting", "model_waiting", "Requests that wait until a model is loaded."),
)
_POOL_COUNTERS: Final = (
    ("num_loads", "model_loads", "Times that a model was loaded."),
    ("num_unloads", "model_unloads", "Times that a model was unloaded."),
    ("num_failed_loads", "model_failed_loads", "Times that a model could not be loaded."),
    ("loading_s", "model_load_seconds", "Seconds in which a model loaded."),
)


class ServerMetrics(Collector):
    """The Prometheus metrics of a server, which counts responses and reads its engines."""

    def __init__(
        self,
        models: ModelRegistry,
        limits: MachineLimits | None = None,
        objectives: Iterable[Objective] = (),
        *,
        has_llama_metrics: bool = False,
    ) -> None:
        """Create the metrics of a server.

        Args:
            models: the served models; the metrics of a pool's engines have the label `model`.
            limits: the machine's measured limits, for metrics of utilization; None for no such
                metrics.
            objectives: the latency objectives.
            has_llama_metrics: whether to add metrics with llama-server's names.

        Raises:
            UsageError: two objectives limit the same measure of the same service tier.
        """
        self.goodput = Goodput(objectives)
        self._models = models
        self._limits = limits
        self._has_llama_metrics = has_llama_metrics
        self._statuses: dict[str, EngineStatus] = {}
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "twostroke_http_responses",
            "HTTP responses by endpoint and status.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.failures = Counter(
            "twostroke_failed_requests",
            "Requests that the engine began and could not finish.",
            registry=self.registry,
        )
        self.checks = Counter(
            "twostroke_constraint_checks",
            "Finished answers, or calls in them, whose grammar does not hold all of their schema.",
            ("result",),
            registry=self.registry,
        )
        self.misses = Counter(
            "twostroke_constraint_misses",
            "Answers and calls that do not keep to their schema, by the keyword that they miss.",
            ("keyword",),
            registry=self.registry,
        )
        self.redraws = Counter(
            "twostroke_constraint_redraws",
            "Answers that were drawn again because they did not keep to their schema.",
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """Read the engines, and return the text of all metrics with its content type.

        `accept` is the value of the request's `Accept` header, which chooses the format.
        """
        engines = {model.name: model.engine for _, model in self._models}
        self._statuses = {
            name: await engine.read([(WINDOWS[0], 0)]) for name, engine in engines.items()
        }
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engines, as `expose` read them, and of goodput."""
        engine = self._models.default.engine
        pool = self._models.pool
        health = engine.health if pool is None else pool.health
        yield _gauge("ready", "Whether the server can answer.", value=health is Health.READY)
        if pool is None:
            yield from self._engine_metrics(engine, self._statuses[self._models.default.name])
        else:
            yield from _pool_metrics(pool)
            merged: dict[str, Metric] = {}
            for name, model_engine in pool.engines.items():
                for metric in self._engine_metrics(model_engine, self._statuses[name]):
                    samples = [
                        sample._replace(labels={**sample.labels, "model": name})
                        for sample in metric.samples
                    ]
                    if metric.name in merged:
                        merged[metric.name].samples += samples
                    else:
                        metric.samples = samples
                        merged[metric.name] = metric
            yield from merged.values()
        if self.goodput.has_objectives:
            yield from _goodput_metrics(self.goodput)

    def _engine_metrics(self, engine: ServedEngine, status: EngineStatus) -> Iterator[Metric]:
        """Yield the Prometheus metrics of one engine, from its status."""
        facts = engine.facts.backend
        snapshot = status.snapshot
        deaths = [((), engine.num_deaths)]
        yield _counter("engine_deaths", "Times that the engine's process died.", samples=deaths)
        yield from _resumption_metrics(engine.resumptions)
        yield _model_info(engine)
        yield from _service_metrics(snapshot.services)
        for table, counts in (
            (_SCHEDULER_METRICS, snapshot.scheduler),
            (_ENGINE_METRICS, snapshot),
        ):
            for key, family, name, text in table:
                yield family(f"twostroke_{name}", text, getattr(counts, key))
        yield _gauge("pages", "Pages of keys and values, full or empty.", value=facts.num_pages)
        yield _gauge("page_tokens", "Tokens in a page.", value=facts.page_size)
        max_running = engine.facts.config.max_running
        yield _gauge("max_running_requests", "Answers that may run at once.", value=max_running)
        yield from _phase_metrics(snapshot)
        yield from _rank_metrics(status.ranks, facts.link)
        limits = self._limits or getattr(engine, "limits", None)
        yield from _utilization_metrics(limits, *status.spans)
        yield from _tier_metrics(snapshot.tiers)
        yield from disaggregation_metrics(status, engine.card)
        yield from _speculation_metrics(snapshot.speculation)
        if self._has_llama_metrics:
            yield from llama_metrics(snapshot)


def _resumption_metrics(totals: ResumptionTotals) -> Iterator[Metric]:
    """Yield the metrics of requests that continued after a death of the engine's process."""
    resumed = [((), totals.num_resumed)]
    yield _counter("resumed_requests", "Requests that continued after a death.", samples=resumed)
    paused = [((), totals.pause_s)]
    yield _counter("resumption_pause_seconds", "Time of their pauses.", samples=paused)
    text = "The longest of their pauses."
    yield _gauge("longest_resumption_pause_seconds", text, value=totals.max_pause_s)


def _model_info(engine: ServedEngine) -> Metric:
    card = engine.card
    facts = {
        "version": VERSION,
        "name": card.name,
        "architecture": card.architecture,
        "format": card.format,
        "backend": engine.facts.backend.detail,
    }
    return InfoMetricFamily("twostroke_model", "The model that is served.", facts)


def _pool_metrics(pool: ModelPool) -> Iterator[Metric]:
    """Yield the metrics of a model pool: the models' states, loads and waiting requests."""
    engines = pool.engines.items()
    yield _gauge("memory_budget_bytes", "Memory for all models.", value=pool.budget_bytes)
    loaded = [((model,), engine.residency is ModelResidency.LOADED) for model, engine in engines]
    yield _gauge("model_loaded", "Whether a model is loaded.", "model", samples=loaded)
    for key, name, text in _POOL_GAUGES:
        samples = [((model,), getattr(engine, key)) for model, engine in engines]
        yield _gauge(name, text, "model", samples=samples)
    for key, name, text in _POOL_COUNTERS:
        samples = [((model,), getattr(engine, key)) for model, engine in engines]
        yield _counter(name, text, "model", samples=samples)


def _utilization_metrics(
    limits: MachineLimits | None, span: TimeSpan[Snapshot]
) -> Iterator[Metric]:
    """Yield the metrics of utilization: busy time, and used shares of compute and bandwidth.

    `span` has the engine's statistics at the start and the end of a recent time. Without `limits`,
    only the busy time is known.
    """
    seconds = WINDOWS[0]
    phases = span.last.phases - span.first.phases
    totals_by_phase = {("prefill",): phases.prefill, ("decode",): phases.decode}
    busy = {label: phase.time_s / max(1, span.seconds) for label, phase in totals_by_phase.items()}
    text = f"Share of the last {seconds} seconds spent in steps."
    yield _gauge("busy_ratio", text, "stroke", samples=busy.items())
    hardware = (
        limits.above(
            bytes_per_s=phases.max_bytes_per_s,
            flops_per_s=phases.max_flops_per_s,
            may_measure=False,
        )
        if limits
        else None
    )
    if hardware is None:
        return
    text = "The machine's peak arithmetic."
    yield _gauge("peak_flops_per_second", text, value=hardware.peak)
    text = "The machine's peak bandwidth."
    yield _gauge("peak_bytes_per_second", text, value=hardware.bandwidth)
    period = f"while steps ran in the last {seconds} seconds."
    mfu = {label: phase.mfu(hardware) for label, phase in totals_by_phase.items()}
    yield _gauge("mfu", f"Share of peak FLOP/s {period}", "stroke", samples=mfu.items())
    mbu = {label: phase.mbu(hardware) for label, phase in totals_by_phase.items()}
    yield _gauge("mbu", f"Share of peak bandwidth {period}", "stroke", samples=mbu.items())


def _goodput_metrics(goodput: Goodput) -> Iterator[Metric]:
    """Yield the metrics of latency objectives: limits, counts since the start, and goodput.

    Goodput is the rate of answers that met all objectives, in the last minute.
    """
    limits = {
        (service_tier, measure): limit_s
        for service_tier, measures in goodput.limits.items()
        for measure, limit_s in measures.items()
    }
    text = "The limit of an objective."
    yield _gauge("objective_limit_seconds", text, "class", "objective", samples=limits.items())
    counts = goodput.read()
    recent, seconds = goodput.recent()
    services = [service_tier for service_tier, measures in goodput.limits.items() if measures]
    answers = [
        ((*key, result), counts[*key, result])
        for key in (*limits, *((service_tier, ALL) for service_tier in services))
        for result in (MET, MISSED)
    ]
    text = "Answers that met or missed an objective, or all of them."
    yield _counter("objective_answers", text, "class", "objective", "result", samples=answers)
    tokens = [
        ((service_tier,), counts[service_tier, ALL, GOOD_TOKENS]) for service_tier in services
    ]
    text = "Tokens of answers that met all objectives."
    yield _counter("good_tokens", text, "class", samples=tokens)
    for name, subject, result in (("requests", "Answers", MET), ("tokens", "Tokens", GOOD_TOKENS)):
        rates = [
            ((service_tier,), recent[service_tier, ALL, result] / max(1, seconds))
            for service_tier in services
        ]
        text = f"{subject} that met all objectives, over the last minute."
        yield _gauge(f"goodput_{name}_per_second", text, "class", samples=rates)


def _service_metrics(services: Mapping[str, ServiceTotals]) -> Iterator[Metric]:
    ends = [
        ((service_tier, reason.value), totals.ends.get(reason, 0))
        for service_tier, totals in services.items()
        for reason in FinishReason
    ]
    text = "Answers that have ended, by finish reason."
    yield _counter("answers", text, "class", "finish_reason", samples=ends)
    for name, text in _SERVICE_COUNTERS:
        counts = [
            ((service_tier,), getattr(totals, name)) for service_tier, totals in services.items()
        ]
        yield _counter(name, text, "class", samples=counts)
    for key, name, text, bounds in _LATENCIES:
        latencies = {
            service_tier: totals.latencies[key] for service_tier, totals in services.items()
        }
        yield _histogram(f"{name}_seconds", text, "class", latencies, bounds)


def _phase_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    totals_by_phase = (("prefill", snapshot.phases.prefill), ("decode", snapshot.phases.decode))
    for key, name, text in _PHASE_COUNTERS:
        counts = [((label,), getattr(phase, key)) for label, phase in totals_by_phase]
        yield _counter(f"step_{name}", text, "stroke", samples=counts)
    text = "Rows of a step: prompt tokens, newest tokens and drafts."
    rows = {"prefill": snapshot.prefill_rows, "decode": snapshot.decode_rows}
    yield _histogram("rows_per_step", text, "stroke", rows, snapshot.decode_rows.bounds)


def _rank_metrics(ranks: Iterable[RankState], link: str) -> Iterator[Metric]:
    """Yield the metrics of each rank of a parallel engine; an engine in one process has none."""
    states = {str(rank.facts.rank): rank for rank in ranks}
    if not states:
        return
    info = InfoMetricFamily("twostroke_rank", "Where a rank runs, and its part.", labels=("rank",))
    for number, rank in states.items():
        coordinate = {name: str(part) for name, part in asdict(rank.facts.coordinate).items()}
        info.add_metric((number,), {"host": rank.facts.host, **coordinate, "link": link})
    yield info
    ready = [((number,), rank.state == "ready") for number, rank in states.items()]
    yield _gauge("rank_ready", "Whether a rank computes steps.", "rank", samples=ready)
    seconds = [((number,), rank.collective_s) for number, rank in states.items()]
    text = "Seconds in collectives since the rank started, waiting for other ranks included."
    yield _counter("rank_collective_seconds", text, "rank", samples=seconds)
    restarts = [((number,), rank.num_restarts) for number, rank in states.items()]
    yield _counter("rank_restarts", "Times that a rank was replaced.", "rank", samples=restarts)


def _tier_metrics(tiers: Iterable[TierTotals]) -> Iterator[Metric]:
    """Yield the metrics of each KV offload tier, such as the disk."""
    totals_by_tier = {tier.tier: tier for tier in tiers}
    for family, key, name, text in _TIER_METRICS if totals_by_tier else ():
        samples = [((tier,), getattr(totals, key)) for tier, totals in totals_by_tier.items()]
        samples = [sample for sample in samples if sample[1] is not None]
        metric = family(f"twostroke_tier_{name}", text, labels=("tier",))
        yield _filled(metric, samples)


def _speculation_metrics(totals: SpeculationTotals) -> Iterator[Metric]:
    for name, text, counts in (
        ("proposed", "Guessed tokens that were computed, by source.", totals.proposed),
        ("accepted", "Guessed tokens that were right, by source.", totals.accepted),
    ):
        samples = [((source,), count) for source, count in counts.items()]
        yield _counter(f"speculation_{name}_tokens", text, "source", samples=samples)
    text = "Accepted drafts by their position after the newest token."
    samples = [((str(index + 1),), count) for index, count in sorted(totals.accepted_at.items())]
    yield _counter("speculation_accepted_at", text, "place", samples=samples)
    text = "Steps of an answer with drafts; each gave one token besides the accepted drafts."
    yield CounterMetricFamily("twostroke_speculation_passes", text, totals.passes)
    text = "Time that drafts have saved; negative if they cost more than they saved."
    yield _gauge("speculation_saved_seconds", text, value=totals.saved_s)


def _counter(name: str, text: str, *labels: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"twostroke_{name}", text, labels=labels), samples)


def _gauge(
    name: str, text: str, *labels: str, samples: Samples = (), value: float | None = None
) -> Metric:
    """Build a Prometheus gauge with one `value`, or with `samples` by `labels`."""
    family = GaugeMetricFamily(f"twostroke_{name}", text, value, labels or None)
    return _filled(family, samples)


def _filled(family: Family, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(
    name: str,
    text: str,
    label: str,
    distributions: Mapping[str, Distribution],
    bounds: tuple[float, ...],
) -> Metric:
    family = HistogramMetricFamily(f"twostroke_{name}", text, labels=(label,))
    for value, distribution in distributions.items():
        below = [(repr(bound), count) for bound, count in distribution.cumulative(bounds)]
        family.add_metric((value,), [*below, ("+Inf", distribution.count)], distribution.sum)
    return family


def llama_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield an engine's metrics under the names that llama-server gives them.

    A step with prompt and answer tokens counts as a step of the tokens in the majority.
    """
    prefill, decode = snapshot.phases.prefill, snapshot.phases.decode
    services, scheduler = snapshot.services.values(), snapshot.scheduler
    num_prompt = sum(totals.prompt_tokens - totals.cached_tokens for totals in services)
    num_predicted = sum(totals.completion_tokens for totals in services)
    for name, text, count in (
        ("prompt_tokens", "Prompt tokens that were computed.", num_prompt),
        ("prompt_seconds", "Seconds in steps of prompts.", prefill.time_s),
        ("tokens_predicted", "Generated tokens.", num_predicted),
        ("tokens_predicted_seconds", "Seconds in steps of answers.", decode.time_s),
        ("n_decode", "Steps.", prefill.steps + decode.steps),
    ):
        yield CounterMetricFamily(f"llamacpp:{name}", text, count)
    for name, text, value in (
        ("prompt_tokens_seconds", "Prompt tokens per second.", _rate(num_prompt, prefill.time_s)),
        (
            "predicted_tokens_seconds",
            "Generated tokens per second.",
            _rate(num_predicted, decode.time_s),
        ),
        ("requests_processing", "Answers that are computed.", scheduler.num_running),
        ("requests_deferred", "Answers in the queue.", scheduler.num_waiting),
        (
            "n_busy_slots_per_decode",
            "Tokens of answers in a step of answers.",
            _rate(decode.rows, decode.steps),
        ),
    ):
        yield GaugeMetricFamily(f"llamacpp:{name}", text, value)


def _rate(count: float, total: float) -> float:
    return count / total if total else 0.0
