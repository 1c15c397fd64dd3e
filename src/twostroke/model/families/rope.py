"""Reads rotary position embeddings (RoPE) from model files, with their context extensions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.families.fields import MAX_CONTEXT, Fields
from twostroke.model.families.spec import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # A RoPE, and the context length in tokens up to which it can be used.
    RopeAndContext = tuple[RopeSpec, int]

# Tensors of a GGUF file that hold divisors of RoPE frequencies, not weights.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

NO_ROTATION_DIVISOR = 1e30  # of a pair's frequency; such a pair is not rotated
_CONFIG_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_DEFAULT_BASE = 10000.0
_MIN_BASE = 1.001  # the logarithm of a base of 1 is 0


def gguf_rope(
    fields: Fields,
    head_dim: int,
    context: int,
    tables: Mapping[str, list[float]],
    *,
    interleaved: bool,
) -> RopeAndContext:
    """Read RoPE from a GGUF file's metadata and its tables of frequency divisors (`ROPE_TABLES`).

    Returns (RoPE, longest context length that it allows). `context` is the length in the file. Keys
    are from the format's specification, with the meaning that llama.cpp gives them.
    """
    for key in ("rope.dimension_sections", "rope.scaling.alpha"):
        fields.expect(key)
    dim = fields.integer("rope.dimension_count", head_dim, low=2, default=head_dim)
    base = fields.number("rope.freq_base", low=_MIN_BASE, default=_DEFAULT_BASE)
    plain = RopeSpec(base, _even(fields, dim), interleaved)
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
        # Llama 3's factors hold for every context; longrope's short factors, up to the original.
        table_for_all, short_table, _ = ROPE_TABLES
        table, max_context = (
            (table_for_all, context)
            if table_for_all in tables
            else (short_table, min(context, original))
        )
        divisors = Fields(fields.name, tables).numbers(table, dim // 2)
        return _divided(plain, divisors, magnitude), max_context
    if kind == "yarn":
        fields.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        fields.expect("rope.scaling.yarn_log_multiplier", 0.0)
        # Converters write transformers' attention_factor here: the complete magnitude.
        stored_magnitude = fields.optional_number("rope.scaling.yarn_attn_factor")
        yarn = _Yarn(
            factor=factor,
            original=original,
            magnitude=magnitude * (stored_magnitude or yarn_magnitude(factor)),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", default=1.0),
            truncate=fields.flag("rope.scaling.yarn_truncate", default=True),
        )
        return yarn.scale(plain, context)
    if kind not in {"none", "linear"}:
        fields.refuse("rope.scaling.type", "which is not supported; none, linear and yarn are")
    fields.expect("rope.scaling.attn_factor", 1.0)
    return _linear(plain, 1.0 if kind == "none" else factor), context


def config_rope(
    fields: Fields,
    head_dim: int,
    context: int,
    layer_type: str = "full_attention",
    *,
    share_key: str | None = None,
) -> RopeAndContext:
    """Read RoPE and the longest context length that it allows from a config.json.

    The key is `rope_parameters` (transformers 5), which may hold an object for each type of layer;
    `layer_type` selects the object. Older files have `rope_theta` and `rope_scaling`. `share_key`
    is the family's key for the rotated fraction of each head, if it has such a key.
    """
    part = fields.part("rope_scaling") or fields.part("rope_parameters")
    if part is not None and {"full_attention", "sliding_attention"} & part.values.keys():
        part = part.part(layer_type)
    part = part or Fields(fields.name, {})
    dim = head_dim
    if share_key is not None:
        share = _either(part, fields, share_key).number(share_key, high=1.0, default=1.0)
        dim = int(head_dim * share)
    base = _either(part, fields, "rope_theta").number(
        "rope_theta", low=_MIN_BASE, default=_DEFAULT_BASE
    )
    plain = RopeSpec(base, _even(fields, dim), interleaved=False)
    key = "original_max_position_embeddings"
    original = _either(fields, part, key).integer(key, MAX_CONTEXT, low=2, default=max(2, context))
    return _config_scaling(part, plain, original, context)


def _config_scaling(part: Fields, plain: RopeSpec, original: int, context: int) -> RopeAndContext:
    """Return RoPE with the context extension that a config.json describes.

    `original` is the context length before the extension.
    """
    key = "rope_type" if part.has("rope_type") else "type"
    kind = part.text(key, default="default")
    if part.has("short_factor") and kind in {"su", "yarn"}:
        kind = "longrope"  # its earlier names, in the first Phi-3 files
    if kind == "mrope":
        kind = "default"  # with text, the three positions of a token are equal
    if kind not in _CONFIG_SCALINGS:
        part.refuse(key, f"which is not supported; {', '.join(_CONFIG_SCALINGS)} are")
    if kind == "default":
        return plain, context
    if kind == "proportional":
        return _proportional(plain, part), context
    if kind == "linear":
        return _linear(plain, part.number("factor", low=1.0)), context
    if kind == "llama3":
        return _llama3(plain, part, original), context
    if kind == "yarn":
        return _config_yarn(part, original, context).scale(plain, context)
    return _longrope(plain, part, original, context)


def _linear(plain: RopeSpec, factor: float) -> RopeSpec:
    """Return a RoPE that divides all positions by `factor` (arXiv:2306.15595)."""
    return plain if factor == 1 else _divided(plain, [factor] * (plain.dim // 2))


def _proportional(plain: RopeSpec, part: Fields) -> RopeSpec:
    """Return a RoPE that rotates only the pairs with the highest frequencies.

    The other pairs have an angle of 0.
    """
    share = part.number("partial_rotary_factor", high=1.0, default=1.0)
    factor, count = part.number("factor", low=1.0, default=1.0), int(share * plain.dim // 2)
    rotating = [frequency / factor for frequency in plain.frequencies[:count]]
    fixed = [0.0] * (plain.dim // 2 - count)
    return replace(plain, scaled_frequencies=(*rotating, *fixed))


def _divided(plain: RopeSpec, divisors: Sequence[float], magnitude: float = 1.0) -> RopeSpec:
    """Return a RoPE in which the frequency of each pair is divided by the pair's divisor.

    `magnitude` multiplies sine and cosine.
    """
    pairs = zip(plain.frequencies, divisors, strict=True)
    scaled = tuple(
        [
            frequency / divisor if divisor < NO_ROTATION_DIVISOR else 0.0
            for frequency, divisor in pairs
        ]
    )
    return replace(plain, scaled_frequencies=scaled, magnitude=magnitude)


def _llama3(plain: RopeSpec, part: Fields, original: int) -> RopeSpec:
    """Return a RoPE extended by Llama 3.1's rule: low frequencies are divided by a factor.

    High frequencies stay, and the frequencies between are blended. A frequency is high if its pair
    makes at least `high_freq_factor` turns within the `original` context, and low if it makes at
    most `low_freq_factor` turns. If both are equal (Llama 4 Scout), nothing is blended.
    """
    low, high = part.number("low_freq_factor"), part.number("high_freq_factor")
    factor = part.number("factor", low=1.0)
    if high < low:
        part.fault(f"has high_freq_factor = {high:g}, less than low_freq_factor = {low:g}")
    scaled = []
    for frequency in plain.frequencies:
        turns = original * frequency / (2 * math.pi)
        if high == low:
            kept_share = float(turns > low)
        else:
            kept_share = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(frequency * (kept_share + (1 - kept_share) / factor))
    return replace(plain, scaled_frequencies=tuple(scaled))


def _longrope(plain: RopeSpec, part: Fields, original: int, context: int) -> RopeAndContext:
    """Return a RoPE with LongRoPE's factors for short contexts (arXiv:2402.13753).

    Also returns the context length up to which these factors hold: the original length.
    """
    factor = part.number("factor", low=1.0, default=max(1.0, context / original))
    magnitude = part.optional_number("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = part.numbers("short_factor", plain.dim // 2)
    return _divided(plain, divisors, magnitude), min(context, original)


class _Yarn(Frozen):
    """YaRN's rule for extending the context of a RoPE (arXiv:2309.00071).

    It divides low frequencies by `factor`, keeps high frequencies, and blends between them. The
    blended pairs begin at the pair that makes `beta_fast` turns within `original` tokens, and end
    at the pair that makes `beta_slow` turns. `truncate` rounds both ends outward to whole pairs.
    `magnitude` multiplies sine and cosine.
    """

    factor: float
    original: int
    magnitude: float
    beta_fast: float
    beta_slow: float
    truncate: bool = True

    def scale(self, plain: RopeSpec, context: int) -> RopeAndContext:
        """Return a RoPE extended by YaRN, and the context length that it allows.

        `context` is the context length in the file, often the length before the extension.
        """

        def pair_of(turns: float) -> float:
            """Return the index (a fraction) of the RoPE pair that makes `turns` turns.

            The turns are counted within the context length before the extension.
            """
            ratio = self.original / (turns * 2 * math.pi)
            return plain.dim * math.log(ratio) / (2 * math.log(plain.base))

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, plain.dim - 1)
        last = last if last > first else first + 0.001
        scaled = []
        for pair, frequency in enumerate(plain.frequencies):
            slowed = min(1.0, max(0.0, (pair - first) / (last - first)))
            scaled.append(frequency / self.factor * slowed + frequency * (1 - slowed))
        spec = replace(plain, scaled_frequencies=tuple(scaled), magnitude=self.magnitude)
        return spec, min(MAX_CONTEXT, max(context, int(self.original * self.factor)))


def _config_yarn(part: Fields, original: int, context: int) -> _Yarn:
    factor = part.number("factor", low=1.0, default=max(1.0, context / original))
    magnitude = part.optional_number("attention_factor")
    if magnitude is None:
        mscale, mscale_all_dim = (
            part.optional_number("mscale"),
            part.optional_number("mscale_all_dim"),
        )
        magnitude = yarn_magnitude(factor)
        if mscale and mscale_all_dim:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return _Yarn(
        factor=factor,
        original=original,
        magnitude=magnitude,
        beta_fast=part.number("beta_fast", default=32.0),
        beta_slow=part.number("beta_slow", default=1.0),
        truncate=part.flag("truncate", default=True),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return the factor of rotated values that YaRN recommends for a context extended by `factor`.

    `weight` is the `mscale` of model files.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _either(first: Fields, second: Fields, key: str) -> Fields:
    return first if first.has(key) else second


def _even(fields: Fields, dim: int) -> int:
    if dim < 2 or dim % 2:
        fields.fault(f"has a rope dimension of {dim}, which is not an even number from 2 up")
    return dim
