"""A model of ours as transformers has it: the same dequantized weights, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from support.tiny_weights import LAYER_NAMES, WHOLE_MODEL
from twostroke.model.families import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.model.families import ModelSpec, RopeSpec
    from twostroke.model.weights import LoadedModel


def transformers_model(loaded: LoadedModel) -> Any:
    """Return transformers' model with the weights of `loaded`, of a family without stacks."""
    spec = loaded.spec
    config = AutoConfig.for_model(**their_config(spec), attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing = dict(model.named_parameters())
    for name, tensor in loaded.tensors.items():  # one after the other: some are gigabytes
        values = _their_values(name, tensor.dequantize(), spec)
        missing.pop(_their_name(name, spec)).data.copy_(torch.from_numpy(values))
    assert not missing, f"not set: {missing.keys()}"
    return model


def text_model(config: dict[str, Any]) -> Any:
    """Return transformers' model of a config.json, with random weights.

    Muse Glimmer has only a multimodal class, which gets a tiny vision tower.
    """
    if config["model_type"] != "muse_glimmer_text":
        theirs = AutoConfig.for_model(**config, attn_implementation="eager")
        return AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    text = {key: value for key, value in config.items() if key != "rope_scaling"}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    whole_config = AutoConfig.for_model(
        "muse_glimmer",
        text_config=text,
        vision_config=vision | {"num_attention_heads": 2, "pos_emb_height": 2, "pos_emb_width": 2},
        out_hidden_size=64,
        projector_hidden_size=16,
        tie_word_embeddings=config["tie_word_embeddings"],
        attn_implementation="eager",
    )
    return AutoModelForImageTextToText.from_config(whole_config, dtype=torch.float32).eval()


def logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits (len(tokens), vocab_size) of one sequence."""
    with torch.inference_mode():
        result: NDArray[np.float32] = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return result


def their_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what a config.json would say of the spec."""
    model_type = next(iter(ARCHITECTURES[spec.architecture].model_types))
    if model_type == "llama" and spec.window is not None:
        model_type = "mistral"
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_parameters": _their_rope(spec.rope),
        "tie_word_embeddings": spec.tied_embeddings,
        "query_pre_attn_scalar": round((spec.attention_scale or spec.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": spec.attention_soft_cap,
        "final_logit_softcapping": spec.logit_soft_cap,
    }
    if spec.window is not None:
        config["sliding_window"] = spec.window.size
        kinds = {True: "sliding_attention", False: "full_attention"}
        config["layer_types"] = [kinds[slides] for slides in spec.window.slides]
        if spec.window.rope is not None:
            config["rope_parameters"] = {
                "full_attention": _their_rope(spec.rope),
                "sliding_attention": _their_rope(spec.window.rope),
            }
    return config


def _their_rope(rope: RopeSpec) -> dict[str, Any]:
    if rope.scaled_frequencies is None:
        return {"rope_type": "default", "rope_theta": rope.base}
    factor = 1 / rope.frequencies[0]
    return {"rope_type": "linear", "rope_theta": rope.base, "factor": factor}


def _their_name(name: str, spec: ModelSpec) -> str:
    if name in WHOLE_MODEL:
        return WHOLE_MODEL[name]
    _, layer, part, kind = name.split(".")
    theirs = {ours: name for name, ours in ARCHITECTURES[spec.architecture].layer_names.items()}
    return f"model.layers.{layer}.{theirs.get(part) or LAYER_NAMES[part]}.{kind}"


def _their_values(name: str, values: NDArray[np.float32], spec: ModelSpec) -> NDArray[np.float32]:
    """Undo what a GGUF does: one added to norms, and pairs (2i, 2i + 1) for (i, i + dim / 2)."""
    if name.endswith("norm.weight") and spec.architecture.startswith("gemma"):
        return values - (1 - spec.norm_offset)
    if not spec.rope.interleaved or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return values
    heads = values.reshape(-1, spec.head_dim // 2, 2, values.shape[-1])
    return heads.swapaxes(1, 2).reshape(values.shape).copy()
