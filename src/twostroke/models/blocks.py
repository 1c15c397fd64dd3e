"""The parts of which decoders are made: each adds a few operations between two named values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.models.rope import inverse_frequencies, magnitude
from twostroke.program import (
    Add,
    Attention,
    CacheLayer,
    Embed,
    Expert,
    GatedActivation,
    Linear,
    Logits,
    MixtureOfExperts,
    Program,
    RMSNorm,
    Rope,
    Scale,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.models.spec import ModelSpec
    from twostroke.program import Op

    Layer = Callable[[ModelSpec, int, str, str], list[Op]]


def decoder(spec: ModelSpec, layer: Layer, *, embedding_scale: float | None = None) -> Program:
    """Return a whole decoder: embedding, `layer(spec, index, x, output)` for each, norm, logits."""
    hidden = spec.hidden_size
    ops: list[Op] = [Embed("x0", "token_embd.weight", hidden)]
    if embedding_scale is not None:
        ops = [Embed("table", "token_embd.weight", hidden)]
        ops.append(Scale("x0", "table", hidden, embedding_scale))
    for index in range(spec.num_layers):
        ops += layer(spec, index, f"x{index}", f"x{index + 1}")
    head = "token_embd.weight" if spec.tied_embeddings else "output.weight"
    ops.append(norm(spec, "last", f"x{spec.num_layers}", "output_norm"))
    ops.append(Logits("logits", "last", head, hidden, spec.vocab_size, spec.logit_soft_cap))
    layers = tuple(
        CacheLayer(spec.num_kv_heads, spec.head_dim, _window(spec, index))
        for index in range(spec.num_layers)
    )
    return Program(spec.name, tuple(ops), layers, spec.vocab_size, spec.context_length)


def norm(spec: ModelSpec, output: str, x: str, weight: str) -> RMSNorm:
    """Return the norm of a whole row; `weight` without its ending."""
    epsilon, offset = spec.norm_epsilon, spec.norm_offset
    return RMSNorm(output, x, f"{weight}.weight", spec.hidden_size, epsilon, offset=offset)


def attention(
    spec: ModelSpec, layer: int, x: str, output: str, *, head_norms: bool = False
) -> list[Op]:
    """Return queries, keys and values of x, their rotation, attention, and its output projection.

    With `head_norms` each head of queries and keys is normalized before it is rotated.
    """
    name, hidden, dim = f"blk.{layer}", spec.hidden_size, spec.head_dim
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    ops: list[Op] = []
    for part, count in heads.items():
        weight = f"{name}.attn_{part}"
        bias = f"{weight}.bias" if spec.qkv_bias else None
        ops.append(Linear(f"{name}.{part}", x, f"{weight}.weight", hidden, count * dim, bias))
    q, k = f"{name}.q", f"{name}.k"
    if head_norms:
        ops += [_head_norm(spec, q, heads["q"]), _head_norm(spec, k, heads["k"])]
        q, k = f"{q}.normed", f"{k}.normed"
    ops += [_rope(spec, layer, q, heads["q"]), _rope(spec, layer, k, heads["k"])]
    mixed = f"{name}.mixed"
    ops.append(
        Attention(
            mixed,
            f"{q}.roped",
            f"{k}.roped",
            f"{name}.v",
            layer,
            spec.num_heads,
            spec.num_kv_heads,
            dim,
            dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            _window(spec, layer),
            spec.attention_soft_cap,
        )
    )
    bias = f"{name}.attn_output.bias" if spec.output_bias else None
    ops.append(
        Linear(output, mixed, f"{name}.attn_output.weight", spec.num_heads * dim, hidden, bias)
    )
    return ops


def feed_forward(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return a gated feed-forward of x."""
    name, hidden, width = f"blk.{layer}", spec.hidden_size, spec.ffn_size
    gate, up, gated = (f"{name}.{part}" for part in ("gate", "up", "gated"))
    return [
        Linear(gate, x, f"{name}.ffn_gate.weight", hidden, width),
        Linear(up, x, f"{name}.ffn_up.weight", hidden, width),
        GatedActivation(gated, gate, up, width, spec.activation),
        Linear(output, gated, f"{name}.ffn_down.weight", width, hidden),
    ]


def mixture(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return a router and a mixture of experts of x."""
    assert spec.experts is not None
    name, hidden, facts = f"blk.{layer}", spec.hidden_size, spec.experts
    experts = tuple(
        Expert(*(f"{name}.ffn_{part}.{index}.weight" for part in ("gate", "up", "down")))
        for index in range(facts.count)
    )
    scores = f"{name}.scores"
    return [
        Linear(scores, x, f"{name}.ffn_gate_inp.weight", hidden, facts.count),
        MixtureOfExperts(
            output,
            x,
            scores,
            experts,
            hidden,
            facts.ffn_size,
            facts.num_used,
            facts.normalize,
            spec.activation,
        ),
    ]


def pre_norm_layer(
    spec: ModelSpec,
    layer: int,
    x: str,
    output: str,
    *,
    head_norms: bool = False,
) -> list[Op]:
    """Return the layer that most families share: norm, part, add; attention, then feed-forward."""
    name = f"blk.{layer}"
    normed, attended, middle = f"{name}.normed", f"{name}.attended", f"h{layer}"
    ffn_normed, fed = f"{name}.ffn_normed", f"{name}.fed"
    second = feed_forward if spec.experts is None else mixture
    return [
        norm(spec, normed, x, f"{name}.attn_norm"),
        *attention(spec, layer, normed, attended, head_norms=head_norms),
        Add(middle, x, attended, spec.hidden_size),
        norm(spec, ffn_normed, middle, f"{name}.ffn_norm"),
        *second(spec, layer, ffn_normed, fed),
        Add(output, middle, fed, spec.hidden_size),
    ]


def _window(spec: ModelSpec, layer: int) -> int | None:
    return spec.window.size if spec.window is not None and spec.window.slides[layer] else None


def _rope(spec: ModelSpec, layer: int, x: str, num_heads: int) -> Rope:
    rope = spec.rope
    if spec.window is not None and spec.window.slides[layer]:
        rope = spec.window.rope or rope
    angles = inverse_frequencies(rope)
    return Rope(
        f"{x}.roped", x, num_heads, spec.head_dim, angles, rope.interleaved, magnitude(rope)
    )


def _head_norm(spec: ModelSpec, x: str, num_heads: int) -> RMSNorm:
    width, epsilon = num_heads * spec.head_dim, spec.norm_epsilon
    blk, part = x.rsplit(".", 1)
    weight = f"{blk}.attn_{part}_norm.weight"
    return RMSNorm(f"{x}.normed", x, weight, width, epsilon, num_heads, spec.norm_offset)
