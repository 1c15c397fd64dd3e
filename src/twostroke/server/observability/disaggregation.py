"""Metrics and dashboard data about KV transfers between prefill and decode engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from twostroke.engine.disaggregation.placement import REASONS
from twostroke.engine.disaggregation.prefill_connection import OUTCOMES
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from twostroke.engine.disaggregation_stats import DecodeSideStats, PrefillSideStats
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import EngineStatus

_TYPICAL_PROMPT_TOKENS: Final = 1024
_TRANSFER_COUNTERS: Final = (
    ("num_bytes", "bytes", "Bytes of pages that came."),
    ("seconds", "seconds", "Seconds of transfers, the reading of prompts included."),
    ("expected_s", "expected_seconds", "Seconds that these were expected to take."),
    ("fetch_s", "fetch_seconds", "Seconds of these in which offered pages were fetched."),
)
_PREFILL_COUNTERS: Final = (
    ("num_prompts", "prompts_read", "Prompts that were read for decode engines."),
    ("num_leased_pages", "pages_lent", "Pages that were offered to decode engines."),
    ("num_expired_leases", "leases_late", "Offers that were not fetched in time."),
)


def describe_disaggregation(status: EngineStatus, card: ModelCard) -> dict[str, Any] | None:
    """Return the statistics of KV transfers for GET /api/state, the dashboard's data.

    None if the engine is neither a prefill nor a decode engine.
    """
    if status.disaggregation is None:
        return None
    ratio = prefill_per_decode(status, card)
    description: dict[str, Any] = to_builtins(status.disaggregation)
    return description | ({} if ratio is None else {"prefill_per_decode": ratio})


def disaggregation_metrics(status: EngineStatus, card: ModelCard) -> Iterator[Metric]:
    """Yield the Prometheus metrics of KV transfers between prefill and decode engines.

    Yields nothing for an engine that is neither a prefill nor a decode engine.
    """
    view = status.disaggregation
    if view is not None and view.decode_side is not None:
        yield from _decode_side_metrics(view.decode_side)
        if (ratio := prefill_per_decode(status, card)) is not None:
            text = "Prefill engines that one such decode engine can use, by measured rates."
            yield GaugeMetricFamily("twostroke_handover_prefill_per_decode", text, ratio)
    if view is not None and view.prefill_side is not None:
        yield from _prefill_side_metrics(view.prefill_side)


def prefill_per_decode(status: EngineStatus, card: ModelCard) -> float | None:
    """Return how many prefill engines a fleet needs for each decode engine like this one.

    The ratio is the time to prefill all prompts so far, at the speed of the fastest prefill engine,
    divided by the time of the decode steps of their answers. None if this is not a decode engine,
    or has no measurement yet.
    """
    decode_side = status.disaggregation and status.disaggregation.decode_side
    decode = status.snapshot.phases.decode
    services = status.snapshot.services.values()
    peers = decode_side.peers if decode_side else ()
    flops_per_s = max((peer.flops_per_s for peer in peers), default=0.0)
    num_generated = sum(totals.completion_tokens for totals in services)
    if not flops_per_s or not decode.rows or not num_generated:
        return None
    flops = (
        card.cost.per_step().of(BatchShape.prefill(_TYPICAL_PROMPT_TOKENS)).flops
        / _TYPICAL_PROMPT_TOKENS
    )
    prefill_s = sum(totals.prompt_tokens for totals in services) * flops / flops_per_s
    return prefill_s / (num_generated * decode.time_s / decode.rows)


def _decode_side_metrics(view: DecodeSideStats) -> Iterator[Metric]:
    text = "Prompts by where they were read, or why they were read here."
    yield _labelled_counter("prompts", text, "where", REASONS, view.decisions)
    text = "Transfers by how they ended; all but done left something to compute here."
    yield _labelled_counter("transfers", text, "outcome", OUTCOMES, view.transfers)
    for key, name, text in _TRANSFER_COUNTERS:
        yield CounterMetricFamily(f"twostroke_handover_{name}", text, getattr(view, key))
    text = "Whether a prefill engine is connected."
    peers = GaugeMetricFamily("twostroke_handover_peer_up", text, labels=("peer",))
    for peer in view.peers:
        peers.add_metric((peer.address,), peer.state == "up")
    yield peers


def _prefill_side_metrics(view: PrefillSideStats) -> Iterator[Metric]:
    for key, name, text in _PREFILL_COUNTERS:
        yield CounterMetricFamily(f"twostroke_handover_{name}", text, getattr(view, key))
    text = "Decode engines that are connected."
    yield GaugeMetricFamily("twostroke_handover_decode_engines", text, view.num_peers)


def _labelled_counter(
    name: str, text: str, label: str, values: Iterable[str], counts: dict[str, int]
) -> Metric:
    family = CounterMetricFamily(f"twostroke_handover_{name}", text, labels=(label,))
    for value in values:
        family.add_metric((value,), counts.get(value, 0))
    return family
