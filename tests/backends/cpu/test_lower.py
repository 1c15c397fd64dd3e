"""What a Program is lowered to: few operations, few buffers."""

from __future__ import annotations

from collections import Counter

import pytest

from support.cpu import tiny_model
from twostroke.backends.cpu.lower import lower
from twostroke.backends.cpu.records import NONE, OpKind, Store
from twostroke.core.errors import BackendError


def test_a_llama_layer_is_five_operations():
    program, _ = tiny_model(num_layers=3)
    lowered = lower(program)
    kinds = Counter(OpKind(op.kind) for op in lowered.ops)
    assert kinds == {
        OpKind.EMBED: 1,
        OpKind.LINEAR: 9,
        OpKind.ATTENTION: 3,
        OpKind.GATED: 3,
        OpKind.LOGITS: 1,
    }
    assert len(lowered.ropes) == 1


def test_queries_and_keys_are_turned_and_stored_behind_their_product():
    program, _ = tiny_model()
    qkv = lower(program).ops[1]
    q, k, v = qkv.outputs[:3]
    assert (q.rope, k.rope, v.rope) == (0, 0, NONE)
    assert (q.store, k.store, v.store) == (Store.NOTHING, Store.KEYS, Store.VALUES)
    assert lower(program).ops[2].is_stored


def test_buffers_do_not_grow_with_the_number_of_layers():
    assert len(lower(tiny_model(num_layers=2)[0]).buffer_widths) == len(
        lower(tiny_model(num_layers=12)[0]).buffer_widths
    )


def test_products_with_a_residual_are_added_in_place():
    ops = lower(tiny_model()[0]).ops
    added = [op for op in ops if op.accumulate]
    assert len(added) == 4
    assert {op.outputs[0].buffer for op in added} == {ops[0].outputs[0].buffer}


def test_heads_that_the_kernels_cannot_run_are_refused():
    program, _ = tiny_model(head_dim=24)
    with pytest.raises(BackendError, match="heads of 24 values"):
        lower(program)
