"""Reads the sizes of Mamba-2 layers from model files (Granite 4.0-H, Nemotron-H)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.message_text import counted_noun
from twostroke.model.families.common_fields import check_attention_layers
from twostroke.model.families.fields import MAX_HEAD_DIM, MAX_WIDTH
from twostroke.model.families.spec import Mamba2Spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families.fields import Fields
    from twostroke.model.families.spec import ModelSpec

_MAX_KERNEL: Final = 64  # rows of the convolution; known models have 4
_INFINITY: Final = {"__float__": "Infinity"}  # as transformers writes it in config.json

# GGUF names by Hugging Face names, without the name of the block.
_MAMBA_WEIGHTS: Final = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}


def mamba_names(block: str) -> dict[str, str]:
    """Map Hugging Face names of Mamba-2's weights to GGUF names.

    `block` is the name that the family's files have for the Mamba-2 block.
    """
    return {f"{block}.{name}": weight for name, weight in _MAMBA_WEIGHTS.items()}


def gguf_mamba2(fields: Fields, spec: ModelSpec, attends: tuple[bool, ...]) -> Mamba2Spec:
    """Read the sizes of Mamba-2 from a GGUF file; `attends` tells which layers have attention."""
    num_heads = fields.integer("ssm.time_step_rank", MAX_WIDTH)
    width = fields.integer("ssm.inner_size", MAX_WIDTH)
    return _checked(
        fields,
        Mamba2Spec(
            attends=attends,
            num_heads=num_heads,
            num_groups=fields.integer("ssm.group_count", MAX_WIDTH),
            state_size=fields.integer("ssm.state_size", MAX_HEAD_DIM),
            head_dim=_head_dim(fields, width, num_heads),
            kernel=fields.integer("ssm.conv_kernel", _MAX_KERNEL, low=2),
            norm_epsilon=spec.norm_epsilon,
        ),
    )


def _head_dim(fields: Fields, width: int, num_heads: int) -> int:
    """Return the width of a head, if `num_heads` heads divide `width` values into equal parts.

    Raises ModelFormatError otherwise.
    """
    if width % num_heads or width > num_heads * MAX_HEAD_DIM:
        parts = f"equal parts of at most {MAX_HEAD_DIM}"
        heads = counted_noun(num_heads, "Mamba head that does", "Mamba heads that do")
        fields.fault(f"has {heads} not divide {counted_noun(width, 'value')} into {parts}")
    return width // num_heads


def config_mamba2(
    fields: Fields, spec: ModelSpec, attends: tuple[bool, ...], keys: Mapping[str, str]
) -> Mamba2Spec:
    """Read the sizes of Mamba-2 from a config.json.

    `attends` tells which layers have attention. `keys` maps the name of each size to its key in the
    file.
    """
    num_heads = fields.integer(keys["num_heads"], MAX_WIDTH)
    head_dim: Any = None
    if "expand" in keys and fields.value(keys["head_dim"]) == "auto":
        width = fields.integer(keys["expand"], MAX_WIDTH) * spec.hidden_size
        head_dim = _head_dim(fields, width, num_heads)
    min_step, max_step = _time_step_limit(fields)
    return _checked(
        fields,
        Mamba2Spec(
            attends=attends,
            num_heads=num_heads,
            num_groups=fields.integer(keys["num_groups"], MAX_WIDTH),
            state_size=fields.integer(keys["state_size"], MAX_HEAD_DIM),
            head_dim=head_dim or fields.integer(keys["head_dim"], MAX_HEAD_DIM),
            kernel=fields.integer(keys["kernel"], _MAX_KERNEL, low=2),
            norm_epsilon=spec.norm_epsilon,
            has_convolution_bias=fields.flag(keys["has_convolution_bias"], default=True),
            has_bias=fields.flag(keys["has_bias"], default=False),
            min_step=min_step,
            max_step=max_step,
        ),
    )


def _time_step_limit(fields: Fields) -> tuple[float, float]:
    """Return the limits of time steps in a config.json; without the key, there are none."""
    key = "time_step_limit"
    limits = fields.value(key)
    if limits is None:
        return 0.0, math.inf
    if isinstance(limits, list):
        limits = [math.inf if limit == _INFINITY else limit for limit in limits]
    are_numbers = isinstance(limits, list) and all(type(x) in {int, float} for x in limits)
    if not are_numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        fields.refuse(key, "not a list of two numbers, the smaller one first")
    return float(limits[0]), float(limits[1])


def _checked(fields: Fields, mamba: Mamba2Spec) -> Mamba2Spec:
    if mamba.num_heads % mamba.num_groups:
        groups = counted_noun(mamba.num_groups, "group")
        fields.fault(
            f"has {counted_noun(mamba.num_heads, 'Mamba head')}, not a multiple of its {groups}"
        )
    check_attention_layers(fields, mamba.attends)
    return mamba
