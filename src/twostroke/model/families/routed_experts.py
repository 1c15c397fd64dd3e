"""Reads experts of which some are shared, and which may be chosen by sigmoids.

Sources: arXiv:2405.04434, 2412.19437.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.model.families.common_fields import MAX_EXPERTS_IN_ALL
from twostroke.model.families.fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.spec import ExpertSpec, RoutingSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

# GGUF's numbers for how experts are chosen.
SOFTMAX: Final = 1
SIGMOID: Final = 2

# Hugging Face names of the weights, those of experts themselves aside, and GGUF's.
EXPERT_NAMES: Final = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def gguf_routed_experts(fields: Fields, spec: ModelSpec, *, unsaid: int) -> ExpertSpec | None:
    """Read the experts of a GGUF file; None if it has none.

    `unsaid` is how they are chosen where the file does not say it.
    """
    count = fields.integer("expert_count", most_experts(spec), low=0, default=0)
    first = fields.integer("leading_dense_block_count", MAX_LAYERS, low=0, default=0)
    if count == 0 or first >= spec.num_layers:
        return None
    fields.expect("expert_gating_func", 0, SOFTMAX, SIGMOID)
    width = fields.integer("expert_feed_forward_length", MAX_WIDTH)
    shared = fields.integer("expert_shared_count", MAX_EXPERTS, low=0, default=0)
    groups = "expert_group_count", "expert_group_used_count"
    used = fields.integer("expert_used_count", count)
    routing = _routing(
        fields,
        (count, used),
        fields.optional_number("expert_weights_scale") or 1.0,
        groups if fields.has(groups[0]) else None,
        is_sigmoid=(fields.value("expert_gating_func") or unsaid) == SIGMOID,
    )
    normalize = fields.flag("expert_weights_norm", default=False)
    return ExpertSpec(count, used, width, normalize, shared * width, first, routing)


def config_routed_experts(
    fields: Fields, spec: ModelSpec, first: int, *, has_groups: bool, is_sigmoid: bool = True
) -> ExpertSpec | None:
    """Read the experts of a config.json, which layers before `first` do not have.

    `has_groups` says that experts are chosen among those of the best groups.
    """
    count = fields.integer("n_routed_experts", most_experts(spec))
    fields.expect("moe_layer_freq", 1)
    fields.expect("scoring_func", "sigmoid" if is_sigmoid else "softmax")
    if first >= spec.num_layers:
        return None
    width = fields.integer("moe_intermediate_size", MAX_WIDTH)
    shared = fields.integer("n_shared_experts", MAX_EXPERTS, low=0, default=0)
    scale = fields.number("routed_scaling_factor", default=1.0)
    groups = ("n_group", "topk_group") if has_groups else None
    used = fields.integer("num_experts_per_tok", count)
    normalize = is_sigmoid and fields.flag("norm_topk_prob", default=True)
    routing = _routing(fields, (count, used), scale, groups, is_sigmoid=is_sigmoid)
    return ExpertSpec(count, used, width, normalize, shared * width, first, routing)


def most_experts(spec: ModelSpec) -> int:
    """Return how many experts, or heads with matrices of their own, a layer has at most."""
    return min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // spec.num_layers)


def _routing(
    fields: Fields,
    counts: tuple[int, int],
    scale: float,
    groups: tuple[str, str] | None,
    *,
    is_sigmoid: bool,
) -> RoutingSpec | None:
    """Return how experts are chosen; None if by softmax alone.

    `counts` are those of all experts and of a row's; `groups` are keys.
    """
    count, num_used = counts
    num_groups = 1 if groups is None else fields.integer(groups[0], count)
    if count % num_groups:
        fields.fault(f"has {count} experts, not a multiple of its {num_groups} groups of them")
    used = num_groups
    if groups is not None and num_groups > 1:
        used = fields.integer(groups[1], num_groups)
    if num_used > used * (count // num_groups):
        most = used * (count // num_groups)
        fields.fault(f"chooses {num_used} of the {most} experts that {used} of its groups have")
    best = min(2, count // num_groups) if is_sigmoid else 1
    routing = RoutingSpec(scale, is_sigmoid, is_sigmoid, num_groups, used, best)
    return None if routing == RoutingSpec() else routing
