"""FLOPs and bytes of steps, compared with counts by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from support.programs import PROGRAMS
from twostroke.core.draft_tree import ROOT, DraftBranch
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import ModelSpec, RopeSpec, build_program
from twostroke.model.program import BatchShape
from twostroke.model.program.batch import DecodeRun
from twostroke.model.program.cost import Cost, CostModel, StepCost
from twostroke.model.program.kv_layout import FLOAT16, CacheFormat, CacheLayer
from twostroke.model.program.mesh import Mesh
from twostroke.model.program.ops import Expert, MixtureOfExperts, SharedKvAttention
from twostroke.model.program.shard import shard

ROPE = RopeSpec(base=10000.0, dim=128, interleaved=True)
SIZES = {
    # name: layers, hidden, ffn, heads, kv heads, head_dim, vocabulary, key-value bytes per token
    "Llama-2-13B": (40, 5120, 13824, 40, 40, 128, 32000, 819_200),
    "Llama-3-8B": (32, 4096, 14336, 32, 8, 128, 128256, 131_072),
    "Llama-3-70B": (80, 8192, 28672, 64, 8, 128, 128256, 327_680),
    "Llama-3-405B": (126, 16384, 53248, 128, 8, 128, 128256, 516_096),
}


def cost_model(name: str) -> CostModel:
    """Return the cost model of a well-known model with 16-bit weights."""
    layers, hidden, ffn, heads, kv_heads, dim, vocab, _ = SIZES[name]
    spec = ModelSpec(
        "llama", name, layers, hidden, ffn, heads, kv_heads, dim, vocab, 8192, 1e-5, ROPE,
        tied_embeddings=False,
    )  # fmt: skip
    program = build_program(spec)
    sizes = {}
    for weight, shape in program.weight_shapes.items():
        count = 2
        for length in shape:
            count *= length
        sizes[weight] = count
    return CostModel(program, sizes)


@pytest.mark.parametrize("name", SIZES)
def test_cache_bytes_per_token_match_published_figures(name: str) -> None:
    assert cost_model(name).program.page_bytes(1) == SIZES[name][-1]


def test_cache_of_llama_2_13b_for_32_sequences_of_2048_tokens_is_54_gigabytes() -> None:
    per_token = cost_model("Llama-2-13B").program.page_bytes(1)
    assert 32 * 2048 * per_token == pytest.approx(53.687e9, rel=1e-4)


def test_prefill_flops_are_two_per_parameter_and_token_plus_attention() -> None:
    model, tokens = cost_model("Llama-3-8B"), 1000
    layers, hidden, ffn, heads, kv_heads, dim, vocab, _ = SIZES["Llama-3-8B"]
    linear = layers * hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * ffn)
    attention = 4 * layers * heads * dim * tokens * (tokens + 1) // 2
    expected = 2 * linear * tokens + attention + 2 * vocab * hidden
    small = model.per_step().of(BatchShape.prefill(tokens)).flops - expected
    assert 0 < small < 0.001 * expected  # norms, rotations and activations


def test_decode_reads_each_weight_once_and_the_whole_context() -> None:
    model = cost_model("Llama-3-8B")
    cost = model.per_step().of(BatchShape.decode((1000, 2000)))
    table = model.weight_bytes["token_embd.weight"]
    rows = 2 * table // model.program.vocab_size
    assert cost.weight_bytes == sum(model.weight_bytes.values()) - table + rows
    assert cost.cache_bytes == (1001 + 2001 + 2) * 131_072


def test_a_steps_cost_is_that_of_its_operations() -> None:
    model, rng = cost_model("Llama-3-8B"), random.Random(5)
    short = model.per_step()
    for _ in range(50):
        starts = tuple(rng.randrange(3000) for _ in range(rng.randrange(9)))
        counts = tuple(rng.randrange(1, 600) for _ in starts)
        batch = BatchShape(starts, counts, rng.randrange(len(starts) + 1))
        parts = [model.operation(op, batch) for op in model.program.ops]
        assert short.of(batch) == sum(parts, Cost(0))


def test_a_branch_reads_its_context_by_itself() -> None:
    request = Request("r", [1] * 21, 20, SamplingParams(), 0)
    branches = (
        DraftBranch(2, 0, 22, 1, ((7,),), 1, (0, 1), is_copied=True),
        DraftBranch(3, ROOT, 21, 1, ((8,),), 1, (0,), is_copied=True),
    )
    tree = Slice(request, 20, 1, True, (5, 6, 7, 8, 9), branches)
    batch = BatchShape.of(StepPlan((Slice(request, 0, 4, False), tree)))
    assert sorted(batch.spans) == [(0, 4), (20, 3), (21, 2), (22, 1)]
    assert (batch.num_rows, batch.num_sampled) == (10, 6)


def test_rows_attend_to_their_window_and_no_further() -> None:
    rng = random.Random(2)
    for _ in range(200):
        start, count, window = (
            rng.randrange(60),
            rng.randrange(1, 40),
            rng.randrange(1, 50),
        )
        batch = BatchShape.prefill(count, start)
        ends = range(start + 1, start + count + 1)
        assert batch.num_attended(window) == sum(min(end, window) for end in ends)
        assert batch.num_context(window) == min(start, window - 1) + count


def test_rows_attend_to_their_own_chunk() -> None:
    rng = random.Random(3)
    for _ in range(100):
        start, count, chunk = rng.randrange(300), rng.randrange(1, 90), rng.randrange(1, 200)
        batch = BatchShape.prefill(count, start)
        seen = {row: range(row - row % chunk, row + 1) for row in range(start, start + count)}
        read = {position for positions in seen.values() for position in positions}
        splits = {row: {position // 64 for position in seen[row]} for row in seen}
        sizes: dict[str, Any] = {"window": chunk, "is_chunked": True}
        assert batch.num_attended(**sizes) == sum(map(len, seen.values()))
        assert batch.num_context(**sizes) == len(read)
        assert batch.num_kv_splits(**sizes) == len(set().union(*splits.values()))
        assert batch.num_partial_attentions(**sizes) == sum(map(len, splits.values()))
        run = DecodeRun.of_steps((start, 7), 50)
        counts = [run.shape_at(step).num_attended(**sizes) for step in range(50)]
        assert run.num_attended(**sizes).tolist() == counts
        assert run.num_context(**sizes).tolist() == counts


def test_logits_are_read_only_if_a_row_is_sampled() -> None:
    model = cost_model("Llama-3-8B")
    unsampled = model.per_step().of(BatchShape((0,), (100,), 0)).weight_bytes
    sampled = model.per_step().of(BatchShape((0,), (100,), 1)).weight_bytes
    assert sampled - unsampled == model.weight_bytes["output.weight"]


def test_rows_that_draw_nothing_stop_after_the_last_store() -> None:
    all_rows = cost_model("Llama-3-8B")
    _, hidden, ffn, heads, _, dim, _, _ = SIZES["Llama-3-8B"]
    late_weights = hidden * (heads * dim + 3 * ffn)  # weights of the last layer after its attention
    each = 4 * heads * dim  # of a pair that the last attention sees
    model = replace(all_rows, stops_rows=True)
    for num_rows, num_sampled in ((1000, 1), (1000, 0), (7, 3), (1, 1)):
        batch = BatchShape((5,), (num_rows,), num_sampled)
        less = all_rows.per_step().of(batch).flops - model.per_step().of(batch).flops
        pairs = batch.num_attended() - batch.logits_rows.num_attended()
        expected = 2 * late_weights * (num_rows - num_sampled) + each * pairs
        assert less == pytest.approx(expected, rel=1e-3)
    batch = BatchShape((5, 9), (1000, 1), 0)
    less = all_rows.per_step().of(batch).weight_bytes - model.per_step().of(batch).weight_bytes
    assert less == pytest.approx(2 * late_weights, rel=1e-3)
    less = all_rows.per_step().of(batch).cache_bytes - model.per_step().of(batch).cache_bytes
    assert less == batch.num_context() * 131_072 // 32  # what the last attention would read
    logits_cost = model.operation(model.program.ops[-1], BatchShape((0,), (9,), 1))
    assert logits_cost == all_rows.operation(all_rows.program.ops[-1], BatchShape((0,), (9,), 1))


def test_layers_with_shared_kv_attend_for_rows_with_logits() -> None:
    program = PROGRAMS["borrowing"]
    model = CostModel(program, dict.fromkeys(program.weight_shapes, 100), stops_rows=True)
    shared_kv_op = next(op for op in program.ops if isinstance(op, SharedKvAttention))
    assert shared_kv_op.output in program.logits_only_outputs
    pairs = BatchShape((99,), (1,), 1).num_attended(shared_kv_op.window)
    flops = model.operation(shared_kv_op, BatchShape((0,), (100,), 1)).flops
    assert flops == 4 * shared_kv_op.num_heads * shared_kv_op.head_dim * pairs
    assert not model.operation(shared_kv_op, BatchShape((0,), (100,), 0)).cache_bytes


def test_drawn_rows_are_the_last_of_requests_the_short_ones_first() -> None:
    batch = BatchShape((5, 0, 7), (100, 1, 3), 3)
    assert [*batch.logits_rows.spans] == [(104, 1), (0, 1), (9, 1)]
    assert [*BatchShape((5, 0), (100, 1), 1).logits_rows.spans] == [(0, 1)]
    assert [*BatchShape((5, 0), (100, 4), 5).logits_rows.spans] == [(104, 1), (0, 4)]
    decode = BatchShape.decode((3, 4))
    assert decode.logits_rows is decode


def test_a_row_reads_only_its_chosen_experts() -> None:
    experts = tuple(Expert(f"g{i}", f"u{i}", f"d{i}") for i in range(8))
    mixture = MixtureOfExperts("y", "x", "scores", experts, 4, 16, 2, normalize=True)
    stored = {weight.name: 100 for weight in mixture.weights}
    cost = StepCost(tuple(mixture.work(stored, FLOAT16))).of(BatchShape.decode((5,)))
    assert cost.weight_bytes == 3 * 2 * 100


def test_a_token_s_bytes_count_the_scales_of_its_heads() -> None:
    layer = CacheLayer(num_kv_heads=4, head_dim=64)
    assert layer.bytes_per_token(CacheFormat(1, head_bytes=2)) == 2 * 4 * (64 + 2)


def test_ranks_share_the_work_of_a_step() -> None:
    model = cost_model("Llama-3-8B")
    for mesh in (
        Mesh(column_parts=(1, 1, 1)),
        Mesh((1, 1)),
        Mesh(row_parts=2),
        Mesh((1, 1), 2, (3, 1)),
        Mesh(row_parts=2, kv_by_tokens=True),
        Mesh((1, 1), 2, (3, 1), kv_by_tokens=True),
    ):
        parts = [model.part(rank).per_step() for rank in shard(model.program, mesh)]
        for batch in (BatchShape.decode((1000,) * 16), BatchShape((0, 50), (300, 200), 2)):
            total = model.per_step().of(batch)
            costs = [part.of(batch) for part in parts]
            assert sum(cost.flops for cost in costs) == pytest.approx(total.flops, rel=0.02)
            copies = mesh.row_parts  # of most weights
            assert sum(cost.weight_bytes for cost in costs) >= total.weight_bytes * 0.99
            assert sum(cost.weight_bytes for cost in costs) <= total.weight_bytes * copies * 1.02
            assert sum(cost.sent_bytes - cost.received_bytes for cost in costs) == pytest.approx(
                0, abs=9
            )
            assert sum(cost.sent_bytes for cost in costs) > 0


def test_parts_of_rows_attend_to_what_the_step_attends_to() -> None:
    rng = random.Random(6)
    for _ in range(50):
        starts = tuple(rng.randrange(300) for _ in range(rng.randint(1, 6)))
        batch = BatchShape(starts, tuple(rng.randint(1, 90) for _ in starts), 3)
        count, window = rng.randint(1, 5), rng.choice((None, 40))
        parts = [batch.part(index, count) for index in range(count)]
        assert sum(part.num_attended(window) for part in parts) == batch.num_attended(window)
        assert {part.whole_step.num_rows for part in parts} == {batch.num_rows}


def test_kv_splits_are_counted_by_the_rows_that_attend_to_them() -> None:
    rng = random.Random(7)
    for _ in range(20):
        starts = tuple(rng.randrange(300) for _ in range(3))
        batch = BatchShape(starts, tuple(rng.randint(1, 90) for _ in starts), 3)
        window = rng.choice((None, 40, 64, 100))
        seen = [
            (request, position, piece)
            for request, (start, count) in enumerate(batch.spans)
            for position in range(start, start + count)
            for piece in range(max(0, position - (window or 999) + 1) // 64, position // 64 + 1)
        ]
        assert batch.num_kv_splits(window) == len({(request, piece) for request, _, piece in seen})
        assert batch.num_partial_attentions(window) == len(seen)


def test_two_ranks_of_an_8b_exchange_106_kilobytes_for_a_row_and_layer() -> None:
    model = cost_model("Llama-3-8B")
    layers, hidden, ffn, *_, vocab, _ = SIZES["Llama-3-8B"]
    of_layer = 4 * (hidden + hidden + ffn + hidden)  # attention, its sum, gated, its sum
    assert of_layer == 106_496
    for number, rank in enumerate(shard(model.program, Mesh(column_parts=(1, 1)))):
        cost = model.part(rank).per_step().of(BatchShape.decode((1000, 1000)))
        of_both = 2 * (layers * of_layer + 4 * hidden)
        logits = 2 * 4 * vocab // 2  # one half of them goes to rank 0
        assert cost.sent_bytes == of_both // 2 + number * logits
        assert cost.received_bytes == of_both // 2 + (1 - number) * logits
        assert cost.exchanges == 4 * layers + 2
