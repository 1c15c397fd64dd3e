"""Reads mixtures of experts with shared experts, sigmoid scores or groups of experts.

Sources: arXiv:2405.04434, 2412.19437.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.message_text import counted_noun
from twostroke.model.families.common_fields import MAX_EXPERTS_IN_ALL
from twostroke.model.families.fields import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH
from twostroke.model.families.spec import ExpertSpec, RoutingSpec

if TYPE_CHECKING:
    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

# GGUF's numbers for the functions that turn router logits into scores.
SOFTMAX: Final = 1
SIGMOID: Final = 2

# GGUF names by Hugging Face names, of weights other than the routed experts' matrices.
EXPERT_NAMES: Final = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def gguf_routed_experts(
    fields: Fields, spec: ModelSpec, *, default_gating: int
) -> ExpertSpec | None:
    """Read a GGUF file's mixture of experts with a router like DeepSeek's; None without one.

    `default_gating` is the scoring function if the file does not name one.
    """
    count = fields.integer("expert_count", max_experts(spec), low=0, default=0)
    first = fields.integer("leading_dense_block_count", MAX_LAYERS, low=0, default=0)
    if count == 0 or first >= spec.num_layers:
        return None
    fields.expect("expert_gating_func", 0, SOFTMAX, SIGMOID)
    width = fields.integer("expert_feed_forward_length", MAX_WIDTH)
    num_shared = fields.integer("expert_shared_count", MAX_EXPERTS, low=0, default=0)
    groups = "expert_group_count", "expert_group_used_count"
    num_used = fields.integer("expert_used_count", count)
    routing = _routing(
        fields,
        (count, num_used),
        fields.optional_number("expert_weights_scale") or 1.0,
        groups if fields.has(groups[0]) else None,
        is_sigmoid=(fields.value("expert_gating_func") or default_gating) == SIGMOID,
    )
    normalize = fields.flag("expert_weights_norm", default=False)
    return ExpertSpec(
        count=count,
        num_used=num_used,
        ffn_size=width,
        normalize=normalize,
        shared_size=num_shared * width,
        first_layer=first,
        routing=routing,
    )


def config_routed_experts(
    fields: Fields, spec: ModelSpec, first: int, *, has_groups: bool, is_sigmoid: bool = True
) -> ExpertSpec | None:
    """Read a config.json's mixture of experts with a router like DeepSeek's; None without one.

    Layers before `first` have no experts. With `has_groups`, experts are chosen from the best
    groups. Families have different keys for the numbers of experts and for the routing scale; all
    of these keys are tried.
    """
    count_key = _first_key(fields, "n_routed_experts", "num_experts", "num_local_experts")
    count = fields.integer(count_key, max_experts(spec))
    fields.expect("moe_layer_freq", 1)
    fields.expect("scoring_func", "sigmoid" if is_sigmoid else "softmax")
    if first >= spec.num_layers:
        return None
    width = fields.integer("moe_intermediate_size", MAX_WIDTH, default=spec.ffn_size)
    shared_key = _first_key(fields, "n_shared_experts", "num_shared_experts")
    num_shared = fields.integer(shared_key, MAX_EXPERTS, low=0, default=0)
    scale_key = _first_key(fields, "routed_scaling_factor", "router_scaling_factor")
    scale = fields.number(scale_key, default=1.0)
    groups = ("n_group", "topk_group") if has_groups else None
    num_used = fields.integer("num_experts_per_tok", count)
    normalize = is_sigmoid and fields.flag("norm_topk_prob", default=True)
    routing = _routing(fields, (count, num_used), scale, groups, is_sigmoid=is_sigmoid)
    return ExpertSpec(
        count=count,
        num_used=num_used,
        ffn_size=width,
        normalize=normalize,
        shared_size=num_shared * width,
        first_layer=first,
        routing=routing,
    )


def config_first_expert_layer(fields: Fields, spec: ModelSpec, *, default: int) -> int:
    """Return a config.json's first layer with experts; layers before it are dense.

    `default` is the layer if the file has no `mlp_layer_types`.
    """
    key = "mlp_layer_types"
    if not fields.has(key):
        return default
    are_sparse = fields.choices(key, {"dense": False, "sparse": True}, spec.num_layers)
    first = are_sparse.count(False)
    if are_sparse != (False,) * first + (True,) * (spec.num_layers - first):
        fields.fault(f"has {key} with dense layers after sparse ones, which is not supported yet")
    return first


def max_experts(spec: ModelSpec) -> int:
    """Return the most experts that a layer of a model file may have.

    The limit keeps a damaged file from taking much memory. It also applies to attention heads that
    have matrices of their own (latent attention).
    """
    return min(MAX_EXPERTS, MAX_EXPERTS_IN_ALL // spec.num_layers)


def _first_key(fields: Fields, *keys: str) -> str:
    """Return the first of these keys that the file has; the very first if it has none."""
    return next((key for key in keys if fields.has(key)), keys[0])


def _routing(
    fields: Fields,
    counts: tuple[int, int],
    scale: float,
    groups: tuple[str, str] | None,
    *,
    is_sigmoid: bool,
) -> RoutingSpec | None:
    """Return the rule by which a model's router chooses experts; None for plain softmax.

    `counts` are the number of experts and the number that a row uses. `groups` are the keys for the
    number of groups and the number that a row uses.
    """
    count, num_used = counts
    num_groups = 1 if groups is None else fields.integer(groups[0], count)
    if count % num_groups:
        fields.fault(
            f"has {counted_noun(count, 'expert')}, not a multiple of its "
            f"{counted_noun(num_groups, 'group')} of them"
        )
    num_used_groups = num_groups
    if groups is not None and num_groups > 1:
        num_used_groups = fields.integer(groups[1], num_groups)
    if num_used > num_used_groups * (count // num_groups):
        num_reachable = num_used_groups * (count // num_groups)
        fields.fault(
            f"chooses {counted_noun(num_used, 'expert')}, but its "
            f"{counted_noun(num_used_groups, 'used group has', 'used groups have')} only "
            f"{num_reachable}"
        )
    group_best = min(2, count // num_groups) if is_sigmoid else 1
    routing = RoutingSpec(
        scale=scale,
        is_sigmoid=is_sigmoid,
        has_bias=is_sigmoid,
        num_groups=num_groups,
        num_used_groups=num_used_groups,
        group_best=group_best,
    )
    return None if routing == RoutingSpec() else routing
