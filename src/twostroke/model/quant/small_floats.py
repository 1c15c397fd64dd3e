"""Floats of one byte or less: E4M3, E8M0 and E2M1, as tables of their values.

E4M3 is the variant without infinities (OCP 8-bit floating point specification, E4M3: 0x7F and 0xFF
are NaN, the largest value is 448). E8M0 and E2M1 are those of the OCP microscaling formats: a power
of two from 2**-127 to 2**127 (0xFF is NaN), and 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from twostroke.model.quant.format import Bytes, Floats


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[[0x7F, 0xFF]] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


def _e8m0_values() -> Floats:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[0xFF] = np.nan
    return values.astype(np.float32)


_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)

E4M3 = _e4m3_values()  # float32 (256,)
E8M0 = _e8m0_values()  # float32 (256,)
E2M1 = np.concatenate([_MAGNITUDES, np.float32(0) - _MAGNITUDES])  # float32 (16,), without a -0

_POSITIVE_E4M3 = E4M3[:0x7F]


def nearest_e4m3(values: Floats) -> Bytes:
    """Return the codes of the nearest E4M3 numbers; what is too large becomes 448."""
    codes = _nearest(np.abs(values), _POSITIVE_E4M3)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def nearest_e8m0(values: Floats) -> Bytes:
    """Return the codes of the largest powers of two that are not above positive `values`."""
    _, exponent = np.frexp(values)
    codes: Bytes = np.clip(exponent + 126, 0, 254).astype(np.uint8)
    return codes


def nearest_e2m1(values: Floats) -> Bytes:
    """Return the codes of the nearest E2M1 numbers; what is too large becomes 6."""
    codes = _nearest(np.abs(values), _MAGNITUDES)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(3))


def _nearest(values: Floats, ascending: Floats) -> Bytes:
    """Return the index of the nearest number; of two equally near, the even one."""
    middles = (ascending[1:] + ascending[:-1]) / np.float32(2)
    up = np.searchsorted(middles, values, side="right")
    tied = np.searchsorted(middles, values, side="left")
    nearest: Bytes = np.where(up % 2 == 0, up, tied).astype(np.uint8)
    return nearest
