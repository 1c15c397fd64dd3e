"""Llama 4: chunks, layers without RoPE, the temperature, and experts, from both kinds of files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.cpu import LEVELS, cpu_backend
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
from support.tiny_families import WINDOW
from support.tiny_weights import folder_weights
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import ModelFormatError
from twostroke.lab.measure.divergence import compare
from twostroke.model.families import WindowSpec, build_program
from twostroke.model.program.ops import Attention, MixtureOfExperts, QueryRope, RMSNorm
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.weights import LoadedModel

TINY = tiny_of("llama4")
TOKENS = [(7 * i * i + 3 * i) % 285 for i in range(120)]
ROTATES = (True, True, True, False)


def folder_with(tmp_path: Path, **changes: Any) -> Path:
    """Write a tiny Llama 4 with other values in its config.json."""
    folder = write_tiny_folder(tmp_path / "model", TINY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def logits(loaded: LoadedModel) -> np.ndarray:
    return ReferenceBackend(build_program(loaded.spec), loaded.tensors, 1, 16).score(TOKENS)


def test_both_files_have_the_chunks_and_the_temperature_of_published_models(tmp_path: Path) -> None:
    gguf = load_path(write_tiny_gguf(tmp_path / "a.gguf", TINY)).spec
    folder = load_path(write_tiny_folder(tmp_path / "model", TINY)).spec
    # GGUF files have the epsilon in float32.
    assert replace(gguf, name=folder.name, norm_epsilon=folder.norm_epsilon) == folder
    assert gguf.window == WindowSpec(8192, ROTATES, is_chunked=True)
    assert (gguf.rotates, gguf.norms_heads, gguf.rope.interleaved) == (ROTATES, True, True)
    rope = gguf.unrotated_rope
    assert rope is not None
    assert set(rope.frequencies) == {0.0}
    temperature = rope.temperature_scale, rope.temperature_length, rope.temperature_offset
    assert temperature == (0.1, 8192, 1)


def test_layers_differ_in_chunks_norms_and_experts(tmp_path: Path) -> None:
    program = build_program(load_path(write_tiny_gguf(tmp_path / "a.gguf", TINY)).spec)
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    assert [op.window for op in attentions] == [8192, 8192, 8192, None]
    assert [op.is_chunked for op in attentions] == list(ROTATES)
    assert [op.output for op in program.ops if isinstance(op, QueryRope)] == ["blk.3.q.roped"]
    head_norms = {op.x for op in program.ops if isinstance(op, RMSNorm) and op.weight is None}
    assert head_norms == {f"blk.{layer}.{part}" for layer in range(3) for part in "qk"}
    mixtures = [op for op in program.ops if isinstance(op, MixtureOfExperts)]
    assert [op.output.split(".")[0] for op in mixtures] == ["x2", "x4"]
    assert all(op.scales_inputs and op.num_used == 1 for op in mixtures)


@pytest.mark.parametrize("level", LEVELS)
def test_chunks_and_temperature_change_later_rows_on_the_cpu_as_well(
    tmp_path: Path, level: str
) -> None:
    plain = logits(load_path(write_tiny_folder(tmp_path / "model", TINY)))
    loaded = load_path(folder_with(tmp_path, attention_chunk_size=WINDOW, floor_scale=20))
    expected = logits(loaded)
    assert np.abs(plain[:19] - expected[:19]).max() < 1e-5
    assert np.abs(plain[30:] - expected[30:]).max() > 1e-2
    model = build_program(loaded.spec), loaded.tensors
    with cpu_backend(model, level, 8) as backend:
        for generated in (False, True):
            actual = backend.score(TOKENS, generated=generated)
            assert compare([(expected, actual, TOKENS)]).mean_kl < 1e-3


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"no_rope_layers": []}, "rotates", ROTATES),
        ({"no_rope_layers": [1, 1, 1, 0]}, "rotates", ROTATES),
        ({"attn_temperature_tuning": False}, "unrotated_rope", None),
        ({"use_qk_norm": False}, "norms_heads", False),
        ({"layer_types": ["full_attention"] * 4}, "window", None),
        ({"no_rope_layer_interval": 2}, "rotates", (True, False, True, False)),
    ],
)
def test_values_of_a_configuration_are_read(
    tmp_path: Path, changes: dict[str, Any], field: str, expected: Any
) -> None:
    assert getattr(load_path(folder_with(tmp_path, **changes)).spec, field) == expected


def test_a_published_configuration_has_a_number_for_the_temperature(tmp_path: Path) -> None:
    plain = load_path(write_tiny_folder(tmp_path / "plain", TINY)).spec
    changes = {"attn_temperature_tuning": 4, "moe_layers": [1, 3], "interleave_moe_layer_step": 7}
    assert replace(load_path(folder_with(tmp_path, **changes)).spec, name="plain") == plain


def test_factors_of_rope_may_be_equal(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    plain = load_path(write_tiny_folder(tmp_path / "plain", TINY)).spec.rope.frequencies
    scaled = load_path(folder_with(tmp_path, rope_scaling=scaling)).spec.rope.frequencies
    ratios = [a / b for a, b in zip(plain, scaled, strict=True)]
    assert ratios == pytest.approx([1.0 if 64 * f > 2 * np.pi else 16.0 for f in plain])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step = 0, not a whole number"),
        ({"interleave_moe_layer_step": 3}, "which the family 'llama4' reads"),
        ({"moe_layers": [1, 4]}, "has moe_layers that is not a list of numbers of its 4 layers"),
        ({"moe_layers": 3}, "has moe_layers that is not a list of numbers"),
        ({"attention_chunk_size": 0}, "attention_chunk_size = 0, not a whole number"),
        ({"attention_chunk_size": None}, "has no attention_chunk_size"),
        ({"floor_scale": 0}, "floor_scale = 0, not a whole number"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers that is not a list of 4 values"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types with 'sliding_attention'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9, not a whole number from 1 to 8"),
        ({"intermediate_size_mlp": 96}, "with shape (128, 64); the family 'llama4' reads (96, 64)"),
    ],
)
def test_wrong_values_of_a_configuration_are_named(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder_with(tmp_path, **changes))
    assert expected in str(caught.value)
    assert str(caught.value).count(". ") == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("interleave_moe_layer_step", 0, "interleave_moe_layer_step = 0, not a whole number"),
        ("interleave_moe_layer_step", None, "has no llama4.interleave_moe_layer_step"),
        ("attention.sliding_window", 0, "attention.sliding_window = 0, which is not supported"),
        ("expert_count", 0, "expert_count = 0, not a whole number"),
        ("expert_gating_func", 1, "expert_gating_func = 1, which is not supported"),
    ],
)
def test_wrong_metadata_of_a_gguf_file_are_named(
    tmp_path: Path, key: str, value: int | None, expected: str
) -> None:
    metadata = tiny_metadata(TINY) | {f"llama4.{key}": value}
    metadata = {name: field for name, field in metadata.items() if field is not None}
    with pytest.raises(ModelFormatError) as caught:
        load_path(write_gguf(tmp_path / "a.gguf", metadata, tiny_tensors(TINY)))
    assert expected in str(caught.value)


EXPERTS = "model.layers.1.feed_forward.experts."


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (f"{EXPERTS}gate_up_proj", None, "lacks tensor"),
        (f"{EXPERTS}gate_up_proj", (8, 64, 254), "with shape (8, 254, 64); the family"),
        (f"{EXPERTS}down_proj", (7, 128, 64), "lacks tensor"),
        ("model.layers.3.feed_forward.router.weight", (9, 64), "router.weight' with shape (9, 64)"),
        ("model.layers.1.feed_forward.shared_expert.up_proj.weight", None, "shared_expert.up_proj"),
    ],
)
def test_a_missing_or_misshapen_tensor_of_a_folder_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, expected: str
) -> None:
    folder = write_tiny_folder(tmp_path / "model", TINY)
    weights = folder_weights(TINY, tiny_weights(TINY))
    assert name in weights
    del weights[name]
    if shape is not None:
        weights[name] = np.ones(shape)
    write_safetensors(folder / "model.safetensors", floats(weights))
    with pytest.raises(ModelFormatError) as caught:
        load_path(folder)
    assert expected in str(caught.value)


def test_vision_tensors_of_a_published_folder_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model", TINY)
    plain = load_path(folder)
    expected = logits(plain)
    weights = folder_weights(TINY, tiny_weights(TINY))
    weights = {f"language_model.{name}": values for name, values in weights.items()}
    weights["vision_model.patch_embedding.linear.weight"] = np.ones((4, 4))
    weights["multi_modal_projector.linear_1.weight"] = np.ones((4, 4))
    write_safetensors(folder / "model.safetensors", floats(weights))
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "llama4", "vision_config": {"hidden_size": 8}, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_path(folder)
    assert loaded.spec == plain.spec
    assert loaded.tensors.keys() == plain.tensors.keys()
    assert np.array_equal(logits(loaded), expected)


def floats(weights: dict[str, np.ndarray]) -> dict[str, QuantTensor]:
    return {
        name: QuantTensor.from_floats(np.ascontiguousarray(values, np.float32), FORMATS["F32"])
        for name, values in weights.items()
    }
