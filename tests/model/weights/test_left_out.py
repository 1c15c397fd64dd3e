"""Parts of model files that are not needed are left out and logged; errors use the file's names."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.gguf_writer import ARRAY, STRING, U32, Typed, write_gguf
from support.safetensors_writer import write_safetensors
from support.tiny import (
    Tiny,
    tiny_metadata,
    tiny_of,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)
from support.tiny_weights import folder_weights
from twostroke.core import errors
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.lab.compress.hf_files import config_of
from twostroke.lab.compress.quantize import gguf_contents
from twostroke.model.loader import build_tokenizer
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.tokenizer import from_gguf
from twostroke.model.weights import load_path, safetensors
from twostroke.model.weights.tensors import StoredArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.model.weights import LoadedModel

MAX_U32 = (1 << 32) - 1


@pytest.fixture(autouse=True)
def told_again() -> None:
    """Forget which notices were logged, so that each test sees the notices of other tests again."""
    errors.notice.cache_clear()


def floats(values: np.ndarray) -> QuantTensor:
    return QuantTensor.from_floats(values.astype(np.float32), FORMATS["F32"])


def folder_tensors(tiny: Tiny) -> dict[str, QuantTensor]:
    weights = folder_weights(tiny, tiny_weights(tiny))
    return {name: floats(values) for name, values in weights.items()}


def load_folder(folder: Path, tiny: Tiny, tensors: dict[str, QuantTensor]) -> LoadedModel:
    write_tiny_folder(folder, tiny)
    write_safetensors(folder / "model.safetensors", tensors)
    return load_path(folder)


def refusal(folder: Path, tiny: Tiny, tensors: dict[str, QuantTensor]) -> str:
    with pytest.raises(ModelFormatError) as caught:
        load_folder(folder, tiny, tensors)
    return str(caught.value)


def wrapped_layers(name: str) -> str:
    """Return the tensor names of a model whose layers were compiled or wrapped one by one."""
    for layer in range(2):
        name = name.replace(f"layers.{layer}.", f"layers.{layer}._orig_mod.")
    return name


PREFIXES: dict[str, Callable[[str], str]] = {
    "module.": lambda name: f"module.{name}",
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "_orig_mod.module.": lambda name: f"_orig_mod.module.{name}",
    "model.model.": lambda name: f"model.{name}",
    "base_model.model.": lambda name: f"base_model.model.{name}",
    "language_model.": lambda name: f"language_model.{name}",
    "model.language_model.": lambda name: name.replace("model.", "model.language_model."),
    "transformer.": lambda name: f"transformer.{name}",
    "_fsdp_wrapped_module.": lambda name: f"_fsdp_wrapped_module.{name}",
    "pretrained_model.": lambda name: f"pretrained_model.{name}",
    "state_dict.actor.module.": lambda name: f"state_dict.actor.module.{name}",
    "thinker.": lambda name: f"thinker.{name}",
    "student.": lambda name: f"student.{name}",
    "no prefix": lambda name: name.removeprefix("model."),
    "in each layer": wrapped_layers,
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("tied", [True, False])
def test_prefixes_of_names_do_not_matter(tmp_path: Path, prefix: str, tied: bool) -> None:
    tiny = Tiny(tied=tied)
    tensors = folder_tensors(tiny)
    expected = load_folder(tmp_path / "plain", tiny, tensors)
    renamed = {PREFIXES[prefix](name): tensor for name, tensor in tensors.items()}
    model = load_folder(tmp_path / "renamed", tiny, renamed)
    assert model.tensors.keys() == expected.tensors.keys()
    for name, tensor in model.tensors.items():
        assert np.array_equal(tensor.data, expected.tensors[name].data)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_errors_have_the_names_of_the_file(tmp_path: Path, prefix: str) -> None:
    renamed_as = PREFIXES[prefix]
    tensors = {renamed_as(name): tensor for name, tensor in folder_tensors(Tiny()).items()}
    name = renamed_as("model.layers.1.mlp.up_proj.weight")
    wrong = {**tensors, name: floats(np.ones((96, 64)))}
    message = refusal(tmp_path / "wrong", Tiny(), wrong)
    assert f"{name!r} with shape (96, 64); the family 'llama' reads (128, 64)" in message
    del wrong[name]
    message = refusal(tmp_path / "lacking", Tiny(), wrong)
    assert f"lacks tensor {name!r} with shape (128, 64)" in message


def test_a_missing_tensor_of_every_layer_has_the_prefix_of_the_file(tmp_path: Path) -> None:
    tensors = {f"module.{name}": tensor for name, tensor in folder_tensors(Tiny()).items()}
    lacking = {name: t for name, t in tensors.items() if "q_proj" not in name}
    message = refusal(tmp_path / "a", Tiny(), lacking)
    assert "lacks tensor 'module.model.layers.0.self_attn.q_proj.weight'" in message


def test_a_missing_expert_is_named_as_the_others_are(tmp_path: Path) -> None:
    tiny = tiny_of("mixtral")
    tensors = {f"module.{name}": tensor for name, tensor in folder_tensors(tiny).items()}
    name = "module.model.layers.1.block_sparse_moe.experts.2.w1.weight"
    del tensors[name]
    assert f"lacks tensor {name!r}" in refusal(tmp_path / "a", tiny, tensors)


def test_a_matrix_of_several_parts_says_its_own_shape(tmp_path: Path) -> None:
    tiny = tiny_of("phi3")
    tensors = folder_tensors(tiny)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    height, width = tensors[name].shape
    tensors[name] = floats(np.ones((height + 8, width)))
    message = refusal(tmp_path / "a", tiny, tensors)
    assert f"{name!r} with shape ({height + 8}, {width})" in message
    assert f"reads ({height}, {width})" in message


BUFFERS = (
    "position_ids",
    "model.embeddings.position_ids",
    "model.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.attn.bias",
    "model.layers.0.attn.masked_bias",
    "model.layers.1.attention.bias",
    "model.freqs_cis",
    "rope.freqs",
    "model.layers.0.self_attn.rotary_emb.cos",
    "model.layers.0.input_layernorm._extra_state",
    "model.layers.1.self_attn.attention_mask",
)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_buffers_of_old_checkpoints_are_left_out(tmp_path: Path, prefix: str) -> None:
    buffers = {name: floats(np.ones((2, 2))) for name in BUFFERS}
    tensors = folder_tensors(Tiny()) | buffers
    load_folder(tmp_path / "a", Tiny(), {prefix + name: t for name, t in tensors.items()})


def test_buffers_of_integers_are_left_out(tmp_path: Path) -> None:
    """Even types that weights cannot have must not lead to a refusal."""
    tensors: dict[str, Any] = dict(folder_tensors(Tiny()))
    tensors["position_ids"] = StoredArray("I64", np.arange(8))
    tensors["score.ids"] = StoredArray("I64", np.arange(8))
    folder = write_tiny_folder(tmp_path / "a")
    safetensors.write_safetensors(folder / "model.safetensors", tensors)
    load_path(folder)


def test_heads_for_other_uses_are_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = ["score.weight", "v_head.summary.weight", "mtp.layers.0.x.weight", "value.weight"]
    extra = {name: floats(np.ones((1, 64))) for name in others}
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            load_folder(tmp_path / name, Tiny(), folder_tensors(Tiny()) | extra)
    [record] = caplog.records
    assert record.getMessage() == (
        "'model.safetensors' has 'mtp.layers.0.x.weight', 'score.weight', 'v_head.summary.weight' "
        "and 1 more, which 'llama' does not read: left out."
    )


def test_parts_of_another_model_in_a_gguf_file_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tiny_tensors(Tiny()) | {"v.blk.0.attn_q.weight": floats(np.ones((4, 32)))}
    with caplog.at_level(logging.WARNING):
        load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(Tiny()), tensors))
    assert "'v.blk.0.attn_q.weight', which 'llama' does not read" in caplog.text
    _, fixed = gguf_contents(load_path(tmp_path / "a.gguf"))  # which `quantize` keeps
    assert fixed == {}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.sinks",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.norm.bias",
        "lm_head.bias",
        "model.embed_positions.weight",
    ],
)
def test_what_could_change_answers_is_refused(tmp_path: Path, name: str) -> None:
    tensors = folder_tensors(Tiny()) | {name: floats(np.ones(64))}
    assert f"has tensor {name!r}, which the family" in refusal(tmp_path / "a", Tiny(), tensors)


def test_an_adapter_that_is_not_merged_is_named(tmp_path: Path) -> None:
    tensors = {f"base_model.model.{name}": t for name, t in folder_tensors(Tiny()).items()}
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = floats(
        np.ones((4, 64))
    )
    assert "merge the adapter into its model first" in refusal(tmp_path / "a", Tiny(), tensors)


def test_equal_copies_of_a_weight_are_one_and_others_are_refused(tmp_path: Path) -> None:
    tiny = Tiny(tied=False)
    tensors = folder_tensors(tiny)
    copies = tensors | {"module.lm_head.weight": tensors["lm_head.weight"]}
    load_folder(tmp_path / "equal", tiny, copies)
    differing = tensors | {"module.lm_head.weight": floats(np.ones((285, 64)))}
    message = refusal(tmp_path / "other", tiny, differing)
    assert "'lm_head.weight' and 'module.lm_head.weight', which differ" in message


def test_without_an_output_matrix_the_embedding_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = folder_tensors(Tiny(tied=False))
    del tensors["lm_head.weight"]
    with caplog.at_level(logging.WARNING):
        loaded = load_folder(tmp_path / "a", Tiny(tied=False), tensors)
    assert loaded.spec.tied_embeddings
    assert "has no 'lm_head.weight': 'model.embed_tokens.weight' is used" in caplog.text
    assert config_of(loaded)["tie_word_embeddings"] is True  # of a folder that `quantize` writes


@pytest.mark.parametrize("vocab_size", [200, 284, 320])
def test_the_rows_of_the_embedding_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, vocab_size: int
) -> None:
    folder = write_tiny_folder(tmp_path / "a")
    change(folder / "config.json", vocab_size=vocab_size)
    with caplog.at_level(logging.WARNING):
        assert load_path(folder).spec.vocab_size == 285
    assert f"285 rows, config.json a vocab_size of {vocab_size}: the rows count" in caplog.text


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Ids that no token has, as files hold them.
WRONG_IDS = (MAX_U32, 285, 10**6)
ID_KEYS = ("bos", "eos", "eot", "eom", "padding", "unknown", "seperator", "mask", "fim_pre")


@pytest.mark.parametrize("key", ID_KEYS)
@pytest.mark.parametrize("wrong_id", WRONG_IDS)
def test_an_id_that_no_token_has_is_left_out_of_a_gguf(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, wrong_id: int
) -> None:
    wrong = {f"tokenizer.ggml.{key}_token_id": Typed(U32, wrong_id)}
    with caplog.at_level(logging.WARNING):
        loaded = load_path(write_tiny_gguf(tmp_path / "a.gguf", metadata=wrong))
        tokenizer = build_tokenizer(loaded)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    id_text = "-1" if wrong_id == MAX_U32 else str(wrong_id)
    messages = [record.getMessage() for record in caplog.records]
    names = [text for text in messages if f"tokenizer.ggml.{key}_token_id is {id_text}," in text]
    assert names == [
        f"tokenizer.ggml.{key}_token_id is {id_text}, which is not the id of a token: left out."
    ]
    if key == "eos":
        assert loaded.eos_token_ids == ()


@pytest.mark.parametrize("value", [-1, "1", True, [1, -1, 999], 1.5])
def test_values_that_are_no_ids_are_left_out(value: object) -> None:
    metadata = dict(tiny_metadata(Tiny())) | {"tokenizer.ggml.eos_token_id": value}
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].value
    ends = from_gguf(metadata).eos_ids
    assert (1 in ends) == isinstance(value, list)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [-1, MAX_U32, 285, [2, -1, 999], "</s>"])
def test_an_id_that_no_token_has_is_left_out_of_a_folder(
    tmp_path: Path, file: str, key: str, value: object
) -> None:
    folder = write_tiny_folder(tmp_path / "a")
    change(folder / file, **{key: value})
    loaded = load_path(folder)
    tokenizer = build_tokenizer(loaded)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert set(loaded.eos_token_ids) <= {0, 2}


def test_added_tokens_beyond_the_rows_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_folder(tmp_path / "a")
    description = json.loads((folder / "tokenizer.json").read_text())
    flags = {"special": False, "normalized": False, "lstrip": False, "rstrip": False}
    added = [{"id": 285 + i, "content": f"[PAD{i}]", **flags} for i in range(5)]
    description["added_tokens"] += added
    (folder / "tokenizer.json").write_text(json.dumps(description))
    with caplog.at_level(logging.WARNING):
        tokenizer = build_tokenizer(load_path(folder))
    assert "'[PAD0]', '[PAD1]', '[PAD2]' and 2 more of tokenizer.json" in caplog.text
    assert "beyond the 285 rows" in caplog.text
    ids = tokenizer.encode("[PAD0] hello", parse_special=True)
    assert max(ids) < 285
    assert tokenizer.decode(ids) == "[PAD0] hello"


def test_marks_of_byte_order_are_skipped(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "a", num_shards=2)
    for path in folder.glob("*.json"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    build_tokenizer(load_path(folder))


def test_arrays_of_arrays_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    odd = {
        "general.tags": Typed(STRING, []),
        "general.odd": Typed(ARRAY, [Typed(U32, [1, 2]), Typed(U32, [])]),
    }
    loaded = load_path(write_tiny_gguf(tmp_path / "a.gguf", metadata=odd))
    source: Any = loaded.tokenizer_source
    assert [list(part) for part in source.metadata["general.odd"]] == [[1, 2], []]
    assert list(source.metadata["general.tags"]) == []


def test_bytes_after_the_last_tensor_are_ignored(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes() + b"signature")
    load_path(path)


def test_shards_need_no_index(tmp_path: Path) -> None:
    expected = load_path(write_tiny_folder(tmp_path / "whole"))
    folder = write_tiny_folder(tmp_path / "shards", num_shards=3)
    (folder / "model.safetensors.index.json").unlink()
    loaded = load_path(folder)
    assert loaded.tensors.keys() == expected.tensors.keys()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="not all the shards of one model"):
        load_path(folder)


def test_the_only_file_of_weights_may_have_any_name(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_path(folder)
    (folder / "weights.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="only safetensors and GGUF are read"):
        load_path(folder)


def test_a_folder_with_only_an_adapter_says_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="is an adapter"):
        load_path(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "link to a missing file"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_side_file_that_cannot_be_read_is_an_error(name: str, kind: str, tmp_path: Path) -> None:
    path = write_tiny_folder(tmp_path / "tiny") / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "missing")
    with pytest.raises(ModelFormatError, match=f"'{name}' cannot be read"):
        load_path(path.parent)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"temperature": 0.5,}', b"\xff\xfe{"])
def test_a_damaged_generation_config_is_left_out(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        model = load_path(folder)
    assert "generation_config.json" in caplog.text
    assert model.eos_token_ids == (2,)  # from config.json
    assert build_tokenizer(model).eos_ids


@pytest.mark.parametrize("index", ["", "{}", '{"weight_map": {"a": "model-00001-of-00002.st"}}'])
def test_an_index_beside_a_whole_file_is_not_read(index: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "model.safetensors.index.json").write_text(index)
    assert load_path(folder).spec.num_layers == 2


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json"])
def test_a_tokenizer_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer.json\.$"):
        load_path(folder)
    (folder / name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=rf"no tokenizer.json, and {name} is not read"):
        load_path(folder)
