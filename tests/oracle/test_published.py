"""Published quantized folders against the library that writes them: values bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from support.published import MATRIX_NAMES, awq, compressed_config, write_published
from support.tiny import write_tiny_folder
from twostroke.lab.compress.quantize import quantize
from twostroke.model.weights import load_path
from twostroke.model.weights.tensor_names import canonical_name

if TYPE_CHECKING:
    from pathlib import Path

    from support.published import MakeModule

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

_DTYPES = {
    torch.int32: ("I32", np.int32),
    torch.int64: ("I64", np.int64),
    torch.int8: ("I8", np.int8),
    torch.uint8: ("U8", np.uint8),
    torch.float8_e4m3fn: ("F8_E4M3", np.uint8),
    torch.bfloat16: ("BF16", np.uint16),
    torch.float32: ("F32", np.float32),
}
INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *[
        ("pack-quantized", {**INT, "num_bits": bits, "symmetric": symmetric, **strategy})
        for bits in (2, 3, 4, 5, 8)
        for symmetric in (True, False)
        for strategy in ({"strategy": "group", "group_size": 32}, {"strategy": "channel"})
    ],
    ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "channel"}),
    ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [32, 64]}),
    (
        "nvfp4-pack-quantized",
        {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    ),
    ("mxfp8-quantized", {**FLOAT, "num_bits": 8, "strategy": "group", "group_size": 32}),
    ("mxfp4-pack-quantized", {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32}),
]


@pytest.mark.parametrize(("kind", "weights"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors(
    tmp_path: Path, kind: str, weights: dict[str, Any], dtype: torch.dtype
) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
    values = write_published(
        tmp_path, compressed(scheme, dtype), compressed_config(kind, **weights)
    )
    _assert_equal(tmp_path, values)


@pytest.mark.parametrize("target", ["w4a16", "w8a16"])
def test_folders_of_quantize(tmp_path: Path, target: str) -> None:
    source, out = write_tiny_folder(tmp_path / "tiny"), tmp_path / "out"
    quantize(str(source), target, out, "Water runs, and stones stay. " * 300, 1024, lambda _: None)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    scheme.format = config["format"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored, read = load_file(out / "model.safetensors"), load_path(out).tensors
    modules = [name.removesuffix("_packed") for name in stored if name.endswith("weight_packed")]
    assert len(modules) == 7 * load_path(out).spec.num_layers
    for name in modules:
        module = name.removesuffix(".weight")
        parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
        names = {part: f"{module}.{part}" for part in parts}
        state = {part: stored[key] for part, key in names.items() if key in stored}
        state["weight_scale"] = state["weight_scale"].float()
        values = compressor.decompress(state, scheme)["weight"].numpy()
        canonical = canonical_name(name, {})
        assert canonical is not None
        assert np.array_equal(read[canonical].dequantize(), values), name


def test_awq(tmp_path: Path) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    values = write_published(tmp_path, converted(awq(64)), quantization)
    _assert_equal(tmp_path, values)


def _assert_equal(folder: Path, values: dict[str, np.ndarray]) -> None:
    tensors = load_path(folder).tensors
    for module, expected in values.items():
        name = f"blk.0.{MATRIX_NAMES[module.rpartition('.')[2]]}.weight"
        assert np.array_equal(tensors[name].dequantize(), expected), module


def compressed(scheme: QuantizationScheme, dtype: torch.dtype) -> MakeModule:
    """Return a maker of modules that compressed-tensors writes, with scales of this type."""
    compressor = BaseCompressor.get_value_from_registry(scheme.format)

    def make(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, tuple[str, np.ndarray]], np.ndarray]:
        weight = torch.from_numpy(rng.standard_normal((outputs, inputs)).astype(np.float32))
        state = {"weight": weight, **_parameters(scheme.weights, rng, weight, dtype)}
        stored = compressor.compress(state, scheme)
        parts = {name: _stored(tensor) for name, tensor in stored.items()}
        # In float32: values of bfloat16 would be rounded once more.
        wide = {
            name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            for name, tensor in stored.items()
        }
        if "weight_global_scale" in stored:
            return parts, _nvfp4_values(wide, scheme.weights).numpy()
        return parts, compressor.decompress(wide, scheme)["weight"].float().numpy()

    return make


def converted(make: MakeModule) -> MakeModule:
    """Return a maker of the same modules of AWQ, whose values the library reads."""
    converter = AutoAWQConverter(group_size=64)

    def read(
        rng: np.random.Generator, outputs: int, inputs: int
    ) -> tuple[dict[str, tuple[str, np.ndarray]], np.ndarray]:
        parts, _ = make(rng, outputs, inputs)
        state = {f"m.{name}": torch.from_numpy(np.array(data)) for name, (_, data) in parts.items()}
        packed = converter.process(state)
        local = {name.removeprefix("m."): tensor for name, tensor in packed.items()}
        local["weight_scale"] = local["weight_scale"].float()
        scheme = converter._build_quant_config().config_groups["config_group_0"]
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        return parts, compressor.decompress(local, scheme)["weight"].numpy()

    return read


def _nvfp4_values(stored: dict[str, torch.Tensor], weights: Any) -> torch.Tensor:
    """Return what `decompress` does, in float32."""
    packed = stored["weight_packed"]
    rows, width = packed.shape
    codes = unpack_fp4_from_uint8(packed, rows, 2 * width, torch.float32)
    scales, global_scale = stored["weight_scale"].float(), stored["weight_global_scale"]
    return dequantize(codes, scales, args=weights, global_scale=global_scale)


def _parameters(
    weights: Any, rng: np.random.Generator, weight: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return random scales and zero points of the shapes that a scheme asks for."""
    outputs, inputs = weight.shape
    match str(getattr(weights.strategy, "value", weights.strategy)):
        case "tensor":
            shape: tuple[int, ...] = (1,)
        case "channel":
            shape = outputs, 1
        case "block":
            height, width = weights.block_structure
            shape = -(-outputs // height), -(-inputs // width)
        case _:
            shape = outputs, inputs // weights.group_size
    largest = 3 / 2 ** (weights.num_bits - 1) if weights.type == "int" else 0.1
    scale = torch.from_numpy(rng.uniform(0.3, 1, shape).astype(np.float32) * np.float32(largest))
    if weights.type == "float" and weights.group_size == 16:
        return {"weight_scale": scale * 400, "weight_global_scale": torch.tensor([777.7])}
    if weights.type == "float" and weights.group_size == 32:
        return {"weight_scale": 2.0 ** torch.floor(torch.log2(scale * 8))}
    parameters = {"weight_scale": scale.to(dtype)}
    if not weights.symmetric:
        half = 1 << (weights.num_bits - 1)
        zeros = rng.integers(-half, half, shape).astype(np.int8)
        parameters["weight_zero_point"] = torch.from_numpy(zeros)
    return parameters


def _stored(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    dtype, numpy_type = _DTYPES[tensor.dtype]
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(numpy_type)
    return dtype, flat.reshape(tensor.shape)
