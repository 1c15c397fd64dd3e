"""Write a model in the shape of DeepSeek V2 Lite with latent attention and random weights.

`python -m benchmarks.common.latent [--layers N] FILE` writes it as a GGUF file, in half a
minute; `python -m benchmarks.peers.compare --models FILE --no-quality --only decode-1
prefill-512` measures it. Its few layers are as wide as the real ones (16 heads over a latent
vector of 512 and a rotated key of 64; 6 of 64 experts and 2 shared ones). Queries are made from
vectors of 768 values; llama.cpp 0.3 opens no such file without them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.experts import ones_tensor, random_matrix
from support.gguf_writer import write_gguf
from support.tiny import tiny_metadata, tiny_of, vocabulary
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDTH, _FFN, _CONTEXT = 2048, 10944, 16384
_HEADS, _RANK, _ROTATED, _KEY, _VALUE, _QUERY_RANK = 16, 512, 64, 128, 128, 768
_EXPERTS, _USED, _SHARED, _EXPERT_FFN = 64, 6, 2, 1408


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    tiny = tiny_of(
        "deepseek-v2", num_layers=args.layers, hidden_size=_WIDTH, ffn_size=_FFN,
        num_heads=_HEADS, context_length=_CONTEXT, norm_epsilon=1e-6, tied=False,
    )  # fmt: skip
    metadata = tiny_metadata(tiny)
    facts = {
        "attention.head_count_kv": 1, "attention.key_length": _RANK + _ROTATED,
        "attention.value_length": _RANK, "attention.key_length_mla": _KEY + _ROTATED,
        "attention.value_length_mla": _VALUE, "attention.kv_lora_rank": _RANK,
        "attention.q_lora_rank": _QUERY_RANK, "rope.dimension_count": _ROTATED,
        "leading_dense_block_count": 1, "expert_count": _EXPERTS, "expert_used_count": _USED,
        "expert_shared_count": _SHARED, "expert_feed_forward_length": _EXPERT_FFN,
        "expert_gating_func": 1, "expert_weights_scale": 1.0,
    }  # fmt: skip
    named = {f"deepseek2.{key}": value for key, value in facts.items()}
    metadata = {key: value for key, value in metadata.items() if ".rope.scaling" not in key}
    write_gguf(args.file, {**metadata, **named}, dict(_tensors(args.layers)))


def _tensors(num_layers: int) -> Iterator[tuple[str, QuantTensor]]:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> QuantTensor:
        return random_matrix(rng, *shape, deviation=shape[-1] ** -0.5)

    vocab = len(vocabulary()[0])
    yield "token_embd.weight", random_matrix(rng, vocab, _WIDTH, deviation=1.0)
    yield "output_norm.weight", ones_tensor(_WIDTH)
    yield "output.weight", matrix(vocab, _WIDTH)
    for layer in range(num_layers):
        parts = {
            "attn_norm": ones_tensor(_WIDTH),
            "attn_q_a": matrix(_QUERY_RANK, _WIDTH),
            "attn_q_a_norm": ones_tensor(_QUERY_RANK),
            "attn_q_b": matrix(_HEADS * (_KEY + _ROTATED), _QUERY_RANK),
            "attn_kv_a_mqa": matrix(_RANK + _ROTATED, _WIDTH),
            "attn_kv_a_norm": ones_tensor(_RANK),
            "attn_k_b": _floats(rng, _HEADS, _RANK, _KEY),
            "attn_v_b": _floats(rng, _HEADS, _VALUE, _RANK),
            "attn_output": matrix(_WIDTH, _HEADS * _VALUE),
            "ffn_norm": ones_tensor(_WIDTH),
        }
        if layer == 0:
            parts |= _feed_forward(matrix, "", _FFN)
        else:
            router = rng.standard_normal((_EXPERTS, _WIDTH)) * _WIDTH**-0.5
            floats = router.astype(np.float32)
            parts["ffn_gate_inp"] = QuantTensor.from_floats(floats, FORMATS["F32"])
            parts |= _feed_forward(matrix, "_exps", _EXPERT_FFN, _EXPERTS)
            parts |= _feed_forward(matrix, "_shexp", _SHARED * _EXPERT_FFN)
        for name, tensor in parts.items():
            yield f"blk.{layer}.{name}.weight", tensor


def _floats(rng: np.random.Generator, *shape: int) -> QuantTensor:
    """Return random weights in float16: llama.cpp 0.3 ends where its heads have fewer bits."""
    floats = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
    return QuantTensor.from_floats(floats, FORMATS["F16"])


def _feed_forward(matrix: object, ending: str, width: int, *count: int) -> dict[str, QuantTensor]:
    assert callable(matrix)
    return {
        f"ffn_gate{ending}": matrix(*count, width, _WIDTH),
        f"ffn_up{ending}": matrix(*count, width, _WIDTH),
        f"ffn_down{ending}": matrix(*count, _WIDTH, width),
    }


if __name__ == "__main__":
    main()
