"""Converts Hugging Face tensor names to canonical names, which are GGUF's, and back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODEL_WEIGHTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "output_norm",  # LFM2
    "model.embeddings": "token_embd",  # Nemotron-H
    "model.norm_f": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}

_LAYER_WEIGHTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    # Of layers for multi-token prediction:
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}

# Qwen's names of weights that only layers for multi-token prediction have.
_QWEN_MTP_WEIGHTS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}

_QWEN_MTP_LAYER = "layers.0."

_EXPERT_WEIGHTS = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "w1": "ffn_gate",
    "w3": "ffn_up",
    "w2": "ffn_down",
}

# Tensors with all experts of a layer, whose names have no suffix.
_EXPERT_STACKS = {
    "gate_up_proj": "ffn_gate_up_exps.weight",
    "up_proj": "ffn_up_exps.weight",  # of experts without gates
    "down_proj": "ffn_down_exps.weight",
    "gate_up_proj_bias": "ffn_gate_up_exps.bias",
    "down_proj_bias": "ffn_down_exps.bias",
}

# Components that torch.compile and other wrappers add to the names of modules.
_WRAPPER = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
# Prefixes before the names of a text model: `module.` from data parallelism, `base_model.model.`
# from peft, `language_model.` and `thinker.` from multimodal models, `pretrained_model.` from trl,
# the others from training programs. A checkpoint without an output matrix, such as an embedding
# model's, may have no prefix.
_PREFIX = re.compile(
    r"(?:(?:module|model|base_model|transformer|language_model|text_model|llm|lm|thinker"
    r"|pretrained_model|policy|actor|student|backbone|net|ema|ema_model|state_dict)\.)*"
    r"(?=(?:embed_tokens|embed_tokens_per_layer|per_layer_\w+|norm|norm_f|embeddings|embedding_norm"
    r"|layers|rotary_emb|lm_head)\.)"
)
# Tables in old checkpoints that follow from the configuration: angles, positions and masks; and
# the empty states that TransformerEngine stores with its modules.
_DERIVED = re.compile(
    r"(?:.*\.)?(?:inv_freq|original_inv_freq|cos_cached|sin_cached|position_ids|masked_bias"
    r"|causal_mask|attention_mask|freqs_cis|freqs_cos|freqs_sin|rope\.freqs|_extra_state"
    r"|rotary_emb\.(?:cos|sin|freqs|scale)|rotary_pos_emb\.\w+|(?:attn|attention|self_attn)\.bias|attn_rot_embd(?:\.weight)?)"
)
# The parts of a multimodal model other than its text model.
_OTHER_MODALITY = re.compile(
    r"(?:model\.)*(?:vision_tower|vision_model|vision_embedder|visual|audio_tower"
    r"|multi_modal_projector|embed_vision|embed_audio|vision_adapter|vision_projection)\..*"
)
# Layers for multi-token prediction of ERNIE and Qwen, which do not compute the next token.
_MTP_LAYER = re.compile(
    r"(?:model\.)*mtp_(?:block|emb_norm|hidden_norm|linear_proj)\..*|model\.mtp\..*"
)
_QWEN_MTP_NAME = re.compile(r"(?:(?:model|language_model)\.)*mtp\.(.+)")
# Prefixes of the weights of a text model, which must not be left out even if unknown.
_TEXT_PART = re.compile(
    r"(?:model|lm_head|blk|token_embd|token_types|position_embd|output|output_norm|rope_freqs"
    r"|rope_factors_\w+|per_layer_\w+|cls_norm)\."
)
_ADAPTER = re.compile(r"\.(?:lora_\w+|base_layer|modules_to_save|original_module)\.")
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")
# Names whose canonical name has another suffix.
_COMPLETE_NAMES = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_EXPERT_PARENT = r"(?:mlp|block_sparse_moe|feed_forward|mixer)"
_EXPERT_NAME = re.compile(_EXPERT_PARENT + r"\.experts\.(\d{1,4})\.(\w+)")
_STACK_NAME = re.compile(rf"(?:{_EXPERT_PARENT}\.)?experts\.(\w+)")


def canonical_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    """Return the canonical (GGUF) name of a Hugging Face tensor; None for an unneeded tensor.

    `layer_names` are a family's names of a layer's weights, where they differ from Llama's. An
    unknown name is returned without its prefixes, for use in the error message.
    """
    name = without_prefix(name)
    if any(unneeded.fullmatch(name) for unneeded in (_DERIVED, _OTHER_MODALITY, _MTP_LAYER)):
        return None
    stem, _, suffix = name.rpartition(".")
    if stem in _MODEL_WEIGHTS:
        return f"{_MODEL_WEIGHTS[stem]}.{suffix}"
    layer = _LAYER_NAME.fullmatch(name)
    part = layer and _layer_part(layer[2], layer_names)
    return f"blk.{int(layer[1])}.{part}" if layer and part else name


def mtp_name(name: str, layer: int) -> str:
    """Return the name of a tensor of Qwen's MTP layer as if the layer had the number `layer`.

    Qwen's files have this layer (multi-token prediction) under `mtp.`. Other families number it
    after the model's other layers. Names of other tensors are returned unchanged.
    """
    match = _QWEN_MTP_NAME.fullmatch(_WRAPPER.sub("", name))
    if match is None:
        return name
    stem, _, suffix = match[1].rpartition(".")
    if stem in _QWEN_MTP_WEIGHTS:
        return f"model.layers.{layer}.{_QWEN_MTP_WEIGHTS[stem]}.{suffix}"
    if match[1].startswith(_QWEN_MTP_LAYER):
        return f"model.layers.{layer}.{match[1].removeprefix(_QWEN_MTP_LAYER)}"
    return name


def is_mtp_name(name: str) -> bool:
    """Return whether a tensor belongs to Qwen's MTP layer (multi-token prediction)."""
    return mtp_name(name, 0) != name


def published_mtp_name(name: str) -> str:
    """Return Qwen's name of a weight of its MTP layer, from the name in other families' files."""
    part = name.split(".", 3)[3]
    stem, _, suffix = part.rpartition(".")
    for published, other in _QWEN_MTP_WEIGHTS.items():
        if stem == other:
            return f"mtp.{published}.{suffix}"
    return f"mtp.{_QWEN_MTP_LAYER}{part}"


def without_prefix(name: str) -> str:
    """Return a tensor's name as transformers writes it, without the prefixes of other tools."""
    name = _WRAPPER.sub("", name)
    prefix = _PREFIX.match(name)
    if prefix is None:
        return name
    stripped = name[prefix.end() :]
    return stripped if stripped.startswith("lm_head.") else f"model.{stripped}"


def is_text_weight(canonical: str) -> bool:
    """Return whether a tensor's name has the form of a text model's weight.

    The weight may still be unknown to the model's family.
    """
    return _TEXT_PART.match(canonical) is not None


def is_derived(name: str) -> bool:
    """Return whether a tensor can be ignored, because it can be computed from the configuration."""
    return _DERIVED.fullmatch(name) is not None


def is_adapter_weight(name: str) -> bool:
    """Return whether a tensor belongs to a LoRA adapter that was not merged into its model."""
    return _ADAPTER.search(name) is not None


def published_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Return the Hugging Face name of a weight, from its canonical name.

    Raises KeyError or ValueError for experts' weights, which have no single name.
    """
    stem, _, suffix = name.rpartition(".")
    for published, canonical in _MODEL_WEIGHTS.items():
        if stem == canonical:
            return f"{published}.{suffix}"
    _, layer, part = name.split(".", 2)
    for published, canonical in _COMPLETE_NAMES.items():
        if canonical == part:
            return f"model.layers.{layer}.{published}"
    published_by_canonical = {
        canonical: published for published, canonical in {**_LAYER_WEIGHTS, **layer_names}.items()
    }
    part = part.removesuffix(f".{suffix}")
    return f"model.layers.{layer}.{published_by_canonical[part]}.{suffix}"


def _layer_part(name: str, layer_names: Mapping[str, str]) -> str | None:
    """Return the canonical name of a layer's weight, without the layer's number.

    None if the weight is unknown.
    """
    if name in _COMPLETE_NAMES:
        return _COMPLETE_NAMES[name]
    stem, _, suffix = name.rpartition(".")
    if stem in layer_names or stem in _LAYER_WEIGHTS:
        return f"{layer_names.get(stem) or _LAYER_WEIGHTS[stem]}.{suffix}"
    stack = _STACK_NAME.fullmatch(name.removesuffix(".weight"))
    if stack and stack[1] in _EXPERT_STACKS:
        return _EXPERT_STACKS[stack[1]]
    expert = _EXPERT_NAME.fullmatch(stem)
    if expert and expert[2] in _EXPERT_WEIGHTS:
        return f"{_EXPERT_WEIGHTS[expert[2]]}.{int(expert[1])}.{suffix}"
    return None
