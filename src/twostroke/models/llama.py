"""The Llama family: pre-norm decoder, grouped queries, rotary positions, gated feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.program import (
    Add,
    Attention,
    CacheLayer,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    Program,
    RMSNorm,
    Rope,
)

if TYPE_CHECKING:
    from twostroke.models.spec import ModelSpec
    from twostroke.program import Op


def llama(spec: ModelSpec) -> Program:
    """Build the Program of a Llama model (arXiv:2302.13971, 2307.09288)."""
    hidden, epsilon = spec.hidden_size, spec.norm_epsilon
    ops: list[Op] = [Embed("x0", "token_embd.weight", hidden)]
    for layer in range(spec.num_layers):
        ops += _attention(spec, layer, x=f"x{layer}", output=f"h{layer}")
        ops += _feed_forward(spec, layer, x=f"h{layer}", output=f"x{layer + 1}")
    head = "token_embd.weight" if spec.tied_embeddings else "output.weight"
    ops.append(RMSNorm("last", f"x{spec.num_layers}", "output_norm.weight", hidden, epsilon))
    ops.append(Logits("logits", "last", head, hidden, spec.vocab_size))
    cache = CacheLayer(spec.num_kv_heads, spec.head_dim)
    return Program(
        spec.name, tuple(ops), (cache,) * spec.num_layers, spec.vocab_size, spec.context_length
    )


def _attention(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    name, hidden, dim = f"blk.{layer}", spec.hidden_size, spec.head_dim
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    normed, q, k, v = (f"{name}.{part}" for part in ("normed", "q", "k", "v"))
    frequencies = tuple(
        spec.rope.base ** (-2 * i / spec.rope.dim) for i in range(spec.rope.dim // 2)
    )
    interleaved = spec.rope.interleaved
    return [
        RMSNorm(normed, x, f"{name}.attn_norm.weight", hidden, spec.norm_epsilon),
        Linear(q, normed, f"{name}.attn_q.weight", hidden, heads * dim),
        Linear(k, normed, f"{name}.attn_k.weight", hidden, kv_heads * dim),
        Linear(v, normed, f"{name}.attn_v.weight", hidden, kv_heads * dim),
        Rope(f"{q}.roped", q, heads, dim, frequencies, interleaved),
        Rope(f"{k}.roped", k, kv_heads, dim, frequencies, interleaved),
        Attention(
            f"{name}.mixed", f"{q}.roped", f"{k}.roped", v, layer, heads, kv_heads, dim, dim**-0.5
        ),
        Linear(
            f"{name}.attended", f"{name}.mixed", f"{name}.attn_output.weight", heads * dim, hidden
        ),
        Add(output, x, f"{name}.attended", hidden),
    ]


def _feed_forward(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    name, hidden, width = f"blk.{layer}", spec.hidden_size, spec.ffn_size
    normed, gate, up = (f"{name}.{part}" for part in ("ffn_normed", "gate", "up"))
    return [
        RMSNorm(normed, x, f"{name}.ffn_norm.weight", hidden, spec.norm_epsilon),
        Linear(gate, normed, f"{name}.ffn_gate.weight", hidden, width),
        Linear(up, normed, f"{name}.ffn_up.weight", hidden, width),
        GatedActivation(f"{name}.gated", gate, up, width),
        Linear(f"{name}.fed", f"{name}.gated", f"{name}.ffn_down.weight", width, hidden),
        Add(output, x, f"{name}.fed", hidden),
    ]
