"""What Prometheus may know: how requests fared, and what the engine is doing now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.engine.loop import Health
from twostroke.serve.openai.usage import decode_rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from twostroke.engine.client import Client
    from twostroke.engine.hardware import Limits
    from twostroke.engine.output import Timings, Usage

# Decades in steps of 1, 2.5, 5, as wide as a small model's token and a long queue are apart.
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counts requests as they end; asks the engine for everything else when it is scraped."""

    def __init__(self, client: Client, limits: Limits | None = None) -> None:
        """Measure `client`'s engine; utilization is left out where `limits` are unknown."""
        self._registry = CollectorRegistry()
        self.responses = Counter(
            "twostroke_http_responses",
            "HTTP responses by endpoint and status.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.failures = Counter(
            "twostroke_failed_requests",
            "Requests that the engine began and could not finish.",
            registry=self._registry,
        )
        self.queue = self._histogram("queue", "From arrival to the first computed row.")
        self.ttft = self._histogram("time_to_first_token", "From arrival to the first token.")
        self.e2e = self._histogram("request", "From arrival to the last token.")
        self.tpot = Histogram(
            "twostroke_time_per_output_token_seconds",
            "Mean time between the tokens of one answer.",
            buckets=_TOKEN_S,
            registry=self._registry,
        )
        self._registry.register(_EngineCollector(client, limits))
        ProcessCollector(registry=self._registry)

    def observe(self, usage: Usage, timings: Timings) -> None:
        """Count one answer that has ended."""
        if not timings.first_token_s:
            return
        self.queue.observe(timings.started_s - timings.arrival_s)
        self.ttft.observe(timings.ttft_s)
        self.e2e.observe(timings.last_token_s - timings.arrival_s)
        if rate := decode_rate(usage, timings):
            self.tpot.observe(1 / rate)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, in the format that `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"twostroke_{name}_seconds", text, buckets=_REQUEST_S, registry=self._registry
        )


class _EngineCollector(Collector):
    """Reads the engine's own counts; nothing is kept here."""

    def __init__(self, client: Client, limits: Limits | None) -> None:
        self._client = client
        self._limits = limits

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics as of now."""
        loop = self._client.loop
        stats, totals = loop.stats(), loop.totals()
        services = totals.services.values()
        ready = loop.health is Health.READY
        yield GaugeMetricFamily("twostroke_ready", "Whether the engine can answer.", float(ready))
        for name, text, value in (
            ("requests_running", "Answers that hold pages.", stats.num_running),
            ("requests_waiting", "Answers that wait.", stats.num_waiting),
            ("waiting_tokens", "Tokens of the answers that wait.", stats.num_waiting_tokens),
            ("free_pages", "Pages that hold nothing.", stats.num_free_pages),
            ("cached_pages", "Pages that only the prefix cache knows.", stats.num_cached_pages),
            ("referenced_pages", "Pages that running requests hold.", stats.num_referenced_pages),
        ):
            yield GaugeMetricFamily(f"twostroke_{name}", text, value)
        for name, text, value in (
            ("answers", "Answers that have ended.", sum(s.answers for s in services)),
            ("prompt_tokens", "Prompt tokens.", sum(s.prompt_tokens for s in services)),
            ("cached_tokens", "Prompt tokens in cache.", sum(s.cached_tokens for s in services)),
            ("completion_tokens", "Tokens made.", sum(s.completion_tokens for s in services)),
            ("preemptions", "Times that a request lost its pages.", stats.num_preemptions),
        ):
            yield CounterMetricFamily(f"twostroke_{name}", text, value)
        yield from self._strokes()
        yield from self._speculation()

    def _speculation(self) -> Iterator[Metric]:
        stats = self._client.loop.speculation  # which grows meanwhile: items are copied at once
        for name, text, counts in (
            ("proposed", "Tokens computed as guesses, by where they came from.", stats.proposed),
            ("accepted", "Guesses that were right.", stats.accepted),
        ):
            family = CounterMetricFamily(
                f"twostroke_speculation_{name}_tokens", text, labels=("source",)
            )
            for source, count in tuple(counts.items()):
                family.add_metric((source,), count)
            yield family
        text = "How often the guess at a place behind the newest token was right."
        places = CounterMetricFamily("twostroke_speculation_accepted_at", text, labels=("place",))
        for place, count in sorted(stats.accepted_at.items()):
            places.add_metric((str(place + 1),), count)
        yield places
        yield CounterMetricFamily(
            "twostroke_speculation_passes",
            "Steps of an answer with guesses: each brought one token besides the accepted ones.",
            stats.passes,
        )
        yield GaugeMetricFamily(  # a step may take longer than hoped for
            "twostroke_speculation_saved_seconds", "Time that guesses have saved.", stats.saved_s
        )

    def _strokes(self) -> Iterator[Metric]:
        strokes = self._client.loop.meter.strokes
        both = (("prefill", strokes.prefill), ("decode", strokes.decode))
        for name, text in (
            ("steps", "Steps by what most of their rows were."),
            ("rows", "Tokens computed."),
            ("flops", "Floating-point operations."),
            ("bytes", "Bytes that had to move."),
            ("time_s", "Seconds in steps."),
            ("kernel_s", "Seconds inside kernels."),
        ):
            unit = name.replace("_s", "_seconds")
            family = CounterMetricFamily(f"twostroke_step_{unit}", text, labels=("stroke",))
            for label, stroke in both:
                family.add_metric((label,), getattr(stroke, name))
            yield family
        hardware = self._limits.beside(strokes) if self._limits else None
        if hardware is None:
            return
        mfu = GaugeMetricFamily("twostroke_mfu", "Share of peak arithmetic.", labels=("stroke",))
        mbu = GaugeMetricFamily("twostroke_mbu", "Share of peak bandwidth.", labels=("stroke",))
        for label, stroke in both:
            mfu.add_metric((label,), stroke.mfu(hardware))
            mbu.add_metric((label,), stroke.mbu(hardware))
        yield mfu
        yield mbu
