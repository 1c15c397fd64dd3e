"""GET /metrics of a router, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.state import wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from twostroke.fleet.router.replica_registry import ReplicaRegistry


class RouterMetrics(Collector):
    """Counts responses, and reads everything else when Prometheus asks."""

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Measure `fleet`."""
        self._fleet = fleet
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "twostroke_http_responses",
            "HTTP responses by endpoint and status.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, in the format that `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the fleet and its replicas."""
        fleet, dispatcher = self._fleet, self._fleet.dispatcher
        states = GaugeMetricFamily(
            "twostroke_router_replicas", "Replicas by state.", labels=("state",)
        )
        for state in ReplicaState:
            count = sum(one.state is state for one in fleet.replicas.values())
            states.add_metric((state.value,), count)
        yield states
        yield GaugeMetricFamily(
            "twostroke_router_wanted_replicas",
            "Replicas that the present work asks for.",
            value=wanted(fleet),
        )
        for name, text, value in (
            ("prompt_bytes", "Bytes of prompts that were sent.", dispatcher.num_units),
            ("hit_bytes", "Bytes of these that their replica should hold.", dispatcher.num_hit),
            ("best_hit_bytes", "Bytes of these that any replica holds.", dispatcher.num_best),
        ):
            yield CounterMetricFamily(f"twostroke_router_{name}", text, value=value)
        gauges = {
            "work_seconds": ("Seconds until a new request would begin.", dispatcher.wait_s),
            "open_requests": ("Requests that have not ended.", dispatcher.num_open),
        }
        for name, (text, of) in gauges.items():
            gauge = GaugeMetricFamily(f"twostroke_router_{name}", text, labels=("replica",))
            for one in fleet.replicas.values():
                gauge.add_metric((one.url,), of(one.place))
            yield gauge
        lost = CounterMetricFamily(
            "twostroke_router_lost_requests",
            "Requests that a replica lost, before the first byte (sent to another) or after it.",
            labels=("replica", "when"),
        )
        sent = CounterMetricFamily(
            "twostroke_router_requests", "Requests sent to a replica.", labels=("replica",)
        )
        for one in fleet.replicas.values():
            sent.add_metric((one.url,), one.num_requests)
            lost.add_metric((one.url, "before"), one.num_failed)
            lost.add_metric((one.url, "after"), one.num_errors)
        yield sent
        yield lost
