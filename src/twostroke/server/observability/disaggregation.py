"""What is shown of prefill and decode engines: prompts handed over, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from twostroke.engine.disaggregation.placement import REASONS
from twostroke.engine.disaggregation.prefill_peer import OUTCOMES
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from twostroke.engine.disaggregation_stats import DecodeSideStats, PrefillSideStats
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import EngineStatus

_TYPICAL: Final = 1024  # tokens of a prompt
_BORROWED: Final = (
    ("num_bytes", "bytes", "Bytes of pages that came."),
    ("seconds", "seconds", "Seconds of transfers, the reading of prompts included."),
    ("expected_s", "expected_seconds", "Seconds that these were expected to take."),
    ("fetch_s", "fetch_seconds", "Seconds of these in which offered pages were fetched."),
)
_LENT: Final = (
    ("num_prompts", "prompts_read", "Prompts that were read for decode engines."),
    ("num_leased_pages", "pages_lent", "Pages that were offered to decode engines."),
    ("num_expired_leases", "leases_late", "Offers that were not fetched in time."),
)


def describe_handover(reading: EngineStatus, card: ModelCard) -> dict[str, Any] | None:
    """Return an engine's part in a hand-over for /api/state; None without a role."""
    if reading.disaggregation is None:
        return None
    ratio = prefill_per_decode(reading, card)
    described: dict[str, Any] = to_builtins(reading.disaggregation)
    return described | ({} if ratio is None else {"prefill_per_decode": ratio})


def handover_metrics(reading: EngineStatus, card: ModelCard) -> Iterator[Metric]:
    """Yield what an engine lent or borrowed; nothing without a role."""
    view = reading.disaggregation
    if view is not None and view.decode_side is not None:
        yield from _borrowed(view.decode_side)
        if (ratio := prefill_per_decode(reading, card)) is not None:
            text = "Prefill engines that one such decode engine can use, by measured rates."
            yield GaugeMetricFamily("twostroke_handover_prefill_per_decode", text, ratio)
    if view is not None and view.prefill_side is not None:
        yield from _lent(view.prefill_side)


def prefill_per_decode(reading: EngineStatus, card: ModelCard) -> float | None:
    """Return how many prefill engines a decode engine like this one can use, once that is known.

    That is the time to read all prompts so far, at the best pace of a prefill engine, over the time
    of their answers' steps.
    """
    borrower, decode = (
        reading.disaggregation and reading.disaggregation.decode_side,
        reading.snapshot.phases.decode,
    )
    services = reading.snapshot.services.values()
    pace = max((peer.flops_per_s for peer in borrower.peers), default=0.0) if borrower else 0.0
    num_drawn = sum(one.completion_tokens for one in services)
    if not pace or not decode.rows or not num_drawn:
        return None
    flops = card.cost.per_step().of(BatchShape.prefill(_TYPICAL)).flops / _TYPICAL
    prefill_s = sum(one.prompt_tokens for one in services) * flops / pace
    return prefill_s / (num_drawn * decode.time_s / decode.rows)


def _borrowed(view: DecodeSideStats) -> Iterator[Metric]:
    text = "Prompts by where they were read, or why they were read here."
    yield _counts("prompts", text, "where", REASONS, view.decisions)
    text = "Transfers by how they ended; all but done left something to compute here."
    yield _counts("transfers", text, "outcome", OUTCOMES, view.transfers)
    for key, name, text in _BORROWED:
        yield CounterMetricFamily(f"twostroke_handover_{name}", text, getattr(view, key))
    text = "Whether a prefill engine is connected."
    peers = GaugeMetricFamily("twostroke_handover_peer_up", text, labels=("peer",))
    for peer in view.peers:
        peers.add_metric((peer.address,), peer.state == "up")
    yield peers


def _lent(view: PrefillSideStats) -> Iterator[Metric]:
    for key, name, text in _LENT:
        yield CounterMetricFamily(f"twostroke_handover_{name}", text, getattr(view, key))
    text = "Decode engines that are connected."
    yield GaugeMetricFamily("twostroke_handover_decode_engines", text, view.num_peers)


def _counts(
    name: str, text: str, label: str, words: Iterable[str], counts: dict[str, int]
) -> Metric:
    family = CounterMetricFamily(f"twostroke_handover_{name}", text, labels=(label,))
    for word in words:
        family.add_metric((word,), counts.get(word, 0))
    return family
