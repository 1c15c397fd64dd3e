"""gpt-oss: sinks, biases of experts and MXFP4, from GGUF files and from folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import write_gguf
from support.safetensors_writer import with_header, write_safetensors
from support.tiny import (
    tiny_config,
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_families import WINDOW
from support.tiny_weights import folder_weights
from twostroke.core.errors import ModelFormatError
from twostroke.model.families import WindowSpec, build_program
from twostroke.model.program import Activation
from twostroke.model.program.ops import Attention, Linear, MixtureOfExperts
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.weights import LoadedModel

TINY = tiny_of("gpt-oss")
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def write_mxfp4_folder(folder: Path, loaded: LoadedModel) -> Path:
    """Write a tiny model whose experts' matrices have the codes and scales of `loaded`'s MXFP4.

    As published: the rows of gate and up projections alternate, and neighbouring values share a
    byte.
    """
    write_tiny_folder(folder, TINY)
    weights = {name: tensor.dequantize() for name, tensor in loaded.tensors.items()}
    stored = {
        name: ("F32", np.ascontiguousarray(values, np.float32))
        for name, values in folder_weights(TINY, weights).items()
        if not name.endswith(("gate_up_proj", "down_proj"))
    }
    for layer in range(TINY.num_layers):
        parts = [
            np.stack([loaded.tensors[f"blk.{layer}.ffn_{part}.{e}.weight"].data for e in range(8)])
            for part in ("gate", "up", "down")
        ]
        gate_up = np.stack(parts[:2], axis=2).reshape(8, -1, parts[0].shape[-1])
        for name, rows in (("gate_up_proj", gate_up), ("down_proj", parts[2])):
            groups = rows.reshape(*rows.shape[:2], -1, 17)
            low, high = groups[..., 1:] & 15, groups[..., 1:] >> 4
            codes = np.concatenate([low, high], axis=-1)
            blocks = codes[..., 0::2] | codes[..., 1::2] << 4
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            stored[f"{stem}_blocks"] = "U8", np.ascontiguousarray(blocks)
            stored[f"{stem}_scales"] = "U8", np.ascontiguousarray(groups[..., 0])
    write_arrays(folder, stored)
    config = tiny_config(TINY) | {"quantization_config": MXFP4_CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_arrays(folder: Path, stored: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write a folder's weight file with arrays of any type."""
    entries, data = {}, b""
    for name, (dtype, values) in stored.items():
        end = len(data) + values.nbytes
        entries[name] = {
            "dtype": dtype, "shape": [*values.shape], "data_offsets": [len(data), end],
        }  # fmt: skip
        data += values.tobytes()
    (folder / "model.safetensors").write_bytes(with_header(entries, data))


def test_gpt_oss_has_sinks_windows_and_biases(tmp_path: Path) -> None:
    for path in (
        write_tiny_gguf(tmp_path / "a.gguf", TINY),
        write_tiny_folder(tmp_path / "model", TINY),
    ):
        spec = load_path(path).spec
        assert spec.window == WindowSpec(WINDOW, (True, False, True, False))
        assert (spec.qkv_bias, spec.output_bias, spec.has_sinks) == (True, True, True)
        assert spec.activation is Activation.SWIGLU_OAI
        program = build_program(spec)
        assert [op.sinks for op in program.ops if isinstance(op, Attention)] == [
            f"blk.{layer}.attn_sinks.weight" for layer in range(4)
        ]
        mixtures = [op for op in program.ops if isinstance(op, MixtureOfExperts)]
        assert all(op.normalize and op.experts[3].biases[2] for op in mixtures)
        routers = [op for op in program.ops if isinstance(op, Linear) and op.width == 8]
        assert all(op.bias for op in routers)


def test_the_blend_of_yarn_does_not_end_at_whole_pairs(tmp_path: Path) -> None:
    gguf = load_path(write_tiny_gguf(tmp_path / "a.gguf", TINY)).spec.rope
    folder = load_path(write_tiny_folder(tmp_path / "model", TINY)).spec.rope
    assert gguf == folder
    truncated = json.loads((tmp_path / "model" / "config.json").read_text())
    truncated["rope_scaling"]["truncate"] = True
    (tmp_path / "model" / "config.json").write_text(json.dumps(truncated))
    assert load_path(tmp_path / "model").spec.rope != folder


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16"])
def test_gguf_files_and_folders_have_the_same_weights(fmt: str, tmp_path: Path) -> None:
    tiny = replace(TINY, fmt=fmt, embedding_fmt=fmt)
    gguf = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny)).tensors
    folder = load_path(write_tiny_folder(tmp_path / "model", tiny)).tensors
    assert gguf.keys() == folder.keys()
    for name, tensor in gguf.items():
        if len(tensor.shape) == 2:  # GGUF files keep vectors in float32
            np.testing.assert_array_equal(folder[name].dequantize(), tensor.dequantize())


def test_experts_in_mxfp4_are_the_same_in_gguf_files_and_folders(tmp_path: Path) -> None:
    tensors = tiny_tensors(TINY)
    for name, tensor in tensors.items():
        if name.endswith("_exps.weight"):
            tensors[name] = QuantTensor.from_floats(tensor.dequantize(), FORMATS["MXFP4"])
    gguf = load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(TINY), tensors))
    folder = load_path(write_mxfp4_folder(tmp_path / "model", gguf))
    assert folder.tensors.keys() == gguf.tensors.keys()
    for name, tensor in gguf.tensors.items():
        np.testing.assert_array_equal(folder.tensors[name].dequantize(), tensor.dequantize())
        if name.count(".") == 4 and name.endswith(".weight"):  # of an expert
            assert folder.tensors[name].format.bits_per_value == 4.25


def damaged(
    tmp_path: Path, name: str, values: np.ndarray | None, *, of_folder: bool = False
) -> str:
    """Return the error about a model, one of whose tensors is left out or has other values."""
    weights = {name: tensor.dequantize() for name, tensor in tiny_tensors(TINY).items()}
    loaded = load_path(write_tiny_gguf(tmp_path / "whole.gguf", TINY))
    if of_folder:
        whole_weights = {name: tensor.dequantize() for name, tensor in loaded.tensors.items()}
        weights = folder_weights(TINY, whole_weights)
    assert name in weights
    del weights[name]
    if values is not None:
        weights[name] = values.astype(np.float32)
    tensors = {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in weights.items()}
    if of_folder:
        path = write_tiny_folder(tmp_path / "model", TINY)
        write_safetensors(path / "model.safetensors", tensors)
    else:
        path = write_gguf(tmp_path / "a.gguf", tiny_metadata(TINY), tensors)
    with pytest.raises(ModelFormatError) as caught:
        load_path(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.1.attn_sinks.weight", None, "lacks tensor 'blk.1.attn_sinks.weight' with shape (4,)"),
        ("blk.1.attn_sinks.weight", (5,), "'blk.1.attn_sinks.weight' with shape (5,); the family"),
        ("blk.1.ffn_gate_inp.bias", None, "lacks tensor 'blk.1.ffn_gate_inp.bias' with shape (8,)"),
        ("blk.2.ffn_up_exps.bias", None, "lacks tensor 'blk.2.ffn_up.0.bias' with shape (128,)"),
        ("blk.2.ffn_up_exps.bias", (8, 64), "with shape (8, 64); the family 'gpt-oss' reads (8, 1"),
        ("blk.2.ffn_down_exps.bias", (7, 64), "lacks tensor 'blk.2.ffn_down.7.bias' with shape"),
        ("blk.0.attn_output.bias", (63,), "'blk.0.attn_output.bias' with shape (63,); the family"),
    ],
)
def test_a_missing_or_misshapen_tensor_of_a_gguf_file_is_named(
    name: str, shape: tuple[int, ...] | None, expected: str, tmp_path: Path
) -> None:
    message = damaged(tmp_path, name, None if shape is None else np.ones(shape))
    assert expected in message
    assert message.count(". ") == 0


EXPERTS = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.1.self_attn.sinks", None, "lacks tensor 'model.layers.1.self_attn.sinks'"),
        ("model.layers.1.self_attn.sinks", (3,), "'model.layers.1.self_attn.sinks' with shape (3,"),
        (f"{EXPERTS}gate_up_proj", (8, 64, 255), "gate_up_proj' with the shape (8, 64, 255); ga"),
        (f"{EXPERTS}gate_up_proj_bias", None, "lacks tensor 'blk.1.ffn_gate.0.bias' with shape"),
        (f"{EXPERTS}gate_up_proj_bias", (8, 254), "with shape (8, 127); the family 'gpt-oss' read"),
        (f"{EXPERTS}gate_up_proj_bias", (8 * 256,), "gate_up_proj_bias', which is not one of"),
        (
            f"{EXPERTS}down_proj",
            (8, 127, 64),
            "'blk.1.ffn_down.0.weight' with shape (64, 127); the",
        ),
    ],
)
def test_a_missing_or_misshapen_tensor_of_a_folder_is_named(
    name: str, shape: tuple[int, ...] | None, expected: str, tmp_path: Path
) -> None:
    values = None if shape is None else np.ones(shape)
    assert expected in damaged(tmp_path, name, values, of_folder=True)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("down_proj_scales", None, "lacks tensor 'model.layers.1.mlp.experts.down_proj_scales'"),
        ("down_proj_scales", np.ones((8, 64, 3), np.uint8), "and scales of [8, 64, 3], not (exper"),
        ("down_proj_blocks", np.ones((8, 64, 4, 8), np.uint8), "has the shape [8, 64, 4, 8] and"),
        ("gate_up_proj_blocks", np.ones((8, 256, 32), np.uint8), "has the shape [8, 256, 32] and"),
    ],
)
def test_codes_and_scales_that_contradict_each_other_are_named(
    name: str, values: np.ndarray | None, expected: str, tmp_path: Path
) -> None:
    stored: dict[str, tuple[str, np.ndarray]] = {}
    for part, outputs, inputs in (("gate_up_proj", 256, 64), ("down_proj", 64, 128)):
        blocks = np.ones((8, outputs, inputs // 32, 16), np.uint8)
        stored[f"{EXPERTS}{part}_blocks"] = "U8", blocks
        stored[f"{EXPERTS}{part}_scales"] = "U8", np.ones(blocks.shape[:3], np.uint8)
    del stored[EXPERTS + name]
    if values is not None:
        stored[EXPERTS + name] = "U8", values
    folder = write_tiny_folder(tmp_path / "model", TINY)
    write_arrays(folder, stored)
    config = tiny_config(TINY) | {"quantization_config": MXFP4_CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder)
    assert expected in str(caught.value)


def test_a_folder_in_mxfp4_without_codes_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model", TINY)
    config = tiny_config(TINY) | {"quantization_config": MXFP4_CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="has no quantized weights, which its"):
        load_path(folder)
