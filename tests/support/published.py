"""Published quantized folders, written from the descriptions of their layouts."""

from __future__ import annotations

import json
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from support.safetensors_writer import with_header
from support.tiny import Tiny, write_tiny_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    # A tensor of a file: its type in the file's words, and its values or their bits.
    Stored = tuple[str, np.ndarray]
    MakeModule = Callable[[np.random.Generator, int, int], tuple[dict[str, Stored], np.ndarray]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MATRIX_NAMES = {
    "q_proj": "attn_q",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of codes into int32 words without gaps, from the lowest bit on."""
    words = [_words_of_row([int(code) for code in row], bits) for row in codes]
    return np.array(words, dtype=np.uint32).view(np.int32)


def _words_of_row(row: list[int], bits: int) -> list[int]:
    row_bits = sum(code << (index * bits) for index, code in enumerate(row))
    count = -(-len(row) * bits // 32)
    return [row_bits >> (32 * word) & 0xFFFF_FFFF for word in range(count)]


def gptq(bits: int, group: int, *, version: int = 1, act_order: bool = False) -> MakeModule:
    """Return a function that creates GPTQ modules."""

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, Stored], np.ndarray]:
        codes = rng.integers(0, 1 << bits, (outputs, inputs))
        groups = -(-inputs // group)
        zeros = rng.integers(1, 1 << bits, (groups, outputs))
        scales = rng.uniform(0.001, 0.01, (groups, outputs)).astype(np.float16)
        index = np.arange(inputs) // group
        if act_order:
            rng.shuffle(index)
        values = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            g = index[i]
            values[:, i] = (codes[:, i] - zeros[g]).astype(np.float32) * scales[g]
        stored = zeros - 1 if version == 1 else zeros
        return {
            "qweight": ("I32", words_of(codes, bits).T),
            "qzeros": ("I32", words_of(stored, bits)),
            "scales": ("F16", scales),
            "g_idx": ("I32", index.astype(np.int32)),
        }, values

    return make


def awq(group: int) -> MakeModule:
    """Return a function that creates AWQ modules."""

    def pack(codes: np.ndarray) -> np.ndarray:
        rows = codes.reshape(len(codes), -1, 8)[:, :, list(AWQ_ORDER)].reshape(len(codes), -1)
        return words_of(rows, 4)

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, Stored], np.ndarray]:
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // group, outputs))
        scales = rng.uniform(0.001, 0.01, zeros.shape).astype(np.float16)
        values = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            values[:, i] = (codes[i] - zeros[i // group]).astype(np.float32) * scales[i // group]
        parts = {"qweight": ("I32", pack(codes)), "qzeros": ("I32", pack(zeros))}
        return {**parts, "scales": ("F16", scales)}, values

    return make


def compressed_ints(bits: int, group: int | None, *, symmetric: bool, packed: bool) -> MakeModule:
    """Return a function that creates integer modules of compressed-tensors.

    A group is a whole row if `group` is None.
    """

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, Stored], np.ndarray]:
        half, size = 1 << (bits - 1), group or inputs
        codes = rng.integers(-half, half, (outputs, inputs))
        zeros = rng.integers(-half, half, (outputs, inputs // size))
        zeros = np.zeros_like(zeros) if symmetric else zeros
        raw = (rng.uniform(0.001, 0.01, zeros.shape).astype(np.float32).view(np.uint32) >> 16) << 16
        scales = raw.view(np.float32)
        values = np.empty((outputs, inputs), np.float32)
        for i in range(inputs):
            g = i // size
            values[:, i] = (codes[:, i] - zeros[:, g]).astype(np.float32) * scales[:, g]
        parts: dict[str, Stored] = {"weight_scale": ("BF16", (raw >> 16).astype(np.uint16))}
        if packed:
            parts["weight_packed"] = ("I32", words_of(codes + half, bits))
            parts["weight_shape"] = ("I64", np.array([outputs, inputs]))
        else:
            parts["weight"] = ("I8", codes.astype(np.int8))
        if not symmetric:
            stored = words_of((zeros + half).T, bits).T if packed else zeros.astype(np.int8)
            parts["weight_zero_point"] = ("I32" if packed else "I8", stored)
        return parts, values

    return make


def e4m3(code: int) -> float:
    """Return the value of an E4M3 code."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def fp8(rows: int | None, columns: int | None, scale: str = "weight_scale") -> MakeModule:
    """Return a function that creates E4M3 modules with a scale for each block.

    A block has the whole side if its size is None.
    """

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, Stored], np.ndarray]:
        codes = rng.integers(0, 127, (outputs, inputs)) | rng.integers(0, 2, (outputs, inputs)) << 7
        height, width = rows or outputs, columns or inputs
        shape = -(-outputs // height), -(-inputs // width)
        scales = rng.uniform(1e-5, 1e-4, shape).astype(np.float32)
        values = np.empty((outputs, inputs), np.float32)
        for o in range(outputs):
            for i in range(inputs):
                value = np.float32(e4m3(int(codes[o, i])))
                values[o, i] = value * scales[o // height, i // width]
        return {"weight": ("F8_E4M3", codes.astype(np.uint8)), scale: ("F32", scales)}, values

    return make


def fp4(kind: str) -> MakeModule:
    """Return a function that creates E2M1 modules: "nvfp4", "mxfp4", or "modelopt" (NVFP4)."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, Stored], np.ndarray]:
        codes = rng.integers(0, 16, (outputs, inputs))
        size, low, high = (32, 115, 122) if kind == "mxfp4" else (16, 1, 126)
        stored = rng.integers(low, high, (outputs, inputs // size)).astype(np.uint8)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        parts: dict[str, Stored] = {"weight_packed": ("U8", packed.astype(np.uint8))}
        if kind == "nvfp4":
            global_scale = np.float32(12345.6)
            numbers = [[e4m3(int(code)) for code in row] for row in stored]
            scales = np.array(numbers, dtype=np.float32) / global_scale
            parts["weight_scale"] = ("F8_E4M3", stored)
            parts["weight_global_scale"] = ("F32", np.array([global_scale]))
        elif kind == "modelopt":
            global_scale = np.float32(0.012)
            numbers = [[e4m3(int(code)) for code in row] for row in stored]
            scales = np.array(numbers, dtype=np.float32) * global_scale
            parts = {"weight": parts["weight_packed"], "weight_scale": ("F8_E4M3", stored)}
            parts["weight_scale_2"] = ("F32", np.array([global_scale]))
        else:
            scales = np.ldexp(np.float32(1), stored.astype(np.int32) - 127)
            parts["weight_scale"] = ("U8", stored)
        values = np.empty((outputs, inputs), np.float32)
        for o in range(outputs):
            for i in range(inputs):
                size_of = np.float32(magnitudes[codes[o, i] & 7]) * scales[o, i // size]
                values[o, i] = -size_of if codes[o, i] & 8 else size_of
        return parts, values

    return make


def mixed_modelopt() -> MakeModule:
    """Return a function that creates modules of ModelOpt in NVFP4 and FP8 in turn."""
    makers = cycle((fp4("modelopt"), fp8(None, None)))

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, Stored], np.ndarray]:
        return next(makers)(rng, outputs, inputs)

    return make


def write_published(
    folder: Path, make: MakeModule, quantization: dict[str, Any], seed: int = 0
) -> dict[str, np.ndarray]:
    """Write a tiny Llama with matrices from `make`; return the values by module name."""
    tiny = Tiny(hidden_size=128, ffn_size=256, num_layers=1, head_dim=32, seed=seed)
    write_tiny_folder(folder, tiny)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    tensors: dict[str, Stored] = {}
    values: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(seed)
    for name, entry in json.loads(raw[8:start]).items():
        module = name.removesuffix(".weight").removeprefix("model.layers.0.")
        if module in MATRICES:
            parts, values[module] = make(rng, *entry["shape"])
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
            tensors[f"{stem}.input_scale"] = ("F32", np.ones(1, np.float32))
        elif name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = np.frombuffer(raw[start + begin : start + end], np.float32)
            tensors[name] = ("F32", data.reshape(entry["shape"]))
    write_stored(path, tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return values


def write_stored(path: Path, tensors: dict[str, Stored]) -> None:
    """Write a safetensors file of any types."""
    entries: dict[str, Any] = {}
    data = bytearray()
    for name, (dtype, values) in tensors.items():
        begin = len(data)
        data += np.ascontiguousarray(values).tobytes()
        entries[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [begin, len(data)],
        }
    path.write_bytes(with_header(entries, bytes(data)))


def compressed_config(kind: str, **weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*k_proj", "re:.*v_proj"],
    }
