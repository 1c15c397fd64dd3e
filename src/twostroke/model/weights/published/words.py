"""Unpacks codes of a few bits from the 32-bit words of published folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twostroke.model.quant import Bytes


def num_words(count: int, bits: int) -> int:
    """Return how many words `count` codes fill, one after the other without holes."""
    return -(-count * bits // 32)


def unpack_words(words: NDArray[Any], bits: int, count: int) -> Bytes:
    """Unpack int32 (rows, words) into uint8 (rows, count): code i begins at bit `i * bits`."""
    packed = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return packed[:, :count]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = packed[:, :, None] >> shifts
        codes &= np.uint8((1 << bits) - 1)
        return codes.reshape(len(packed), -1)[:, :count]
    single = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * bits]
    return np.packbits(single.reshape(-1, bits), axis=1, bitorder="little").reshape(-1, count)


def unpack_padded_words(words: NDArray[Any], bits: int, count: int) -> Bytes:
    """Unpack words that hold only whole codes: `32 // bits` in each, from the lowest bit on."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts
    codes &= np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)[:, :count]
