"""Codes of a few bits in bytes: a run of bytes holds a run of codes in each of its bit planes.

Every block format of ggml packs this way. A run of 32 bytes with 2-bit codes holds values 0 to 31
in bits 0 and 1, 32 to 63 in bits 2 and 3, and so on; a run of 1 byte holds neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from twostroke.model.quant.format import Bytes


def unpack_planes(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpack (blocks, bytes) into codes below 2**bits, uint8 (blocks, bytes * 8 / bits)."""
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = runs >> shifts[:, None]  # (blocks, runs, planes, run)
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(packed.shape[0], -1)


def pack_planes(codes: Bytes, bits: int, run: int) -> Bytes:
    """Pack codes below 2**bits, uint8 (blocks, codes), into (blocks, codes * bits / 8)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    planes = codes.reshape(codes.shape[0], -1, len(shifts), run) << shifts[:, None]
    packed: Bytes = np.bitwise_or.reduce(planes, axis=2)
    return packed.reshape(codes.shape[0], -1)
