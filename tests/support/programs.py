"""Small Programs with the blocks of every family, with random weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from twostroke.model.families import ExpertSpec, ModelSpec, RopeSpec, WindowSpec
from twostroke.model.families.blocks import decoder, residual_layer
from twostroke.model.families.gemma4 import gemma4_layer
from twostroke.model.families.llama4 import llama4_layer
from twostroke.model.families.spec import (
    ConvolutionSpec,
    DeltaSpec,
    LatentSpec,
    Mamba2Spec,
    RoutingSpec,
    SharedKvSpec,
)
from twostroke.model.program import Activation, Program
from twostroke.model.program.ops import Attention, ExternalInput, Linear
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    Model = tuple[Program, dict[str, QuantTensor]]

VOCAB_SIZE = 250

SPEC = ModelSpec(
    architecture="llama",
    name="small",
    num_layers=2,
    hidden_size=64,
    ffn_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=VOCAB_SIZE,
    context_length=640,
    norm_epsilon=1e-6,
    rope=RopeSpec(10000.0, 32, interleaved=False),
    tied_embeddings=True,
)


def _plain(**changes: Any) -> Program:
    return decoder(replace(SPEC, **changes), residual_layer)


def _head_norms(**changes: Any) -> Program:
    return decoder(replace(SPEC, **changes), partial(residual_layer, query_key_norm="head"))


def _row_norms() -> Program:
    return decoder(SPEC, partial(residual_layer, query_key_norm="row"))


def _post_norms(**changes: Any) -> Program:
    spec = replace(SPEC, activation=Activation.GELU_TANH, **changes)
    layer = partial(residual_layer, post_norms=True, query_key_norm="head")
    return decoder(spec, layer, embedding_scale=8.0)


def _biases() -> Program:
    """Return a Program in which every product has a bias, gate and up included."""
    program = _plain(qkv_bias=True, output_bias=True)
    biased = [
        replace(op, bias=op.weight.replace(".weight", ".bias")) if isinstance(op, Linear) else op
        for op in program.ops
    ]
    return replace(program, ops=tuple(biased))


def _chunks() -> Program:
    """Return a small Llama 4: chunks, a layer without RoPE, and experts whose inputs are scaled."""
    rope = RopeSpec(10000.0, 32, interleaved=True)
    spec = replace(
        SPEC,
        num_layers=3,
        rope=rope,
        unrotated_rope=replace(
            rope,
            scaled_frequencies=(0.0,) * 16,
            temperature_scale=0.5,
            temperature_length=40,
            temperature_offset=1,
        ),
        rotates=(True, False, True),
        window=WindowSpec(37, (True, False, True), is_chunked=True),
        norms_heads=True,
        experts=ExpertSpec(
            8,
            2,
            32,
            normalize=False,
            shared_size=32,
            layers=(False, True, True),
            scales_inputs=True,
        ),
    )
    return decoder(spec, llama4_layer)


def _borrowing() -> Program:
    """Return a small Gemma 4, whose last two layers use keys and values of earlier layers."""
    spec = replace(
        SPEC,
        num_layers=5,
        num_kv_heads=1,
        head_dim=64,
        rope=RopeSpec(1e6, 64, False, (1.0, 0.3) + (0.0,) * 30),
        window=WindowSpec(
            37, (True, False, True, True, False), SPEC.rope, num_kv_heads=2, head_dim=32
        ),
        activation=Activation.GELU_TANH,
        attention_scale=0.1,
        shared_kv=SharedKvSpec(2, 192),
        layer_inputs=32,
        layer_factors=True,
        norms_values=True,
    )
    return decoder(spec, gemma4_layer, embedding_scale=8.0)


def _experts_in_parallel() -> Program:
    """Return a small Gemma 4 with experts in parallel to each feed-forward."""
    spec = replace(
        SPEC,
        num_kv_heads=1,
        head_dim=64,
        rope=RopeSpec(1e6, 64, interleaved=False),
        window=WindowSpec(37, (True, False), SPEC.rope, num_kv_heads=2, head_dim=32),
        layer_factors=True,
        norms_values=True,
        experts=ExpertSpec(8, 2, 32, normalize=True, adds_dense_ffn=True),
    )
    return decoder(spec, gemma4_layer)


def _latent(latent: LatentSpec, num_heads: int, routing: RoutingSpec) -> Program:
    """Return a small DeepSeek, whose second layer has experts, one of them shared."""
    spec = replace(
        SPEC,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotated,
        rope=RopeSpec(10000.0, latent.rotated, interleaved=True),
        latent=latent,
        experts=ExpertSpec(16, 3, 32, True, 64, 1, routing),
    )
    return decoder(spec, residual_layer)


PROGRAMS: dict[str, Program] = {
    "borrowing": _borrowing(),
    "experts beside": _experts_in_parallel(),
    "latent": _latent(LatentSpec(32, 16, 32, 48, 64), 4, RoutingSpec(2.5, True, True, 4, 2, 2)),
    "latent, many heads": _latent(
        LatentSpec(64, 16, 32, 32), 70, RoutingSpec(1.0, False, False, 4, 2, 1)
    ),
    "biases": _biases(),
    "head norms": _head_norms(tied_embeddings=False),
    "row norms": _row_norms(),
    "sinks": _plain(
        qkv_bias=True,
        has_sinks=True,
        window=WindowSpec(37, (True, False)),
        activation=Activation.SWIGLU_OAI,
    ),
    "experts with biases": _plain(
        has_sinks=True,
        experts=ExpertSpec(8, 2, 96, normalize=True, has_biases=True),
        activation=Activation.SWIGLU_OAI,
    ),
    "chunks and experts": _chunks(),
    "experts": _plain(experts=ExpertSpec(8, 2, 96, normalize=True)),
    "many experts": _head_norms(
        experts=ExpertSpec(40, 5, 32, normalize=False), activation=Activation.GELU_TANH
    ),
    "routed experts": _head_norms(
        qkv_bias=True,
        rope=RopeSpec(10000.0, 16, interleaved=False),
        experts=ExpertSpec(16, 3, 32, True, 64, 1, RoutingSpec(2.5, True, True, group_best=2)),
    ),
    "post norms": _post_norms(norm_offset=1.0, num_kv_heads=1, logit_soft_cap=5.0),
}


MIXERS = ("delta", "channels", "convolution", "mamba")


def hybrid_program(
    attends: tuple[bool, ...] = (False, False, True, False), mixer: str = "delta", **sizes: Any
) -> Program:
    """Return a small Program, some of whose layers have a recurrent `mixer` (of `MIXERS`)."""
    mixers = {
        "delta": DeltaSpec(
            attends=attends,
            num_key_heads=2,
            num_value_heads=6,
            key_dim=8,
            value_dim=8,
            kernel=4,
        ),
        "channels": DeltaSpec(
            attends=attends,
            num_key_heads=4,
            num_value_heads=4,
            key_dim=8,
            value_dim=8,
            kernel=4,
            gates_channels=True,
            gate_rank=8,
        ),
        "convolution": ConvolutionSpec(attends, kernel=3),
        "mamba": Mamba2Spec(
            attends=attends,
            num_heads=6,
            num_groups=2,
            state_size=8,
            head_dim=8,
            kernel=4,
            norm_epsilon=1e-6,
        ),
    }
    spec = replace(
        SPEC,
        name="hybrid",
        num_layers=len(attends),
        hidden_size=32,
        ffn_size=48,
        head_dim=16,
        context_length=8192,
        rope=RopeSpec(10000.0, 8, interleaved=False),
        gates_attention=mixer == "delta",
    )
    field = "delta" if mixer == "channels" else mixer
    spec = replace(spec, **{field: replace(mixers[mixer], **sizes)})
    return decoder(spec, residual_layer)


def program_of_layers(
    windows: Sequence[int | None],
    *,
    num_kv_heads: int = 1,
    head_dim: int = 256,
    context_length: int = 32768,
) -> Program:
    """Return a Program that only stores a layer of keys and values for each window."""
    width = num_kv_heads * head_dim
    layers = [
        Attention(f"a{i}", "x", "x", "x", i, num_kv_heads, num_kv_heads, head_dim, 1.0, window)
        for i, window in enumerate(windows)
    ]
    return Program("layers", (ExternalInput("x", width), *layers), 1000, context_length)


def random_tensors(
    program: Program, fmt: str = "F32", embedding_fmt: str = "F32", seed: int = 0
) -> dict[str, QuantTensor]:
    """Return weights for a Program: matrices in `fmt`, tables in `embedding_fmt`, others in F32.

    Matrices whose rows do not fill whole blocks are in F32, too.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in program.weight_shapes.items():
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        chosen_format = fmt
        if len(shape) == 1:
            values = 1 + 0.1 * values if "norm" in name else values
            values = -np.abs(values) if name.endswith("ssm_a") else values
            chosen_format = "F32"
        elif (
            name in {"token_embd.weight", "output.weight"} or name == "per_layer_token_embd.weight"
        ):
            chosen_format = embedding_fmt
        elif "ffn_gate_inp" in name:
            values, chosen_format = values * 3, "F32"
        if shape[-1] % FORMATS[chosen_format].block_size:
            chosen_format = "F32"
        tensors[name] = QuantTensor.from_floats(values.astype(np.float32), FORMATS[chosen_format])
    return tensors
