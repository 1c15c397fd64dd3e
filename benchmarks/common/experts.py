"""Write a model with 64 experts and random weights as a GGUF file, in about a second.

Used by benchmarks of mixtures. It is a Qwen3 with experts: 8 layers, width 512, 8 of 64 experts
for each token. Experts are most of its 230 MB, and most of the time of a step. Rows choose
almost independently, as in trained mixtures: 16 streams use 51 experts of a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from support.gguf_writer import write_gguf
from support.tiny import tiny_metadata, tiny_of, vocabulary
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from pathlib import Path

_EXPERTS, _USED = 64, 8
_LAYERS, _WIDTH, _FFN = 8, 512, 512
_HEADS, _KV_HEADS, _HEAD_DIM = 8, 4, 64
_CONTEXT = 4096
_SPREAD = 4.32  # the standard deviation of the codes of Q4_0


def write_experts(path: Path) -> Path:
    """Write the model, unless it is there; return its path."""
    if path.exists():
        return path
    tiny = tiny_of(
        "qwen3-moe", num_layers=_LAYERS, hidden_size=_WIDTH, ffn_size=_FFN, num_heads=_HEADS,
        num_kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, context_length=_CONTEXT, tied=False,
    )  # fmt: skip
    facts = {
        "expert_count": _EXPERTS, "expert_used_count": _USED, "expert_feed_forward_length": _FFN
    }  # fmt: skip
    named = {f"{tiny.variant.architecture}.{key}": value for key, value in facts.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    write_gguf(part, {**tiny_metadata(tiny), **named}, _tensors())
    return part.rename(path)


def _tensors() -> dict[str, QuantTensor]:
    rng = np.random.default_rng(0)
    queries, keys, vocabulary_size = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM, len(vocabulary()[0])
    tensors = {
        "token_embd.weight": random_matrix(rng, vocabulary_size, _WIDTH, deviation=1.0),
        "output_norm.weight": ones_tensor(_WIDTH),
        "output.weight": random_matrix(rng, vocabulary_size, _WIDTH),
    }
    for layer in range(_LAYERS):
        router = rng.standard_normal((_EXPERTS, _WIDTH)) * _WIDTH**-0.5
        named = {
            "attn_norm": ones_tensor(_WIDTH),
            "attn_q": random_matrix(rng, queries, _WIDTH),
            "attn_k": random_matrix(rng, keys, _WIDTH),
            "attn_v": random_matrix(rng, keys, _WIDTH),
            "attn_output": random_matrix(rng, _WIDTH, queries),
            "attn_q_norm": ones_tensor(_HEAD_DIM),
            "attn_k_norm": ones_tensor(_HEAD_DIM),
            "ffn_norm": ones_tensor(_WIDTH),
            "ffn_gate_inp": QuantTensor.from_floats(router.astype(np.float32), FORMATS["F32"]),
            "ffn_gate_exps": random_matrix(rng, _EXPERTS, _FFN, _WIDTH),
            "ffn_up_exps": random_matrix(rng, _EXPERTS, _FFN, _WIDTH),
            "ffn_down_exps": random_matrix(rng, _EXPERTS, _WIDTH, _FFN),
        }
        tensors |= {f"blk.{layer}.{name}.weight": tensor for name, tensor in named.items()}
    return tensors


def random_matrix(
    rng: np.random.Generator, *shape: int, deviation: float = _WIDTH**-0.5
) -> QuantTensor:
    """Return random codes of Q4_0 in blocks of one scale.

    Their mean is 0: otherwise a matrix adds nearly the same to all rows, they become alike from
    layer to layer, and all choose the same experts.
    """
    fmt = FORMATS["Q4_0"]
    num_blocks = int(np.prod(shape)) // fmt.block_size
    low, high = rng.integers(1, 16, (2, num_blocks, fmt.block_bytes), np.uint8)
    blocks = low | high << 4
    blocks[:, :2] = np.array([deviation / _SPREAD], np.float16).view(np.uint8)
    return QuantTensor(fmt, shape, blocks.reshape(int(np.prod(shape[:-1])), -1))


def ones_tensor(width: int) -> QuantTensor:
    """Return the weights of a norm that changes nothing."""
    return QuantTensor.from_floats(np.ones(width, np.float32), FORMATS["F32"])
