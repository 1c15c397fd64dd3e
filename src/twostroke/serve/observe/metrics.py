"""What Prometheus may know: how requests fared, and what the engine is doing now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.serve.observe.collector import EngineCollector
from twostroke.serve.observe.objectives import ALL, Goodput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from twostroke.engine.client import Client
    from twostroke.engine.limits import Limits
    from twostroke.serve.observe.objectives import Objective


class Metrics:
    """Counts responses; asks the engine for everything else when it is scraped."""

    def __init__(
        self,
        client: Client,
        limits: Limits | None = None,
        objectives: Iterable[Objective] = (),
        version: str = "unknown",
    ) -> None:
        """Measure `client`'s engine; utilization is left out where `limits` are unknown.

        Raises:
            UsageError: the objectives contradict each other.
        """
        self.goodput = Goodput(objectives)
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
        self._registry.register(EngineCollector(client, limits, version))
        self._registry.register(_GoodputCollector(self.goodput))
        ProcessCollector(registry=self._registry)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, in the format that `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _GoodputCollector(Collector):
    """Tells how objectives are kept; nothing where there are none."""

    def __init__(self, goodput: Goodput) -> None:
        self._goodput = goodput

    def collect(self) -> Iterator[Metric]:
        """Yield limits, counts since the start, and goodput in the last minute."""
        goodput = self._goodput
        if not goodput.is_asked:
            return
        labels, limits = ("class", "objective"), goodput.limits
        text = "What answers are held against."
        family = GaugeMetricFamily("twostroke_objective_limit_seconds", text, labels=labels)
        for service, measures in limits.items():
            for measure, limit_s in measures.items():
                family.add_metric((service, measure), limit_s)
        yield family
        kept, (recent, seconds) = goodput.read(), goodput.recent()
        text = "Answers by whether they met an objective, or all of them."
        answers = CounterMetricFamily(
            "twostroke_objective_answers", text, labels=(*labels, "result")
        )
        text = "Tokens of answers that met all objectives."
        tokens = CounterMetricFamily("twostroke_good_tokens", text, labels=("class",))
        text = "Answers that met all objectives, over the last minute."
        rate = GaugeMetricFamily("twostroke_goodput_requests_per_second", text, labels=("class",))
        text = "Tokens of answers that met all objectives, over the last minute."
        token_rate = GaugeMetricFamily(
            "twostroke_goodput_tokens_per_second", text, labels=("class",)
        )
        for service, measures in limits.items():
            if not measures:
                continue
            for measure in (*measures, ALL):
                for result, counts in (("met", kept.met), ("missed", kept.missed)):
                    count = counts.get((service, measure), 0)
                    answers.add_metric((service, measure, result), count)
            tokens.add_metric((service,), kept.good_tokens.get(service, 0))
            rate.add_metric((service,), recent.met.get((service, ALL), 0) / max(1, seconds))
            token_rate.add_metric((service,), recent.good_tokens.get(service, 0) / max(1, seconds))
        yield from (answers, tokens, rate, token_rate)
