"""Floats of 8 and 4 bits with scales (FP8, MXFP8, NVFP4, MXFP4), whatever a folder calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.model.quant import e4m3_tensor
from twostroke.model.quant.small_floats import E4M3
from twostroke.model.weights.published.groups import Coded, Scales, exact_floats

if TYPE_CHECKING:
    from twostroke.model.quant import Bytes, Floats, QuantTensor
    from twostroke.model.weights.published.module import Module


def fp8_matrix(codes: Bytes, scales: Floats, size: tuple[int, int]) -> QuantTensor:
    """Return E4M3 (outputs, inputs) times a scale for each block of `size`.

    It stays E4M3, unless a row has a block that is cut: then it is bfloat16 where that is exact,
    else float32.
    """
    outputs, inputs = codes.shape
    rows, columns = min(size[0], outputs), min(size[1], inputs)
    scales = np.repeat(scales, rows, axis=0)[:outputs]
    if inputs % columns == 0:
        return e4m3_tensor(codes, scales)
    with np.errstate(over="ignore", invalid="ignore"):
        return exact_floats(E4M3[codes] * np.repeat(scales, columns, axis=1)[:, :inputs])


def fp4_codes(packed: Bytes, scales: Scales, size: int) -> Coded:
    """Return E2M1 uint8 (outputs, inputs / 2), the first of two in the low bits, and scales."""
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
    codes = pairs.reshape(len(packed), -1)
    return Coded(codes, 4, scales, None, np.arange(codes.shape[1]) // size, "e2m1")


def float32_scales(values: Floats) -> Scales:
    """Return float32 values as scales."""
    return Scales("f32", np.ascontiguousarray(values, dtype=np.float32).view(np.uint32))


def e4m3_codes(module: Module, part: str) -> Bytes:
    """Return a matrix of E4M3 codes; ModelFormatError if one is not a number."""
    codes: Bytes = module.array(part, ("F8_E4M3",))
    if ((codes & np.uint8(0x7F)) == 0x7F).any():
        raise module.fault(part, "has a value that is not a number")
    return codes
