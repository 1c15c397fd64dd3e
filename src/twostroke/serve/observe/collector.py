"""The engine's own counts, in Prometheus' form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from twostroke.core.request import FinishReason
from twostroke.engine.loop import Health
from twostroke.serve.observe.state import WINDOWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from twostroke.engine.client import Client
    from twostroke.engine.histogram import Distribution
    from twostroke.engine.limits import Limits
    from twostroke.engine.tally import ServiceTotals

# Decades in steps of 1, 2.5, 5, as wide as a small model's token and a long queue are apart.
_TOKEN_S: Final = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
_REQUEST_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
_LATENCIES: Final = (
    ("queue", "queue", "From arrival to the first computed row.", _REQUEST_S),
    ("ttft", "time_to_first_token", "From arrival to the first token.", _REQUEST_S),
    ("e2e", "request", "From arrival to the last token.", _REQUEST_S),
    ("tpot", "time_per_output_token", "Mean time between the tokens of one answer.", _TOKEN_S),
    ("itl", "inter_token_latency", "Time between two steps that brought tokens.", _TOKEN_S),
)


class EngineCollector(Collector):
    """Reads what the engine counts; nothing is kept here."""

    def __init__(self, client: Client, limits: Limits | None, version: str) -> None:
        """Read `client`'s engine; `limits` are what utilization is measured against."""
        self._client = client
        self._limits = limits
        self._version = version

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics as of now."""
        loop = self._client.loop
        is_ready = float(loop.health is Health.READY)
        yield GaugeMetricFamily("twostroke_ready", "Whether the engine can answer.", is_ready)
        yield self._model()
        services = loop.totals().services
        yield from _services(services)
        yield from _latencies(services)
        yield from self._scheduler()
        yield from self._strokes()
        yield from self._utilization()
        yield from self._speculation()

    def _model(self) -> Metric:
        card = self._client.card
        facts = {
            "version": self._version,
            "name": card.name,
            "architecture": card.architecture,
            "format": card.format,
            "backend": self._client.loop.facts.detail,
        }
        return InfoMetricFamily("twostroke_model", "What is served.", facts)

    def _scheduler(self) -> Iterator[Metric]:
        loop = self._client.loop
        stats, facts = loop.stats(), loop.facts
        for name, text, value in (
            ("requests_running", "Answers that hold pages.", stats.num_running),
            ("requests_waiting", "Answers that wait.", stats.num_waiting),
            ("waiting_tokens", "Tokens of the answers that wait.", stats.num_waiting_tokens),
            ("pages", "Pages of keys and values, whatever they hold.", facts.num_pages),
            ("page_tokens", "Tokens that a page holds.", facts.page_size),
            ("free_pages", "Pages that hold nothing.", stats.num_free_pages),
            ("cached_pages", "Pages that only the prefix cache knows.", stats.num_cached_pages),
            ("referenced_pages", "Pages that running requests hold.", stats.num_referenced_pages),
        ):
            yield GaugeMetricFamily(f"twostroke_{name}", text, value)
        for name, text, value in (
            ("preemptions", "Times that a request lost its pages.", stats.num_preemptions),
            (
                "prefix_cache_asked_tokens",
                "Prompt tokens looked for in the prefix cache.",
                stats.num_prompt_tokens,
            ),
            (
                "prefix_cache_hit_tokens",
                "Prompt tokens found in the prefix cache.",
                stats.num_hit_tokens,
            ),
        ):
            yield CounterMetricFamily(f"twostroke_{name}", text, value)

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
        meter = self._client.loop.meter
        strokes = meter.strokes
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
        text = "Rows of a step: tokens of prompts, newest tokens, and guesses."
        sizes = HistogramMetricFamily("twostroke_rows_per_step", text, labels=("stroke",))
        for label, rows in (("prefill", meter.prefill_rows), ("decode", meter.decode_rows)):
            distribution = rows.read()
            _add(sizes, label, distribution, distribution.bounds)
        yield sizes

    def _utilization(self) -> Iterator[Metric]:
        """Yield what the last seconds made of the machine."""
        loop = self._client.loop
        span = loop.span(WINDOWS[0])
        strokes = span.last.strokes - span.first.strokes
        both = (("prefill", strokes.prefill), ("decode", strokes.decode))
        seconds = max(1, span.seconds)
        text = f"Share of the last {WINDOWS[0]} seconds spent in steps."
        busy = GaugeMetricFamily("twostroke_busy_ratio", text, labels=("stroke",))
        for label, stroke in both:
            busy.add_metric((label,), stroke.time_s / seconds)
        yield busy
        hardware = self._limits.seen(strokes) if self._limits else None
        if hardware is None:
            return
        for name, text, value in (
            ("peak_flops_per_second", "The machine's peak arithmetic.", hardware.peak),
            ("peak_bytes_per_second", "The machine's peak bandwidth.", hardware.bandwidth),
        ):
            yield GaugeMetricFamily(f"twostroke_{name}", text, value)
        when = f"while steps ran in the last {WINDOWS[0]} seconds."
        mfu = GaugeMetricFamily("twostroke_mfu", f"Share of peak FLOP/s {when}", labels=("stroke",))
        text = f"Share of peak bandwidth {when}"
        mbu = GaugeMetricFamily("twostroke_mbu", text, labels=("stroke",))
        for label, stroke in both:
            mfu.add_metric((label,), stroke.mfu(hardware))
            mbu.add_metric((label,), stroke.mbu(hardware))
        yield from (mfu, mbu)


def _services(services: Mapping[str, ServiceTotals]) -> Iterator[Metric]:
    text = "Answers that have ended, by why."
    ends = CounterMetricFamily("twostroke_answers", text, labels=("class", "finish_reason"))
    for service, totals in services.items():
        for reason in FinishReason:
            ends.add_metric((service, reason.value), totals.ends.get(reason, 0))
    yield ends
    for name, text in (
        ("prompt_tokens", "Prompt tokens of answers that have begun."),
        ("cached_tokens", "Those of them that the prefix cache had."),
        ("completion_tokens", "Tokens made."),
        ("embedded_texts", "Texts whose embeddings were made."),
        ("embedded_tokens", "Their tokens."),
    ):
        family = CounterMetricFamily(f"twostroke_{name}", text, labels=("class",))
        for service, totals in services.items():
            family.add_metric((service,), getattr(totals, name))
        yield family


def _latencies(services: Mapping[str, ServiceTotals]) -> Iterator[Metric]:
    for key, name, text, bounds in _LATENCIES:
        family = HistogramMetricFamily(f"twostroke_{name}_seconds", text, labels=("class",))
        for service, totals in services.items():
            _add(family, service, totals.latencies[key], bounds)
        yield family


def _add(
    family: HistogramMetricFamily,
    label: str,
    distribution: Distribution,
    bounds: tuple[float, ...],
) -> None:
    below = [(repr(bound), count) for bound, count in distribution.cumulative(bounds)]
    family.add_metric((label,), [*below, ("+Inf", distribution.count)], distribution.sum)
