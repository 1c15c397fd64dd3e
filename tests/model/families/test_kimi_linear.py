"""Kimi Linear: decays of channels and latent attention without RoPE, from both kinds of files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import write_gguf
from support.safetensors_writer import write_safetensors
from support.tiny import (
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_weights import folder_weights
from twostroke.core.errors import ModelFormatError
from twostroke.model.families import build_program
from twostroke.model.families.spec import DeltaSpec, LatentSpec
from twostroke.model.program.ops import GatedDeltaRule, LatentAttention, Rope
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

TINY = tiny_of("kimi-linear")
ATTENDS = (False, False, True, False)


def folder_with(tmp_path: Path, changes: dict[str, Any]) -> Path:
    """Write a tiny Kimi Linear with other values in its config.json; None removes a key."""
    folder = write_tiny_folder(tmp_path / "model", TINY)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_both_files_have_the_same_layers(tmp_path: Path) -> None:
    gguf = load_path(write_tiny_gguf(tmp_path / "a.gguf", TINY)).spec
    folder = load_path(write_tiny_folder(tmp_path / "model", TINY)).spec
    assert gguf.experts is not None
    assert folder.experts is not None
    assert gguf.experts.routing is not None
    # GGUF files have numbers in float32.
    assert gguf.experts.routing.scale == pytest.approx(2.446)
    experts = replace(gguf.experts, routing=folder.experts.routing)
    same = {"name": folder.name, "rope": folder.rope, "norm_epsilon": folder.norm_epsilon}
    assert replace(gguf, experts=experts, **same) == folder
    assert gguf.delta == DeltaSpec(ATTENDS, 4, 4, 32, 32, 4, gates_channels=True, gate_rank=32)
    assert gguf.latent == LatentSpec(32, 16, 32, 48)
    program = build_program(gguf)
    rules = [op for op in program.ops if isinstance(op, GatedDeltaRule)]
    assert [op.layer for op in rules] == [1, 3, 5]
    assert all(op.gates_channels for op in rules)
    assert [op.layer for op in program.ops if isinstance(op, LatentAttention)] == [0]
    angles = [op.inverse_frequencies for op in program.ops if isinstance(op, Rope)]
    assert set(angles) == {(0.0,)}
    assert program.state_bytes == 3 * 4 * (4 * 32 * 32 + 3 * 3 * 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_attn_config": None, "linear_num_heads": 4, "linear_head_dim": 32,
            "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"] * 2
            + ["full_attention", "linear_attention"]},
        {"num_experts": None, "n_routed_experts": 8, "num_experts_per_token": None,
            "num_experts_per_tok": 3, "moe_renormalize": None, "norm_topk_prob": True,
            "num_shared_experts": None, "n_shared_experts": 1},
        {"first_k_dense_replace": None, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
        {"max_position_embeddings": None, "model_max_length": 512},
    ],
)  # fmt: skip
def test_configurations_of_transformers_say_the_same(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plain = load_path(write_tiny_folder(tmp_path / "plain", TINY)).spec
    assert replace(load_path(folder_with(tmp_path, changes)).spec, name="plain") == plain


LINEAR = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"linear_attn_config": LINEAR | {"full_attn_layers": [3], "kda_layers": [1, 2]}},
            "has full_attn_layers and kda_layers that do not list each of its 4 layers once"),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": [2, 3], "kda_layers": [1, 3, 4]}},
            "do not list each of its 4 layers once"),
        ({"linear_attn_config": LINEAR | {"full_attn_layers": [], "kda_layers": [1, 2, 3, 4]}},
            "has no attention in any of its 4 layers"),
        ({"linear_attn_config": [1]}, "has linear_attn_config that is not an object"),
        ({"linear_attn_config": {"head_dim": 0}}, "head_dim = 0, not a whole number"),
        ({"mla_use_nope": False}, "mla_use_nope = False, which is not supported yet"),
        ({"attn_res_block_size": 8}, "attn_res_block_size = 8, which is not supported yet"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True, which is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2, which is not supported yet"),
        ({"num_attention_heads": 8}, "with shape"),
    ],
)  # fmt: skip
def test_wrong_values_of_a_configuration_are_named(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder_with(tmp_path, changes))
    assert expected in str(caught.value)
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention.head_count_kv", [0, 0, 1], "3 numbers of key-value heads for 4 layers"),
        ("attention.head_count_kv", [0, 0, 0, 0], "has no attention in any of its 4 layers"),
        ("kda.head_dim", None, "has no kimi-linear.kda.head_dim"),
        ("kda.head_dim", 16, "with shape"),
        ("attention.key_length_mla", 16, "key_length_mla = 16, not a whole number from 17"),
        ("ssm.conv_kernel", 3, "'blk.0.ssm_conv1d_q.weight' with shape (128, 1, 4); the family"),
        ("expert_used_count", 9, "expert_used_count = 9, not a whole number from 1 to 8"),
    ],
)
def test_wrong_metadata_of_a_gguf_file_are_named(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    metadata = tiny_metadata(TINY) | {f"kimi-linear.{key}": value}
    metadata = {name: field for name, field in metadata.items() if field is not None}
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", metadata, tiny_tensors(TINY)))
    assert expected in str(caught.value)


WEIGHTS = (
    *("attn_q.weight", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_b.weight", "ssm_beta.weight"),
    *("ssm_conv1d_k.weight", "ssm_norm.weight", "ssm_a", "ssm_dt.bias"),
)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_missing_or_misshapen_tensor_of_a_gguf_file_is_named(tmp_path: Path, weight: str) -> None:
    tensors = tiny_tensors(TINY)
    name = f"blk.1.{weight}"
    shape = tensors.pop(name).shape
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(TINY), tensors))
    assert f"lacks tensor {name!r}" in str(caught.value)
    wrong = np.ones((shape[0] + 1, *shape[1:]), np.float32)
    tensors[name] = QuantTensor.from_floats(wrong, FORMATS["F32"])
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(TINY), tensors))
    assert f"tensor {name!r} with shape {wrong.shape}" in str(caught.value)


@pytest.mark.parametrize("weight", ["A_log", "dt_bias", "q_conv1d.weight", "f_a_proj.weight"])
def test_a_missing_tensor_of_a_folder_is_named_as_in_the_folder(
    tmp_path: Path, weight: str
) -> None:
    folder = write_tiny_folder(tmp_path / "model", TINY)
    weights = folder_weights(TINY, tiny_weights(TINY))
    name = f"model.layers.3.self_attn.{weight}"
    del weights[name]
    stored = {
        key: QuantTensor.from_floats(np.ascontiguousarray(values, np.float32), FORMATS["F32"])
        for key, values in weights.items()
    }
    write_safetensors(folder / "model.safetensors", stored)
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder)
    assert f"lacks tensor {name!r}" in str(caught.value)
