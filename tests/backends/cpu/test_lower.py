"""A Program is lowered to few native operations and few buffers."""

from __future__ import annotations

from collections import Counter

import pytest

from support.cpu import tiny_model
from support.programs import PROGRAMS
from twostroke.backends.cpu.lower import lower
from twostroke.backends.cpu.lowered import Vector
from twostroke.backends.cpu.records import NONE, KvTarget, OpKind, Precision
from twostroke.core.errors import BackendError
from twostroke.model.program import Program
from twostroke.model.program.ops import Embed, Linear, Logits, RMSNorm, TakeColumns


def test_a_llama_layer_is_five_operations():
    program, _ = tiny_model(num_layers=3)
    lowered = lower(program)
    kinds = Counter(OpKind(op.kind) for op in lowered.records)
    assert kinds == {
        OpKind.EMBED: 1,
        OpKind.LINEAR: 9,
        OpKind.ATTENTION: 3,
        OpKind.GATED: 3,
        OpKind.LOGITS: 1,
    }
    assert len(lowered.ropes) == 1


def test_queries_and_keys_are_rotated_and_stored_after_their_product():
    program, _ = tiny_model()
    qkv = lower(program).records[1]
    q, k, v = qkv.outputs[:3]
    assert (q.rope, k.rope, v.rope) == (0, 0, NONE)
    assert (q.store, k.store, v.store) == (KvTarget.NOTHING, KvTarget.KEYS, KvTarget.VALUES)
    assert lower(program).records[2].is_stored


def test_buffers_do_not_grow_with_the_number_of_layers():
    assert len(lower(tiny_model(num_layers=2)[0]).buffers) == len(
        lower(tiny_model(num_layers=12)[0]).buffers
    )


def test_products_with_a_residual_are_added_in_place():
    ops = lower(tiny_model()[0]).records
    added = [op for op in ops if op.accumulate]
    assert len(added) == 4
    assert {op.outputs[0].buffer for op in added} == {ops[0].outputs[0].buffer}


def test_only_what_a_program_with_routers_computes_before_them_is_precise():
    ops = lower(PROGRAMS["experts"]).records
    precise = {OpKind(op.kind) for op in ops if op.precision == Precision.PRECISE}
    assert precise == {OpKind.LINEAR, OpKind.ATTENTION}
    assert all(op.precision == Precision.PRECISE for op in ops if op.kind in precise)
    assert not any(op.precision == Precision.PRECISE for op in lower(tiny_model()[0]).records)


@pytest.mark.parametrize(("bits", "precision"), [(9, Precision.MIXED), (8, Precision.COARSE)])
def test_fewer_bits_apply_to_all_products_except_those_before_routers(
    bits: int, precision: Precision
):
    ops = lower(tiny_model()[0], activation_bits=bits).records
    assert {op.precision for op in ops} == {precision}
    ops = lower(PROGRAMS["experts"], activation_bits=bits).records
    of_kind = {OpKind(op.kind): op.precision for op in ops}
    assert of_kind[OpKind.LINEAR] == Precision.PRECISE
    assert of_kind[OpKind.EXPERTS] == of_kind[OpKind.LOGITS] == precision


def test_bits_by_name_apply_to_the_products_of_a_matrix():
    bits = {"blk.0.attn_q.weight": 8, "blk.0.attn_k.weight": 9, "blk.1.ffn_down.weight": 8}
    bits |= {"blk.0.attn_v.weight": 8, "blk.1.ffn_gate.weight": 8}
    lowered = lower(tiny_model()[0], activation_bits=bits)
    precisions = {
        op.weight: record.precision
        for record, parts in zip(lowered.records, lowered.parts, strict=True)
        for op in parts
        if isinstance(op, Linear | Logits)
    }
    assert {precisions[f"blk.0.attn_{name}.weight"] for name in "qkv"} == {Precision.MIXED}
    assert precisions.pop("blk.1.ffn_down.weight") == Precision.COARSE
    rest = {value for name, value in precisions.items() if "attn_" not in name}
    assert rest == {Precision.PLAIN}, "one of a gate's two products needs all bits"


def test_heads_that_the_kernels_cannot_run_are_refused():
    program, _ = tiny_model(head_dim=24)
    with pytest.raises(BackendError, match="heads of 24 values"):
        lower(program)


def test_operations_after_a_product_are_fused_with_it():
    """Biases and norms of heads need no separate operation, and a post-norm is added at once."""
    kinds = Counter(OpKind(op.kind) for op in lower(PROGRAMS["post norms"]).records)
    assert kinds == {
        OpKind.EMBED: 1,  # and scaled
        OpKind.LINEAR: 6,
        OpKind.ATTENTION: 2,
        OpKind.GATED: 2,
        OpKind.NORM: 4,  # and added
        OpKind.LOGITS: 1,
    }
    qkv = lower(PROGRAMS["biases"]).records[1]
    assert all(output.bias != NONE for output in qkv.outputs[: qkv.num_outputs])


def test_products_with_biases_are_not_fused_with_their_gate():
    """The kernel for a gate and its two products has no biases."""
    records = lower(PROGRAMS["biases"]).records
    kinds = Counter(OpKind(op.kind) for op in records)
    assert kinds[OpKind.GATED] == 0
    assert kinds[OpKind.ACTIVATION] == 2
    gate_and_up = [records[i - 1] for i, op in enumerate(records) if op.kind == OpKind.ACTIVATION]
    assert all(
        op.num_outputs == 2 and NONE not in (op.outputs[0].bias, op.outputs[1].bias)
        for op in gate_and_up
    )


def test_one_vector_with_two_offsets_is_two_vectors():
    ops = (
        Embed("x", "table", 100, 64),
        RMSNorm("a", "x", "w", 64, 1e-6),
        RMSNorm("b", "a", "w", 64, 1e-6, offset=1.0),
        Logits("logits", "b", "table", 64, 100),
    )
    lowered = lower(Program("twice", ops, 100, 16))
    assert lowered.vectors == (Vector("w"), Vector("w", 1.0))


def test_a_tapped_value_is_neither_fused_away_nor_overwritten():
    program, _ = tiny_model()
    names = list(program.value_widths)[:-1]
    taps = [op for op in lower(program, names).records if op.kind == OpKind.TAP]
    assert sorted(op.tap for op in taps) == list(range(len(names)))
    few = lower(program, ["x1"])
    assert len(few.records) == len(lower(program).records) + 1
    tap_index = next(i for i, op in enumerate(few.records) if op.kind == OpKind.TAP)
    assert few.records[tap_index].x == few.records[tap_index - 1].outputs[0].buffer


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("has_taps", [False, True])
def test_each_operation_of_a_program_is_run_by_exactly_one_record(name, has_taps):
    program = PROGRAMS[name]
    taps = [op.output for op in program.ops[::3] if not isinstance(op, Logits)] if has_taps else []
    lowered = lower(program, taps)
    assert len(lowered.parts) == len(lowered.records)
    run = [op for op in program.ops if not isinstance(op, TakeColumns)]  # which are views
    assert Counter(op for parts in lowered.parts for op in parts) == Counter(run)
    for op, parts in zip(lowered.records, lowered.parts, strict=True):
        assert bool(parts) == (op.kind != OpKind.TAP)
