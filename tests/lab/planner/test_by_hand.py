"""A plan of a 70B model on two kinds of GPUs, with each figure computed from data sheets alone."""

from __future__ import annotations

import pytest

from support.configs import write_config
from twostroke.lab.planner import Question, find_device, load_planned_model, make_plan

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, WIDE, VOCAB = 80, 8192, 64, 8, 128, 28672, 128256
MATRICES = (
    WIDTH * HEADS * DIM, WIDTH * KV_HEADS * DIM, WIDTH * KV_HEADS * DIM, HEADS * DIM * WIDTH,
    WIDTH * WIDE, WIDTH * WIDE, WIDE * WIDTH,
)  # fmt: skip
WEIGHTS = LAYERS * (sum(MATRICES) + 2 * WIDTH) + WIDTH + 2 * VOCAB * WIDTH
KV_BYTES = 2 * LAYERS * KV_HEADS * DIM * 2  # of a token
GPUS, PROMPT, OUTPUT, STREAMS, BUDGET = 4, 2048, 300, 32, 2048


def step_s(sheet, rows, context, pairs, logits):
    """Compute the seconds of a step by hand, operation by operation.

    `context` is the number of positions that are read, `pairs` the number of pairs of a row and a
    position.
    """
    tflops, gb_s, _, link_gb_s, _ = sheet
    peak, bandwidth = GPUS * tflops * 1e12, GPUS * gb_s * 1e9

    def longer(flops, num_bytes):
        return max(flops / peak, num_bytes / bandwidth)

    seconds = sum(LAYERS * longer(2 * size * rows, 2 * size) for size in MATRICES)
    seconds += LAYERS * longer(4 * HEADS * DIM * pairs, (context + rows) * KV_BYTES / LAYERS)
    seconds += longer(2 * VOCAB * WIDTH * logits, 2 * VOCAB * WIDTH)
    exchanged = rows * 2 * LAYERS * WIDTH * 2  # two all-reduces a layer, two bytes a value
    return seconds + exchanged * 2 * (GPUS - 1) / GPUS / (link_gb_s * 1e9)


@pytest.mark.parametrize(
    ("name", "sheet"),  # TFLOP/s, GB/s, GB, GB/s of the link, $ an hour
    [("H100-SXM", (989, 3350, 80, 450, 2.69)), ("A100-80GB", (312, 2039, 80, 300, 1.39))],
)
def test_each_line_of_a_plan_by_hand(tmp_path, name, sheet):
    model = load_planned_model(write_config(tmp_path / "config.json", "70B"))
    question = Question(
        prompt=PROMPT, output=OUTPUT, count=GPUS, streams=STREAMS, token_budget=BUDGET
    )
    plan = make_plan(model, find_device(name), question)
    tflops, gb_s, gigabytes, _, usd = sheet
    usable = GPUS * gigabytes * 1e9 * 0.9
    assert plan.num_weights == WEIGHTS
    assert plan.memory.weights == 2 * WEIGHTS
    assert plan.memory.kv_per_token == KV_BYTES == 327_680
    assert plan.memory.most_streams == (usable - 2 * WEIGHTS) // (KV_BYTES * (PROMPT + OUTPUT))
    assert plan.knee == pytest.approx(tflops * 1e3 / gb_s, rel=0.002)

    prompt_pairs = PROMPT * (PROMPT + 1) // 2
    context = PROMPT + OUTPUT // 2 + 1  # half of the answer, and the token itself
    decode_s = step_s(sheet, STREAMS, STREAMS * context, STREAMS * context, STREAMS)
    others = (STREAMS - 1) * context
    alone_s = step_s(sheet, STREAMS - 1, others, others, STREAMS - 1)
    prompt_s, first_s, left = (
        0.0,
        0.0,
        BUDGET - (STREAMS - 1),
    )  # of a step; the rest of the prompt is in the next
    for start, end, logits in ((0, left, STREAMS - 1), (left, PROMPT, STREAMS)):
        rows, pairs = end - start, (end * (end + 1) - start * (start + 1)) // 2
        both_s = step_s(sheet, STREAMS - 1 + rows, others + end, others + pairs, logits)
        prompt_s += both_s - alone_s
        first_s += both_s
    request_s = prompt_s + OUTPUT * decode_s / STREAMS
    row = plan.chosen_row
    for planned, expected in (
        (plan.ttft_s, step_s(sheet, PROMPT, PROMPT, prompt_pairs, 1)),
        (row.step_s, decode_s),
        (row.ttft_s, first_s),
        (row.tpot_s, decode_s + (STREAMS - 1) * prompt_s / OUTPUT),
        (row.requests_per_s, 1 / request_s),
        (row.tokens_per_s, OUTPUT / request_s),
        (row.usd_per_million, GPUS * usd / 3600 * request_s / OUTPUT * 1e6),
        (plan.prefill_per_decode, plan.ttft_s * STREAMS / (decode_s * OUTPUT)),
    ):
        assert planned == pytest.approx(expected, rel=0.002)  # norms and the like are left out
