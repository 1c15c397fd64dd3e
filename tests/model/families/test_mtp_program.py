"""Layers for multi-token prediction compute what their sources say, from files of both kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import write_gguf
from support.safetensors_writer import write_safetensors
from support.tiny import (
    tiny_metadata,
    tiny_of,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_mtp import (
    MTP_FAMILIES,
    gguf_layer,
    own_weights,
    write_mtp_folder,
    write_mtp_gguf,
)
from support.tiny_weights import folder_weights
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import ModelFormatError, UsageError
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import build_program
from twostroke.model.families.mtp import mtp_program, mtp_spec
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path
from twostroke.model.weights.mtp import mtp_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.families import ModelSpec
    from twostroke.model.program import Program
    from twostroke.model.weights import LoadedModel

NUM_TOKENS = 12


def opened(loaded: LoadedModel) -> tuple[ModelSpec, Program, dict[str, QuantTensor]]:
    """Return the spec, the Program and the weights of a model's MTP layer."""
    spec = mtp_spec(loaded.spec, window=64)
    program = mtp_program(spec, loaded.spec.vocab_size)
    return spec, program, mtp_tensors(loaded, spec, program)


def run_layer(loaded: LoadedModel, tokens: list[int], hidden: np.ndarray) -> np.ndarray:
    """Return the hidden states that a model's MTP layer computes, before its last norm."""
    _, program, tensors = opened(loaded)
    backend = ReferenceBackend(program, tensors, 4, 16, tapped_value="x1")
    params = SamplingParams(temperature=0)
    request = Request("a", tokens, len(tokens), params, 0, pages=[[0]])
    part = Slice(request, 0, len(tokens), samples=True)
    states = backend.run(StepPlan((part,), external=hidden)).row_states
    assert states is not None
    return states


def run_plainly(
    family: str, folder: Path, loaded: LoadedModel, tokens: list[int], hidden: np.ndarray
) -> np.ndarray:
    """Return the same, from a model with one layer whose embeddings are the layer's inputs."""
    tiny = tiny_of(family)
    own = own_weights(tiny)

    def normed(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + loaded.spec.norm_epsilon)
        return rows / scale * weight

    embeddings = loaded.tensors["token_embd.weight"].dequantize()[tokens]
    both = [normed(embeddings, own["enorm"]), normed(hidden, own["hnorm"])]
    inputs = np.concatenate(both, axis=1) @ own["eh_proj"].T
    old = f"blk.{tiny.num_layers}."
    layer = {n.replace(old, "blk.0."): t for n, t in gguf_layer(tiny).items() if "nextn" not in n}
    table = np.zeros(loaded.tensors["token_embd.weight"].shape, np.float32)
    table[: len(tokens)] = inputs
    plain = FORMATS["F32"]
    tensors = layer | {
        "token_embd.weight": QuantTensor.from_floats(table, plain),
        "output_norm.weight": QuantTensor.from_floats(np.ones(table.shape[1], np.float32), plain),
    }
    name = tiny.variant.architecture
    metadata = tiny_metadata(replace(tiny, num_layers=1)) | {f"{name}.full_attention_interval": 1}
    if f"{name}.leading_dense_block_count" in metadata:
        metadata[f"{name}.leading_dense_block_count"] = 0
    single = load_path(write_gguf(folder / "single.gguf", metadata, tensors))
    backend = ReferenceBackend(build_program(single.spec), single.tensors, 4, 16)
    return backend.trace(list(range(len(tokens))), ["x1"])["x1"]


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_an_mtp_layer_is_a_layer_after_the_projection_of_both_inputs(
    tmp_path: Path, family: str
) -> None:
    rng = np.random.default_rng(3)
    loaded = load_path(write_mtp_gguf(tmp_path / "a.gguf", family))
    tokens = rng.integers(3, 250, NUM_TOKENS).tolist()
    hidden = rng.standard_normal((NUM_TOKENS, loaded.spec.hidden_size)).astype(np.float32)
    ours = run_layer(loaded, tokens, hidden)
    plain = run_plainly(family, tmp_path, loaded, tokens, hidden)
    assert np.abs(plain).max() > 0.5
    np.testing.assert_allclose(ours, plain, atol=2e-4)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_both_kinds_of_files_have_the_same_mtp_layer(tmp_path: Path, family: str) -> None:
    rng = np.random.default_rng(4)
    gguf = load_path(write_mtp_gguf(tmp_path / "a.gguf", family))
    folder = load_path(write_mtp_folder(tmp_path / "folder", family))
    tokens = rng.integers(3, 250, NUM_TOKENS).tolist()
    hidden = rng.standard_normal((NUM_TOKENS, gguf.spec.hidden_size)).astype(np.float32)
    states = [run_layer(loaded, tokens, hidden) for loaded in (gguf, folder)]
    np.testing.assert_allclose(states[0], states[1], atol=2e-4)


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_the_mtp_layer_changes_nothing_of_the_model(tmp_path: Path, family: str) -> None:
    pairs = [
        (write_mtp_gguf(tmp_path / "a.gguf", family), write_tiny_gguf),
        (write_mtp_folder(tmp_path / "folder" / "a", family), write_tiny_folder),
    ]
    for path, write_plain in pairs:
        with_layer = load_path(path)
        plain = load_path(write_plain(path.with_name("plain" + path.suffix), tiny_of(family)))
        assert with_layer.mtp is not None
        assert plain.mtp is None
        assert with_layer.tensors.keys() == plain.tensors.keys()
        assert replace(with_layer.spec, name=plain.spec.name) == plain.spec


@pytest.mark.parametrize("family", ["qwen3.5", "glm4"])
@pytest.mark.parametrize("part", ["eh_proj", "enorm", "hnorm"])
def test_missing_and_misshapen_weights_of_mtp_layers_are_named(
    tmp_path: Path, family: str, part: str
) -> None:
    tiny = tiny_of(family)
    name = f"blk.{tiny.num_layers}.nextn.{part}.weight"
    shape = gguf_layer(tiny)[name].shape
    loaded = load_path(write_mtp_gguf(tmp_path / "a.gguf", family, {name: None}))
    with pytest.raises(ModelFormatError) as caught:
        opened(loaded)
    assert f"'a.gguf' lacks tensor {name!r} with shape {shape}, which the MTP" in str(caught.value)
    wrong = QuantTensor.from_floats(np.ones((3, *shape[1:]), np.float32), FORMATS["F32"])
    loaded = load_path(write_mtp_gguf(tmp_path / "a.gguf", family, {name: wrong}))
    with pytest.raises(ModelFormatError) as caught:
        opened(loaded)
    assert f"tensor {name!r} with shape {(3, *shape[1:])}; the MTP layer" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3.5", "mtp.pre_fc_norm_hidden.weight"),
        ("qwen3.5", "mtp.layers.0.self_attn.k_proj.weight"),
        ("glm4", "model.layers.3.hnorm.weight"),
    ],
)
def test_missing_weights_of_mtp_layers_have_their_names_in_folders(
    tmp_path: Path, family: str, name: str
) -> None:
    loaded = load_path(write_mtp_folder(tmp_path / "folder", family, {name: None}))
    with pytest.raises(ModelFormatError) as caught:
        opened(loaded)
    assert f"lacks tensor {name!r}" in str(caught.value)


def test_a_model_without_an_mtp_layer_says_so(tmp_path: Path) -> None:
    loaded = load_path(write_tiny_gguf(tmp_path / "m.gguf", tiny_of("qwen3.5")))
    with pytest.raises(UsageError, match=r"m has no layer for multi-token prediction \(MTP\)"):
        opened(loaded)


def test_own_tables_of_an_mtp_layer_are_read(tmp_path: Path) -> None:
    """GLM's files have copies of the model's tables, which may have other formats."""
    tiny = tiny_of("glm4")
    table = tiny_weights(tiny)["token_embd.weight"]
    prefix = f"blk.{tiny.num_layers}.nextn"
    own: dict[str, Any] = {
        f"{prefix}.embed_tokens.weight": QuantTensor.from_floats(2 * table, FORMATS["F32"]),
        f"{prefix}.shared_head_head.weight": QuantTensor.from_floats(3 * table, FORMATS["F32"]),
    }
    loaded = load_path(write_mtp_gguf(tmp_path / "a.gguf", "glm4", own))
    _, program, tensors = opened(loaded)
    assert tensors.keys() == program.weight_shapes.keys()
    assert np.array_equal(tensors["token_embd.weight"].dequantize(), 2 * table)
    assert np.array_equal(tensors["output.weight"].dequantize(), 3 * table)


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_K"])
def test_halves_of_the_projection_are_cut_between_blocks_or_converted(
    tmp_path: Path, fmt: str
) -> None:
    """Q4_K has blocks of 256 values; the tiny model's halves have 128."""
    loaded = load_path(write_mtp_gguf(tmp_path / "a.gguf", "qwen3.5", hidden_size=128))
    assert loaded.mtp is not None
    name = "blk.4.nextn.eh_proj.weight"
    whole = QuantTensor.from_floats(loaded.mtp.tensors[name].dequantize(), FORMATS[fmt])
    path = write_mtp_gguf(tmp_path / "b.gguf", "qwen3.5", {name: whole}, hidden_size=128)
    _, _, tensors = opened(load_path(path))
    halves = [tensors[f"blk.4.nextn.eh_proj.{norm}.weight"] for norm in ("enorm", "hnorm")]
    assert [half.format.name for half in halves] == ["Q8_0" if fmt == "Q8_0" else "F16"] * 2
    joined = np.concatenate([half.dequantize() for half in halves], axis=1)
    np.testing.assert_allclose(joined, whole.dequantize(), atol=1e-3)


def test_a_further_layer_of_a_qwen_folder_is_no_mtp_layer(tmp_path: Path) -> None:
    further = QuantTensor.from_floats(np.ones((2, 2), np.float32), FORMATS["F32"])
    folder = write_tiny_folder(tmp_path / "tiny", tiny_of("qwen3.5"))
    tiny = tiny_of("qwen3.5")
    tensors = {
        name: QuantTensor.from_floats(values, FORMATS["F32"])
        for name, values in folder_weights(tiny, tiny_weights(tiny)).items()
    }
    tensors["model.layers.4.self_attn.q_proj.weight"] = further
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFormatError, match=r"'model\.layers\.4\.self_attn"):
        load_path(folder)
