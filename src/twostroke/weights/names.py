"""One name for each weight, whatever the file's own: GGUF's names are the canonical ones."""

from __future__ import annotations

import re

_WHOLE_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Tables that old checkpoints carry along and that follow from the configuration.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")


def canonical_name(name: str) -> str | None:
    """Return the canonical name of a Hugging Face tensor, or None for one that is not needed.

    A name that is not known stays as it is, so that whoever checks the weights can name it.
    """
    if _DERIVED.fullmatch(name):
        return None
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[stem]}.{kind}"
    layer = _LAYER_NAME.fullmatch(stem)
    if layer and layer[2] in _LAYER:
        return f"blk.{int(layer[1])}.{_LAYER[layer[2]]}.{kind}"
    return name
