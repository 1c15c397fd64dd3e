"""Building blocks of a decoder's Program: each function returns the operations of a block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.model.families.recurrent_blocks import (
    channel_delta_rule,
    mamba2,
    short_convolution,
)
from twostroke.model.families.spec import LayerKind
from twostroke.model.program import Activation, Program, ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from twostroke.model.families.spec import ExpertSpec, ModelSpec, RoutingSpec
    from twostroke.model.program import Op

    Layer = Callable[[ModelSpec, int, str, str], list[Op]]
    QueryKeyNorm = Literal["head", "row", "head without weight"] | None

_LATENT_EPSILON: Final = 1e-6  # of norms of latent vectors, in every model


def decoder(spec: ModelSpec, layer: Layer, *, embedding_scale: float | None = None) -> Program:
    """Return the Program of a decoder-only model: embedding, layers, last norm and logits.

    `layer(spec, index, x, output)` returns the operations of layer `index`, which reads the value
    `x` and writes `output`.
    """
    hidden = spec.hidden_size
    parts: list[Op] = [ops.Embed("x0", "token_embd.weight", spec.vocab_size, hidden)]
    if embedding_scale is not None:
        parts = [ops.Embed("table", "token_embd.weight", spec.vocab_size, hidden)]
        parts.append(ops.Scale("x0", "table", hidden, embedding_scale))
    if spec.norms_embedding:
        parts = [ops.Embed("table", "token_embd.weight", spec.vocab_size, hidden)]
        parts.append(ops.RMSNorm("x0", "table", None, hidden, spec.norm_epsilon))
    for index in range(spec.num_layers):
        parts += layer(spec, index, f"x{index}", f"x{index + 1}")
    head = "token_embd.weight" if spec.tied_embeddings else "output.weight"
    last_norm = norm(spec, "last", f"x{spec.num_layers}", "output_norm")
    parts.append(last_norm if spec.offsets_last_norm else replace(last_norm, offset=0.0))
    if spec.logit_scale != 1:
        parts.append(ops.Scale("last.scaled", "last", hidden, spec.logit_scale))
    parts.append(
        ops.Logits(
            "logits",
            parts[-1].output,
            weight=head,
            in_width=hidden,
            width=spec.vocab_size,
            soft_cap=spec.logit_soft_cap,
        )
    )
    outputs = tuple(f"x{index + 1}" for index in range(spec.num_layers))
    return Program(spec.name, tuple(parts), spec.vocab_size, spec.context_length, outputs)


def norm(spec: ModelSpec, output: str, x: str, weight: str) -> ops.RMSNorm:
    """Return the operation that normalizes each row of the value `x` (RMSNorm).

    `weight` is the weight's name without ".weight".
    """
    epsilon, offset = spec.norm_epsilon, spec.norm_offset
    return ops.RMSNorm(output, x, f"{weight}.weight", spec.hidden_size, epsilon, offset=offset)


def attention(
    spec: ModelSpec, layer: int, x: str, output: str, *, query_key_norm: QueryKeyNorm = None
) -> list[Op]:
    """Return the operations of an attention block, which reads `x` and writes `output`.

    They are the projections, the rotation, attention, and the output projection. With a
    `query_key_norm`, queries and keys are normalized before they are rotated: each head by itself
    ("head", or "head without weight"), or the whole row ("row").
    """
    name, hidden = f"blk.{layer}", spec.hidden_size
    kv_source = spec.kv_source_layer(layer)
    kv_heads, dim = spec.kv_heads_of(layer)
    window = spec.window_of(layer)
    parts, values = _heads(spec, layer, x, query_key_norm)
    origin = None
    if kv_source is None and query_key_norm != "head without weight":
        queries = _normed_projection(spec, name, "q", query_key_norm)
        keys = _normed_projection(spec, name, "k", query_key_norm)
        origin = ops.QkProjections(queries, keys, _rope(spec, layer, f"{name}.k", kv_heads))
    mixed = f"{name}.mixed"
    source_layer = layer if kv_source is None else kv_source
    attention_type = ops.Attention if kv_source is None else ops.SharedKvAttention
    parts.append(
        attention_type(
            mixed,
            q=values["q"],
            k=values.get("k", ""),
            v=values.get("v", ""),
            layer=spec.cache_layer_of(source_layer),
            num_heads=spec.num_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            scale=dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            window=None if window is None else window.size,
            soft_cap=spec.attention_soft_cap,
            origin=origin,
            sinks=f"{name}.attn_sinks.weight" if spec.has_sinks else None,
            is_chunked=window is not None and window.is_chunked,
        )
    )
    if spec.gates_attention:
        gate, gated, width = f"{name}.attn_gate", f"{mixed}.gated", spec.num_heads * dim
        parts.append(ops.Linear(gate, x, f"{gate}.weight", hidden, width))
        parts.append(ops.GatedActivation(gated, gate, mixed, width, Activation.SIGMOID))
        mixed = gated
    parts.append(
        ops.Linear(
            output,
            mixed,
            weight=f"{name}.attn_output.weight",
            in_width=spec.num_heads * dim,
            width=hidden,
            bias=f"{name}.attn_output.bias" if spec.output_bias else None,
        )
    )
    return parts


def _heads(
    spec: ModelSpec, layer: int, x: str, query_key_norm: QueryKeyNorm
) -> tuple[list[Op], dict[str, str]]:
    """Return the operations that compute a layer's queries, keys and values from `x`.

    Also returns the names of the computed values, under the keys "q", "k" and "v". A layer that
    reads an earlier layer's keys and values computes queries only.
    """
    name = f"blk.{layer}"
    has_kv = spec.kv_source_layer(layer) is None
    kv_heads, dim = spec.kv_heads_of(layer)
    heads = {"q": spec.num_heads} | ({"k": kv_heads, "v": kv_heads} if has_kv else {})
    rotated = [part for part in heads if part != "v"]
    one_matrix = spec.keys_give_values and spec.window_of(layer) is None
    parts: list[Op] = []
    for part in rotated if one_matrix else heads:
        weight = f"{name}.attn_{part}"
        parts.append(
            ops.Linear(
                f"{name}.{part}",
                x,
                weight=f"{weight}.weight",
                in_width=spec.hidden_size,
                width=heads[part] * dim,
                bias=f"{weight}.bias" if spec.qkv_bias else None,
            )
        )
    values = {part: f"{name}.{part}" for part in heads} | ({"v": f"{name}.k"} if one_matrix else {})
    if query_key_norm is not None:
        groups = dict.fromkeys(heads, 1) if query_key_norm == "row" else heads
        for part in rotated:
            normed = _query_key_norm(spec, name, part, heads[part] * dim, groups[part])
            if query_key_norm == "head without weight":
                normed = replace(normed, weight=None, offset=0.0)
            parts.append(normed)
            values[part] = parts[-1].output
    if spec.norms_values and has_kv:
        value_norm = ops.RMSNorm(
            f"{name}.v.normed",
            values["v"],
            weight=None,
            width=kv_heads * dim,
            epsilon=spec.norm_epsilon,
            num_groups=kv_heads,
        )
        parts.append(value_norm)
        values["v"] = value_norm.output
    for part in rotated:
        parts.append(_rope(spec, layer, values[part], heads[part], is_query=part == "q"))
        values[part] = parts[-1].output
    return parts, values


def delta_rule(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a gated delta rule block from `x` to `output`.

    They are the projections, the convolution of queries, keys and values, the rule, the norm of its
    heads, the gate, and the output projection.
    """
    assert spec.delta is not None
    name, hidden, sizes = f"blk.{layer}", spec.hidden_size, spec.delta
    width = sizes.width
    mixed_width = 2 * sizes.num_key_heads * sizes.key_dim + width
    qkv, gate, decay, strength = (
        f"{name}.{part}" for part in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
    )
    first_state = 2 * spec.state_layer_of(layer)
    return [
        ops.Linear(qkv, x, f"{qkv}.weight", hidden, mixed_width),
        ops.Linear(gate, x, f"{gate}.weight", hidden, width),
        ops.Linear(decay, x, f"{decay}.weight", hidden, sizes.num_value_heads),
        ops.Linear(strength, x, f"{strength}.weight", hidden, sizes.num_value_heads),
        ops.ShortConvolution(
            f"{qkv}.mixed",
            qkv,
            weight=f"{name}.ssm_conv1d.weight",
            width=mixed_width,
            kernel=sizes.kernel,
            layer=first_state,
            activation=Activation.SILU,
        ),
        ops.GatedDeltaRule(
            f"{name}.rule",
            x=f"{qkv}.mixed",
            decay=decay,
            strength=strength,
            decay_rate=f"{name}.ssm_a",
            decay_bias=f"{name}.ssm_dt.bias",
            num_key_heads=sizes.num_key_heads,
            num_value_heads=sizes.num_value_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            layer=first_state + 1,
            is_tiled=sizes.is_tiled,
        ),
        ops.RMSNorm(
            f"{name}.rule.normed",
            f"{name}.rule",
            weight=f"{name}.ssm_norm.weight",
            width=width,
            epsilon=spec.norm_epsilon,
            num_groups=sizes.num_value_heads,
        ),
        ops.GatedActivation(f"{name}.rule.gated", gate, f"{name}.rule.normed", width),
        ops.Linear(output, f"{name}.rule.gated", f"{name}.ssm_out.weight", width, hidden),
    ]


def latent_attention(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of latent attention (DeepSeek), which read `x` and write `output`.

    Scores are computed from latent vectors, without expanding them to keys.
    """
    assert spec.latent is not None
    name = f"blk.{layer}"
    weight = f"blk.{layer}.attn"
    sizes = spec.latent
    hidden, heads = spec.hidden_size, spec.num_heads
    stored_width = sizes.rank + sizes.rotated
    query_width = sizes.key + sizes.rotated  # of a head's queries
    q, latent, mixed = f"{name}.q", f"{name}.kv_a", f"{name}.mixed"
    rope = _rope(spec, layer, f"{name}.k.joined", 1)
    latents = ops.Projection(f"{weight}_kv_a_norm.weight")
    queries = _projection(spec, name, "q")
    if sizes.query_rank:
        queries = ops.Projection(f"{weight}_q_b.weight", None, f"{weight}_q_a_norm.weight")
    keys = _projection(spec, name, "k_pe")
    return [
        *_latent_projections(spec, layer, x),
        *_latent_queries_and_keys(spec, layer, q, latent),
        rope,
        ops.LatentAttention(
            mixed,
            q=f"{q}.joined.roped",
            k=f"{name}.k.joined.roped",
            v=f"{name}.k.joined.roped",
            layer=spec.cache_layer_of(layer),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=stored_width,
            scale=query_width**-0.5 if spec.attention_scale is None else spec.attention_scale,
            origin=ops.QkProjections(queries, keys, rope, latents=latents),
            rotated=sizes.rotated,
            key=sizes.key,
            value=sizes.value,
        ),
        ops.HeadLinear(
            f"{name}.v",
            mixed,
            matrices=_head_matrices(spec, f"{weight}_v_b"),
            in_width=sizes.rank,
            head_width=sizes.value,
            x_head=stored_width,
            first=sizes.rotated,
        ),
        ops.Linear(output, f"{name}.v", f"{weight}_output.weight", heads * sizes.value, hidden),
    ]


def _latent_projections(spec: ModelSpec, layer: int, x: str) -> list[Op]:
    """Return the operations that compute the inputs of latent attention from `x`.

    The inputs are the queries, the latent vectors and the rotary part of the keys.
    """
    assert spec.latent is not None
    name = f"blk.{layer}"
    weight = f"blk.{layer}.attn"
    sizes = spec.latent
    hidden = spec.hidden_size
    q = f"{name}.q"
    latent = f"{name}.kv_a"
    query_size = spec.num_heads * (sizes.key + sizes.rotated)
    compressed_q = f"{name}.q_a"
    first_product = ops.Linear(q, x, f"{weight}_q.weight", hidden, query_size)
    if sizes.query_rank:
        first_product = ops.Linear(
            compressed_q, x, f"{weight}_q_a.weight", hidden, sizes.query_rank
        )
    parts: list[Op] = [
        first_product,
        ops.Linear(latent, x, f"{weight}_kv_a.weight", hidden, sizes.rank),
        ops.Linear(f"{name}.k", x, f"{weight}_k_pe.weight", hidden, sizes.rotated),
        _latent_norm(latent, f"{weight}_kv_a_norm", sizes.rank),
    ]
    if sizes.query_rank:
        parts.append(_latent_norm(compressed_q, f"{weight}_q_a_norm", sizes.query_rank))
        parts.append(
            ops.Linear(
                q,
                f"{compressed_q}.normed",
                weight=f"{weight}_q_b.weight",
                in_width=sizes.query_rank,
                width=query_size,
            )
        )
    return parts


def _latent_queries_and_keys(spec: ModelSpec, layer: int, q: str, latent: str) -> list[Op]:
    """Return the operations that turn projections into queries and keys of the latent space.

    They multiply queries by the key matrix of each head, and join the rotary part and the latent
    part of queries and of keys. The last operation applies RoPE to the queries; the caller applies
    it to the keys.
    """
    assert spec.latent is not None
    name = f"blk.{layer}"
    sizes = spec.latent
    heads = spec.num_heads
    query_width = sizes.key + sizes.rotated
    return [
        ops.HeadLinear(
            f"{q}.latent",
            q,
            matrices=_head_matrices(spec, f"{name}.attn_k_b"),
            in_width=sizes.key,
            head_width=sizes.rank,
            x_head=query_width,
        ),
        ops.Join(
            f"{q}.joined",
            a=q,
            b=f"{q}.latent",
            num_heads=heads,
            a_width=sizes.rotated,
            b_width=sizes.rank,
            a_head=query_width,
            first=sizes.key,
        ),
        ops.Join(
            f"{name}.k.joined",
            a=f"{name}.k",
            b=f"{latent}.normed",
            num_heads=1,
            a_width=sizes.rotated,
            b_width=sizes.rank,
            a_head=sizes.rotated,
        ),
        _rope(spec, layer, f"{q}.joined", heads),
    ]


def _head_matrices(spec: ModelSpec, weight: str) -> tuple[str, ...]:
    """Return the weight names of a latent attention weight's matrices: one matrix for each head."""
    return tuple([f"{weight}.{head}.weight" for head in range(spec.num_heads)])


def feed_forward(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a gated feed-forward, which read `x` and write `output`."""
    return _gated_feed_forward(spec, layer, x, output, width=spec.ffn_size_of(layer))


def mixture_of_experts(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a mixture of experts, which read `x` and write `output`.

    They are the router, the experts, and the shared expert if the model has one.
    """
    assert spec.experts is not None
    name = f"blk.{layer}"
    hidden = spec.hidden_size
    experts = spec.experts
    scores = f"{name}.scores"
    routed = f"{output}.routed" if experts.shared_size else output
    width, expert_input, expert_output = hidden, x, routed
    router = f"{name}.ffn_gate_inp"
    bias = f"{router}.bias" if experts.has_biases else None
    parts: list[Op] = [ops.Linear(scores, x, f"{router}.weight", hidden, experts.count, bias=bias)]
    if experts.routing is not None:
        parts.append(_route(experts, experts.routing, name, scores))
        scores = parts[-1].output
    if experts.latent_size:
        width, expert_input, expert_output = experts.latent_size, f"{name}.latent", f"{routed}.part"
        down = f"{name}.ffn_latent_down.weight"
        parts.append(ops.Linear(expert_input, x, down, hidden, width))
    parts.append(
        ops.MixtureOfExperts(
            expert_output,
            x=expert_input,
            scores=scores,
            experts=_experts(name, spec, experts),
            width=width,
            ffn_width=experts.ffn_size,
            num_used=experts.num_used,
            normalize=experts.normalize and experts.routing is None,
            activation=spec.activation,
            are_shares=experts.routing is not None,
            scales_inputs=experts.scales_inputs,
        )
    )
    if experts.latent_size:
        up = f"{name}.ffn_latent_up.weight"
        parts.append(ops.Linear(routed, expert_output, up, width, hidden))
    if experts.shared_size:
        shared = f"{output}.shared"
        parts += _gated_feed_forward(
            spec, layer, x=x, output=shared, width=experts.shared_size, suffix="_shexp"
        )
        if experts.gates_shared:
            gate = f"{name}.ffn_gate_inp_shexp"
            parts.append(ops.Linear(gate, x, f"{gate}.weight", hidden, 1))
            parts.append(ops.GateRows(f"{shared}.gated", shared, gate, hidden))
            shared = f"{shared}.gated"
        parts.append(ops.Add(output, routed, shared, hidden))
    return parts


def mixture_with_dense_ffn(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a Gemma 4 layer's second half: a feed-forward plus experts.

    The outputs of feed-forward and experts are normalized and added. The feed-forward reads `x`.
    The router and the experts have separate norms, and read the hidden state from which `x` was
    normalized.
    """
    assert spec.experts is not None
    name = f"blk.{layer}"
    hidden = spec.hidden_size
    experts = spec.experts
    state, dense, routed = f"h{layer}", f"{output}.dense", f"{output}.routed"
    router, expert_input = f"{name}.ffn_gate_inp", f"{routed}.x"
    scores, shares = f"{name}.scores", f"{name}.shares"
    return [
        *_gated_feed_forward(spec, layer, x, dense, width=spec.ffn_size),
        norm(spec, f"{dense}.normed", dense, f"{name}.post_ffw_norm_1"),
        ops.RMSNorm(f"{router}.x", state, f"{router}.scale", hidden, spec.norm_epsilon),
        ops.Linear(router, f"{router}.x", f"{router}.weight", hidden, experts.count),
        ops.Scale(scores, router, experts.count, hidden**-0.5),
        ops.Route(
            shares,
            x=scores,
            width=experts.count,
            num_used=experts.num_used,
            normalize=experts.normalize,
            factors=f"{name}.ffn_down_exps.scale",
        ),
        norm(spec, expert_input, state, f"{name}.pre_ffw_norm_2"),
        ops.MixtureOfExperts(
            routed,
            x=expert_input,
            scores=shares,
            experts=_experts(name, spec, experts),
            width=hidden,
            ffn_width=experts.ffn_size,
            num_used=experts.num_used,
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
    """Return the operations of a usual decoder layer: attention, then a feed-forward.

    The output of attention, and of the feed-forward, is added to its input. `pre_norms` names the
    weights of the norms before attention and before the feed-forward; None: there are none. With
    `post_norms` there is also a norm after each of the two. Layers with experts have a mixture of
    experts in place of the feed-forward.
    """
    name, attention_output = f"blk.{layer}", f"h{layer}"
    attention_part = (
        latent_attention if spec.latent else partial(attention, query_key_norm=query_key_norm)
    )
    if spec.attends is not None and not spec.attends[layer]:
        attention_part = short_convolution if spec.convolution else mamba2
        if spec.delta:
            attention_part = channel_delta_rule if spec.delta.gates_channels else delta_rule
    has_experts = spec.has_experts(layer)
    ffn_part = mixture_of_experts if has_experts else feed_forward
    if has_experts and spec.experts and spec.experts.adds_dense_ffn:
        ffn_part = mixture_with_dense_ffn
    parts: list[Op] = []
    pre_norm_names = pre_norms or (None, None)
    for part, start, end, pre_norm, post_norm in (
        (attention_part, x, attention_output, pre_norm_names[0], "post_attention_norm"),
        (ffn_part, attention_output, output, pre_norm_names[1], "post_ffw_norm"),
    ):
        part_input = start
        result = f"{end}.part"
        if pre_norm is not None:
            part_input = f"{end}.normed"
            parts.append(norm(spec, part_input, start, f"{name}.{pre_norm}"))
        parts += part(spec, layer, part_input, result)
        if post_norms:
            normed = norm(spec, f"{result}.normed", result, f"{name}.{post_norm}")
            epsilon = spec.post_norm_epsilon or spec.norm_epsilon
            parts.append(replace(normed, epsilon=epsilon))
            result = f"{result}.normed"
        parts.append(ops.Add(end, start, result, spec.hidden_size))
    return parts


def one_block_layer(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a layer with one block, whose output is added to its input."""
    assert spec.layer_kinds is not None
    block: Layer = {
        LayerKind.RECURRENT: mamba2,
        LayerKind.ATTENTION: attention,
        LayerKind.FEED_FORWARD: feed_forward,
        LayerKind.EXPERTS: mixture_of_experts,
    }[spec.layer_kinds[layer]]
    normed, result = f"{output}.normed", f"{output}.part"
    return [
        norm(spec, normed, x, f"blk.{layer}.attn_norm"),
        *block(spec, layer, normed, result),
        ops.Add(output, x, result, spec.hidden_size),
    ]


def _rope(
    spec: ModelSpec, layer: int, x: str, num_heads: int, *, is_query: bool = False
) -> ops.Rope:
    rope = spec.rope_of(layer)
    _, head_dim = spec.kv_heads_of(layer)
    rotate: Callable[..., ops.Rope] = ops.Rope
    if is_query and rope.temperature_scale:
        rotate = partial(
            ops.QueryRope,
            temperature_scale=rope.temperature_scale,
            temperature_length=rope.temperature_length,
            temperature_offset=rope.temperature_offset,
        )
    return rotate(
        f"{x}.roped",
        x,
        num_heads=num_heads,
        head_dim=head_dim,
        inverse_frequencies=rope.frequencies,
        interleaved=rope.interleaved,
        magnitude=rope.magnitude,
    )


def _gated_feed_forward(
    spec: ModelSpec, layer: int, x: str, output: str, width: int, suffix: str = ""
) -> list[Op]:
    """Return the operations of a gated feed-forward whose inner width is `width`.

    If not `ModelSpec.gates_ffn`, there is no gate projection, and the up projection is also the
    gate. `suffix` is appended to the names of the weights: "_shexp" for a shared expert.
    """
    name, hidden = f"blk.{layer}", spec.hidden_size
    gate, up, gated = (f"{name}.{part}{suffix}" for part in ("gate", "up", "gated"))
    gates: list[Op] = []
    if spec.gates_ffn:
        gates.append(ops.Linear(gate, x, f"{name}.ffn_gate{suffix}.weight", hidden, width))
    else:
        gate = up
    return [
        *gates,
        ops.Linear(up, x, f"{name}.ffn_up{suffix}.weight", hidden, width),
        ops.GatedActivation(gated, gate, up, width, spec.activation),
        ops.Linear(output, gated, f"{name}.ffn_down{suffix}.weight", width, hidden),
    ]


def _experts(name: str, spec: ModelSpec, experts: ExpertSpec) -> tuple[ops.Expert, ...]:
    parts = "gate" if spec.gates_ffn else "up", "up", "down"
    kinds = ("weight", "bias") if experts.has_biases else ("weight",)
    return tuple(
        ops.Expert(*(f"{name}.ffn_{part}.{index}.{kind}" for kind in kinds for part in parts))
        for index in range(experts.count)
    )


def _route(experts: ExpertSpec, routing: RoutingSpec, name: str, scores: str) -> ops.Route:
    return ops.Route(
        f"{name}.shares",
        x=scores,
        width=experts.count,
        num_used=experts.num_used,
        normalize=experts.normalize,
        scale=routing.scale,
        bias=f"{name}.exp_probs_b.bias" if routing.has_bias else None,
        is_sigmoid=routing.is_sigmoid,
        num_groups=routing.num_groups,
        num_used_groups=routing.num_used_groups,
        group_best=routing.group_best,
    )


def _latent_norm(x: str, weight: str, width: int) -> ops.RMSNorm:
    return ops.RMSNorm(f"{x}.normed", x, f"{weight}.weight", width, _LATENT_EPSILON)


def _normed_projection(
    spec: ModelSpec, name: str, part: str, query_key_norm: QueryKeyNorm
) -> ops.Projection:
    weight = f"{name}.attn_{part}"
    offset = spec.norm_offset
    if query_key_norm is not None:
        return ops.Projection(f"{weight}_norm.weight", offset=offset)
    return _projection(spec, name, part, f"{weight}.bias" if spec.qkv_bias else None)


def _projection(spec: ModelSpec, name: str, part: str, bias: str | None = None) -> ops.Projection:
    weight = f"{name}.attn_{part}.weight"
    return ops.Projection(weight, bias, f"{name}.attn_norm.weight", spec.norm_offset)


def _query_key_norm(
    spec: ModelSpec, name: str, part: str, width: int, num_groups: int
) -> ops.RMSNorm:
    x = f"{name}.{part}"
    return ops.RMSNorm(
        f"{x}.normed",
        x,
        weight=f"{name}.attn_{part}_norm.weight",
        width=width,
        epsilon=spec.norm_epsilon,
        num_groups=num_groups,
        offset=spec.norm_offset,
    )
