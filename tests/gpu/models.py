"""Models of which whole steps are compiled; together they have every variant of a launch."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from twostroke.model.families import ModelSpec, RopeSpec
from twostroke.model.families.spec import (
    ExpertSpec,
    LatentSpec,
    RoutingSpec,
    SharedKvSpec,
    WindowSpec,
)
from twostroke.model.program import Activation

VOCAB: Final = 128_256
_LLAMA: Final = ModelSpec(
    architecture="llama",
    name="llama",
    num_layers=2,
    hidden_size=4096,
    ffn_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=VOCAB,
    context_length=8192,
    norm_epsilon=1e-5,
    rope=RopeSpec(500_000.0, 128, interleaved=False),
    tied_embeddings=False,
)
MODELS: Final = {
    "llama": _LLAMA,
    "qwen2": replace(_LLAMA, architecture="qwen2", hidden_size=3584, num_heads=28, num_kv_heads=4),
    "qwen3": replace(_LLAMA, architecture="qwen3"),
    "gemma2": replace(
        _LLAMA,
        architecture="gemma2",
        hidden_size=3584,
        num_heads=16,
        head_dim=256,
        rope=RopeSpec(10_000.0, 256, interleaved=False),
        activation=Activation.GELU_TANH,
        window=WindowSpec(4096, (True, False)),
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        tied_embeddings=True,
    ),
    "gemma4": replace(
        _LLAMA,
        architecture="gemma4",
        num_layers=4,
        hidden_size=2560,
        num_heads=8,
        num_kv_heads=2,
        head_dim=512,
        rope=RopeSpec(1e6, 512, interleaved=False),
        activation=Activation.GELU_TANH,
        window=WindowSpec(
            512,
            (True, False, True, False),
            RopeSpec(10_000.0, 256, interleaved=False),
            num_kv_heads=2,
            head_dim=256,
        ),
        shared_kv=SharedKvSpec(2, 20_480),
        layer_inputs=256,
        layer_factors=True,
        norms_values=True,
    ),
    "deepseek-v2-lite": replace(
        _LLAMA,
        architecture="deepseek2",
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=1,
        head_dim=576,
        rope=RopeSpec(10_000.0, 64, interleaved=True),
        latent=LatentSpec(512, 64, 128, 128),
        experts=ExpertSpec(64, 6, 1408, False, 2816, 1),
    ),
    "deepseek-v3": replace(
        _LLAMA,
        architecture="deepseek2",
        hidden_size=7168,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        rope=RopeSpec(10_000.0, 64, interleaved=True),
        latent=LatentSpec(512, 64, 128, 128, 1536),
        experts=ExpertSpec(256, 8, 2048, True, 2048, 1, RoutingSpec(2.5, True, True, 8, 4, 2)),
    ),
}
