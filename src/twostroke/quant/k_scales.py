"""What Q4_K and Q5_K share: a head of scales for eight groups of 32 values.

Layout of the head (ggml `block_q4_K`, `get_scale_min_k4`): two float16, the scale of the scales and
the scale of the minimums, then twelve bytes for eight of each, six bits wide. Of the twelve, bytes
0 to 3 hold scales 0 to 3 in their low six bits and bytes 4 to 7 minimums 0 to 3; bytes 8 to 11 hold
the low four bits of scales 4 to 7 and, above them, of minimums 4 to 7, whose upper two bits are the
upper two of bytes 0 to 3 and of bytes 4 to 7.
"""

from __future__ import annotations

import numpy as np

from twostroke.quant.fit import fit_scale_and_minimum, nearest_codes, whole_shares
from twostroke.quant.format import Bytes, Floats, half_bytes, half_column

_LOW_SIX = np.uint8(0x3F)
_HIGH_TWO = np.uint8(0xC0)


def scaled_groups(head: Bytes, codes: Bytes) -> Floats:
    """Scale and shift codes (n, 256) by their heads (n, 16); float32 (n, 256)."""
    scales, minimums = unpack_scales(head[:, 4:])
    values = codes.astype(np.float32).reshape(-1, 8, 32)
    values *= (half_column(head, 0) * scales.astype(np.float32))[:, :, None]
    values -= (half_column(head, 2) * minimums.astype(np.float32))[:, :, None]
    return values.reshape(-1, 256)


def head_and_codes(values: Floats, high: int) -> tuple[Bytes, Bytes]:
    """Fit float32 (n, 256) with codes from 0 to `high`; return heads (n, 16) and codes (n, 256)."""
    groups = values.reshape(-1, 8, 32)
    scales, minimums = fit_scale_and_minimum(groups, high)
    scale, scale_shares = whole_shares(scales[:, :, 0], 0, 63)
    minimum, minimum_shares = whole_shares(minimums[:, :, 0], 0, 63)
    codes = nearest_codes(groups, scale * scale_shares, minimum * minimum_shares, high)
    packed = pack_scales(scale_shares.astype(np.uint8), minimum_shares.astype(np.uint8))
    head = np.concatenate([half_bytes(scale), half_bytes(minimum), packed], axis=1)
    return head, codes.reshape(-1, 256)


def unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Bytes (n, 12) to scales and minimums, each uint8 (n, 8) below 64."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & _LOW_SIX, rest & 15 | (first & _HIGH_TWO) >> 2], axis=1)
    minimums = np.concatenate([second & _LOW_SIX, rest >> 4 | (second & _HIGH_TWO) >> 2], axis=1)
    return scales, minimums


def pack_scales(scales: Bytes, minimums: Bytes) -> Bytes:
    """Pack scales and minimums, each uint8 (n, 8) below 64, into bytes (n, 12)."""
    first = scales[:, :4] | (scales[:, 4:] & 0x30) << 2
    second = minimums[:, :4] | (minimums[:, 4:] & 0x30) << 2
    rest = scales[:, 4:] & 15 | minimums[:, 4:] << 4
    return np.concatenate([first, second, rest], axis=1)
