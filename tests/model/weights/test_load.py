"""From files to a checked model: the translation of their fields, and the refused files."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import gguf_bytes, header, key_value, tensor_info, write_gguf
from support.resident_memory import resident_bytes
from support.tiny import (
    CHAT_TEMPLATE,
    Tiny,
    tiny_metadata,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_weights import interleave_rows
from twostroke.core.errors import MemoryLimitError, ModelFormatError, ModelNotFoundError
from twostroke.model.families import ModelSpec, RopeSpec, build_program
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import (
    GgufTokenizer,
    JsonTokenizer,
    load_path,
    peek_family,
    weights_identity,
)

if TYPE_CHECKING:
    from pathlib import Path

SPEC = ModelSpec(
    architecture="llama",
    name="tiny",
    num_layers=2,
    hidden_size=64,
    ffn_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=285,
    context_length=512,
    norm_epsilon=1e-5,
    rope=RopeSpec(base=10000.0, dim=16, interleaved=False),
    tied_embeddings=True,
)


def test_files_that_differ_anywhere_but_in_a_few_bytes_are_told_apart(tmp_path: Path) -> None:
    first = load_path(write_tiny_gguf(tmp_path / "a.gguf", Tiny())).tensors
    same = load_path(write_tiny_gguf(tmp_path / "b.gguf", Tiny())).tensors
    assert weights_identity(first) == weights_identity(same)
    name = "blk.0.ffn_up.weight"
    tensor = first[name]
    middle = tensor.data.copy()
    middle[len(middle) // 3 : len(middle) // 2] = 0  # as in a copy that broke off
    changed = {**first, name: replace(tensor, data=middle)}
    assert weights_identity(changed) != weights_identity(first)


def refusal(path: Path) -> str:
    with pytest.raises(ModelFormatError) as caught:
        load_path(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_a_folder_is_translated(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    model = load_path(folder)
    assert model.spec == SPEC
    assert model.tokenizer_source == JsonTokenizer(
        folder / "tokenizer.json", json.loads((folder / "tokenizer_config.json").read_text())
    )
    assert model.chat_template == CHAT_TEMPLATE
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2, 0))
    assert model.file_bytes == (folder / "model.safetensors").stat().st_size


def test_a_gguf_file_is_translated(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    model = load_path(path)
    assert (model.name, model.path, model.licence) == ("tiny", path, "apache-2.0")
    assert model.spec.rope == RopeSpec(base=10000.0, dim=16, interleaved=True)
    assert model.spec.norm_epsilon == float(np.float32(1e-5))
    assert isinstance(model.tokenizer_source, GgufTokenizer)
    assert len(model.tokenizer_source.metadata["tokenizer.ggml.tokens"]) == 285
    assert model.chat_template == CHAT_TEMPLATE
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))
    assert model.file_bytes == path.stat().st_size


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_file_and_folder_of_one_model_have_the_same_weights(
    tmp_path: Path, tied: bool, num_shards: int
) -> None:
    tiny = Tiny(tied=tied)
    file = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    folder = load_path(write_tiny_folder(tmp_path / "a", tiny, num_shards))
    assert file.tensors.keys() == folder.tensors.keys() == tiny_weights(tiny).keys()
    assert file.tensors.keys() == build_program(file.spec).weight_shapes.keys()
    assert file.spec.tied_embeddings == folder.spec.tied_embeddings == tied
    for name, tensor in folder.tensors.items():
        values = tensor.dequantize()
        if "attn_q" in name:
            values = interleave_rows(values, tiny.num_heads)
        elif "attn_k" in name:
            values = interleave_rows(values, tiny.num_kv_heads)
        assert np.array_equal(file.tensors[name].dequantize(), values)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_loads_and_releases(tmp_path: Path, fmt: str) -> None:
    tiny = Tiny(hidden_size=256, ffn_size=256, head_dim=64, fmt=fmt, embedding_fmt=fmt)
    model = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    tensor = model.tensors["blk.0.ffn_up.weight"]
    assert tensor.format is FORMATS[fmt]
    before = tensor.dequantize()
    num_resident = resident_bytes(model.path)
    model.release([tensor])
    assert resident_bytes(model.path) < num_resident
    assert np.array_equal(tensor.dequantize(), before)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no model",
        header(0, 1) + key_value("general.alignment", 3),
        header(1, 0) + tensor_info("a", (8,), 0, 7),
    ],
)
def test_a_peek_names_the_model_and_not_its_temporary_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "3fabc.incomplete"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"^'Q8/tiny\.gguf' "):
        peek_family(path, "Q8/tiny.gguf")


def test_a_folder_with_one_gguf_file_loads_that_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    assert load_path(tmp_path).path == path
    write_tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        load_path(tmp_path)


def test_a_safetensors_file_is_read_with_the_folder_around_it(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "one")
    assert load_path(folder / "model.safetensors").spec.num_layers == 2
    many = write_tiny_folder(tmp_path / "many", Tiny(), num_shards=2)
    assert len(load_path(many / "model-00002-of-00002.safetensors").mappings) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"general.architecture": "gpt2"}, "architecture 'gpt2', which is not supported yet; "),
        ({"general.architecture": None}, "has no general.architecture"),
        ({"general.architecture": 7}, "general.architecture = 7, not text"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.block_count": 0}, "llama.block_count = 0, not a whole number from 1 to 1024"),
        ({"llama.block_count": 1000}, "20 tensors, too few for 1000 layers"),
        ({"llama.block_count": 3}, "lacks tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 1}, "tensor 'blk.1.attn_k.weight', which the family"),
        ({"llama.block_count": 2.0}, "llama.block_count = 2.0, not a whole number"),
        ({"llama.attention.head_count": [4, 2]}, "head_count = a list, not a whole number"),
        ({"general.architecture": "clip"}, "reads pictures or sound, not a language model"),
        ({"general.type": "mmproj"}, "reads pictures or sound, not a language model"),
        ({"general.type": "adapter"}, "is an adapter, not a language model"),
        (
            {"general.type": "imatrix", "general.architecture": None},
            "is an importance matrix, not a language model",
        ),
        ({"llama.attention.head_count_kv": 3}, "4 heads, not a multiple of its 3 key-value"),
        ({"llama.attention.value_length": 8}, "value_length = 8, which is not supported yet"),
        (
            {
                "llama.attention.key_length": None,
                "llama.attention.head_count": 3,
                "llama.attention.head_count_kv": 3,
            },
            "do not divide",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "not a number from 1e-30 to"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "not a number from 1e-30 to"),
        ({"llama.embedding_length": 32}, "shape (285, 64); the family 'llama' reads (285, 32)"),
        ({"llama.expert_count": 8}, "has no llama.expert_used_count"),
        ({"llama.rope.dimension_count": 15}, "a rope dimension of 15, which is not an even"),
        (
            {"llama.rope.scaling.type": "dynamic"},
            "scaling.type = 'dynamic', which is not supported",
        ),
        (
            {"llama.rope.freq_base": float("inf")},
            "rope.freq_base = inf, not a number from 1.001 to 1e+30",
        ),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.tokens": ["a"] * 286}, "286 tokens, its embedding table 285 rows"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template = 1, not text"),
    ],
)
def test_wrong_metadata_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    metadata = {k: v for k, v in (tiny_metadata(Tiny()) | changes).items() if v is not None}
    path = write_gguf(tmp_path / "a.gguf", metadata, tiny_tensors(Tiny()))
    assert expected in refusal(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2', which is not supported yet; supported: "),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', which is not supported yet"),
        ({"attention_bias": True}, "lacks tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "has no low_freq_factor"),
        (
            {"rope_scaling": {"type": "dynamic"}},
            "type = 'dynamic', which is not supported; default",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "has no quantized weights, which its"),
        ({"head_dim": 2048}, "head_dim = 2048, not a whole number from 1 to 1024"),
        ({"rope_parameters": 3}, "rope_parameters that is not an object"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1, not a whole number"),
        ({"hidden_size": 2**70}, "hidden_size = a huge number, not a whole number from 1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1, not true or false"),
    ],
)
def test_wrong_configurations_are_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    assert expected in refusal(folder)


def test_rope_parameters_of_newer_configurations_are_understood(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    config = folder / "config.json"
    changed = json.loads(config.read_text())
    del changed["rope_theta"]
    changed["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    config.write_text(json.dumps(changed))
    assert load_path(folder).spec.rope.base == 500000.0


def test_an_unsupported_type_is_reported_with_the_supported_ones(tmp_path: Path) -> None:
    tensors = tiny_tensors(Tiny(hidden_size=256))
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(Tiny(hidden_size=256)), tensors)
    name = "blk.0.attn_v.weight"
    shape = tensors[name].shape
    data = path.read_bytes()
    entry = tensor_info(name, shape, 0, 0)[:-12]
    at = data.index(entry) + len(entry)
    path.write_bytes(data[:at] + b"\x0f" + data[at + 1 :])
    assert (
        "'blk.0.attn_v.weight' of type Q8_K, which is not supported yet; supported: F32, F16, "
        in (refusal(path))
    )


def test_a_bias_that_the_family_does_not_read_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors(Tiny())
    bias = np.ones(64, dtype=np.float32)
    tensors["blk.0.attn_q.bias"] = QuantTensor.from_floats(bias, FORMATS["F32"])
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(tiny_metadata(Tiny()), tensors))
    assert "lacks tensor 'blk.0.attn_k.bias'" in refusal(path)


def test_chat_templates_are_found_in_each_place(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_path(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_path(folder).chat_template == "J"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_path(folder).chat_template is None


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_a_folder_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / missing).unlink()
    with pytest.raises(ModelNotFoundError, match=missing):
        load_path(folder)


@pytest.mark.model
def test_the_real_model_is_translated(smollm2_path: Path) -> None:
    model = load_path(smollm2_path, name="smollm2")
    assert model.spec == ModelSpec(
        architecture="llama",
        name="smollm2",
        num_layers=30,
        hidden_size=576,
        ffn_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        context_length=8192,
        norm_epsilon=float(np.float32(1e-5)),
        rope=RopeSpec(base=100000.0, dim=64, interleaved=True),
        tied_embeddings=True,
    )
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))
    assert model.licence == "apache-2.0"


def test_a_list_of_equal_numbers_is_one_number(tmp_path: Path) -> None:
    keys = {
        "llama.attention.head_count": [4, 4],
        "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [128, 128],
    }
    expected = load_path(write_tiny_gguf(tmp_path / "one.gguf"), name="tiny").spec
    assert (
        load_path(write_tiny_gguf(tmp_path / "two.gguf", None, keys), name="tiny").spec == expected
    )


def test_too_little_address_space_is_a_memory_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("mmap.mmap", no_room)
    with pytest.raises(MemoryLimitError, match=r"'tiny.gguf' needs \d+ MB of address space"):
        load_path(path)
