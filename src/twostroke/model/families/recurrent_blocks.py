"""Blocks with recurrent states: short convolutions, Mamba-2, the per-channel delta rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.model.program import Activation, ops

if TYPE_CHECKING:
    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.program import Op


def short_convolution(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a gated short convolution (LFM2), from `x` to `output`.

    `x` is projected to b, c and v. The block's output is `out_proj(c * convolution(b * v))`.
    """
    assert spec.convolution is not None
    name, hidden = f"blk.{layer}.shortconv", spec.hidden_size
    has_bias = spec.convolution.has_bias

    def product(result: str, source: str, weight: str) -> ops.Linear:
        bias = f"{weight}.bias" if has_bias else None
        return ops.Linear(result, source, f"{weight}.weight", hidden, hidden, bias=bias)

    b, c, v = (f"{name}.{part}" for part in "bcv")
    mixed, gated = f"{name}.mixed", f"{name}.gated"
    return [
        *(product(value, x, f"{name}.in_{value[-1]}") for value in (b, c, v)),
        ops.GatedActivation(f"{name}.x", b, v, hidden, Activation.IDENTITY),
        ops.ShortConvolution(
            mixed,
            f"{name}.x",
            weight=f"{name}.conv.weight",
            width=hidden,
            kernel=spec.convolution.kernel,
            layer=spec.state_layer_of(layer),
            bias=f"{name}.conv.bias" if has_bias else None,
        ),
        ops.GatedActivation(gated, c, mixed, hidden, Activation.IDENTITY),
        product(output, gated, f"{name}.out_proj"),
    ]


def mamba2(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a Mamba-2 block, which reads `x` and writes `output`.

    They are the projections, the convolution of values, keys and queries, Mamba-2, the gate, the
    norm of each group, and the output projection.
    """
    assert spec.mamba is not None
    name, sizes = f"blk.{layer}", spec.mamba
    gate, mixed, step = (f"{name}.ssm_in_{part}" for part in ("z", "x", "dt"))
    first_state = 2 * spec.state_layer_of(layer)

    def product(result: str, source: str, weight: str, in_width: int, width: int) -> ops.Linear:
        bias = f"{weight}.bias" if sizes.has_bias else None
        return ops.Linear(result, source, f"{weight}.weight", in_width, width, bias=bias)

    return [
        product(gate, x, gate, spec.hidden_size, sizes.width),
        product(mixed, x, mixed, spec.hidden_size, sizes.mixed_width),
        product(step, x, step, spec.hidden_size, sizes.num_heads),
        ops.ShortConvolution(
            f"{mixed}.mixed",
            mixed,
            weight=f"{name}.ssm_conv1d.weight",
            width=sizes.mixed_width,
            kernel=sizes.kernel,
            layer=first_state,
            bias=f"{name}.ssm_conv1d.bias" if sizes.has_convolution_bias else None,
            activation=Activation.SILU,
        ),
        ops.Mamba2(
            f"{name}.mamba",
            x=f"{mixed}.mixed",
            time_step=step,
            decay_rate=f"{name}.ssm_a",
            step_bias=f"{name}.ssm_dt.bias",
            skip=f"{name}.ssm_d",
            num_heads=sizes.num_heads,
            num_groups=sizes.num_groups,
            state_size=sizes.state_size,
            head_dim=sizes.head_dim,
            layer=first_state + 1,
            min_step=sizes.min_step,
            max_step=sizes.max_step,
        ),
        ops.GatedActivation(f"{name}.mamba.gated", gate, f"{name}.mamba", sizes.width),
        ops.RMSNorm(
            f"{name}.mamba.normed",
            f"{name}.mamba.gated",
            weight=f"{name}.ssm_norm.weight",
            width=sizes.width,
            epsilon=sizes.norm_epsilon,
            num_groups=sizes.num_groups,
            is_wide=True,
        ),
        product(output, f"{name}.mamba.normed", f"{name}.ssm_out", sizes.width, spec.hidden_size),
    ]


def channel_delta_rule(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
    """Return the operations of a delta rule with a decay for each channel (Kimi Linear).

    They are the projections, the convolution of queries, keys and values, the rule, the norm of its
    heads, the gate, and the output projection.
    """
    assert spec.delta is not None
    name, sizes = f"blk.{layer}", spec.delta
    width = sizes.width
    mixed, rule, gated = f"{name}.qkv.mixed", f"{name}.rule", f"{name}.rule.gated"
    first_state = 2 * spec.state_layer_of(layer)
    return [
        *_channel_projections(spec, layer, x),
        ops.ShortConvolution(
            mixed,
            f"{name}.qkv",
            weight=f"{name}.ssm_conv1d.weight",
            width=3 * width,
            kernel=sizes.kernel,
            layer=first_state,
            activation=Activation.SILU,
        ),
        ops.GatedDeltaRule(
            rule,
            x=mixed,
            decay=f"{name}.ssm_f_b",
            strength=f"{name}.ssm_beta",
            decay_rate=f"{name}.ssm_a",
            decay_bias=f"{name}.ssm_dt.bias",
            num_key_heads=sizes.num_key_heads,
            num_value_heads=sizes.num_value_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            layer=first_state + 1,
            gates_channels=True,
        ),
        ops.RMSNorm(
            f"{rule}.normed",
            rule,
            weight=f"{name}.ssm_norm.weight",
            width=width,
            epsilon=spec.norm_epsilon,
            num_groups=sizes.num_value_heads,
        ),
        ops.GatedActivation(
            gated, f"{name}.ssm_g_b", f"{rule}.normed", width, activation=Activation.SIGMOID
        ),
        ops.Linear(output, gated, f"{name}.attn_output.weight", width, spec.hidden_size),
    ]


def _channel_projections(spec: ModelSpec, layer: int, x: str) -> list[Op]:
    """Return the operations that compute the inputs of a delta rule with per-channel decays.

    Queries, keys and values are concatenated. Decays and gates are low-rank: products of two
    matrices.
    """
    assert spec.delta is not None
    name, hidden, sizes = f"blk.{layer}", spec.hidden_size, spec.delta
    width, rank = sizes.width, sizes.gate_rank

    def product(part: str, source: str, in_width: int, product_width: int) -> ops.Linear:
        result = f"{name}.{part}"
        return ops.Linear(result, source, f"{result}.weight", in_width, product_width)

    def join(result: str, a: str, b: str, a_width: int) -> ops.Join:
        sizes_of_parts = {"a_width": a_width, "b_width": width, "a_head": a_width}
        return ops.Join(f"{name}.{result}", f"{name}.{a}", f"{name}.{b}", 1, **sizes_of_parts)

    return [
        *(product(f"attn_{part}", x, hidden, width) for part in "qkv"),
        product("ssm_beta", x, hidden, sizes.num_value_heads),
        product("ssm_f_a", x, hidden, rank),
        product("ssm_g_a", x, hidden, rank),
        product("ssm_f_b", f"{name}.ssm_f_a", rank, width),
        product("ssm_g_b", f"{name}.ssm_g_a", rank, width),
        join("qk", "attn_q", "attn_k", width),
        join("qkv", "qk", "attn_v", 2 * width),
    ]
