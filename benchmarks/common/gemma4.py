"""Write a model in the shape of Gemma 4 E2B with random weights, whose last layers share KV.

`python -m benchmarks.common.gemma4 [--layers N] FILE` writes it as a GGUF file; `python
benchmarks/peers.py --models FILE --no-quality --only decode-1 prefill-512` measures it. Its
layers are as wide as the real ones. There are few layers, a multiple of five; the second half
reads keys and values of the first half. Its vocabulary is small.
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

_WIDTH, _FFN, _CONTEXT, _WINDOW = 1536, 6144, 16384, 512
_HEADS, _WIDE, _NARROW, _INPUTS, _PERIOD = 8, 512, 256, 256, 5
_TURNED = 64  # pairs of a wide head


def main() -> None:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    num_own_kv = -(-args.layers // 2 // _PERIOD) * _PERIOD
    tiny = tiny_of(
        "gemma4", num_layers=args.layers, hidden_size=_WIDTH, num_heads=_HEADS, num_kv_heads=1,
        head_dim=_WIDE, context_length=_CONTEXT, norm_epsilon=1e-6,
    )  # fmt: skip
    facts = {
        "attention.key_length_swa": _NARROW, "attention.value_length_swa": _NARROW,
        "attention.sliding_window": _WINDOW, "rope.dimension_count_swa": _NARROW,
        "attention.sliding_window_pattern": [_slides(layer) for layer in range(args.layers)],
        "attention.shared_kv_layers": args.layers - num_own_kv, "attention.head_count_kv": 1,
        "feed_forward_length": [_FFN] * num_own_kv + [2 * _FFN] * (args.layers - num_own_kv),
        "embedding_length_per_layer_input": _INPUTS,
    }  # fmt: skip
    named = {f"gemma4.{key}": value for key, value in facts.items()}
    write_gguf(args.file, {**tiny_metadata(tiny), **named}, dict(_tensors(args.layers, num_own_kv)))


def _slides(layer: int) -> bool:
    return (layer + 1) % _PERIOD != 0


def _tensors(num_layers: int, num_own_kv: int) -> Iterator[tuple[str, QuantTensor]]:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> QuantTensor:
        return random_matrix(rng, *shape, deviation=shape[-1] ** -0.5)

    vocab, width = len(vocabulary()[0]), _INPUTS * num_layers
    yield "token_embd.weight", random_matrix(rng, vocab, _WIDTH, deviation=_WIDTH**-0.5)
    yield "per_layer_token_embd.weight", random_matrix(rng, vocab, width, deviation=_INPUTS**-0.5)
    yield "per_layer_model_proj.weight", matrix(width, _WIDTH)
    yield "per_layer_proj_norm.weight", ones_tensor(_INPUTS)
    yield "output_norm.weight", ones_tensor(_WIDTH)
    divisors = np.array([1.0] * _TURNED + [1e30] * (_WIDE // 2 - _TURNED), np.float32)
    yield "rope_freqs.weight", _floats(divisors)
    for layer in range(num_layers):
        dim, ffn = _NARROW if _slides(layer) else _WIDE, _FFN if layer < num_own_kv else 2 * _FFN
        parts = {
            "attn_norm": ones_tensor(_WIDTH),
            "attn_q": matrix(_HEADS * dim, _WIDTH),
            "attn_q_norm": _floats(np.full(dim, dim**-0.5, np.float32)),
            "attn_output": matrix(_WIDTH, _HEADS * dim),
            "post_attention_norm": ones_tensor(_WIDTH),
            "ffn_norm": ones_tensor(_WIDTH),
            "ffn_gate": matrix(ffn, _WIDTH),
            "ffn_up": matrix(ffn, _WIDTH),
            "ffn_down": matrix(_WIDTH, ffn),
            "post_ffw_norm": ones_tensor(_WIDTH),
            "inp_gate": matrix(_INPUTS, _WIDTH),
            "proj": matrix(_WIDTH, _INPUTS),
            "post_norm": ones_tensor(_WIDTH),
            "layer_output_scale": _floats(np.full(1, 0.7, np.float32)),
        }
        if layer < num_own_kv:
            parts |= {
                "attn_k": matrix(dim, _WIDTH),
                "attn_k_norm": ones_tensor(dim),
                "attn_v": matrix(dim, _WIDTH),
            }
        for name, tensor in parts.items():
            yield f"blk.{layer}.{name}.weight", tensor


def _floats(values: np.ndarray) -> QuantTensor:
    return QuantTensor.from_floats(values, FORMATS["F32"])


if __name__ == "__main__":
    main()
