"""The metrics of llama-server, for dashboards that were made for it (`--llama-metrics`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from twostroke.engine.counters import Snapshot


def llama_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the counts of an engine under llama-server's names.

    A step with prompt and answer tokens counts as what most of its tokens are.
    """
    prefill, decode = snapshot.strokes.prefill, snapshot.strokes.decode
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
