"""GET /metrics of a router, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.state import wanted_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from twostroke.fleet.router.replica_registry import ReplicaRegistry


class RouterMetrics(Collector):
    """The Prometheus metrics of a router: counts responses, and reads the replicas at each scrape.

    Attributes:
        registry: the registry of all metrics.
        responses: the counter of HTTP responses by endpoint and status.
    """

    def __init__(self, fleet: ReplicaRegistry) -> None:
        """Create the metrics of a router with the replicas of `fleet`."""
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
        """Return the text of all metrics and its content type, in the format that `accept` prefers.

        `accept` is the value of the request's `Accept` header.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the router's replicas."""
        replicas, dispatcher = self._fleet.replicas.values(), self._fleet.dispatcher
        states = GaugeMetricFamily(
            "twostroke_router_replicas", "Replicas by state.", labels=("state",)
        )
        for state in ReplicaState:
            count = sum(replica.state is state for replica in replicas)
            states.add_metric((state.value,), count)
        yield states
        yield GaugeMetricFamily(
            "twostroke_router_wanted_replicas",
            "Replicas that the present work needs.",
            value=wanted_replicas(self._fleet),
        )
        yield CounterMetricFamily(
            "twostroke_router_prompt_bytes",
            "Bytes of prompts that were sent to replicas.",
            value=dispatcher.num_units,
        )
        yield CounterMetricFamily(
            "twostroke_router_hit_bytes",
            "Bytes of these prompts that their replica should have in its prefix cache.",
            value=dispatcher.num_hit_units,
        )
        yield CounterMetricFamily(
            "twostroke_router_best_hit_bytes",
            "Bytes of these prompts that any replica has in its prefix cache.",
            value=dispatcher.num_best_hit_units,
        )
        work = GaugeMetricFamily(
            "twostroke_router_work_seconds",
            "Seconds until a new request would start.",
            labels=("replica",),
        )
        open_requests = GaugeMetricFamily(
            "twostroke_router_open_requests",
            "Requests that have not ended.",
            labels=("replica",),
        )
        lost = CounterMetricFamily(
            "twostroke_router_lost_requests",
            "Requests that a replica lost, before the first byte (sent to another) or after it.",
            labels=("replica", "when"),
        )
        sent = CounterMetricFamily(
            "twostroke_router_requests", "Requests sent to a replica.", labels=("replica",)
        )
        for replica in replicas:
            work.add_metric((replica.url,), dispatcher.wait_s(replica.index))
            open_requests.add_metric((replica.url,), dispatcher.num_open(replica.index))
            sent.add_metric((replica.url,), replica.num_requests)
            lost.add_metric((replica.url, "before"), replica.num_lost_before)
            lost.add_metric((replica.url, "after"), replica.num_lost_after)
        yield from (work, open_requests, sent, lost)
