"""GET /metrics of a router, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.fleet.router.model_starts import START_OUTCOMES
from twostroke.fleet.router.replica_registry import ReplicaState
from twostroke.fleet.router.state import SCRAPE_S, wanted_replicas
from twostroke.fleet.router.upstream_state import FAILURE_KINDS
from twostroke.server.auth.costs import REPLICAS_SIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from twostroke.fleet.router.overflow import Overflow
    from twostroke.fleet.router.replica_registry import ReplicaRegistry
    from twostroke.fleet.shared_records.records import SharedRecords


class RouterMetrics(Collector):
    """The Prometheus metrics of a router: counts responses, and reads the replicas at each scrape.

    Attributes:
        registry: the registry of all metrics.
        responses: the counter of HTTP responses by endpoint and status.
    """

    def __init__(
        self,
        fleet: ReplicaRegistry,
        shared_records: SharedRecords | None = None,
        overflow: Overflow | None = None,
    ) -> None:
        """Create the metrics of a router, its replicas, `shared_records` and upstreams."""
        self._fleet = fleet
        self._shared_records = shared_records
        self._overflow = overflow
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
            value=wanted_replicas(self._fleet, used_within_s=SCRAPE_S),
        )
        yield from self._starts()
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
        yield from self._continued()
        if self._shared_records is not None:
            yield from _store_metrics(self._shared_records)
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
        if self._overflow is not None:
            yield from _upstreams(self._overflow)

    def _starts(self) -> Iterator[Metric]:
        """Yield the metrics of models that may have no replica until requests wait for one."""
        replicas = GaugeMetricFamily(
            "twostroke_router_wanted_model_replicas",
            "Replicas of a model that scales to zero which its present work needs.",
            labels=("model",),
        )
        waiting = GaugeMetricFamily(
            "twostroke_router_start_waiting_requests",
            "Requests that wait for the first replica of their model.",
            labels=("model",),
        )
        start_s = GaugeMetricFamily(
            "twostroke_router_start_seconds",
            "Time of the last start, from the first waiting request to the first ready replica.",
            labels=("model",),
        )
        waited = CounterMetricFamily(
            "twostroke_router_start_waited_requests",
            "Requests that waited for the first replica of their model, by outcome.",
            labels=("model", "outcome"),
        )
        for name, model in self._fleet.starts.models.items():
            count = wanted_replicas(self._fleet, name, used_within_s=SCRAPE_S)
            replicas.add_metric((name,), count)
            waiting.add_metric((name,), len(model.waiting))
            if model.start_s is not None:
                start_s.add_metric((name,), model.start_s)
            for outcome in START_OUTCOMES:
                waited.add_metric((name, outcome), model.num_waited[outcome])
        yield from (replicas, waiting, start_s, waited)

    def _continued(self) -> Iterator[Metric]:
        """Yield the metrics of responses that another replica continued after a loss."""
        yield CounterMetricFamily(
            "twostroke_router_continued_requests",
            "Responses that another replica continued after a loss.",
            value=self._fleet.num_continued,
        )
        yield CounterMetricFamily(
            "twostroke_router_continued_pause_seconds",
            "Time of the pauses of these responses.",
            value=self._fleet.pause_s,
        )
        yield GaugeMetricFamily(
            "twostroke_router_longest_continued_pause_seconds",
            "The longest pause of these responses.",
            value=self._fleet.max_pause_s,
        )


def _store_metrics(records: SharedRecords) -> Iterator[Metric]:
    """Yield the metrics of the store that several routers share."""
    yield GaugeMetricFamily(
        "twostroke_router_store_up",
        "1 if the store of several routers answers in time, 0 if the router decides alone.",
        value=not records.is_away,
    )
    yield CounterMetricFamily(
        "twostroke_router_store_alone",
        "Decisions and counts of requests for which the router did not wait for the store.",
        value=records.num_alone,
    )
    yield GaugeMetricFamily(
        "twostroke_router_store_unwritten_requests",
        "Requests whose usage is not in the store yet.",
        value=records.num_unwritten,
    )
    batches = SummaryMetricFamily(
        "twostroke_router_store_seconds", "Times in which the store answered batches."
    )
    batches.add_metric((), records.num_batches, records.batch_s)
    yield batches


def _upstreams(overflow: Overflow) -> Iterator[Metric]:
    """Yield the metrics of upstreams, and the costs of replicas and upstreams."""
    answered = CounterMetricFamily(
        "twostroke_router_overflow_requests",
        "Requests that an upstream answered, by the rule that sent them.",
        labels=("upstream", "rule"),
    )
    failed = CounterMetricFamily(
        "twostroke_router_overflow_failures",
        "Requests that an upstream did not answer to the end, by the kind of the failure.",
        labels=("upstream", "kind"),
    )
    usable = GaugeMetricFamily(
        "twostroke_router_overflow_usable",
        "Whether an upstream is used if a rule applies: 1, or 0.",
        labels=("upstream",),
    )
    for upstream in overflow.upstreams:
        for rule in upstream.spec.when:
            answered.add_metric((upstream.name, rule), upstream.num_requests[rule])
        for kind in FAILURE_KINDS:
            failed.add_metric((upstream.name, kind), upstream.num_failures[kind])
        usable.add_metric((upstream.name,), int(upstream.state[0] == "ready"))
    tokens = CounterMetricFamily(
        "twostroke_router_tokens",
        "Tokens that replicas (here) and upstreams have computed; input includes cached.",
        labels=("upstream", "kind"),
    )
    cost = CounterMetricFamily(
        "twostroke_router_cost",
        "Costs of replicas (here, if the overflow file has their price) and of upstreams.",
        labels=("upstream", "currency"),
    )
    for side, sums in overflow.costs.since_start.items():
        tokens.add_metric((side, "input"), sums.input)
        tokens.add_metric((side, "cached"), sums.cached)
        tokens.add_metric((side, "output"), sums.output)
        if side != REPLICAS_SIDE or overflow.costs.knows_cost_here:
            cost.add_metric((side, overflow.currency), sums.cost)
    yield from (answered, failed, usable, tokens, cost)
