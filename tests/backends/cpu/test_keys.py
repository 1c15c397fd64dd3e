"""Keys are made small and equally large in all channels before they become int8."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import LEVELS, cpu_backend
from support.programs import PROGRAMS, SPEC, random_tensors
from twostroke.backends.cpu.keys import balances
from twostroke.model.families import RopeSpec, build_program
from twostroke.model.program.ops import Attention
from twostroke.model.quant import QuantTensor

TURNED = {
    "halves": RopeSpec(10000.0, 32, interleaved=False),
    "neighbours": RopeSpec(10000.0, 32, interleaved=True),
    "a part": RopeSpec(10000.0, 16, interleaved=False),
}


def planted(tensors, factors):
    """Multiply the channels of keys, and divide the channels of queries by the same factors.

    `factors` are (kv_heads, dim).
    """
    changed = dict(tensors)
    for name, tensor in tensors.items():
        values = tensor.dequantize()
        if name.endswith(("attn_k.weight", "attn_q.weight")):
            is_key = "attn_k" in name
            rows = values.reshape(len(factors), -1, factors.shape[1], values.shape[1])
            row_factors = (factors if is_key else 1 / factors)[:, None, :, None]
            changed[name] = QuantTensor.from_floats(
                (rows * row_factors).reshape(values.shape).astype(np.float32), tensor.format
            )
    return changed


def pairs_of(rope, channels):
    """Return the number of each channel's RoPE pair; a channel without rotation is a pair."""
    turned = np.arange(rope.dim)
    pair = turned // 2 if rope.interleaved else turned % (rope.dim // 2)
    return np.concatenate([pair, np.arange(rope.dim, channels)])


@pytest.mark.parametrize("kind", [kind for kind in PROGRAMS if "latent" not in kind])
def test_queries_undo_what_becomes_of_keys(kind):
    program = PROGRAMS[kind]
    key_balances = balances(program, random_tensors(program))
    # The layers with RoPE of Llama 4 have keys and queries of length 1: they are balanced.
    unit_layers = {0, 2} if kind == "chunks and experts" else set()
    assert set(key_balances) == set(range(len(program.cache_layers))) - unit_layers
    attentions = [op for op in program.ops if isinstance(op, Attention) and op.stores]
    for op in (op for op in attentions if op.layer not in unit_layers):
        means, keys, queries = key_balances[op.layer].reshape(3, op.num_kv_heads, op.head_dim)
        assert np.array_equal(keys * queries, np.ones(keys.shape))
        assert np.array_equal(np.log2(keys), np.rint(np.log2(keys)))
        first, second = np.split(keys, 2, axis=1)
        assert np.array_equal(first, second)  # they turn together
        assert means.any() == (kind == "biases")
    of_int16 = balances(program, random_tensors(program), "int16")
    assert list(of_int16) == (list(key_balances) if kind == "biases" else [])
    assert all(np.array_equal(of_int16[layer], key_balances[layer]) for layer in of_int16)


@pytest.mark.parametrize("way", TURNED)
@pytest.mark.parametrize("level", LEVELS)
def test_channels_that_stick_out_in_keys_alone_change_no_bit(level, way):
    program = build_program(replace(SPEC, rope=TURNED[way]))
    tensors, rng = random_tensors(program), np.random.default_rng(5)
    each = 2.0 ** rng.integers(-3, 4, (SPEC.num_kv_heads, 32))
    factors = each[:, pairs_of(TURNED[way], 32)]
    tokens = rng.integers(0, 250, 120).tolist()
    logits = []
    for model in (tensors, planted(tensors, factors)):
        with cpu_backend((program, model), level, 8, kv_format="int8") as backend:
            logits.append(backend.score(tokens, generated=True))
    assert np.array_equal(*logits)


def test_weights_of_zero_have_factors():
    program = PROGRAMS["biases"]
    tensors = {
        name: QuantTensor.from_floats(0 * tensor.dequantize(), tensor.format)
        for name, tensor in random_tensors(program).items()
    }
    for balance in balances(program, tensors).values():
        assert np.isfinite(balance).all()
