"""A Llama of ours as transformers has it: the same dequantized weights, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.models import ModelSpec
    from twostroke.weights import LoadedModel

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def transformers_llama(loaded: LoadedModel) -> LlamaForCausalLM:
    """Return transformers' model with the weights of `loaded`."""
    spec = loaded.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.base},
        tie_word_embeddings=spec.tied_embeddings,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    state = {
        _their_name(name): torch.from_numpy(_their_order(name, tensor.dequantize(), spec))
        for name, tensor in loaded.tensors.items()
    }
    if spec.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits (len(tokens), vocab_size) of one sequence."""
    with torch.inference_mode():
        result: NDArray[np.float32] = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return result


def _their_name(name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _their_order(name: str, values: NDArray[np.float32], spec: ModelSpec) -> NDArray[np.float32]:
    """Undo GGUF's order of query and key rows: pairs (2i, 2i + 1) become (i, i + dim / 2)."""
    if not spec.rope.interleaved or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return values
    heads = values.reshape(-1, spec.head_dim // 2, 2, values.shape[-1])
    return heads.swapaxes(1, 2).reshape(values.shape).copy()
