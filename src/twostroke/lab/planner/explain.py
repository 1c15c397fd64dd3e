"""Writes the formulas of a plan with their numbers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twostroke.lab.planner.question import MEMORY_SHARE
from twostroke.lab.planner.roofline import copies
from twostroke.model.program.kv_layout import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.planner import MemoryPlan, Planner
    from twostroke.lab.planner.roofline import PlannedStepTime, Roofline


def explain(planner: Planner, memory: MemoryPlan, streams: int) -> Iterator[str]:
    """Yield each formula with its numbers, a line each."""
    yield from _limits(planner)
    yield from _memory(planner, memory)
    yield from _times(planner, streams)
    yield from _figures(planner, streams)


def _limits(planner: Planner) -> Iterator[str]:
    asked, device, roofline = planner.question, planner.device, planner.roofline
    peak = device.peaks[roofline.arithmetic]
    yield (
        f"arithmetic = devices x peak x MFU = {asked.count} x {peak / 1e12:g} T/s "
        f"({roofline.arithmetic}) x {asked.mfu:g} = {_number(roofline.peak / 1e12)} T/s"
    )
    yield (
        f"bandwidth = devices x bandwidth x MBU = {asked.count} x {device.bandwidth / 1e9:g} GB/s "
        f"x {asked.mbu:g} = {_number(roofline.bandwidth / 1e9)} GB/s"
    )


def _memory(planner: Planner, memory: MemoryPlan) -> Iterator[str]:
    asked, model = planner.question, planner.model
    yield (
        f"weights = {model.num_weights / 1e9:.4g} G weights, {model.stored} = "
        f"{memory.weights / 1e9:.4g} GB"
    )
    layers, stored = Counter(model.program.cache_layers), FORMATS[asked.kv_format]
    terms = []
    for layer, times in layers.items():
        size = layer.bytes_per_token(stored) / layer.values_per_token
        copied = copies(layer.num_kv_heads, asked.count)
        more = f" x {copied:.4g} (devices / heads)" if copied > 1 else ""
        heads = f"{layer.num_rows} x {layer.num_kv_heads} x {layer.head_dim}"
        terms.append(f"{times} x {heads} x {size:.4g}{more}")
    yield (
        f"KV of a token = sum over layers of rows x heads x dimension x bytes ({asked.kv_format}) "
        f"= {' + '.join(terms)} = {memory.kv_per_token:,.0f} bytes"
    )
    yield (
        f"KV of a request = that x ({asked.prompt} + {asked.output}) tokens, within windows = "
        f"{memory.kv_per_request / 1e9:.4g} GB"
    )
    if memory.usable is not None:
        yield (
            f"streams that fit = (devices x memory x {MEMORY_SHARE:g} - weights) / KV of a request "
            f"= ({memory.usable / 1e9:.4g} - {memory.weights / 1e9:.4g}) GB / "
            f"{memory.kv_per_request / 1e9:.4g} GB = {memory.most_streams}"
        )


def _times(planner: Planner, streams: int) -> Iterator[str]:
    asked, roofline = planner.question, planner.roofline
    yield (
        "time of a step = sum over its operations of max(operations / arithmetic, bytes / "
        "bandwidth) + 2 all-reduces a layer over the links"
    )
    count = planner.num_chunks(1)
    chunks = f" in {count} steps of at most {asked.token_budget}" if count > 1 else ""
    least = planner.prefill(is_limit=True)
    yield _stroke(f"prefill of {asked.num_new} tokens{chunks}", planner.prefill(), least, roofline)
    for number in sorted({1, streams}):
        least = planner.decode(number, is_limit=True)
        name = f"decode, {number} {'stream' if number == 1 else 'streams'}"
        yield _stroke(name, planner.decode(number), least, roofline)
    if asked.most_decoding is not None:
        yield (
            "streams that fill a step = tokens of a step x output / (computed prompt + output) = "
            f"{asked.token_budget} x {asked.output} / ({asked.num_new} + {asked.output}) = "
            f"{asked.most_decoding}"
        )
    yield (
        "knee = (bytes / bandwidth) / (operations of a token / arithmetic) of the products of a "
        "step with as many streams = "
        f"{planner.knee:.1f} streams"
    )
    prompt_s = planner.prompt_s(streams)
    if streams > 1:
        count = planner.num_chunks(streams)
        sums, part = (f"sum over {count} of ", "a part of the prompt") if count > 1 else ("", "")
        yield (
            f"prompt among others = {sums}step with {streams - 1} streams and "
            f"{part or 'the prompt'} - step with these alone = {prompt_s:.4g} s"
        )
        yield (
            f"TTFT = prompt among others + {count} x step with these alone = {prompt_s:.4g} + "
            f"{count} x {planner.step_s(streams - 1):.4g} = {planner.ttft_s(streams):.4g} s"
        )
        yield (
            "TPOT = decode step + (streams - 1) x prompt among others / output = "
            f"{planner.step_s(streams):.4g} + {streams - 1} x {prompt_s:.4g} / {asked.output} = "
            f"{planner.tpot_s(streams):.4g} s"
        )


def _figures(planner: Planner, streams: int) -> Iterator[str]:
    asked, row, prompt_s = planner.question, planner.row(streams), planner.prompt_s(streams)
    yield (
        "MBU = bytes / decode step / (devices x bandwidth), MFU = operations / decode step / "
        f"(devices x peak) = {row.mbu:.1%}, {row.mfu:.1%}"
    )
    yield (
        f"time of a request = prompt + output x decode step / streams = {prompt_s:.4g} + "
        f"{asked.output} x {row.step_s:.4g} / {streams} = "
        f"{planner.request_s(streams):.4g} s of the devices"
    )
    yield (
        "requests/s = 1 / time of a request, tokens/s = output x requests/s = "
        f"{asked.output} x {row.requests_per_s:.4g} = {_number(row.tokens_per_s)}"
    )
    if planner.usd_per_hour is not None:
        yield (
            "$ per 1M output tokens = $ an hour / 3600 / tokens/s x 1e6 = "
            f"{planner.usd_per_hour:g} / 3600 / {_number(row.tokens_per_s)} x 1e6 = "
            f"{row.usd_per_million:.4g} ({planner.price_source or 'as given'})"
        )
    if row.joules_per_token is not None:
        yield (
            f"J per token = devices x power / tokens/s = {asked.count} x {planner.device.tdp_w:g} "
            f"W / {_number(row.tokens_per_s)} = {row.joules_per_token:.4g}"
        )
    yield (
        "prefill devices for each that decodes = prefill x streams / (decode step x output) = "
        f"{planner.prefill().seconds:.4g} x {streams} / ({row.step_s:.4g} x {asked.output}) = "
        f"{planner.prefill_per_decode(streams):.4g}"
    )


def _stroke(name: str, step: PlannedStepTime, least: PlannedStepTime, roofline: Roofline) -> str:
    computing_s, reading_s = step.flops / roofline.peak, step.bytes / roofline.bandwidth
    limits = (
        f"{name}: {_number(step.flops / 1e9)} G operations = {computing_s * 1e3:.4g} ms, "
        f"{_number(step.bytes / 1e9)} GB = {reading_s * 1e3:.4g} ms, links "
        f"{step.moving_s * 1e3:.3g} ms; together {least.seconds * 1e3:.4g} ms"
    )
    if step.nearest is not None:  # corrected
        limits += (
            f"; by measured steps attention {_longer(step.attention_s, least.attention_s)} + "
            f"products {_longer(step.products_s, least.products_s)} + {step.rest_s * 1e3:.3g} ms "
            f"around them + links = {step.seconds * 1e3:.4g} ms"
        )
    return f"{limits}, most of it {step.bottleneck}"


def _longer(seconds: float, least_s: float) -> str:
    return f"{least_s * 1e3:.4g} ms x {seconds / least_s:.3g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
