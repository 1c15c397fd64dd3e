"""Rope scalings: from a base and a scaling to the frequencies that a Program rotates by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.models.spec import RopeSpec


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
