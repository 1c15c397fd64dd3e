"""Write models of real shapes with random weights as GGUF files.

Used by benchmarks of speed, which depends on the shapes and formats of a model's weights but not
on their values. Formats are mixed as in published Q4_K_M files; gpt-oss has its experts in MXFP4
and other matrices in Q8_0, as its published file. A file of 4.5 GB takes some ten
seconds. Run `python -m benchmarks.common.shapes llama-8b FOLDER` to write one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from support.gguf_writer import I32, Typed, header, key_value, tensor_info
from support.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, vocabulary
from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_ALIGNMENT: Final = 32
_WRITTEN_BLOCKS: Final = 1 << 16  # blocks of 256 weights that are drawn at once


class RecurrentShape(Frozen, kw_only=True):
    """The sizes of layers with the gated delta rule; every `interval`-th layer has attention.

    A gate is as wide as all queries, and mixtures have a shared expert with a gate.
    """

    num_key_heads: int
    num_value_heads: int
    head_dim: int
    kernel: int
    interval: int
    rope_dim: int

    @property
    def width(self) -> int:
        """The width of all value heads."""
        return self.num_value_heads * self.head_dim

    @property
    def mixed_width(self) -> int:
        """The width of queries, keys and values, which the convolution reads."""
        return 2 * self.num_key_heads * self.head_dim + self.width


class ModelShape(Frozen, kw_only=True):
    """The sizes of a published model.

    `ffn_size` is the width of an expert in a mixture. `is_tied` says whether the output matrix is
    the token embedding. `window` is the sliding window of every second layer, `yarn_factor` the
    factor by which YaRN extends a context. `is_gpt_oss`: the model has biases and sinks, and the
    formats of gpt-oss.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool = False
    has_head_norms: bool = False
    num_experts: int = 0
    num_used_experts: int = 0
    rope_base: float = 500_000.0
    context_length: int = 32_768
    recurrent: RecurrentShape | None = None
    window: int | None = None
    yarn_factor: float | None = None
    is_gpt_oss: bool = False


SHAPES: Final[dict[str, ModelShape]] = {
    "llama-3b": ModelShape(
        architecture="llama",
        num_layers=28,
        hidden_size=3072,
        ffn_size=8192,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        is_tied=True,
    ),
    "llama-8b": ModelShape(
        architecture="llama",
        num_layers=32,
        hidden_size=4096,
        ffn_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
    ),
    "qwen3-14b": ModelShape(
        architecture="qwen3",
        num_layers=40,
        hidden_size=5120,
        ffn_size=17_408,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        has_head_norms=True,
        rope_base=1e6,
    ),
    "qwen3-30b-a3b": ModelShape(
        architecture="qwen3moe",
        num_layers=48,
        hidden_size=2048,
        ffn_size=768,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        has_head_norms=True,
        num_experts=128,
        num_used_experts=8,
        rope_base=1e6,
    ),
    "gpt-oss-20b": ModelShape(
        architecture="gpt-oss",
        num_layers=24,
        hidden_size=2880,
        ffn_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=201_088,
        num_experts=32,
        num_used_experts=4,
        rope_base=150_000.0,
        context_length=131_072,
        window=128,
        yarn_factor=32.0,
        is_gpt_oss=True,
    ),
    "qwen3.5-0.8b": ModelShape(
        architecture="qwen35",
        num_layers=24,
        hidden_size=1024,
        ffn_size=3584,
        num_heads=8,
        num_kv_heads=2,
        head_dim=256,
        vocab_size=248_320,
        is_tied=True,
        has_head_norms=True,
        rope_base=1e7,
        recurrent=RecurrentShape(
            num_key_heads=16, num_value_heads=16, head_dim=128, kernel=4, interval=4, rope_dim=64
        ),
    ),
    "qwen3.5-35b-a3b": ModelShape(
        architecture="qwen35moe",
        num_layers=40,
        hidden_size=2048,
        ffn_size=512,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        vocab_size=248_320,
        has_head_norms=True,
        num_experts=256,
        num_used_experts=8,
        rope_base=1e7,
        recurrent=RecurrentShape(
            num_key_heads=16, num_value_heads=32, head_dim=128, kernel=4, interval=4, rope_dim=64
        ),
    ),
}


class _Matrix(Frozen):
    """A weight to write: its name, shape and number format."""

    name: str
    shape: tuple[int, ...]
    format_name: str


def write_shape(name: str, path: Path, num_layers: int | None = None) -> Path:
    """Write the model of a name in `SHAPES` to `path`, unless it is there; return the path.

    `num_layers` writes only that many layers.
    """
    if path.exists():
        return path
    shape = SHAPES[name]
    num_layers = num_layers or shape.num_layers
    matrices = list(_matrices(shape, num_layers))
    metadata = _metadata(name, shape, num_layers)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    rng = np.random.default_rng(0)
    with part.open("wb") as file:
        head = bytearray(header(len(matrices), len(metadata)))
        for key, value in metadata.items():
            head += key_value(key, value)
        offset = 0
        for matrix in matrices:
            fmt = FORMATS[matrix.format_name]
            assert fmt.gguf_id is not None
            head += tensor_info(matrix.name, matrix.shape, fmt.gguf_id, offset)
            offset += _aligned(fmt.num_bytes(int(np.prod(matrix.shape))))
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for matrix in matrices:
            num_bytes = 0
            for data in _random_data(rng, matrix):
                file.write(data.data)
                num_bytes += data.nbytes
            file.write(bytes(_aligned(num_bytes) - num_bytes))
    return part.rename(path)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _metadata(name: str, shape: ModelShape, num_layers: int) -> dict[str, Any]:
    """Return the metadata of the file. Most tokens have no meaning but a name of their own."""
    tokens, merges = vocabulary()
    tokens += [f"<{number}>" for number in range(shape.vocab_size - len(tokens))]
    facts: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": shape.context_length,
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.ffn_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": shape.vocab_size,
    }
    if shape.num_experts:
        facts["expert_count"] = shape.num_experts
        facts["expert_used_count"] = shape.num_used_experts
        facts["expert_feed_forward_length"] = shape.ffn_size
    if shape.recurrent is not None:
        facts |= _recurrent_facts(shape, shape.recurrent)
    if shape.window is not None:
        facts["attention.sliding_window"] = shape.window
    if shape.yarn_factor is not None:
        facts["rope.scaling.type"] = "yarn"
        facts["rope.scaling.factor"] = shape.yarn_factor
        facts["rope.scaling.original_context_length"] = int(
            shape.context_length / shape.yarn_factor
        )
    return {
        "general.architecture": shape.architecture,
        "general.name": f"{name} (random weights)",
        **{f"{shape.architecture}.{key}": value for key, value in facts.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(
            I32, [3 if token in SPECIAL_TOKENS else 1 for token in tokens]
        ),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _recurrent_facts(shape: ModelShape, recurrent: RecurrentShape) -> dict[str, Any]:
    quarter = recurrent.rope_dim // 2 // 4
    facts: dict[str, Any] = {
        "full_attention_interval": recurrent.interval,
        "ssm.conv_kernel": recurrent.kernel,
        "ssm.state_size": recurrent.head_dim,
        "ssm.group_count": recurrent.num_key_heads,
        "ssm.time_step_rank": recurrent.num_value_heads,
        "ssm.inner_size": recurrent.width,
        "rope.dimension_count": recurrent.rope_dim,
        "rope.dimension_sections": [2 * quarter, quarter, quarter, 0],
    }
    if shape.num_experts:
        facts["expert_shared_feed_forward_length"] = shape.ffn_size
    return facts


def _matrices(shape: ModelShape, num_layers: int) -> Iterator[_Matrix]:
    """Yield the weights with the formats that published files give them."""
    if shape.is_gpt_oss:
        yield from _gpt_oss_matrices(shape, num_layers)
        return
    width = shape.hidden_size
    yield _Matrix(
        "token_embd.weight", (shape.vocab_size, width), "Q6_K" if shape.is_tied else "Q4_K"
    )
    yield _Matrix("output_norm.weight", (width,), "F32")
    if not shape.is_tied:
        yield _Matrix("output.weight", (shape.vocab_size, width), "Q6_K")
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        fine = "Q6_K" if _has_more_bits(layer, num_layers) else "Q4_K"
        yield _Matrix(f"{prefix}attn_norm.weight", (width,), "F32")
        recurrent = shape.recurrent
        if recurrent is not None and (layer + 1) % recurrent.interval:
            yield from _recurrent_matrices(prefix, width, recurrent)
        else:
            yield from _attention_matrices(prefix, shape, fine)
        norm = "ffn_norm" if recurrent is None else "post_attention_norm"
        yield _Matrix(f"{prefix}{norm}.weight", (width,), "F32")
        experts = (shape.num_experts,) if shape.num_experts else ()
        suffix = "_exps" if experts else ""
        if experts:
            yield _Matrix(f"{prefix}ffn_gate_inp.weight", (shape.num_experts, width), "F32")
        gate_shape = (*experts, shape.ffn_size, width)
        yield _Matrix(f"{prefix}ffn_gate{suffix}.weight", gate_shape, "Q4_K")
        yield _Matrix(f"{prefix}ffn_up{suffix}.weight", gate_shape, "Q4_K")
        yield _Matrix(f"{prefix}ffn_down{suffix}.weight", (*experts, width, shape.ffn_size), fine)
        if experts and recurrent is not None:
            yield _Matrix(f"{prefix}ffn_gate_inp_shexp.weight", (width,), "F32")
            yield _Matrix(f"{prefix}ffn_gate_shexp.weight", (shape.ffn_size, width), "Q4_K")
            yield _Matrix(f"{prefix}ffn_up_shexp.weight", (shape.ffn_size, width), "Q4_K")
            yield _Matrix(f"{prefix}ffn_down_shexp.weight", (width, shape.ffn_size), fine)


def _gpt_oss_matrices(shape: ModelShape, num_layers: int) -> Iterator[_Matrix]:
    width, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    experts, ffn = shape.num_experts, shape.ffn_size
    yield _Matrix("token_embd.weight", (shape.vocab_size, width), "Q8_0")
    yield _Matrix("output_norm.weight", (width,), "F32")
    yield _Matrix("output.weight", (shape.vocab_size, width), "Q8_0")
    for layer in range(num_layers):
        prefix = f"blk.{layer}."
        yield _Matrix(f"{prefix}attn_norm.weight", (width,), "F32")
        for name, rows, columns in (
            ("attn_q", queries, width),
            ("attn_k", keys, width),
            ("attn_v", keys, width),
            ("attn_output", width, queries),
        ):
            yield _Matrix(f"{prefix}{name}.weight", (rows, columns), "Q8_0")
            yield _Matrix(f"{prefix}{name}.bias", (rows,), "F32")
        yield _Matrix(f"{prefix}attn_sinks.weight", (shape.num_heads,), "F32")
        yield _Matrix(f"{prefix}post_attention_norm.weight", (width,), "F32")
        yield _Matrix(f"{prefix}ffn_gate_inp.weight", (experts, width), "F32")
        yield _Matrix(f"{prefix}ffn_gate_inp.bias", (experts,), "F32")
        for name, rows, columns in (("gate", ffn, width), ("up", ffn, width), ("down", width, ffn)):
            yield _Matrix(f"{prefix}ffn_{name}_exps.weight", (experts, rows, columns), "MXFP4")
            yield _Matrix(f"{prefix}ffn_{name}_exps.bias", (experts, rows), "F32")


def _attention_matrices(prefix: str, shape: ModelShape, fine: str) -> Iterator[_Matrix]:
    width, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    num_parts = 1 if shape.recurrent is None else 2  # queries, and a gate of their outputs
    yield _Matrix(f"{prefix}attn_q.weight", (num_parts * queries, width), "Q4_K")
    yield _Matrix(f"{prefix}attn_k.weight", (keys, width), "Q4_K")
    yield _Matrix(f"{prefix}attn_v.weight", (keys, width), fine)
    yield _Matrix(f"{prefix}attn_output.weight", (width, queries), "Q4_K")
    if shape.has_head_norms:
        yield _Matrix(f"{prefix}attn_q_norm.weight", (shape.head_dim,), "F32")
        yield _Matrix(f"{prefix}attn_k_norm.weight", (shape.head_dim,), "F32")


def _recurrent_matrices(prefix: str, width: int, recurrent: RecurrentShape) -> Iterator[_Matrix]:
    heads = recurrent.num_value_heads
    yield _Matrix(f"{prefix}attn_qkv.weight", (recurrent.mixed_width, width), "Q4_K")
    yield _Matrix(f"{prefix}attn_gate.weight", (recurrent.width, width), "Q4_K")
    yield _Matrix(f"{prefix}ssm_alpha.weight", (heads, width), "F32")
    yield _Matrix(f"{prefix}ssm_beta.weight", (heads, width), "F32")
    yield _Matrix(f"{prefix}ssm_conv1d.weight", (recurrent.mixed_width, recurrent.kernel), "F32")
    yield _Matrix(f"{prefix}ssm_a", (heads,), "F32")
    yield _Matrix(f"{prefix}ssm_dt.bias", (heads,), "F32")
    yield _Matrix(f"{prefix}ssm_norm.weight", (recurrent.head_dim,), "F32")
    yield _Matrix(f"{prefix}ssm_out.weight", (width, recurrent.width), "Q4_K")


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M stores values and down projections of this layer in Q6_K."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def _random_data(rng: np.random.Generator, matrix: _Matrix) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a weight: ones for a norm, else values with a mean of 0.

    Decay rates are negative, biases of products are 0.
    """
    count = int(np.prod(matrix.shape))
    deviation = matrix.shape[-1] ** -0.5
    if matrix.name.endswith("ssm_a"):
        yield np.full(count, -0.5, np.float32).view(np.uint8)
    elif matrix.name.endswith(".bias") and not matrix.name.endswith("ssm_dt.bias"):
        yield np.zeros(count, np.float32).view(np.uint8)
    elif len(matrix.shape) == 1:
        yield np.ones(count, np.float32).view(np.uint8)
    elif matrix.format_name == "F32":
        values = rng.standard_normal(count, np.float32)
        values *= np.float32(deviation)
        yield values.view(np.uint8)
    else:
        draw = _DRAWN_BLOCKS[matrix.format_name]
        num_blocks = count // FORMATS[matrix.format_name].block_size
        for first in range(0, num_blocks, _WRITTEN_BLOCKS):
            yield draw(rng, min(_WRITTEN_BLOCKS, num_blocks - first), deviation)


def _q4_k_blocks(rng: np.random.Generator, count: int, deviation: float) -> NDArray[np.uint8]:
    """Return random blocks of Q4_K whose minimums make the mean of each sub-block 0."""
    scale_spread, code_spread, mean_code = 36.6, 4.61, 7.5
    blocks = np.frombuffer(rng.bytes(count * 144), np.uint8).reshape(count, 144).copy()
    scale = deviation / (scale_spread * code_spread)
    blocks[:, :4] = np.array([scale, scale * mean_code], np.float16).view(np.uint8)
    blocks[:, 8:12] = blocks[:, 4:8]  # minimums have the same 6 bits as scales
    blocks[:, 12:16] = blocks[:, 12:16] & 15 | blocks[:, 12:16] << 4
    return blocks


def _q6_k_blocks(rng: np.random.Generator, count: int, deviation: float) -> NDArray[np.uint8]:
    """Return random blocks of Q6_K."""
    scale_spread, code_spread = 73.9, 18.5
    blocks = np.frombuffer(rng.bytes(count * 210), np.uint8).reshape(count, 210).copy()
    blocks[:, 208:] = np.array([deviation / (scale_spread * code_spread)], np.float16).view(
        np.uint8
    )
    return blocks


def _q8_0_blocks(rng: np.random.Generator, count: int, deviation: float) -> NDArray[np.uint8]:
    """Return random blocks of Q8_0, whose codes are uniform from -128 to 127."""
    code_spread = 73.9
    blocks = np.frombuffer(rng.bytes(count * 34), np.uint8).reshape(count, 34).copy()
    blocks[:, :2] = np.array([deviation / code_spread], np.float16).view(np.uint8)
    return blocks


def _mxfp4_blocks(rng: np.random.Generator, count: int, deviation: float) -> NDArray[np.uint8]:
    """Return random blocks of MXFP4, whose scale is the power of two next to the deviation."""
    code_spread, code_of_one = 2.93, 127
    blocks = np.frombuffer(rng.bytes(count * 17), np.uint8).reshape(count, 17).copy()
    blocks[:, 0] = code_of_one + round(float(np.log2(deviation / code_spread)))
    return blocks


_DRAWN_BLOCKS: Final = {
    "Q4_K": _q4_k_blocks,
    "Q6_K": _q6_k_blocks,
    "Q8_0": _q8_0_blocks,
    "MXFP4": _mxfp4_blocks,
}


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="write only that many layers")
    arguments = parser.parse_args()
    suffix = f"-{arguments.layers}-layers" if arguments.layers else ""
    path = arguments.folder / f"{arguments.name}{suffix}.gguf"
    print(write_shape(arguments.name, path, arguments.layers))


if __name__ == "__main__":
    main()
