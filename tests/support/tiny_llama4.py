"""A tiny Llama 4: experts in some layers, and layers without RoPE."""

from __future__ import annotations

from support.tiny_variant import Variant

# Every second layer has experts, and the fourth layer has no RoPE. Chunks and the attention
# temperature begin after 8,192 tokens, which are more than tests have.
LLAMA4 = Variant(
    "llama4",
    "llama4_text",
    sizes={"num_layers": 4, "rope_base": 5e5},
    num_experts=8,
    num_shared=1,
    expert_step=2,
    expert_stacks=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    are_transposed=True,
    metadata={
        "expert_count": 8,
        "expert_used_count": 1,
        "expert_feed_forward_length": 128,
        "interleave_moe_layer_step": 2,
    },
    config={
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
        "pad_token_id": 0,
    },
    layer_names={
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_inp": "feed_forward.router",
        "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
        "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    },
)
