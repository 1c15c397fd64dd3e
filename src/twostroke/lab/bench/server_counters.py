"""Counters of a server (GET /metrics) before and after a run: drafts, cache hits and work.

Only the counters of Twostroke and vLLM are known. For a server whose counters have other names,
nothing is counted.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from twostroke.core.frozen import Frozen
from twostroke.lab.bench.endpoint import ExchangeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.lab.bench.endpoint import EndpointClient

_TIMEOUT_S: Final = 5.0
_MODEL_LABELS: Final = ("model", "model_name")  # of Twostroke's pools, and of vLLM
_STROKES: Final = ("prefill", "decode")
_STEP_COUNTERS: Final = {
    "num_steps": "twostroke_step_steps_total",
    "flops": "twostroke_step_flops_total",
    "num_bytes": "twostroke_step_bytes_total",
    "seconds": "twostroke_step_time_seconds_total",
}
# Names of Twostroke's and vLLM's counters.
_COUNTERS: Final = {
    "num_drafted": (
        "twostroke_speculation_proposed_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "num_accepted": (
        "twostroke_speculation_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
    "num_draft_steps": (
        "twostroke_speculation_passes_total",
        "vllm:spec_decode_num_drafts_total",
    ),
    "num_looked_up": (
        "twostroke_prefix_cache_asked_tokens_total",
        "vllm:prefix_cache_queries_total",
    ),
    "num_hits": ("twostroke_prefix_cache_hit_tokens_total", "vllm:prefix_cache_hits_total"),
    "num_preemptions": ("twostroke_preemptions_total", "vllm:num_preemptions_total"),
}
_PEAK_FLOPS: Final = "twostroke_peak_flops_per_second"
_PEAK_BANDWIDTH: Final = "twostroke_peak_bytes_per_second"


class StepWork(Frozen):
    """The steps of one kind, prefill or decode, and the work and time in them."""

    num_steps: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0


class ServerCounters(Frozen):
    """Counts from a server's metrics, since its start or during a run; None for missing metrics.

    Attributes:
        num_drafted, num_accepted: draft tokens, and accepted draft tokens.
        num_draft_steps: how often a request was computed with drafts in a step.
        num_looked_up, num_hits: prompt tokens looked up in the prefix cache, and found there.
        num_preemptions: how often a running request was preempted.
        prefill, decode: work of steps.
        peak_flops, bandwidth: the limits of the server's machine per second, as it measured them.
    """

    num_drafted: float | None = None
    num_accepted: float | None = None
    num_draft_steps: float | None = None
    num_looked_up: float | None = None
    num_hits: float | None = None
    num_preemptions: float | None = None
    prefill: StepWork | None = None
    decode: StepWork | None = None
    peak_flops: float | None = None
    bandwidth: float | None = None

    @property
    def acceptance(self) -> float | None:
        """The share of draft tokens that were accepted; None without drafts."""
        if not self.num_drafted or self.num_accepted is None:
            return None
        return self.num_accepted / self.num_drafted

    @property
    def tokens_per_draft_step(self) -> float | None:
        """The mean number of tokens that a request gets in a step with drafts."""
        if not self.num_draft_steps or self.num_accepted is None:
            return None
        return 1 + self.num_accepted / self.num_draft_steps

    @property
    def hit_share(self) -> float | None:
        """The share of prompt tokens that the prefix cache had."""
        if not self.num_looked_up or self.num_hits is None:
            return None
        return self.num_hits / self.num_looked_up


async def read_counters(client: EndpointClient, model: str) -> ServerCounters | None:
    """Return the counters of a server's model; None if the server has no metrics."""
    text = await _get(client, "/metrics")
    return None if text is None else parse_counters(text, model)


async def read_version(client: EndpointClient) -> str:
    """Return the server's version as it reports it, such as "vLLM 0.20.1"; empty if unknown."""
    text = await _get(client, "/version")
    fields = _json_object(text)
    if isinstance(fields.get("version"), str):
        return f"vLLM {fields['version']}"
    fields = _json_object(await _get(client, "/props"))
    build = fields.get("build_info")
    if not isinstance(build, str):
        return ""
    match = re.fullmatch(r"b(.+)-twostroke", build)
    return f"Twostroke {match[1]}" if match else f"llama.cpp {build}"


def parse_counters(text: str, model: str) -> ServerCounters | None:
    """Return the counters in the text of a server's metrics; None if there are none.

    Samples of other models than `model` are left out, unless it is empty.
    """
    values: defaultdict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels
                if model and any(labels.get(label, model) != model for label in _MODEL_LABELS):
                    continue
                stroke = labels.get("stroke")
                values[f"{sample.name} {stroke}" if stroke else sample.name] += sample.value
    except ValueError:  # not the text of metrics
        return None
    counts: dict[str, Any] = {
        field: next((values[name] for name in names if name in values), None)
        for field, names in _COUNTERS.items()
    }
    for stroke in _STROKES:
        names = {field: f"{name} {stroke}" for field, name in _STEP_COUNTERS.items()}
        if all(name in values for name in names.values()):
            counts[stroke] = StepWork(**{field: values[name] for field, name in names.items()})
    if all(count is None for count in counts.values()):
        return None
    return ServerCounters(
        **counts, peak_flops=values.get(_PEAK_FLOPS), bandwidth=values.get(_PEAK_BANDWIDTH)
    )


def counted_between(
    before: ServerCounters | None, after: ServerCounters | None
) -> ServerCounters | None:
    """Return the counts of a run; None if they are unknown, or if the server was restarted.

    A counter that first appears during the run, such as a draft method's, began at 0.
    """
    if before is None or after is None:
        return None
    counts: dict[str, Any] = {}
    for field in _COUNTERS:
        first, last = getattr(before, field), getattr(after, field)
        counts[field] = None if last is None else last - (first or 0.0)
    for stroke in _STROKES:
        first, last = getattr(before, stroke), getattr(after, stroke)
        if first is not None and last is not None:
            counts[stroke] = StepWork(
                **{field: getattr(last, field) - getattr(first, field) for field in _STEP_COUNTERS}
            )
    if any(count < 0 for count in _numbers(counts.values())):
        return None
    return ServerCounters(**counts, peak_flops=after.peak_flops, bandwidth=after.bandwidth)


def _numbers(counts: Iterable[float | StepWork | None]) -> Iterable[float]:
    for count in counts:
        if isinstance(count, StepWork):
            yield from msgspec.structs.astuple(count)
        elif count is not None:
            yield count


async def _get(client: EndpointClient, path: str) -> str | None:
    """Return the text at a path of the endpoint; None if there is none."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reply = await client.get(path)
    except (ExchangeError, TimeoutError):
        return None
    return reply.body.decode(errors="replace") if reply.status == 200 else None


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text or "null")
    except msgspec.MsgspecError:
        return {}
    return fields if isinstance(fields, dict) else {}
