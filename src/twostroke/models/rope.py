"""Rotary positions: scalings, the frequencies that result, and the fields in model files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twostroke.models.fields import MAX_CONTEXT, Fields
from twostroke.models.spec import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    Tables = Mapping[str, list[float]]

# Tensors of a GGUF file that are facts about rope, not weights.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_DEFAULT_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions count 1 / `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow rotations are slowed by `factor`, quick ones stay, those between are blended.

    Quick means at least `high_freq_factor` turns within the `original_context` tokens of the first
    training, slow at most `low_freq_factor` (Llama 3.1).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow rotations are slowed by `factor`, quick ones stay, a ramp between (arXiv:2309.00071).

    The ramp goes from the pair that makes `beta_fast` turns within `original_context` tokens to the
    one that makes `beta_slow`. `magnitude` multiplies sine and cosine. `truncate` rounds the ends
    of the ramp outward to whole pairs.
    """

    factor: float
    original_context: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class TableScaling:
    """Each pair's frequency is divided by its factor; `magnitude` multiplies sine and cosine.

    The factors hold for contexts of up to `reach` tokens; None for any.
    """

    factors: tuple[float, ...]
    magnitude: float = 1.0
    reach: int | None = None


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | TableScaling


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's recommended magnitude for a context stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeSpec) -> tuple[float, ...]:
    """Return the angle per position, in radians, of each of the `rope.dim // 2` pairs."""
    plain = [rope.base ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]
    match rope.scaling:
        case None:
            return tuple(plain)
        case LinearScaling(factor):
            return tuple(angle / factor for angle in plain)
        case TableScaling(factors=factors):
            return tuple(angle / factor for angle, factor in zip(plain, factors, strict=True))
        case Llama3Scaling() as scaling:
            return tuple(_llama3(angle, scaling) for angle in plain)
        case YarnScaling() as scaling:
            return _yarn(plain, rope, scaling)


def magnitude(rope: RopeSpec) -> float:
    """Return what sine and cosine are multiplied by."""
    return rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling | TableScaling) else 1.0


def gguf_rope(
    fields: Fields, head_dim: int, context: int, tables: Tables, *, interleaved: bool
) -> RopeSpec:
    """Read rope from a GGUF file's metadata (fields of its architecture) and its `ROPE_TABLES`.

    `context` is the context length in tokens. The keys are those of the format's specification,
    their meaning is that of llama.cpp.
    """
    for key in ("rope.dimension_sections", "rope.scaling.alpha"):
        fields.expect(key)
    dim = fields.integer("rope.dimension_count", head_dim, low=2, default=head_dim)
    return RopeSpec(
        base=fields.number("rope.freq_base", above=1.0, default=_DEFAULT_BASE),
        dim=_even(fields, dim),
        interleaved=interleaved,
        scaling=_gguf_scaling(fields, dim, context, tables),
    )


def config_rope(
    fields: Fields,
    head_dim: int,
    context: int,
    layer_type: str = "full_attention",
    *,
    partial: bool = False,
) -> RopeSpec:
    """Read rope from a config.json: `rope_parameters` (transformers 5), or `rope_theta` and others.

    `rope_parameters` may hold one object for each type of layer; `layer_type` chooses one.
    Older files keep their scaling in `rope_scaling`. `partial` says that the family rotates the
    share of each head that `partial_rotary_factor` names.
    """
    part = fields.part("rope_scaling") or fields.part("rope_parameters")
    if part is not None and {"full_attention", "sliding_attention"} & part.values.keys():
        part = part.part(layer_type)
    part = part or Fields(fields.name, {})
    share = _either(part, fields, "partial_rotary_factor")
    dim = _rotated(share, head_dim) if partial else head_dim
    scaling = _config_scaling(part, fields, dim, context)
    key = "partial_rotary_factor"
    if scaling is not None and not partial and share.number(key, default=1.0) != 1:
        # Without a scaling transformers ignores the share; with one it begins to use it, and fails.
        share.refuse(key, "which this family cannot have with a rope scaling")
    return RopeSpec(
        base=_either(part, fields, "rope_theta").number(
            "rope_theta", above=1.0, default=_DEFAULT_BASE
        ),
        dim=_even(fields, dim),
        interleaved=False,
        scaling=scaling,
    )


def reach(rope: RopeSpec, context: int) -> int:
    """Return the usable context length in tokens; `context` is the length in the file."""
    match rope.scaling:
        case TableScaling(reach=int(limit)):
            return min(context, limit)
        case YarnScaling(factor=factor, original_context=original):
            # Most files with YaRN do not state the longer context.
            return min(MAX_CONTEXT, max(context, int(original * factor)))
        case _:
            return context


def _llama3(angle: float, scaling: Llama3Scaling) -> float:
    turns = scaling.original_context * angle / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return angle * (kept + (1 - kept) / scaling.factor)


def _yarn(plain: list[float], rope: RopeSpec, scaling: YarnScaling) -> tuple[float, ...]:
    def pair_of(turns: float) -> float:
        """Return the pair that makes that many turns within the original context."""
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.base))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    last = last if last > first else first + 0.001
    result = []
    for pair, angle in enumerate(plain):
        slowed = min(1.0, max(0.0, (pair - first) / (last - first)))
        result.append(angle / scaling.factor * slowed + angle * (1 - slowed))
    return tuple(result)


def _rotated(fields: Fields, head_dim: int) -> int:
    """Return how many values of a head are rotated."""
    share = fields.number("partial_rotary_factor", default=1.0)
    if share > 1:
        fields.refuse("partial_rotary_factor", "more than all of each head, which is 1")
    return int(head_dim * share)


def _gguf_scaling(fields: Fields, dim: int, context: int, tables: Tables) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", default="linear")
    factor = fields.optional_number("rope.scaling.factor", low=1.0)
    factor = factor or fields.optional_number("rope.scale_linear", low=1.0) or 1.0
    original = fields.integer(
        "rope.scaling.original_context_length", MAX_CONTEXT, low=2, default=max(2, context)
    )
    magnitude = fields.number("rope.scaling.attn_factor", default=1.0)
    if tables:
        if factor != 1.0 or kind == "yarn":
            fields.fault(f"scales its rope twice: by {kind} and by {next(iter(tables))!r}")
        # Llama 3's factors hold for every context, the short ones of longrope up to the original.
        whole = ROPE_TABLES[0] in tables
        factors = Fields(fields.name, tables).numbers(ROPE_TABLES[0 if whole else 1], dim // 2)
        return TableScaling(factors, magnitude, None if whole else original)
    if kind == "yarn":
        fields.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        fields.expect("rope.scaling.yarn_log_multiplier", 0.0)
        # As converters write it, this is transformers' attention_factor: the whole magnitude.
        whole_magnitude = fields.optional_number("rope.scaling.yarn_attn_factor")
        return YarnScaling(
            factor,
            original,
            magnitude * (whole_magnitude or yarn_magnitude(factor)),
            fields.number("rope.scaling.yarn_beta_fast", default=32.0),
            fields.number("rope.scaling.yarn_beta_slow", default=1.0),
        )
    if kind not in {"none", "linear"}:
        fields.refuse("rope.scaling.type", "which is not supported; none, linear and yarn are")
    fields.expect("rope.scaling.attn_factor", 1.0)
    return None if kind == "none" or factor == 1.0 else LinearScaling(factor)


def _config_scaling(part: Fields, whole: Fields, dim: int, context: int) -> RopeScaling | None:
    key = "rope_type" if part.has("rope_type") else "type"
    kind = part.text(key, default="default")
    original_key = "original_max_position_embeddings"
    original = _either(whole, part, original_key).integer(
        original_key, MAX_CONTEXT, low=2, default=max(2, context)
    )
    if part.has("short_factor") and kind in {"su", "yarn"}:
        kind = "longrope"  # its earlier names, in the first Phi-3 files
    scaling: RopeScaling | None = None
    match kind:
        case "default":
            pass
        case "linear":
            scaling = LinearScaling(part.number("factor", low=1.0))
        case "llama3":
            scaling = _llama3_scaling(part, original)
        case "yarn":
            scaling = _yarn_scaling(part, original, context)
        case "longrope":
            scaling = _longrope_scaling(part, dim, original, context)
        case _:
            part.refuse(key, "which is not supported; linear, llama3, yarn and longrope are")
    return scaling


def _llama3_scaling(part: Fields, original: int) -> Llama3Scaling:
    low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
    if high <= low:
        part.fault(f"has high_freq_factor = {high:g}, not above low_freq_factor = {low:g}")
    return Llama3Scaling(part.number("factor", low=1.0), low, high, original)


def _yarn_scaling(part: Fields, original: int, context: int) -> YarnScaling:
    if not part.has("factor") and context < original:
        part.fault(
            f"stretches its context from {original} tokens to {context}: say a factor of at least 1"
        )
    factor = part.number("factor", low=1.0, default=context / original)
    magnitude = part.optional_number("attention_factor")
    if magnitude is None:
        above, below = part.optional_number("mscale"), part.optional_number("mscale_all_dim")
        magnitude = yarn_magnitude(factor)
        if above and below:
            magnitude = yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return YarnScaling(
        factor,
        original,
        magnitude,
        part.number("beta_fast", default=32.0),
        part.number("beta_slow", default=1.0),
        part.flag("truncate", default=True),
    )


def _longrope_scaling(part: Fields, dim: int, original: int, context: int) -> TableScaling:
    """Take the factors for short contexts, which hold up to the original one (arXiv:2402.13753)."""
    factor = part.number("factor", low=1.0, default=max(1.0, context / original))
    magnitude = part.optional_number("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    return TableScaling(part.numbers("short_factor", dim // 2), magnitude, original)


def _either(first: Fields, second: Fields, key: str) -> Fields:
    return first if first.has(key) else second


def _even(fields: Fields, dim: int) -> int:
    if dim < 2 or dim % 2:
        fields.fault(f"has a rope dimension of {dim}, which is not an even number from 2 up")
    return dim
