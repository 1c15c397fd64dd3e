"""The parts of decoders: each adds a few operations between two named values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from twostroke.model.program import Program, ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from twostroke.model.families.spec import ExpertSpec, ModelSpec, RoutingSpec
    from twostroke.model.program import Op

    Layer = Callable[[ModelSpec, int, str, str], list[Op]]
    QueryKeyNorm = Literal["head", "row"] | None

_LATENT_EPSILON: Final = 1e-6  # of norms of latent vectors, whatever the others have


def decoder(spec: ModelSpec, layer: Layer, *, embedding_scale: float | None = None) -> Program:
    """Return a whole decoder: embedding, `layer(spec, index, x, output)` for each, norm, logits."""
    hidden = spec.hidden_size
    parts: list[Op] = [ops.Embed("x0", "token_embd.weight", spec.vocab_size, hidden)]
    if embedding_scale is not None:
        parts = [ops.Embed("table", "token_embd.weight", spec.vocab_size, hidden)]
        parts.append(ops.Scale("x0", "table", hidden, embedding_scale))
    for index in range(spec.num_layers):
        parts += layer(spec, index, f"x{index}", f"x{index + 1}")
    head = "token_embd.weight" if spec.tied_embeddings else "output.weight"
    parts.append(norm(spec, "last", f"x{spec.num_layers}", "output_norm"))
    parts.append(ops.Logits("logits", "last", head, hidden, spec.vocab_size, spec.logit_soft_cap))
    outputs = tuple(f"x{index + 1}" for index in range(spec.num_layers))
    return Program(spec.name, tuple(parts), spec.vocab_size, spec.context_length, outputs)


def norm(spec: ModelSpec, output: str, x: str, weight: str) -> ops.RMSNorm:
    """Return the norm of a whole row; `weight` without its ending."""
    epsilon, offset = spec.norm_epsilon, spec.norm_offset
    return ops.RMSNorm(output, x, f"{weight}.weight", spec.hidden_size, epsilon, offset=offset)


def attention(
    spec: ModelSpec, layer: int, x: str, output: str, *, query_key_norm: QueryKeyNorm = None
) -> list[Op]:
    """Return queries, keys and values of x, their rotation, attention, and its output projection.

    With a `query_key_norm` queries and keys are normalized before they are rotated: each head by
    itself, or a whole row.
    """
    name, hidden, lender = f"blk.{layer}", spec.hidden_size, spec.lender_of(layer)
    kv_heads, dim = spec.kv_heads_of(layer)
    heads = {"q": spec.num_heads}
    if lender is None:
        heads |= {"k": kv_heads, "v": kv_heads}
    window, normed = spec.window_of(layer), [part for part in heads if part != "v"]
    one_matrix = spec.keys_give_values and window is None
    parts: list[Op] = []
    for part in normed if one_matrix else heads:
        weight = f"{name}.attn_{part}"
        bias = f"{weight}.bias" if spec.qkv_bias else None
        width = heads[part] * dim
        parts.append(ops.Linear(f"{name}.{part}", x, f"{weight}.weight", hidden, width, bias))
    values = {part: f"{name}.{part}" for part in heads} | ({"v": f"{name}.k"} if one_matrix else {})
    if query_key_norm is not None:
        groups = dict.fromkeys(heads, 1) if query_key_norm == "row" else heads
        for part in normed:
            parts.append(_query_key_norm(spec, name, part, heads[part] * dim, groups[part]))
            values[part] = parts[-1].output
    if spec.norms_values and lender is None:
        epsilon, width = spec.norm_epsilon, kv_heads * dim
        own = ops.RMSNorm(f"{name}.v.normed", values["v"], None, width, epsilon, kv_heads)
        parts.append(own)
        values["v"] = own.output
    for part in normed:
        parts.append(_rope(spec, layer, values[part], heads[part]))
        values[part] = parts[-1].output
    origin = None
    if lender is None:
        made_q, made_k = (_made(spec, name, part, query_key_norm) for part in normed)
        origin = ops.QkProjections(made_q, made_k, _rope(spec, layer, f"{name}.k", kv_heads))
    mixed, kind = f"{name}.mixed", ops.Attention if lender is None else ops.SharedKvAttention
    parts.append(
        kind(
            mixed,
            values["q"],
            values.get("k", ""),
            values.get("v", ""),
            layer if lender is None else lender,
            spec.num_heads,
            kv_heads,
            dim,
            dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            None if window is None else window.size,
            spec.attention_soft_cap,
            origin=origin,
        )
    )
    bias = f"{name}.attn_output.bias" if spec.output_bias else None
    width = spec.num_heads * dim
    parts.append(ops.Linear(output, mixed, f"{name}.attn_output.weight", width, hidden, bias))
    return parts


def latent_attention(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return attention of x to latent vectors, in whose space queries and values are computed."""
    assert spec.latent is not None
    name, weight, sizes = f"blk.{layer}", f"blk.{layer}.attn", spec.latent
    hidden, heads, width = spec.hidden_size, spec.num_heads, sizes.rank + sizes.rotated
    whole = sizes.key + sizes.rotated  # of a head's queries
    q, latent, mixed = f"{name}.q", f"{name}.kv_a", f"{name}.mixed"
    low = f"{name}.q_a"
    made = (q, f"{weight}_q", heads * whole)
    if sizes.query_rank:
        made = (low, f"{weight}_q_a", sizes.query_rank)
    parts: list[Op] = [
        ops.Linear(made[0], x, f"{made[1]}.weight", hidden, made[2]),
        ops.Linear(latent, x, f"{weight}_kv_a.weight", hidden, sizes.rank),
        ops.Linear(f"{name}.k", x, f"{weight}_k_pe.weight", hidden, sizes.rotated),
        _latent_norm(latent, f"{weight}_kv_a_norm", sizes.rank),
    ]
    if sizes.query_rank:
        parts.append(_latent_norm(low, f"{weight}_q_a_norm", sizes.query_rank))
        read = f"{low}.normed", f"{weight}_q_b.weight", sizes.query_rank
        parts.append(ops.Linear(q, *read, heads * whole))

    def matrices(part: str) -> tuple[str, ...]:
        return tuple([f"{weight}_{part}.{head}.weight" for head in range(heads)])

    scale = whole**-0.5 if spec.attention_scale is None else spec.attention_scale
    joints = sizes.rotated, sizes.rank
    rope = _rope(spec, layer, f"{name}.k.joined", 1)
    keys, latents = _read_by(spec, name, "k_pe"), ops.Projection(f"{weight}_kv_a_norm.weight")
    queries = _read_by(spec, name, "q")
    if sizes.query_rank:
        queries = ops.Projection(f"{weight}_q_b.weight", None, f"{weight}_q_a_norm.weight")
    return [
        *parts,
        ops.HeadLinear(f"{q}.latent", q, matrices("k_b"), sizes.key, sizes.rank, whole),
        ops.Join(f"{q}.joined", q, f"{q}.latent", heads, *joints, whole, sizes.key),
        ops.Join(f"{name}.k.joined", f"{name}.k", f"{latent}.normed", 1, *joints, sizes.rotated),
        _rope(spec, layer, f"{q}.joined", heads),
        rope,
        ops.LatentAttention(
            mixed,
            f"{q}.joined.roped",
            f"{name}.k.joined.roped",
            f"{name}.k.joined.roped",
            layer,
            heads,
            1,
            width,
            scale,
            origin=ops.QkProjections(queries, keys, rope, latents=latents),
            rotated=sizes.rotated,
            key=sizes.key,
            value=sizes.value,
        ),
        ops.HeadLinear(
            f"{name}.v", mixed, matrices("v_b"), sizes.rank, sizes.value, width, sizes.rotated
        ),
        ops.Linear(output, f"{name}.v", f"{weight}_output.weight", heads * sizes.value, hidden),
    ]


def feed_forward(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return a gated feed-forward of x."""
    return _gated(spec, layer, x, output, spec.ffn_size_of(layer))


def mixture(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return a router and a mixture of experts of x, with the shared one if there is one."""
    assert spec.experts is not None
    name, hidden, facts = f"blk.{layer}", spec.hidden_size, spec.experts
    scores, routed = f"{name}.scores", f"{output}.routed" if facts.shared_size else output
    parts: list[Op] = [ops.Linear(scores, x, f"{name}.ffn_gate_inp.weight", hidden, facts.count)]
    if facts.routing is not None:
        parts.append(_route(facts, facts.routing, name, scores))
        scores = parts[-1].output
    parts.append(
        ops.MixtureOfExperts(
            routed,
            x,
            scores,
            _experts(name, facts),
            hidden,
            facts.ffn_size,
            facts.num_used,
            facts.normalize and facts.routing is None,
            spec.activation,
            facts.routing is not None,
        )
    )
    if facts.shared_size:
        shared = f"{output}.shared"
        parts += _gated(spec, layer, x, shared, facts.shared_size, "_shexp")
        parts.append(ops.Add(output, routed, shared, hidden))
    return parts


def mixture_beside(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return a feed-forward of x, and a mixture of experts of what x is the norm of; their sum.

    Both are normalized, and so are the inputs of the router and of the experts.
    """
    assert spec.experts is not None
    name, hidden, facts, whole = f"blk.{layer}", spec.hidden_size, spec.experts, f"h{layer}"
    dense, routed, router = f"{output}.dense", f"{output}.routed", f"{name}.ffn_gate_inp"
    scores, shares, given = f"{name}.scores", f"{name}.shares", f"{routed}.x"
    mixture_of = _experts(name, facts), hidden, facts.ffn_size, facts.num_used
    return [
        *_gated(spec, layer, x, dense, spec.ffn_size),
        norm(spec, f"{dense}.normed", dense, f"{name}.post_ffw_norm_1"),
        ops.RMSNorm(f"{router}.x", whole, f"{router}.scale", hidden, spec.norm_epsilon),
        ops.Linear(router, f"{router}.x", f"{router}.weight", hidden, facts.count),
        ops.Scale(scores, router, facts.count, hidden**-0.5),
        ops.Route(
            shares,
            scores,
            facts.count,
            facts.num_used,
            facts.normalize,
            factors=f"{name}.ffn_down_exps.scale",
        ),
        norm(spec, given, whole, f"{name}.pre_ffw_norm_2"),
        ops.MixtureOfExperts(
            routed,
            given,
            shares,
            *mixture_of,
            normalize=False,
            activation=spec.activation,
            are_shares=True,
        ),
        norm(spec, f"{routed}.normed", routed, f"{name}.post_ffw_norm_2"),
        ops.Add(output, f"{dense}.normed", f"{routed}.normed", hidden),
    ]


def residual_layer(
    spec: ModelSpec,
    layer: int,
    x: str,
    output: str,
    *,
    pre_norms: tuple[str, str] | None = ("attn_norm", "ffn_norm"),
    post_norms: bool = False,
    query_key_norm: QueryKeyNorm = None,
) -> list[Op]:
    """Return the layer that families share: `x + attention(x)`, then the same of a feed-forward.

    Each part may have a norm before it and one after it; `pre_norms` are the names of those before.
    The second part is a mixture of experts if the layer has experts.
    """
    name, middle = f"blk.{layer}", f"h{layer}"
    first = latent_attention if spec.latent else partial(attention, query_key_norm=query_key_norm)
    has_experts = spec.experts is not None and layer >= spec.experts.first_layer
    second = mixture if has_experts else feed_forward
    if has_experts and spec.experts and spec.experts.beside:
        second = mixture_beside
    parts: list[Op] = []
    before = pre_norms or (None, None)
    for part, start, end, pre_norm, after in (
        (first, x, middle, before[0], "post_attention_norm"),
        (second, middle, output, before[1], "post_ffw_norm"),
    ):
        read, result = start, f"{end}.part"
        if pre_norm is not None:
            read = f"{end}.normed"
            parts.append(norm(spec, read, start, f"{name}.{pre_norm}"))
        parts += part(spec, layer, read, result)
        if post_norms:
            parts.append(norm(spec, f"{result}.normed", result, f"{name}.{after}"))
            result = f"{result}.normed"
        parts.append(ops.Add(end, start, result, spec.hidden_size))
    return parts


def _rope(spec: ModelSpec, layer: int, x: str, num_heads: int) -> ops.Rope:
    window = spec.window_of(layer)
    rope = spec.rope if window is None or window.rope is None else window.rope
    frequencies, (_, dim) = rope.frequencies, spec.kv_heads_of(layer)
    return ops.Rope(f"{x}.roped", x, num_heads, dim, frequencies, rope.interleaved, rope.magnitude)


def _gated(
    spec: ModelSpec, layer: int, x: str, output: str, width: int, ending: str = ""
) -> list[Op]:
    """Return a gated feed-forward of x, `width` wide, whose matrices' names have an `ending`."""
    name, hidden = f"blk.{layer}", spec.hidden_size
    gate, up, gated = (f"{name}.{part}{ending}" for part in ("gate", "up", "gated"))
    return [
        ops.Linear(gate, x, f"{name}.ffn_gate{ending}.weight", hidden, width),
        ops.Linear(up, x, f"{name}.ffn_up{ending}.weight", hidden, width),
        ops.GatedActivation(gated, gate, up, width, spec.activation),
        ops.Linear(output, gated, f"{name}.ffn_down{ending}.weight", width, hidden),
    ]


def _experts(name: str, facts: ExpertSpec) -> tuple[ops.Expert, ...]:
    parts = "gate", "up", "down"
    return tuple(
        ops.Expert(*(f"{name}.ffn_{part}.{index}.weight" for part in parts))
        for index in range(facts.count)
    )


def _route(facts: ExpertSpec, routing: RoutingSpec, name: str, scores: str) -> ops.Route:
    return ops.Route(
        f"{name}.shares",
        scores,
        facts.count,
        facts.num_used,
        facts.normalize,
        routing.scale,
        f"{name}.exp_probs_b.bias" if routing.has_bias else None,
        routing.is_sigmoid,
        routing.num_groups,
        routing.num_used_groups,
        routing.group_best,
    )


def _latent_norm(x: str, weight: str, width: int) -> ops.RMSNorm:
    return ops.RMSNorm(f"{x}.normed", x, f"{weight}.weight", width, _LATENT_EPSILON)


def _made(spec: ModelSpec, name: str, part: str, query_key_norm: QueryKeyNorm) -> ops.Projection:
    weight, offset = f"{name}.attn_{part}", spec.norm_offset
    if query_key_norm is not None:
        return ops.Projection(f"{weight}_norm.weight", offset=offset)
    return _read_by(spec, name, part, f"{weight}.bias" if spec.qkv_bias else None)


def _read_by(spec: ModelSpec, name: str, part: str, bias: str | None = None) -> ops.Projection:
    weight = f"{name}.attn_{part}.weight"
    return ops.Projection(weight, bias, f"{name}.attn_norm.weight", spec.norm_offset)


def _query_key_norm(
    spec: ModelSpec, name: str, part: str, width: int, num_groups: int
) -> ops.RMSNorm:
    weight, epsilon, x = f"{name}.attn_{part}_norm.weight", spec.norm_epsilon, f"{name}.{part}"
    return ops.RMSNorm(f"{x}.normed", x, weight, width, epsilon, num_groups, spec.norm_offset)
