"""Files of models with recurrent layers: the forms of their weights, and parts left out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import write_gguf
from support.random_blocks import in_format
from support.safetensors_writer import write_safetensors
from support.tiny import (
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_families import FAMILIES
from support.tiny_weights import folder_weights
from twostroke.core.errors import ModelFormatError
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

RECURRENT = [name for name, variant in FAMILIES.items() if variant.delta is not None]
STATE_WEIGHTS = (
    *("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_norm", "ssm_out"),
    *("ssm_a", "ssm_dt"),
)


def folder_tensors(family: str) -> dict[str, QuantTensor]:
    tiny = tiny_of(family)
    weights = folder_weights(tiny, tiny_weights(tiny))
    return {name: floats(values) for name, values in weights.items()}


def floats(values: np.ndarray) -> QuantTensor:
    return QuantTensor.from_floats(values.astype(np.float32), FORMATS["F32"])


@pytest.mark.parametrize("weight", STATE_WEIGHTS)
def test_missing_and_misshapen_weights_of_recurrent_layers_are_named(
    tmp_path: Path, weight: str
) -> None:
    tiny = tiny_of("qwen3.5")
    tensors = tiny_tensors(tiny)
    name = next(name for name in tensors if name.startswith(f"blk.2.{weight}"))
    shape = tensors[name].shape
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), others))
    assert f"lacks tensor {name!r} with shape {shape}, which the family" in str(caught.value)
    wrong = {name: floats(np.ones((shape[0] + 1, *shape[1:])))}
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), others | wrong))
    assert f"tensor {name!r} with shape {(shape[0] + 1, *shape[1:])}; the" in str(caught.value)


MIXER_WEIGHTS = [
    *[("lfm2", f"shortconv.{part}.weight") for part in ("in_proj", "conv", "out_proj")],
    *[("granite-hybrid", f"ssm_{part}.weight") for part in ("in", "conv1d", "norm", "out")],
    *[("granite-hybrid", f"ssm_{part}") for part in ("a", "d", "dt.bias", "conv1d.bias")],
    ("nemotron-h-experts", "ffn_latent_up.weight"),
]


@pytest.mark.parametrize(("family", "weight"), MIXER_WEIGHTS)
def test_missing_and_misshapen_weights_of_mixers_are_named(
    tmp_path: Path, family: str, weight: str
) -> None:
    tiny = tiny_of(family)
    tensors = tiny_tensors(tiny)
    name = f"blk.1.{weight}"
    shape = tensors[name].shape
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), others))
    assert f"lacks tensor {name!r}" in str(caught.value)
    wrong = {name: floats(np.ones((shape[0] + 1, *shape[1:])))}
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), others | wrong))
    assert f"tensor {name!r} with shape {(shape[0] + 1, *shape[1:])}; the" in str(caught.value)


@pytest.mark.parametrize("weight", ["mamba.A_log", "mamba.in_proj.weight", "mamba.conv1d.bias"])
def test_missing_weights_of_granite_folders_are_named_as_in_the_folder(
    tmp_path: Path, weight: str
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of("granite-hybrid"))
    tensors = folder_tensors("granite-hybrid")
    del tensors[f"model.layers.1.{weight}"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder)
    assert f"lacks tensor 'model.layers.1.{weight}'" in str(caught.value)


@pytest.mark.parametrize("family", ["lfm2", "granite-hybrid"])
@pytest.mark.parametrize("fmt", ["Q4_0", "BF16"])
def test_parts_of_joined_projections_stay_as_they_are_stored(
    tmp_path: Path, family: str, fmt: str
) -> None:
    tiny = replace(tiny_of(family), fmt=fmt)
    loaded = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny)).tensors
    stack = {"lfm2": "shortconv.in_proj", "granite-hybrid": "ssm_in"}[family]
    stored = tiny_tensors(tiny)[f"blk.1.{stack}.weight"]
    names = {"lfm2": "shortconv.in_{}", "granite-hybrid": "ssm_in_{}"}[family]
    letters = {"lfm2": ("b", "c", "v"), "granite-hybrid": ("z", "x", "dt")}[family]
    parts = [loaded[f"blk.1.{names.format(letter)}.weight"] for letter in letters]
    assert {part.format.name for part in parts} == {fmt}
    assert np.array_equal(np.concatenate([part.data for part in parts]), stored.data)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("lfm2", {"layer_types": None, "full_attn_idxs": [2], "block_ff_dim": 192}
            | {"intermediate_size": 5, "tie_word_embeddings": False, "tie_embedding": True}),
        ("granite-hybrid", {"mamba_d_head": "auto", "time_step_limit": [0.0, float("inf")]}),
        ("granite-hybrid", {"layer_types": ["linear_attention"] * 2 + ["full_attention"]
            + ["linear_attention"], "time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ],
)  # fmt: skip
def test_older_and_newer_configurations_say_the_same(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of(family))
    spec = load_path(folder).spec
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert load_path(folder).spec == spec


@pytest.mark.parametrize(
    ("family", "weight"),
    [
        *[("qwen3.5", name) for name in ("A_log", "dt_bias", "conv1d.weight", "in_proj_a.weight")],
        ("qwen3-next", "A_log"),
    ],
)
def test_missing_weights_of_folders_are_named_as_in_the_folder(
    tmp_path: Path, family: str, weight: str
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of(family))
    name = f"model.layers.2.linear_attn.{weight}"
    tensors = folder_tensors(family)
    del tensors[name]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder)
    assert f"lacks tensor {name!r}" in str(caught.value)


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "BF16"])
def test_rows_of_queries_and_gates_stay_as_they_are_stored(tmp_path: Path, fmt: str) -> None:
    tiny = replace(tiny_of("qwen3.5"), fmt=fmt)
    loaded = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny)).tensors
    stored = tiny_tensors(tiny)["blk.1.attn_q.weight"].data
    rows = stored.reshape(tiny.num_heads, 2, tiny.head_dim, -1)
    for part, weight in enumerate(("attn_q", "attn_gate")):
        tensor = loaded[f"blk.1.{weight}.weight"]
        assert tensor.format.name == fmt
        assert np.array_equal(tensor.data, rows[:, part].reshape(tensor.data.shape))


@pytest.mark.parametrize("fmt", ["Q4_0", "Q8_0", "BF16"])
def test_joined_projections_of_older_files_are_split(tmp_path: Path, fmt: str) -> None:
    tiny = replace(tiny_of("qwen3-next"), fmt=fmt)
    delta = tiny.variant.delta
    assert delta is not None
    stored = tiny_tensors(tiny)
    joined = in_format(np.random.default_rng(1).standard_normal((448, 64)), fmt)
    for part in ("attn_qkv", "attn_gate"):
        del stored[f"blk.0.{part}.weight"]
    stored["blk.0.ssm_in.weight"] = joined
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), stored)
    loaded = load_path(path).tensors
    heads = joined.data.reshape(delta.num_key_heads, 224, -1)  # 16 + 16 + 96 + 96 rows
    parts = [heads[:, :16], heads[:, 16:32], heads[:, 32:128]]
    mixed = np.concatenate([part.reshape(-1, joined.data.shape[1]) for part in parts])
    assert np.array_equal(loaded["blk.0.attn_qkv.weight"].data, mixed)
    gates = heads[:, 128:].reshape(-1, joined.data.shape[1])
    assert np.array_equal(loaded["blk.0.attn_gate.weight"].data, gates)


def test_a_weight_in_two_forms_is_refused(tmp_path: Path) -> None:
    tiny = tiny_of("qwen3-next")
    tensors = tiny_tensors(tiny)
    extra = {"blk.0.ssm_in.weight": floats(np.ones((448, 64)))}
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), tensors | extra)
    with pytest.raises(ModelFormatError, match=r"'blk\.0\.attn_\w+\.weight' twice"):
        load_path(path)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_a_list_of_recurrent_layers_may_take_the_place_of_the_interval(
    tmp_path: Path, family: str
) -> None:
    tiny = tiny_of(family)
    plain = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    name = tiny.variant.architecture
    listed = {f"{name}.attention.recurrent_layers": [True, False, True, False]}
    metadata = tiny_metadata(tiny) | listed
    del metadata[f"{name}.full_attention_interval"]
    path = write_gguf(tmp_path / "b.gguf", metadata, tiny_tensors(tiny))
    assert load_path(path).spec.delta == plain.spec.delta


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("is_listed", [False, True])
def test_mtp_layers_of_gguf_files_are_left_out(
    tmp_path: Path, family: str, is_listed: bool
) -> None:
    tiny = tiny_of(family)
    plain = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    tensors = tiny_tensors(tiny)
    extra = {
        name.replace("blk.3.", "blk.4."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blk.3.")
    }
    extra["blk.4.nextn.eh_proj.weight"] = tensors["token_embd.weight"]
    values: dict[str, Any] = {"block_count": 5, "nextn_predict_layers": 1}
    if is_listed:
        values["attention.recurrent_layers"] = [True, False, True, False, False]
    metadata = {f"{tiny.variant.architecture}.{key}": value for key, value in values.items()}
    path = write_gguf(tmp_path / "b.gguf", tiny_metadata(tiny) | metadata, tensors | extra)
    loaded = load_path(path)
    assert loaded.tensors.keys() == plain.tensors.keys()
    assert replace(loaded.spec, name=plain.spec.name) == plain.spec


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_a_published_folder_is_read_as_its_text_model(tmp_path: Path, family: str) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of(family))
    plain = load_path(folder)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in folder_tensors(family).items()
    }
    for extra in (
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.fc.weight",
        "model.mtp.norm.weight",
    ):
        tensors[extra] = floats(np.ones((2, 2)))
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = floats(np.ones((2, 2)))
    write_safetensors(folder / "model.safetensors", tensors)
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": text["model_type"].removesuffix("_text"), "vision_config": {"depth": 2}}
    rope = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "partial_rotary_factor": text.pop("partial_rotary_factor"),
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    del text["rope_scaling"]
    config = outer | {"text_config": text | {"rope_parameters": rope}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_path(folder)
    assert loaded.spec == plain.spec
    assert loaded.tensors.keys() == plain.tensors.keys()


def test_a_folder_with_vision_only_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of("qwen3.5"))
    tensors = {"model.visual.patch_embed.proj.weight": floats(np.ones((2, 2)))}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder)
    assert str(caught.value) == "'model.safetensors' has no weights of a text model."


def test_the_epsilon_of_nemotron_files_may_have_the_other_key(tmp_path: Path) -> None:
    tiny = tiny_of("nemotron-h")
    metadata, tensors = tiny_metadata(tiny), tiny_tensors(tiny)
    spec = load_path(write_gguf(tmp_path / "a.gguf", metadata, tensors)).spec
    del metadata["nemotron_h.attention.layer_norm_rms_epsilon"]
    assert load_path(write_gguf(tmp_path / "a.gguf", metadata, tensors)).spec == spec


def test_mtp_layers_of_nemotron_files_are_left_out(tmp_path: Path) -> None:
    tiny = tiny_of("nemotron-h-experts")
    metadata, tensors = tiny_metadata(tiny), tiny_tensors(tiny)
    plain = load_path(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    metadata |= {
        "nemotron_h_moe.block_count": 5,
        "nemotron_h_moe.nextn_predict_layers": 1,
        "nemotron_h_moe.attention.head_count_kv": [0, 0, 2, 0, 2],
        "nemotron_h_moe.feed_forward_length": [0, 128, 0, 128, 128],
    }
    extra = {
        name.replace("blk.3.", "blk.4."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blk.3.")
    }
    loaded = load_path(write_gguf(tmp_path / "a.gguf", metadata, tensors | extra))
    assert loaded.spec == plain.spec
    assert loaded.tensors.keys() == plain.tensors.keys()
