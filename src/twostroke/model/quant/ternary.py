"""TQ1_0 and TQ2_0 of GGUF files: -1, 0 and 1, times a float16 for 256 values.

Layout of a block of TQ2_0 (ggml `block_tq2_0`): 64 bytes of 2-bit codes, of which each run of 32
bytes holds values 0 to 31 in bits 0 and 1, and so on; the scale. A code of 3 is 2.

Layout of a block of TQ1_0 (ggml `block_tq1_0`): 32 bytes with five codes each, of which the first
are values 0 to 31; 16 bytes with five; 4 bytes with four; the scale. A byte is a fraction of 256:
multiplied by 3 it has the first code before the point, and the next ones follow.
"""

from __future__ import annotations

import numpy as np

from twostroke.model.quant.format import Bytes, Floats, Format, half_column
from twostroke.model.quant.planes import pack_planes, unpack_planes


def decode_tq2_0(blocks: Bytes) -> Floats:
    """Bytes (n, 66) to float32 (n, 256)."""
    values = unpack_planes(blocks[:, :64], 2, run=32).astype(np.float32)
    values -= np.float32(1)
    values *= half_column(blocks, 64)
    return values


def decode_tq1_0(blocks: Bytes) -> Floats:
    """Bytes (n, 54) to float32 (n, 256)."""
    return decode_tq2_0(_as_tq2_0(blocks))


def _as_tq2_0(data: Bytes) -> Bytes:
    """Bring rows of TQ1_0's blocks, uint8 (rows, row_bytes), into TQ2_0's, which kernels read."""
    blocks = data.reshape(-1, 54)
    parts = []
    for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([3**i for i in range(count)], np.uint8)
        fractions = blocks[:, None, first:end] * powers[:, None]
        codes = fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
        parts.append(codes.astype(np.uint8).reshape(len(blocks), -1))
    packed = pack_planes(np.concatenate(parts, axis=1), 2, run=32)
    return np.concatenate([packed, blocks[:, 52:]], axis=1).reshape(len(data), -1)


TQ1_0 = Format(
    "TQ1_0", 35, 256, 256, 54, decode_tq1_0, gguf_id=34, to_kernel=_as_tq2_0, packed_bits=2.125
)
TQ2_0 = Format("TQ2_0", 35, 256, 256, 66, decode_tq2_0, gguf_id=35, packed_bits=2.125)
