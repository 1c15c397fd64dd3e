"""Random blocks of formats that are only read: the codes are random bytes, the scales are set."""

from __future__ import annotations

from math import prod

import numpy as np

from twostroke.model.quant import FORMATS, QuantTensor

CODED = ("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
SCALE_AT = {"TQ1_0": 52, "TQ2_0": 64}  # others but IQ1_M: 0


def random_blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> QuantTensor:
    """Return a tensor with values of about the size that weights of this shape have."""
    fmt = FORMATS[name]
    data = rng.integers(0, 256, (prod(shape[:-1]), fmt.num_bytes(shape[-1])), dtype=np.uint8)
    set_scales(name, data, 1.0)
    set_scales(name, data, float(shape[-1] ** -0.5 / fmt.dequantize(data).std()))
    return QuantTensor(fmt, shape, data)


def set_scales(name: str, data: np.ndarray, scale: float) -> None:
    """Write a float16 scale into each block of rows of bytes."""
    blocks = data.reshape(-1, FORMATS[name].block_bytes)
    half = np.array([scale], np.float16)
    if name == "IQ1_M":  # a nibble in each of the last four words
        words = blocks[:, 48:].copy().view(np.uint16)
        words &= 0x0FFF
        words |= (half.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)) << 12
        blocks[:, 48:] = words.view(np.uint8)
    else:
        start = SCALE_AT.get(name, 0)
        blocks[:, start : start + 2] = half.view(np.uint8)


def in_format(values: np.ndarray, name: str) -> QuantTensor:
    """Return a tensor in any format: `values` rounded, or random blocks where nothing rounds."""
    if FORMATS[name].encode is not None:
        return QuantTensor.from_floats(values, FORMATS[name])
    return random_blocks(name, values.shape, np.random.default_rng(values.size))
