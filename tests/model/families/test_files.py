"""The fields of model files: each family reads the right ones and refuses unsupported values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.gguf_writer import tensor_info, write_gguf
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
from support.tiny_weights import folder_weights, gguf_weights, interleave_rows
from twostroke.core.errors import ModelFormatError
from twostroke.model.families import MODEL_TYPES, ExpertSpec, RopeSpec, WindowSpec
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path
from twostroke.model.weights.hf_model import hf_fields, hf_spec

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.families import ModelSpec


def from_config(folder: Path, family: str, **changes: Any) -> ModelSpec:
    """Load a tiny model's folder with a changed config.json; `...` leaves a key out."""
    path = write_tiny_folder(folder / "tiny", tiny_of(family)) / "config.json"
    changed = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in changed.items() if v is not ...}))
    return load_path(path.parent).spec


def from_metadata(folder: Path, family: str, **changes: Any) -> ModelSpec:
    """Load a tiny GGUF file with changed metadata; `...` leaves a key out, `__` means a dot."""
    tiny = tiny_of(family)
    architecture = tiny.variant.architecture
    named = {f"{architecture}.{k.replace('__', '.')}": v for k, v in changes.items()}
    metadata = {k: v for k, v in (tiny_metadata(tiny) | named).items() if v is not ...}
    return load_path(write_gguf(folder / "a.gguf", metadata, tiny_tensors(tiny))).spec


def linear(rope: RopeSpec, factor: float) -> RopeSpec:
    return replace(
        rope, scaled_frequencies=tuple(frequency / factor for frequency in rope.frequencies)
    )


def test_gemma3_slides_in_all_but_every_sixth_layer(tmp_path: Path) -> None:
    slides = (True, True, True, True, True, False, True)
    local = RopeSpec(10000.0, 32, interleaved=False)
    for spec in (from_metadata(tmp_path, "gemma3"), from_config(tmp_path, "gemma3")):
        assert spec.window == WindowSpec(WINDOW, slides, local)
        assert spec.rope == linear(RopeSpec(1e6, 32, interleaved=False), 8.0)
        assert spec.logit_soft_cap is None
    assert from_metadata(tmp_path, "gemma3", attention__sliding_window_pattern=2).window == (
        WindowSpec(WINDOW, (True, False, True, False, True, False, True), local)
    )


def test_rope_parameters_by_layer_type_are_read(tmp_path: Path) -> None:
    by_type = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    spec = from_config(tmp_path, "gemma3", rope_parameters=by_type, rope_scaling=...)
    assert spec.rope == linear(RopeSpec(5e5, 32, interleaved=False), 4.0)
    assert spec.window is not None
    assert spec.window.rope == RopeSpec(2e4, 32, interleaved=False)


@pytest.mark.parametrize(
    ("stored_values", "base"), [({}, 10000.0), ({"rope_local_base_freq": 5e3}, 5e3)]
)
def test_sliding_layers_of_gemma3_never_take_the_base_of_the_others(
    stored_values: dict[str, float], base: float, tmp_path: Path
) -> None:
    by_type = {"sliding_attention": {"rope_type": "default"}}
    silent = {"rope_scaling": ..., "rope_local_base_freq": ...}
    spec = from_config(tmp_path, "gemma3", **silent | stored_values, rope_parameters=by_type)
    assert spec.rope.base == 1e6
    assert spec.window is not None
    assert spec.window.rope == RopeSpec(base, 32, interleaved=False)


def test_only_gemma3_has_a_pattern_of_windows(tmp_path: Path) -> None:
    spec = from_config(tmp_path, "gemma3", sliding_window_pattern=2)
    assert spec.window is not None
    assert spec.window.slides == (True, False, True, False, True, False, True)
    spec = from_config(tmp_path, "mistral", sliding_window_pattern=2)  # as in transformers
    assert spec.window == WindowSpec(WINDOW, (True, True))


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma3"])
def test_only_phi3_rotates_a_part_of_each_head(family: str, tmp_path: Path) -> None:
    share = {"partial_rotary_factor": 0.5, "rope_scaling": None}
    spec = from_config(tmp_path, family, **share)
    assert spec.rope.dim == spec.head_dim
    spec = from_config(tmp_path, "phi3", **share)
    assert spec.rope.dim == spec.head_dim // 2


def test_sliding_layers_of_olmo3_have_a_plain_rope(tmp_path: Path) -> None:
    plain = RopeSpec(5e5, 16, interleaved=False)
    for spec in (from_metadata(tmp_path, "olmo3"), from_config(tmp_path, "olmo3")):
        assert spec.window == WindowSpec(WINDOW, (True, True, True, False), plain)
        assert spec.rope.scaled_frequencies is not None
    pattern = {"attention__sliding_window_pattern": [False, True, False, True]}
    spec = from_metadata(tmp_path, "olmo3", **pattern, rope__freq_base_swa=2e4)
    assert spec.window == WindowSpec(WINDOW, (False, True, False, True), replace(plain, base=2e4))
    assert from_metadata(tmp_path, "olmo3", attention__sliding_window=0).window is None


def test_exaone4_has_a_rope_in_its_sliding_layers(tmp_path: Path) -> None:
    slides = (True, True, True, False)
    for spec in (from_metadata(tmp_path, "exaone4"), from_config(tmp_path, "exaone4")):
        assert (spec.window, spec.rotates) == (WindowSpec(WINDOW, slides), slides)
    pattern = {"attention__sliding_window_pattern": [False, True, False, True]}
    assert from_metadata(tmp_path, "exaone4", **pattern).rotates == (False, True, False, True)
    no_layer = {"attention__sliding_window_pattern": [False] * 4}
    assert from_metadata(tmp_path, "exaone4", **no_layer).rotates == (False,) * 4
    for letters, rotates in (
        ("LG", (True, False, True, False)),
        ("LLG", (True, True, False, False)),  # the last layer never has the window
    ):
        changes = {"layer_types": None, "sliding_window_pattern": letters}
        assert from_config(tmp_path, "exaone4", **changes).rotates == rotates
    full = {"layer_types": ["full_attention"] * 4}
    assert from_config(tmp_path, "exaone4", **full).rotates == (False,) * 4
    for spec in (
        from_metadata(tmp_path, "exaone4", attention__sliding_window=0),
        from_config(tmp_path, "exaone4", sliding_window=None, sliding_window_pattern=0, **full),
        from_config(tmp_path, "exaone4-small"),
    ):
        assert (spec.window, spec.rotates) == (None, None)


def test_layers_without_rope_turn_nothing(tmp_path: Path) -> None:
    listed = {"no_rope_layers": [1, 0, 1, 1]}
    spec = from_config(tmp_path, "smollm3", **listed)
    assert spec.rotates == (True, False, True, True)
    assert spec.rope_of(1).frequencies == (0.0,)
    assert spec.rope_of(0) == spec.rope
    assert from_metadata(tmp_path, "smollm3").rotates == (True, True, True, False)
    every_second = from_config(tmp_path, "smollm3", no_rope_layer_interval=2)
    assert every_second.rotates == (True, False, True, False)


def test_layer_types_are_read_where_transformers_reads_them(tmp_path: Path) -> None:
    some = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
    qwens = some | {"use_sliding_window": True}
    for family, layer_types in (("mistral", some), ("qwen2", qwens), ("qwen3", qwens)):
        assert from_config(tmp_path, family, **layer_types).window == WindowSpec(
            WINDOW, (False, True)
        )
    for family, layer_types in (("mixtral", some), ("phi3", some), ("qwen3-moe", qwens)):
        assert from_config(tmp_path, family, **layer_types).window == WindowSpec(
            WINDOW, (True, True)
        )


# DeepSeek V2 has no number of used experts unless the file says one.
# Models that transformers' defaults describe, and that are refused: of another width of keys, and
# without attention.
NOT_ALONE = {"deepseek_v2", "granitemoehybrid"}


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES.keys() - NOT_ALONE))
def test_every_key_but_the_type_may_be_left_out(model_type: str) -> None:
    spec = hf_spec(hf_fields("config.json", {"model_type": model_type}), "a")
    assert spec.vocab_size >= 32000
    if model_type == "qwen3_moe":
        assert spec.experts == ExpertSpec(128, 8, 768, normalize=False)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts_are_counted_under_either_name(key: str) -> None:
    for model_type in ("mixtral", "qwen3_moe"):
        spec = hf_spec(hf_fields("config.json", {"model_type": model_type, key: 16}), "a")
        assert spec.experts is not None
        assert spec.experts.count == 16


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_qwen3_normalizes_heads_whatever_its_file_says(model_type: str) -> None:
    silent = hf_spec(hf_fields("config.json", {"model_type": model_type}), "a")
    for use_qk_norm in (True, False):
        config = {"model_type": model_type, "use_qk_norm": use_qk_norm}
        assert hf_spec(hf_fields("config.json", config), "a") == silent


def test_a_vision_model_is_read_as_its_text_model(tmp_path: Path) -> None:
    tiny = tiny_of("gemma3")
    folder = write_tiny_folder(tmp_path / "tiny", tiny)
    plain = load_path(folder)
    text = json.loads((folder / "config.json").read_text())
    left_out = ("model_type", "eos_token_id", "tie_word_embeddings")
    outer = {"model_type": "gemma3", "eos_token_id": [1, 2], "vision_config": {"hidden_size": 3}}
    inner = {k: v for k, v in text.items() if k not in left_out}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    tensors = {
        f"language_model.{name}": QuantTensor.from_floats(values, FORMATS["F32"])
        for name, values in folder_weights(tiny, tiny_weights(tiny)).items()
    }
    eye = QuantTensor.from_floats(np.ones((2, 2), np.float32), FORMATS["F32"])
    tensors["vision_tower.vision_model.head.weight"] = eye
    write_safetensors(folder / "model.safetensors", tensors)
    seeing = load_path(folder)
    assert seeing.spec == plain.spec
    assert seeing.tensors.keys() == plain.tensors.keys()
    assert seeing.eos_token_ids == (1, 2, 0)


def test_experts_are_read_one_by_one_or_in_stacks_without_a_copy(tmp_path: Path) -> None:
    tiny = tiny_of("mixtral")
    stacked = load_path(write_tiny_gguf(tmp_path / "a.gguf", tiny))
    names = tiny_weights(tiny)
    single = {}
    for name, values in names.items():
        heads = {"attn_q": tiny.num_heads, "attn_k": tiny.num_kv_heads}
        part = name.split(".")[2] if name.startswith("blk") else ""
        stored = interleave_rows(values, heads[part]) if part in heads else values
        single[name] = QuantTensor.from_floats(stored, FORMATS["F32"])
    old = load_path(write_gguf(tmp_path / "b.gguf", tiny_metadata(tiny), single))
    assert stacked.tensors.keys() == old.tensors.keys() == names.keys()
    for name, tensor in stacked.tensors.items():
        assert np.array_equal(tensor.dequantize(), old.tensors[name].dequantize())
        assert not tensor.data.flags.owndata


def test_keys_and_values_of_heads_are_in_one_tensor_or_in_two(tmp_path: Path) -> None:
    tiny = tiny_of("deepseek-v2")
    weights = gguf_weights(tiny, tiny_weights(tiny))
    weights["blk.0.attn_v_b.weight"] = np.zeros((4, 48, 32), np.float32)
    stored = {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in weights.items()}
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), stored)
    with pytest.raises(ModelFormatError, match=r"has 'blk\.0\.attn_v_b\.0\.weight' twice"):
        load_path(path)


def test_a_factor_of_zero_says_that_shares_have_none(tmp_path: Path) -> None:
    tiny = tiny_of("deepseek-v3")
    for factor in (0.0, 1.0):
        metadata = tiny_metadata(tiny) | {"deepseek2.expert_weights_scale": factor}
        weights = gguf_weights(tiny, tiny_weights(tiny))
        stored = {name: QuantTensor.from_floats(w, FORMATS["F32"]) for name, w in weights.items()}
        loaded = load_path(write_gguf(tmp_path / f"{factor}.gguf", metadata, stored))
        assert loaded.spec.experts.routing.scale == 1


def test_keys_of_heads_are_transposed_once_and_stay_exact(tmp_path: Path) -> None:
    for fmt, turned in (("BF16", "BF16"), ("Q8_0", "F32")):
        tiny = replace(tiny_of("deepseek-v2"), fmt=fmt)
        loaded = load_path(write_tiny_gguf(tmp_path / f"{fmt}.gguf", tiny))
        stored = gguf_weights(tiny, tiny_weights(tiny))["blk.0.attn_kv_b.weight"]
        dequantized = QuantTensor.from_floats(stored, FORMATS[fmt]).dequantize().reshape(4, 80, 32)
        for head in range(4):
            keys, values = (loaded.tensors[f"blk.0.attn_{p}_b.{head}.weight"] for p in "kv")
            assert (keys.format.name, values.format.name) == (turned, fmt)
            np.testing.assert_array_equal(keys.dequantize(), dequantized[head, :32].T)
            np.testing.assert_array_equal(values.dequantize(), dequantized[head, 32:])


def test_stacks_of_gates_and_ups_are_cut(tmp_path: Path) -> None:
    tiny = tiny_of("qwen3-moe")
    folder = write_tiny_folder(tmp_path / "tiny", tiny)
    plain = load_path(folder).tensors
    expected = {name: tensor.dequantize() for name, tensor in plain.items()}
    ours = folder_weights(tiny, tiny_weights(tiny))
    dense_tensors = {name: values for name, values in ours.items() if ".experts." not in name}
    for layer in range(tiny.num_layers):
        mlp, num = f"model.layers.{layer}.mlp.experts", range(tiny.variant.num_experts)
        parts = {
            part: np.stack([ours[f"{mlp}.{e}.{part}.weight"] for e in num])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        dense_tensors |= {f"{mlp}.gate_up_proj": both, f"{mlp}.down_proj": parts["down_proj"]}
    fmt = FORMATS["F32"]
    write_safetensors(
        folder / "model.safetensors",
        {name: QuantTensor.from_floats(values, fmt) for name, values in dense_tensors.items()},
    )
    cut = load_path(folder).tensors
    assert cut.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(cut[name].dequantize(), values)


def test_a_routers_bias_of_hy3_has_no_suffix_in_a_gguf_file(tmp_path: Path) -> None:
    tiny = tiny_of("hy3")
    tensors = {
        name.replace("exp_probs_b.bias", "exp_probs_b"): tensor
        for name, tensor in tiny_tensors(tiny).items()
    }
    assert "blk.1.exp_probs_b" in tensors
    loaded = load_path(write_gguf(tmp_path / "a.gguf", tiny_metadata(tiny), tensors))
    bias = loaded.tensors["blk.1.exp_probs_b.bias"].dequantize()
    np.testing.assert_array_equal(bias, tensors["blk.1.exp_probs_b"].dequantize())


def test_a_mellum_without_a_base_for_windows_has_the_base_of_all_layers(tmp_path: Path) -> None:
    spec = from_metadata(tmp_path, "mellum", rope__freq_base_swa=...)
    assert spec.window is not None
    assert spec.window.rope == RopeSpec(5e5, 16, interleaved=False)
    assert spec.rope.magnitude > 1


def test_a_stack_of_an_unsupported_type_is_named(tmp_path: Path) -> None:
    tiny = tiny_of("mixtral")
    path = write_tiny_gguf(tmp_path / "a.gguf", tiny)
    name, shape = "blk.0.ffn_up_exps.weight", (4, tiny.ffn_size, tiny.hidden_size)
    entry = tensor_info(name, shape, 0, 0)[:-12]
    data = path.read_bytes()
    at = data.index(entry) + len(entry)
    path.write_bytes(data[:at] + b"\x18" + data[at + 1 :])  # 24: I8
    with pytest.raises(ModelFormatError, match=f"'{name}' of type I8, which is not supported"):
        load_path(path)


def test_the_rope_scaling_sets_the_context_length(tmp_path: Path) -> None:
    spec = from_config(tmp_path, "phi3-long")
    assert spec.rope.magnitude > 1
    assert (spec.context_length, spec.rope.dim) == (256, 12)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    spec = from_config(tmp_path, "qwen2", rope_scaling=yarn)
    assert spec.rope.magnitude > 1
    assert spec.context_length == 2048
    # Qwen's models for pictures: with text, the three positions of a token are equal.
    of_pictures = {"type": "mrope", "mrope_section": [2, 3, 3]}
    spec = from_config(tmp_path, "qwen2", rope_scaling=of_pictures)
    assert spec.rope == from_config(tmp_path, "qwen2").rope


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window = 0, not a whole number from 1"),
        ("llama", {"sliding_window": 16}, "sliding_window = 16, which is not supported"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types that is not a list of 4"),
        ("gemma2", {"layer_types": ["chunked"] * 4}, "layer_types with 'chunked'; supported:"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu', which is not"),
        ("gemma3", {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping = 9.0, which is not"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional_attention = True, which"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, not a number from"),
        ("mixtral", {"num_local_experts": 10**9}, "num_local_experts = 1000000000, not a whole"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5, not a whole number"),
        ("mixtral", {"num_local_experts": 3}, "(4, 64); the family 'llama' reads (3, 64)"),
        ("llama", {"num_key_value_heads": 3}, "'config.json' has 4 heads, not a multiple of"),
        ("llama", {"hidden_size": 8192, "head_dim": None}, "equal parts of at most 1024"),
        ("llama", {"num_hidden_layers": 900}, "too few for 900 layers"),
        ("llama", {"attention_bias": True}, "self_attn.q_proj.bias' with shape (64,), which"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "mlp_only_layers = a list, which is not supported"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2, which is not"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 8}, "intermediate_size = 8, which"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LXG"}, "letters L and G"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "has no short_factor"),
        ("phi3-long", {"rope_scaling": {"type": "su", "short_factor": [1]}}, "a list of 6 numbers"),
        ("llama", {"rope_theta": 1}, "rope_theta = 1, not a number from 1.001"),
        ("phi3", {"partial_rotary_factor": 0.01}, "a rope dimension of 0"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5, not a number from"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 0.5}}, "not a number from 1 to 1e"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5, not a num"),
        ("llama", {"rms_norm_eps": 1e31}, "rms_norm_eps = 1e+31, not a number from 1e-30 to"),
        ("llama", {"rope_theta": 10**400}, "rope_theta = a huge number, not a number from"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0, not a number from"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias = True, which is not supported"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0, not a whole number from 1 to 512"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax', which is not"),
        ("deepseek-v3", {"n_group": 3}, "8 experts, not a multiple of its 3 groups of them"),
        ("deepseek-v3", {"topk_group": 1}, "chooses 3 experts, but its 1 used group has only 2"),
        ("deepseek-v3", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, not a whole number"),
        ("deepseek-v3", {"v_head_dim": 32}, "self_attn.kv_b_proj.weight' with shape"),
        ("gemma4", {"enable_moe_block": True}, "has no num_experts"),
        ("gemma4-experts", {"top_k_experts": 9}, "top_k_experts = 9, not a whole number from 1"),
        ("gemma4", {"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7, not a whole number"),
        ("gemma4", {"num_kv_shared_layers": 6}, "6 layers that read keys and values of earlier"),
        ("gemma4", {"vocab_size_per_layer_input": 7}, "per_layer_input = 7, which is not supp"),
        ("gemma4", {"use_double_wide_mlp": False}, "the family 'gemma4' reads (128, 64)"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 64}}}, "changes more than the heads"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 64}, "4": 3}}, "layers that differ"),
        ("gemma4", {"per_layer_config": {}}, "per_layer_config with layers that differ"),
        ("gemma4", {"per_layer_config": {"x": {"head_dim": 64}}}, "changes more than the heads"),
        ("gemma4", {"rope_parameters": {"sliding_attention": {}}}, "without an entry for full_att"),
        ("gemma4", {"rope_parameters": 3}, "has rope_parameters that is not an object"),
        ("gemma4-large", {"num_key_value_heads": 3}, "not a multiple of its 3 key-value heads"),
        ("gemma4", {"global_head_dim": "wide"}, "head_dim = 'wide', not a whole number from"),
        ("gemma4", {"layer_types": ["sliding_attention"] * 7}, "no earlier layer with"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob = True, which is not supported"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc', which is not"),
        ("glm4-lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "dense layers after"),
        ("glm4", {"use_qk_norm": False}, "self_attn.k_norm.weight', which the family"),
        ("glm4-air", {"use_qk_norm": True}, "layers.0.self_attn.q_norm.weight' with shape"),
        ("llama", {"use_qk_norm": True}, "use_qk_norm = True, which is not supported"),
        ("glm4", {"scoring_func": "softmax"}, "scoring_func = 'softmax', which is not"),
        ("qwen3.5", {"full_attention_interval": 5}, "no attention in any of its 4 layers"),
        ("qwen3.5", {"full_attention_interval": 0}, "full_attention_interval = 0, not a whole"),
        ("qwen3.5", {"full_attention_interval": 3}, "which the family 'qwen35' reads"),
        ("qwen3.5", {"layer_types": ["full_attention"] * 3}, "layer_types that is not a list of 4"),
        ("qwen3.5", {"layer_types": ["mamba"] * 4}, "layer_types with 'mamba'; supported:"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "no attention in any of its 4"),
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate = False, which is not"),
        ("qwen3.5", {"attention_bias": True}, "attention_bias = True, which is not supported"),
        ("qwen3.5", {"linear_num_key_heads": 4}, "has 6 value heads, not a multiple of its 4 key"),
        ("qwen3.5", {"linear_conv_kernel_dim": 3}, "linear_attn.conv1d.weight' with shape"),
        ("qwen3.5", {"linear_value_head_dim": 16}, "linear_attn.in_proj_qkv.weight' with shape"),
        ("qwen3.5", {"num_attention_heads": 2}, "(256, 64); its heads have (128, 64)"),
        ("qwen3-next", {"linear_key_head_dim": 8}, "in_proj_qkvz.weight' with shape (448, 64);"),
        ("qwen3-next", {"mlp_only_layers": [0]}, "mlp_only_layers = a list, which is not"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "has no attention in any of its 4 layers"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "layer_types that is not a list of 4 values"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, "layer_types with 'mamba'; supported: conv,"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 2}, "full_attn_idxs = 2, not a list of"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1, not a whole number from 2 to 64"),
        ("lfm2", {"conv_L_cache": 4}, "'model.layers.0.conv.conv.weight' with shape (64, 1, 3);"),
        ("lfm2", {"conv_bias": True}, "lacks tensor 'model.layers.0.conv.in_proj.bias'"),
        ("lfm2", {"block_multiple_of": 256}, "feed_forward.w1.weight' with shape (128, 64)"),
        ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias = False, which is not"),
        ("granite-hybrid", {"layer_types": ["attention"] * 3}, "a list of 4 values"),
        ("granite-hybrid", {"layer_types": None}, "has no attention in any of its 4 layers"),
        ("granite-hybrid", {"mamba_n_groups": 3}, "8 Mamba heads, not a multiple of its 3 groups"),
        ("granite-hybrid", {"mamba_d_state": 8}, "mamba.in_proj.weight' with shape (328, 64);"),
        ("granite-hybrid", {"time_step_limit": [1, 0]}, "not a list of two numbers, the smaller"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "= 'alibi', which is not"),
        ("nemotron-h", {"hybrid_override_pattern": "M*-X"}, "with 'X'; supported: M, *, -, E"),
        ("nemotron-h", {"hybrid_override_pattern": "M--M"}, "no attention in any of its 4 layers"),
        ("nemotron-h", {"hybrid_override_pattern": "**--"}, "no Mamba-2 in any of its 4 layers"),
        ("nemotron-h", {"hybrid_override_pattern": ""}, "pattern of 0 layers, not of 1 to 1024"),
        ("nemotron-h", {"hybrid_override_pattern": "M*MM"}, "layers.2.mixer.in_proj.weight' with"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu', which is not"),
        ("nemotron-h-experts", {"moe_latent_size": 48}, "with shape (32, 64)"),
        ("qwen3.5-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, not a whole number"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types that is not a list of 4"),
        ("olmo3", {"sliding_window": 0}, "sliding_window = 0, not a whole number from 1"),
        ("exaone4-small", {"layer_types": ["sliding_attention"] * 2}, "has no sliding_window"),
        ("seed-oss", {"attention_out_bias": True}, "self_attn.o_proj.bias' with shape (64,), wh"),
        ("seed-oss", {"mlp_bias": True}, "mlp_bias = True, which is not supported"),
        ("ernie4.5", {"use_bias": True}, "use_bias = True, which is not supported"),
        ("ernie4.5-experts", {"use_bias": True}, "use_bias = True, which is not supported"),
        ("ernie4.5-experts", {"moe_layer_interval": 2}, "moe_layer_interval = 2, which is not"),
        ("ernie4.5-experts", {"moe_layer_end_index": 0}, "moe_layer_end_index = 0, which is not"),
        ("ernie4.5-experts", {"moe_norm_min": 0.5}, "moe_norm_min = 0.5, which is not"),
        ("ernie4.5-experts", {"moe_k": 9}, "moe_k = 9, not a whole number from 1 to 8"),
        ("ernie4.5-experts", {"moe_num_experts": 10**9}, "moe_num_experts = 1000000000, not a wh"),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers that is not a list of 4 values"),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 2]}, "no_rope_layers with 2; supported: 1, 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "interval = 0, not a whole number from 1"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "supported: full_attention"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias = True, which is not supported"),
        ("youtu", {"qk_rope_head_dim": 15}, "a rope dimension of 15"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier = 0, not a number from 0.001"),
        ("granite", {"logits_scaling": -1.0}, "logits_scaling = -1.0, not a number from"),
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0.0, not a number"),
        ("granite", {"mlp_bias": True}, "mlp_bias = True, which is not supported"),
        ("gpt-oss", {"swiglu_limit": 9.0}, "swiglu_limit = 9.0, which is not supported"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0, which is not supported"),
        ("gpt-oss", {"layer_types": ["chunked"] * 4}, "layer_types with 'chunked'; supported:"),
        ("gpt-oss", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, not a whole number"),
        ("gpt-oss", {"attention_bias": False}, "which the family 'gpt-oss' does not read"),
        ("minimax-m2", {"rotary_dim": 17}, "rotary_dim = 17, not a whole number from 1 to 16"),
        ("minimax-m2", {"rotary_dim": 7}, "a rope dimension of 7, which is not an even"),
        ("minimax-m2", {"num_local_experts": 0}, "num_local_experts = 0, not a whole number"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax', which is not"),
        ("minimax-m2", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64, which"),
        ("hy3", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "dense layers after sparse"),
        ("hy3", {"num_shared_experts": 1}, "mlp.shared_mlp.gate_proj.weight' with shape"),
        ("hy3", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9, not a whole number from 1"),
        ("hy3", {"router_scaling_factor": -1}, "router_scaling_factor = -1, not a number from"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "has no original_max_"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1}}, "beta = -1, not a num"),
        ("ministral3", {"sliding_window": 0}, "sliding_window = 0, not a whole number from 1"),
        ("muse-glimmer", {"layer_rope_theta": [1, 0]}, "that is not a list of 4 numbers"),
        ("muse-glimmer", {"post_norm_eps": 0}, "post_norm_eps = 0, not a number from"),
        ("muse-glimmer", {"qk_scale_factor": 0.0}, "qk_scale_factor = 0.0, not a number from"),
        ("muse-glimmer", {"output_multiplier": -1}, "output_multiplier = -1, not a number from"),
        ("muse-glimmer", {"layer_types": ["chunked"] * 4}, "layer_types with 'chunked'; supported"),
        ("mellum", {"layer_types": ["chunked"] * 4}, "layer_types with 'chunked'; supported:"),
        ("mellum", {"sliding_window": 0}, "sliding_window = 0, not a whole number from 1"),
        ("mellum", {"mlp_layer_types": ["sparse", "dense"] * 2}, "dense layers after sparse ones"),
        ("mellum", {"moe_intermediate_size": 0}, "moe_intermediate_size = 0, not a whole number"),
        ("granite-hybrid", {"mamba_d_head": "auto", "mamba_n_heads": 24},
            "has 24 Mamba heads that do not divide 128 values into equal parts of at most 1024"),
        ("granite-hybrid", {"mamba_d_head": "auto", "mamba_expand": 0}, "mamba_expand = 0, not a"),
        ("nemotron-h", {"mamba_head_dim": "auto"}, "mamba_head_dim = 'auto', not a whole number"),
        ("youtu", {"num_attention_heads": 2000}, "has 2000 attention heads; at most 1024 are"),
        ("youtu", {"num_attention_heads": 3}, "with shape (320, 32); its heads have (240, 32)"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_refused(
    family: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFormatError) as caught:
        from_config(tmp_path, family, **changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("mixtral", {"expert_count": 10**9}, "expert_count = 1000000000, not a whole number"),
        ("mixtral", {"expert_used_count": 5}, "expert_used_count = 5, not a whole number from 1"),
        ("mixtral", {"expert_count": 5}, "with shape (4, 64); the family 'llama' reads (5, 64)"),
        ("mixtral", {"expert_shared_count": 1}, "expert_shared_count = 1, which is not supported"),
        ("qwen3-moe", {"expert_count": 0}, "but its expert_count is 0"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "a list of 7 values"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping = -1.0, not a number"),
        ("qwen2-yarn", {"rope__scaling__yarn_beta_fast": 1e-40}, "not a number from 1e-30"),
        ("qwen2-yarn", {"rope__scaling__factor": 0.5}, "scaling.factor = 0.5, not a number from"),
        ("qwen2-yarn", {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5, which"),
        ("phi3-long", {"rope__dimension_count": 10}, "is not a list of 5 numbers"),
        ("llama-3.1", {"rope__scaling__factor": 2.0}, "scales its rope twice"),
        ("qwen3", {"attention__causal": False}, "attention.causal = False, which is not supported"),
        ("olmo3", {"attention__sliding_window_pattern": [True]}, "a list of 4 values"),
        ("olmo3", {"rope__freq_base_swa": 0.5}, "freq_base_swa = 0.5, not a number from 1.001"),
        ("exaone4", {"rope__freq_base_swa": 1e4}, "freq_base_swa = 10000.0, which is not"),
        ("exaone4", {"attention__sliding_window_pattern": [2] * 4}, "with 2; supported: True, F"),
        ("ernie4.5-experts", {"interleave_moe_layer_step": 2}, "layer_step = 2, which is not"),
        ("ernie4.5-experts", {"expert_gating_func": 2}, "gating_func = 2, which is not"),
        ("ernie4.5-experts", {"expert_weights_scale": 2.0}, "weights_scale = 2.0, which is not"),
        ("ernie4.5-experts", {"expert_group_count": 2}, "group_count = 2, which is not"),
        ("ernie4.5-experts", {"leading_dense_block_count": 2}, "but no layer has experts"),
        (
            "mixtral",
            {"leading_dense_block_count": 1},
            "leading_dense_block_count = 1, which is not",
        ),
        ("gemma4", {"expert_count": 8}, "has no gemma4.expert_used_count"),
        ("gemma4-experts", {"expert_count": 10**9}, "expert_count = 1000000000, not a whole"),
        ("gemma4", {"attention__shared_kv_layers": 7}, "shared_kv_layers = 7, not a whole number"),
        ("gemma4", {"attention__shared_kv_layers": 6}, "6 layers that read keys and values of"),
        ("gemma4", {"attention__sliding_window_pattern": [True] * 7}, "no layer without a window"),
        ("gemma4", {"feed_forward_length": [128] * 6}, "that is not a list of 7 numbers"),
        (
            "gemma4",
            {"feed_forward_length": [128, 256] * 3 + [256]},
            "feed-forward widths: layer 1 has 256",
        ),
        (
            "gemma4",
            {"attention__head_count_kv": [1, 1, 1, 1, 2, 1, 1]},
            "numbers of key-value heads: layer 4 has 2",
        ),
        ("gemma4", {"attention__head_count_kv": [3, 3, 1, 3, 1, 3, 1]}, "not a multiple of its 3"),
        ("gemma4", {"attention__key_length_swa": 33}, "33, which must be even"),
        ("gemma4", {"attention__key_length_swa": 0}, "key_length_swa = 0, not a whole number"),
        ("deepseek-v3", {"expert_gating_func": 3}, "expert_gating_func = 3, which is not"),
        ("deepseek-v3", {"attention__key_length_mla": 16}, "key_length_mla = 16, not a whole"),
        ("deepseek-v3", {"expert_group_used_count": 5}, "group_used_count = 5, not a whole"),
        ("deepseek-v2", {"attention__kv_lora_rank": 48}, "reads (64, 64)"),
        ("granite", {"residual_scale": 1e4}, "residual_scale = 10000.0, not a number from 0.001"),
        ("granite", {"rope__scaling__finetuned": False}, "rope.scaling.finetuned = False, which"),
        ("granite", {"expert_count": 8}, "expert_count = 8, which is not supported"),
        ("gpt-oss", {"expert_count": 0}, "but its expert_count is 0"),
        ("gpt-oss", {"expert_gating_func": 2}, "expert_gating_func = 2, which is not supported"),
        ("gpt-oss", {"attention__sliding_window_pattern": [True]}, "a list of 4 values"),
        ("gpt-oss", {"rope__scaling__factor": 0.5}, "scaling.factor = 0.5, not a number from"),
        ("minimax-m2", {"expert_count": 0}, "does not have only experts in every layer"),
        ("minimax-m2", {"expert_shared_count": 1}, "does not have only experts in every layer"),
        ("minimax-m2", {"leading_dense_block_count": 1}, "does not have only experts in every"),
        ("minimax-m2", {"expert_gating_func": 3}, "expert_gating_func = 3, which is not"),
        ("hy3", {"leading_dense_block_count": 0}, "lacks tensor 'blk.0.ffn_gate_inp.weight'"),
        ("hy3", {"expert_shared_feed_forward_length": 0}, "feed_forward_length = 0, not a whole"),
        ("hy3", {"nextn_predict_layers": 3}, "layers = 3, not a whole number from 0 to 2"),
        ("ministral3", {"expert_count": 4}, "expert_count = 4, which is not supported"),
        ("ministral3", {"attention__sliding_window": 9}, "sliding_window = 9, which is not"),
        ("ministral3", {"rope__dimension_count": 8}, "rotates only 8 of 16 values of queries"),
        ("ministral3", {"rope__scaling__original_context_length": ...}, "has no mistral3.rope.sca"),
        ("ministral3", {"attention__temperature_scale": -1.0}, "scale = -1.0, not a number from"),
        ("muse-glimmer", {"attention__sliding_window": 0}, "has no layer with a sliding window"),
        ("muse-glimmer", {"logit_scale": ...}, "has no muse-glimmer.logit_scale"),
        ("muse-glimmer", {"final_logit_softcapping": -1.0}, "softcapping = -1.0, not a number"),
        ("mellum", {"expert_count": 0}, "but its expert_count is 0"),
        ("mellum", {"expert_gating_func": 2}, "expert_gating_func = 2, which is not supported"),
        ("mellum", {"attention__sliding_window_pattern": [True]}, "a list of 4 values"),
        ("mellum", {"rope__freq_base_swa": 0.0}, "rope.freq_base_swa = 0.0, not"),
        ("smollm3", {"attention__sliding_window": 64}, "sliding_window = 64, which is not"),
        ("glm4", {"expert_gating_func": 1}, "'blk.1.exp_probs_b.bias', which the family"),
        ("glm4", {"nextn_predict_layers": 3}, "layers = 3, not a whole number from 0 to 2"),
        ("qwen3.5", {"full_attention_interval": 0}, "full_attention_interval = 0, not a whole"),
        ("qwen3.5", {"full_attention_interval": 5}, "no attention in any of its 4 layers"),
        ("qwen3.5", {"full_attention_interval": 3}, "which the family 'qwen35' reads"),
        ("qwen3.5", {"attention__recurrent_layers": [True] * 4}, "no attention in any of its"),
        ("qwen3.5", {"attention__recurrent_layers": [True] * 3}, "is not a list of 4 values"),
        ("qwen3.5", {"ssm__group_count": 4}, "has 6 value heads, not a multiple of its 4 key"),
        ("qwen3.5", {"ssm__inner_size": 193}, "6 value heads that do not divide 193 values"),
        ("qwen3.5", {"ssm__conv_kernel": 65}, "ssm.conv_kernel = 65, not a whole number from 1"),
        ("qwen3.5", {"ssm__state_size": ...}, "has no qwen35.ssm.state_size"),
        ("qwen3.5", {"ssm__state_size": 8}, "'blk.0.attn_qkv.weight' with shape (256, 64)"),
        ("qwen3.5-moe", {"expert_count": 0}, "but its expert_count is 0"),
        ("qwen3-next", {"ssm__time_step_rank": 4}, "ssm_ba.weight' with shape (12, 64); its heads"),
        ("lfm2", {"attention__head_count_kv": [0] * 4}, "with zeros; one number that is not 0"),
        ("lfm2", {"attention__head_count_kv": [0, 2, 4, 0]}, "with 2, 4; one number that is not 0"),
        ("lfm2", {"attention__head_count_kv": [0, 2]}, "2 numbers of key-value heads for 4 layers"),
        ("lfm2", {"attention__head_count_kv": [0.5] * 4}, "= a list, not whole numbers"),
        ("lfm2", {"attention__head_count_kv": [0, 2, 2, 0]}, "lacks tensor 'blk.1.attn_q.weight'"),
        ("lfm2", {"shortconv__l_cache": ...}, "has no lfm2.shortconv.l_cache"),
        ("granite-hybrid", {"ssm__group_count": 3}, "8 Mamba heads, not a multiple of its 3"),
        ("granite-hybrid", {"ssm__inner_size": 129}, "8 Mamba heads that do not divide 129 values"),
        (
            "granite-hybrid",
            {"ssm__conv_kernel": 3},
            "'blk.0.ssm_conv1d.weight' with shape (192, 4)",
        ),
        ("granite-hybrid", {"ssm__state_size": 8}, "'blk.0.ssm_in.weight' with shape (328, 64);"),
        ("nemotron-h", {"feed_forward_length": [0, 128, 128, 0]}, "a feed-forward in layer 1"),
        ("nemotron-h", {"feed_forward_length": 128}, "feed_forward_length that is not a list of 4"),
        ("nemotron-h", {"feed_forward_length": [0] * 4}, "with zeros; one number that is not 0"),
        ("nemotron-h-experts", {"expert_count": 0}, "but its expert_count is 0"),
    ],
)
def test_unsupported_metadata_is_refused(
    family: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFormatError) as caught:
        from_metadata(tmp_path, family, **changes)
    assert expected in str(caught.value)
