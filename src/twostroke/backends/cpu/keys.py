"""Balances keys before they are quantized: subtracts their means and scales their channels.

The means and factors are computed from the model's weights alone, without sample text.
"""

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
_UNIT: Final = np.float32(2**-8)  # means are rounded to it: cosines differ between machines
_MAX_EXPONENT: Final = 6  # factors are 2^-6 to 2^6, because float16 scales must hold the keys
_MIN_SQUARE_RATIO: Final = 1e-6  # of the largest mean square of a layer
_MIN_SQUARE: Final = 1e-30  # if all weights are 0


def balances(
    program: Program, tensors: Mapping[str, QuantTensor], kv_format: str = "int8"
) -> dict[int, Array]:
    """Return, for each layer, how keys are balanced before they are quantized.

    A layer's balance is (3, width of keys): means of keys, factors of keys, factors of queries.

    For "int8": the mean is subtracted from keys, unless the layer has a soft cap or sinks, with
    which that would change the output. The mean of a key is the mean over positions of its rotated
    bias. Each pair of channels of keys is then multiplied by sqrt(size of queries / size of keys),
    rounded to a power of two, and the same channels of queries are divided by it; both are exact.
    Quantized keys have the same error in all channels, which harms scores least if queries and keys
    have the same size.

    For "int16", only two kinds of layers have a balance: layers with a bias, whose means AMX
    subtracts from keys before they become bfloat16, and layers with latent attention
    (`_balance_of_latents`).

    `tensors` are the undivided weights, also if `program` is a rank's part.
    """
    balance_by_layer: dict[int, Array] = {}
    for op in program.ops if kv_format in {"int8", "int16"} else ():
        if not isinstance(op, ops.Attention | ops.SplitKvAttention) or op.origin is None:
            continue
        if op.origin.latents is not None:
            balance_by_layer[op.layer] = _balance_of_latents(
                op.origin, op.origin.latents, tensors, kv_format
            )
            continue
        origin, heads = op.origin, (-1, op.head_dim)
        has_means = origin.keys.bias is not None and op.soft_cap is None and op.sinks is None
        if kv_format == "int16" and not has_means:
            continue
        keys = _mean_squares(origin.keys, tensors).reshape(heads)
        queries = (
            _mean_squares(origin.queries, tensors).reshape(len(keys), -1, op.head_dim).mean(axis=1)
        )
        means = np.zeros(keys.shape, np.float32)
        if origin.keys.bias is not None:
            bias = tensors[origin.keys.bias].dequantize().reshape(heads)
            if has_means:
                means = _means(origin.rope, bias)
            keys = keys - means.astype(np.float64) ** 2
        factors = _factors(_pair_means(keys, origin.rope), _pair_means(queries, origin.rope))
        kv_heads = (origin.first // op.head_dim + np.arange(op.num_kv_heads)) % len(keys)
        rows = np.stack([means[kv_heads], factors[kv_heads], 1 / factors[kv_heads]])
        balance_by_layer[op.layer] = rows.reshape(3, -1).astype(np.float32)
    return balance_by_layer


def _balance_of_latents(
    origin: QkProjections, latents: Projection, tensors: Mapping[str, QuantTensor], kv_format: str
) -> Array:
    """Return the key balance of a layer with latent attention (MLA), as `balances` does.

    Rotated keys and latent vectors are quantized with a common scale, so the rotated keys are
    scaled to about the size of the latent vectors. Latent vectors keep their size, because they are
    also values. With int16 the rotated and the latent part of queries have a common scale as well.
    If both parts contribute equally to scores, their sizes differ by the square root of the ratio
    of their widths; half of that factor is then given to the keys.
    """
    rotated, others = _mean_squares(origin.keys, tensors), _mean_squares(latents, tensors)
    ratio = max(others.max(), _MIN_SQUARE) / max(rotated.max(), _MIN_SQUARE)
    if kv_format == "int16":
        ratio *= np.sqrt(others.size / rotated.size)
    factor = 2.0 ** np.clip(np.rint(np.log2(ratio) / 2), -_MAX_EXPONENT, _MAX_EXPONENT)
    factors = np.r_[np.full(rotated.size, factor), np.ones(others.size)]
    return np.stack([0 * factors, factors, 1 / factors]).astype(np.float32)


def _mean_squares(projection: Projection, tensors: Mapping[str, QuantTensor]) -> Doubles:
    """Return the mean square of each channel of queries or keys, predicted from the weights.

    The input of the projection is assumed to be normed. If queries or keys are normalized by head,
    the norm's weight determines their size, and the result is for one head.
    """
    weight = tensors[projection.weight].dequantize()
    if weight.ndim == 1:
        return (weight.astype(np.float64) + projection.offset) ** 2
    norm = tensors[projection.input_norm].dequantize().astype(np.float64) + projection.offset
    squares: Doubles = np.einsum("ij,ij,j->i", weight, weight, norm**2)
    if projection.bias is not None:
        squares += tensors[projection.bias].dequantize().astype(np.float64) ** 2
    return squares


def _means(rope: Rope, bias: Array) -> Array:
    """Return the mean over positions of a bias (heads, head_dim) that RoPE rotates."""
    cosine, sine = _mean_rotation(rope.inverse_frequencies)
    first, second = _pairs(bias, rope)
    rotated = first * cosine - second * sine, first * sine + second * cosine
    means = bias.copy()
    for half, mean in zip(_pairs(means, rope), rotated, strict=True):
        half[:] = mean * rope.magnitude
    rounded: Array = np.round(means / _UNIT) * _UNIT
    return rounded


@lru_cache(maxsize=4)
def _mean_rotation(frequencies: tuple[float, ...]) -> tuple[Doubles, Doubles]:
    angles = _POSITIONS[:, None] * np.array(frequencies)
    return np.cos(angles).mean(axis=0), np.sin(angles).mean(axis=0)


def _pairs(x: NDArray[Any], rope: Rope) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return views of the two channels of each pair that RoPE rotates, (heads, pairs) each."""
    count = len(rope.inverse_frequencies)
    if rope.interleaved:
        return x[:, 0 : 2 * count : 2], x[:, 1 : 2 * count : 2]
    return x[:, :count], x[:, count : 2 * count]


def _pair_means(squares: Doubles, rope: Rope) -> Doubles:
    """Return channels (heads, head_dim) with both values of each rotated pair set to their mean."""
    even = squares.copy()
    mean = sum(_pairs(squares, rope)) / 2
    for half in _pairs(even, rope):
        half[:] = mean
    return even


def _factors(keys: Doubles, queries: Doubles) -> Doubles:
    """Return the factors that scale keys before quantization, as powers of two.

    `keys`, `queries`: mean squares of channels (heads, head_dim).
    """
    keys, queries = (
        np.maximum(x, _MIN_SQUARE_RATIO * x.max() + _MIN_SQUARE) for x in (keys, queries)
    )
    factors: Doubles = 2.0 ** np.clip(
        np.rint(np.log2(queries / keys) / 4), -_MAX_EXPONENT, _MAX_EXPONENT
    )
    return factors
