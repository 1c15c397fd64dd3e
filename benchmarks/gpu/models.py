"""Models of the GPU benchmark: real shapes with random weights. Used by campaign.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.model.families import ExpertSpec, ModelSpec, RopeSpec, build_program
from twostroke.model.quant import FORMATS, QuantTensor, e4m3

if TYPE_CHECKING:
    from twostroke.model.program import Program
    from twostroke.model.quant import Format

# Hidden size, heads, key-value heads, layers, FFN, vocabulary: those of Llama 3.1 8B
# (https://huggingface.co/meta-llama/Llama-3.1-8B), Qwen 2.5 1.5B
# (https://huggingface.co/Qwen/Qwen2.5-1.5B), and Qwen3-30B-A3B
# (https://huggingface.co/Qwen/Qwen3-30B-A3B), read on 2026-11-26; Llama 2 7B and Llama 3.3 70B as
# in published.py.
_SHAPES: Final = {
    "8b": (4096, 32, 8, 32, 14336, 128256),
    "7b": (4096, 32, 32, 32, 11008, 32000),
    "70b": (8192, 64, 8, 80, 28672, 128256),
    "1.5b": (1536, 12, 2, 28, 8960, 151936),
    "30b-a3b": (2048, 32, 4, 48, 768, 151936),
    "small": (256, 8, 2, 2, 512, 1000),
    "small-experts": (256, 8, 2, 2, 256, 1000),
}
_EXPERTS: Final = {
    "30b-a3b": ExpertSpec(128, 8, 768, normalize=True),
    "small-experts": ExpertSpec(16, 4, 256, normalize=True),
}
_HEAD_DIMS: Final = {"30b-a3b": 128}
_TABLE_ROWS: Final = 257  # that differ


def program_of(model: str) -> Program:
    """Return a Llama of a shape, perhaps with experts."""
    hidden, heads, kv_heads, layers, ffn, vocabulary = _SHAPES[model]
    head_dim = _HEAD_DIMS.get(model, hidden // heads)
    return build_program(
        ModelSpec(
            architecture="llama",
            name=model,
            num_layers=layers,
            hidden_size=hidden,
            ffn_size=ffn,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocabulary,
            context_length=40_960,
            norm_epsilon=1e-5,
            rope=RopeSpec(500_000.0, head_dim, interleaved=False),
            tied_embeddings=False,
            experts=_EXPERTS.get(model),
        )
    )


def made_up(program: Program, fmt: str) -> dict[str, QuantTensor]:
    """Return weights of which each has one row, repeated without memory.

    Tables have many, and routers are random: else all tokens would choose the same experts.
    """
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in program.weight_shapes.items():
        rows = 1 if len(shape) == 1 else shape[0]
        is_router, is_table = "ffn_gate_inp" in name, name == "token_embd.weight"
        chosen_format = (
            FORMATS["F32"] if len(shape) == 1 or is_router else format_of(fmt, name, shape[1])
        )
        num_drawn = rows if is_router else min(rows, _TABLE_ROWS) if is_table else 1
        values = (
            np.ones((1, shape[-1]))
            if len(shape) == 1
            else rng.standard_normal((num_drawn, shape[-1])) * shape[-1] ** -0.5
        )
        some = QuantTensor.from_floats(values.astype(np.float32), chosen_format).data
        repeated = np.lib.stride_tricks.as_strided(some, (rows, some.shape[1]), (0, 1))
        data = repeated if num_drawn == 1 else np.resize(some, (rows, some.shape[1]))
        tensors[name] = QuantTensor(chosen_format, shape, data)
    return tensors


def format_of(fmt: str, name: str, width: int) -> Format:
    """Return the format of a matrix; folders of FP8 leave tables in BF16."""
    if not fmt.startswith("FP8"):
        return FORMATS[fmt]
    return e4m3(width if fmt == "FP8" else 128) if name.startswith("blk.") else FORMATS["BF16"]


def random_tensors(program: Program, fmt: str, rng: np.random.Generator) -> dict[str, QuantTensor]:
    """Return random weights."""
    return {
        name: QuantTensor.from_floats(
            (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
            if len(shape) > 1
            else np.ones(shape, np.float32),
            format_of(fmt, name, shape[1]) if len(shape) > 1 else FORMATS["F32"],
        )
        for name, shape in program.weight_shapes.items()
    }


def stored_bytes(program: Program, fmt: str) -> dict[str, int]:
    """Return the bytes of each weight in a format."""
    return {
        name: shape[0] * format_of(fmt, name, shape[1]).num_bytes(shape[1])
        if len(shape) > 1
        else 4 * shape[0]
        for name, shape in program.weight_shapes.items()
    }
