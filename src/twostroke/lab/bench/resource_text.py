"""Sentences about the resources of a run, for the terminal and HTML reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.report_text import format_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.bench.resources import MachineUse, RunCost, RunResources


def resource_sentences(resources: RunResources) -> Iterator[tuple[str, str]]:
    """Yield the name and a sentence of each resource that is known."""
    counters = resources.counters
    if counters is not None and counters.acceptance is not None:
        per_step = counters.tokens_per_draft_step
        steps = "" if per_step is None else f", {per_step:.2f} tokens for each step with drafts"
        drafted = f"{counters.num_drafted:,.0f} drafted tokens"
        text = f"{counters.acceptance:.1%} of {drafted} were right{steps}, as the server counts."
        yield "Speculation", text
    if counters is not None and counters.num_preemptions:
        times = counted_noun(counters.num_preemptions, "time", form=",.0f")
        yield "Preemptions", f"Running requests lost their pages {times}."
    if resources.use is not None and not (resources.use.mfu is resources.use.mbu is None):
        yield "Machine", _use_sentence(resources.use)
    if resources.energy is not None:
        energy = resources.energy
        parts = ", ".join(
            f"{part} {format_number(joules)} J" for part, joules in energy.joules_by_part.items()
        )
        each = resources.joules_per_output_token
        per_token = "" if each is None else f"; {format_number(each)} J for each output token"
        text = (
            f"{format_number(energy.joules)} J in {format_number(energy.seconds)} s, "
            f"{format_number(energy.watts)} W on average ({parts}){per_token}. The client, other "
            "programs and idle power are included."
        )
        yield "Energy", text
    if resources.cost is not None:
        yield "Costs", _cost_sentence(resources.cost)


def _use_sentence(use: MachineUse) -> str:
    kind = "prefill steps" if use.method.startswith("counted") else "the whole time"
    shares = []
    if use.mfu is not None:
        peak = f"{format_number(use.peak_flops / 1e12)} TFLOP/s"
        shares.append(f"MFU {use.mfu:.1%} of {peak} in {kind}")
    if use.mbu is not None:
        bandwidth = f"{format_number(use.bandwidth / 1e9)} GB/s"
        shares.append(f"MBU {use.mbu:.1%} of {bandwidth} in decode steps")
    return f"{', '.join(shares)}; {use.method}. Limits: {use.limits_source}."


def _cost_sentence(cost: RunCost) -> str:
    figures = (
        (cost.per_million_output, "per million output tokens"),
        (cost.per_million_tokens, "per million tokens of input and output"),
        (cost.per_thousand_requests, "per 1,000 requests"),
        (cost.per_thousand_good, "per 1,000 requests that met every objective"),
    )
    texts = [f"${usd:,.4g} {noun}" for usd, noun in figures if usd is not None]
    price = f"at ${cost.usd_per_hour:,.4g} an hour ({cost.price_source})"
    return f"{', '.join(texts) or 'No request completed'}, {price}."
