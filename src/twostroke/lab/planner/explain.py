"""The formulas of a plan with their numbers, as text (`twostroke plan --explain`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twostroke.core.message_text import counted_noun
from twostroke.lab.planner.question import MEMORY_SHARE
from twostroke.lab.planner.roofline import STATE_COPIES, kv_copies
from twostroke.model.program.kv_layout import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.lab.planner.planner import MemoryPlan, Planner
    from twostroke.lab.planner.roofline import PlannedStepTime, Roofline


def explain(planner: Planner, memory: MemoryPlan, streams: int) -> Iterator[str]:
    """Yield each formula of a plan with its numbers, one line each.

    `streams` is the number of requests that decode together, and `memory` the plan's memory.
    """
    yield from _limit_formulas(planner)
    yield from _memory_formulas(planner, memory)
    yield from _time_formulas(planner, streams)
    yield from _figure_formulas(planner, streams)


def _limit_formulas(planner: Planner) -> Iterator[str]:
    question = planner.question
    device = planner.device
    roofline = planner.roofline
    peak = device.peaks[roofline.arithmetic]
    yield (
        f"arithmetic = devices x peak x MFU = {question.count} x {peak / 1e12:g} T/s "
        f"({roofline.arithmetic}) x {question.mfu:g} = {_number(roofline.peak / 1e12)} T/s"
    )
    yield (
        f"bandwidth = devices x bandwidth x MBU = {question.count} x "
        f"{device.bandwidth / 1e9:g} GB/s x {question.mbu:g} = "
        f"{_number(roofline.bandwidth / 1e9)} GB/s"
    )


def _memory_formulas(planner: Planner, memory: MemoryPlan) -> Iterator[str]:
    question = planner.question
    model = planner.model
    yield (
        f"weights = {model.num_weights / 1e9:.4g} G weights, {model.stored} = "
        f"{memory.weights / 1e9:.4g} GB"
    )
    kv_format = FORMATS[question.kv_format]
    terms = []
    for layer, num_layers in Counter(model.program.cache_layers).items():
        value_bytes = layer.bytes_per_token(kv_format) / layer.values_per_token
        num_copies = kv_copies(layer.num_kv_heads, question.count)
        copied = f" x {num_copies:.4g} (devices / heads)" if num_copies > 1 else ""
        heads = f"{layer.num_rows} x {layer.num_kv_heads} x {layer.head_dim}"
        terms.append(f"{num_layers} x {heads} x {value_bytes:.4g}{copied}")
    yield (
        "KV of a token = sum over layers of rows x heads x dimension x bytes "
        f"({question.kv_format}) = {' + '.join(terms)} = {memory.kv_per_token:,.0f} bytes"
    )
    state_bytes = model.program.state_bytes
    states = f", + {STATE_COPIES} x {state_bytes:,} bytes of states" if state_bytes else ""
    yield (
        f"KV of a request = KV of a token x ({question.prompt} + {question.output}) tokens, "
        f"within windows{states} = {memory.kv_per_request / 1e9:.4g} GB"
    )
    if memory.usable is not None:
        yield (
            f"streams that fit = (devices x memory x {MEMORY_SHARE:g} - weights) / KV of a request "
            f"= ({memory.usable / 1e9:.4g} - {memory.weights / 1e9:.4g}) GB / "
            f"{memory.kv_per_request / 1e9:.4g} GB = {memory.most_streams}"
        )


def _time_formulas(planner: Planner, streams: int) -> Iterator[str]:
    question = planner.question
    roofline = planner.roofline
    yield (
        "time of a step = sum over its operations of max(operations / arithmetic, bytes / "
        "bandwidth) + 2 all-reduces per layer over the links"
    )
    num_chunks = planner.num_chunks(1)
    chunks = (
        f" in {counted_noun(num_chunks, 'step')} of at most {question.token_budget}"
        if num_chunks > 1
        else ""
    )
    yield _step_formula(
        f"prefill of {counted_noun(question.num_new, 'token')}{chunks}",
        planner.prefill(),
        min_step=planner.prefill(is_limit=True),
        roofline=roofline,
    )
    for number in sorted({1, streams}):
        yield _step_formula(
            f"decode, {counted_noun(number, 'stream')}",
            planner.decode(number),
            min_step=planner.decode(number, is_limit=True),
            roofline=roofline,
        )
    if question.max_decoding_streams is not None:
        yield (
            "streams that fill a step = tokens of a step x output / (computed prompt + output) = "
            f"{question.token_budget} x {question.output} / ({question.num_new} + "
            f"{question.output}) = {question.max_decoding_streams}"
        )
    yield (
        "knee = (bytes / bandwidth) / (operations of a token / arithmetic), of the products in a "
        f"decode step with this number of streams = {planner.knee:.1f} streams"
    )
    if streams > 1:
        yield from _mixed_step_formulas(planner, streams)


def _mixed_step_formulas(planner: Planner, streams: int) -> Iterator[str]:
    """Yield the formulas of a plan's steps in which a prompt is prefilled while streams decode.

    There are `streams - 1` decoding streams.
    """
    output = planner.question.output
    prompt_s = planner.prompt_s(streams)
    num_chunks = planner.num_chunks(streams)
    is_chunked = num_chunks > 1
    sums = f"sum over {num_chunks} of " if is_chunked else ""
    prompt = "a chunk of the prompt" if is_chunked else "the prompt"
    yield (
        f"prompt among others = {sums}step with {counted_noun(streams - 1, 'stream')} and {prompt} "
        f"- step with these streams alone = {prompt_s:.4g} s"
    )
    yield (
        f"TTFT = prompt among others + {num_chunks} x step with these streams alone = "
        f"{prompt_s:.4g} + {num_chunks} x {planner.step_s(streams - 1):.4g} = "
        f"{planner.ttft_s(streams):.4g} s"
    )
    yield (
        "TPOT = decode step + (streams - 1) x prompt among others / output = "
        f"{planner.step_s(streams):.4g} + {streams - 1} x {prompt_s:.4g} / {output} = "
        f"{planner.tpot_s(streams):.4g} s"
    )


def _figure_formulas(planner: Planner, streams: int) -> Iterator[str]:
    question = planner.question
    row = planner.row(streams)
    prompt_s = planner.prompt_s(streams)
    yield (
        "MBU = bytes / decode step / (devices x bandwidth), MFU = operations / decode step / "
        f"(devices x peak) = {row.mbu:.1%}, {row.mfu:.1%}"
    )
    yield (
        f"time of a request = prompt + output x decode step / streams = {prompt_s:.4g} + "
        f"{question.output} x {row.step_s:.4g} / {streams} = "
        f"{planner.request_s(streams):.4g} s of the devices"
    )
    yield (
        "requests/s = 1 / time of a request, tokens/s = output x requests/s = "
        f"{question.output} x {row.requests_per_s:.4g} = {_number(row.tokens_per_s)}"
    )
    if planner.usd_per_hour is not None:
        yield (
            "$ per 1M output tokens = $ per hour / 3600 / tokens/s x 1e6 = "
            f"{planner.usd_per_hour:g} / 3600 / {_number(row.tokens_per_s)} x 1e6 = "
            f"{row.usd_per_million:.4g} ({planner.price_source or 'as given'})"
        )
    if row.joules_per_token is not None:
        yield (
            f"J per token = devices x power / tokens/s = {question.count} x "
            f"{planner.device.tdp_w:g} W / {_number(row.tokens_per_s)} = "
            f"{row.joules_per_token:.4g}"
        )
    yield (
        "prefill devices per decode device = prefill x streams / (decode step x output) = "
        f"{planner.prefill().seconds:.4g} x {streams} / ({row.step_s:.4g} x {question.output}) = "
        f"{planner.prefill_per_decode(streams):.4g}"
    )


def _step_formula(
    name: str, step: PlannedStepTime, *, min_step: PlannedStepTime, roofline: Roofline
) -> str:
    """Return the formula of a step's planned time, with its numbers.

    They are its work, its minimum time, and the corrected time if measured steps correct it.
    """
    computing_s = step.flops / roofline.peak
    reading_s = step.bytes / roofline.bandwidth
    text = (
        f"{name}: {_number(step.flops / 1e9)} G operations = {computing_s * 1e3:.4g} ms, "
        f"{_number(step.bytes / 1e9)} GB = {reading_s * 1e3:.4g} ms, links "
        f"{step.moving_s * 1e3:.3g} ms; together {min_step.seconds * 1e3:.4g} ms"
    )
    if step.nearest is not None:
        attention = _corrected_time(step.attention_s, min_step.attention_s)
        products = _corrected_time(step.products_s, min_step.products_s)
        text += (
            f"; corrected by measured steps: attention {attention} + products {products} + "
            f"{step.rest_s * 1e3:.3g} ms around operations + links = {step.seconds * 1e3:.4g} ms"
        )
    return f"{text}, most of it {step.bottleneck}"


def _corrected_time(seconds: float, min_s: float) -> str:
    return f"{min_s * 1e3:.4g} ms x {seconds / min_s:.3g}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
