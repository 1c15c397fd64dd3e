"""How keys are made small and even before they lose bits, from a model's weights alone."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from twostroke.model.program import Program
    from twostroke.model.program.ops import Projection, QkProjections, Rope
    from twostroke.model.quant import QuantTensor

    Array = NDArray[np.float32]
    Doubles = NDArray[np.float64]

_POSITIONS: Final = np.arange(4096)
_UNIT: Final = np.float32(2**-8)  # means are rounded: they do not depend on a machine's cosine
_MOST: Final = 6  # factors are from 2^-6 to 2^6: a float16 scale must hold the largest key
_LEAST: Final = 1e-6  # of the largest square in a layer
_TINY: Final = 1e-30  # where all weights are 0


def balances(
    program: Program, tensors: Mapping[str, QuantTensor], kv_format: str = "int8"
) -> dict[int, Array]:
    """Return for each layer means of keys, factors of keys, and of queries, (3, width of keys).

    Of int8; of int16 the means of layers with a bias, which AMX takes from keys that become
    bfloat16, and the factors of latent attention (`_of_latents`). Keys lose their mean, that of
    their rotated bias over positions, where there is no soft cap. A pair of channels is then
    multiplied by the root of the ratio of its sizes in queries and keys, rounded to a power of two,
    which keeps both exact: the error of keys that are spread is the same in all channels, so it
    harms scores least where both sizes are alike.
    `tensors` are the whole weights, also for a rank's part of a Program.
    """
    found: dict[int, Array] = {}
    for op in program.ops if kv_format in {"int8", "int16"} else ():
        if not isinstance(op, ops.Attention | ops.SplitKvAttention) or op.origin is None:
            continue
        if op.origin.latents is not None:
            found[op.layer] = _of_latents(op.origin, op.origin.latents, tensors, kv_format)
            continue
        origin, heads = op.origin, (-1, op.head_dim)
        if kv_format == "int16" and (origin.keys.bias is None or op.soft_cap is not None):
            continue
        keys = _squares(origin.keys, tensors).reshape(heads)
        queries = _squares(origin.queries, tensors).reshape(len(keys), -1, op.head_dim).mean(axis=1)
        means = np.zeros(keys.shape, np.float32)
        if origin.keys.bias is not None:
            bias = tensors[origin.keys.bias].dequantize().reshape(heads)
            if op.soft_cap is None:
                means = _means(origin.rope, bias)
            keys = keys - means.astype(np.float64) ** 2
        factors = _factors(_of_pairs(keys, origin.rope), _of_pairs(queries, origin.rope))
        own = (origin.first // op.head_dim + np.arange(op.num_kv_heads)) % len(keys)
        made = np.stack([means[own], factors[own], 1 / factors[own]])
        found[op.layer] = made.reshape(3, -1).astype(np.float32)
    return found


def _of_latents(
    origin: QkProjections, latents: Projection, tensors: Mapping[str, QuantTensor], kv_format: str
) -> Array:
    """Return what makes rotated keys about as large as the latent vectors whose scale they share.

    Latent vectors stay, since they are values, too. With int16 the queries of both share a scale as
    well. Where both bring as much to scores, they differ by the root of the ratio of their widths
    when keys are alike; half of that is then left to the keys.
    """
    rotated, others = _squares(origin.keys, tensors), _squares(latents, tensors)
    ratio = max(others.max(), _TINY) / max(rotated.max(), _TINY)
    if kv_format == "int16":
        ratio *= np.sqrt(others.size / rotated.size)
    factor = 2.0 ** np.clip(np.rint(np.log2(ratio) / 2), -_MOST, _MOST)
    factors = np.r_[np.full(rotated.size, factor), np.ones(others.size)]
    return np.stack([0 * factors, factors, 1 / factors]).astype(np.float32)


def _squares(made: Projection, tensors: Mapping[str, QuantTensor]) -> Doubles:
    """Return the mean squares of values before rotation; of one head if all are alike."""
    weight = tensors[made.weight].dequantize()
    if weight.ndim == 1:
        return (weight.astype(np.float64) + made.offset) ** 2
    norm = tensors[made.input_norm].dequantize().astype(np.float64) + made.offset
    squares: Doubles = np.einsum("ij,ij,j->i", weight, weight, norm**2)
    if made.bias is not None:
        squares += tensors[made.bias].dequantize().astype(np.float64) ** 2
    return squares


def _means(rope: Rope, bias: Array) -> Array:
    """Return the mean of rotated biases (heads, head_dim) over positions."""
    cosine, sine = _mean_turn(rope.inverse_frequencies)
    first, second = _pairs(bias, rope)
    turned = first * cosine - second * sine, first * sine + second * cosine
    means = bias.copy()
    for half, mean in zip(_pairs(means, rope), turned, strict=True):
        half[:] = mean * rope.magnitude
    rounded: Array = np.round(means / _UNIT) * _UNIT
    return rounded


@lru_cache(maxsize=4)
def _mean_turn(frequencies: tuple[float, ...]) -> tuple[Doubles, Doubles]:
    angles = _POSITIONS[:, None] * np.array(frequencies)
    return np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)


def _pairs(x: NDArray[Any], rope: Rope) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return views of both values of each pair that turns, (heads, pairs), of (heads, head_dim)."""
    count = len(rope.inverse_frequencies)
    if rope.interleaved:
        return x[:, 0 : 2 * count : 2], x[:, 1 : 2 * count : 2]
    return x[:, :count], x[:, count : 2 * count]


def _of_pairs(squares: Doubles, rope: Rope) -> Doubles:
    """Return (heads, head_dim) in which values that are rotated together have their mean."""
    even = squares.copy()
    mean = sum(_pairs(squares, rope)) / 2
    for half in _pairs(even, rope):
        half[:] = mean
    return even


def _factors(keys: Doubles, queries: Doubles) -> Doubles:
    """Return the factors of keys, from mean squares (heads, head_dim)."""
    keys, queries = (np.maximum(x, _LEAST * x.max() + _TINY) for x in (keys, queries))
    factors: Doubles = 2.0 ** np.clip(np.rint(np.log2(queries / keys) / 4), -_MOST, _MOST)
    return factors
