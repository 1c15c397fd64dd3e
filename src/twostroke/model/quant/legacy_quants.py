"""Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 values in even steps of one float16 scale.

Layout of a block (GGUF specification; ggml `block_q4_0` and so on): the scale; in Q4_1 and Q5_1 the
smallest value as float16; in Q5_0 and Q5_1 four bytes with the codes' fifth bits, value i in bit i;
16 bytes with the codes' lower four bits, values 0 to 15 in the low nibbles and 16 to 31 in the high
ones. Q8_0 has 32 signed bytes after its scale.

A value of Q4_0, Q5_0 and Q8_0 is (code - half) * scale, with half = 8, 16 and 0. A value of Q4_1
and Q5_1 is code * scale + the smallest value.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from twostroke.model.quant.format import (
    Bytes,
    Floats,
    Format,
    ggml_format,
    half_bytes,
    half_column,
    pack_planes,
    unpack_planes,
)


def decode_around_zero(blocks: Bytes, bits: int) -> Floats:
    """Decode blocks of Q4_0, bytes (n, 18), or Q5_0, bytes (n, 22), to float32 (n, 32)."""
    values = unpack_codes(blocks[:, 2:]).astype(np.float32)
    values -= np.float32(1 << (bits - 1))
    values *= half_column(blocks, 0)
    return values


def encode_around_zero(values: Floats, bits: int) -> Bytes:
    """Encode float32 (n, 32) as Q4_0 (4 bits) or Q5_0 (5 bits) blocks.

    The value farthest from zero becomes code 0 exactly.
    """
    half = 1 << (bits - 1)
    farthest = np.abs(values).argmax(axis=1)[:, None]
    scale = np.take_along_axis(values, farthest, axis=1) / np.float32(-half)
    codes = np.trunc(values * _inverse_or_zero(scale) + np.float32(half + 0.5))
    return np.concatenate([half_bytes(scale), pack_codes(codes, bits)], axis=1)


def decode_from_smallest(blocks: Bytes) -> Floats:
    """Decode blocks of Q4_1, bytes (n, 20), or Q5_1, bytes (n, 24), to float32 (n, 32)."""
    values = unpack_codes(blocks[:, 4:]).astype(np.float32)
    values *= half_column(blocks, 0)
    values += half_column(blocks, 2)
    return values


def encode_from_smallest(values: Floats, bits: int) -> Bytes:
    """Encode float32 (n, 32) as Q4_1 (4 bits) or Q5_1 (5 bits) blocks.

    The levels are evenly spaced from the smallest value to the largest.
    """
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / np.float32((1 << bits) - 1)
    codes = np.trunc((values - low) * _inverse_or_zero(scale) + np.float32(0.5))
    parts = [half_bytes(scale), half_bytes(low), pack_codes(codes, bits)]
    return np.concatenate(parts, axis=1)


def decode_q8_0(blocks: Bytes) -> Floats:
    """Decode Q8_0 blocks, bytes (n, 34), to float32 (n, 32)."""
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= half_column(blocks, 0)
    return values


def encode_q8_0(values: Floats) -> Bytes:
    """Encode float32 (n, 32) as Q8_0 blocks, bytes (n, 34), with ties rounded away from zero."""
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse_or_zero(scale)
    magnitude = np.abs(scaled)
    rounded = np.floor(magnitude)
    # floor(magnitude + 0.5) would round 0.49999997 up, because the sum is rounded to 1.
    rounded += np.floor(np.float32(2) * (magnitude - rounded))
    codes = np.copysign(rounded, scaled).astype(np.int8).view(np.uint8)
    return np.concatenate([half_bytes(scale), codes], axis=1)


def unpack_codes(packed: Bytes) -> Bytes:
    """Unpack the codes of Q4 or Q5 blocks into uint8 (n, 32).

    The packed bytes are (n, 16) with 4 bits or (n, 20) with 5 bits.
    """
    codes = unpack_planes(packed[:, -16:], 4, run=16)
    if packed.shape[1] > 16:
        codes |= unpack_planes(packed[:, :4], 1, run=1) << np.uint8(4)
    return codes


def pack_codes(codes: Floats, bits: int) -> Bytes:
    """Clip the codes (n, 32) of Q4 or Q5 blocks to their range, and pack them into bytes.

    The packed bytes are (n, 16) with 4 bits or (n, 20) with 5 bits.
    """
    integer_codes = np.clip(codes, 0, (1 << bits) - 1).astype(np.uint8)
    nibbles = pack_planes(integer_codes & np.uint8(15), 4, run=16)
    if bits == 4:
        return nibbles
    return np.concatenate([pack_planes(integer_codes >> np.uint8(4), 1, run=1), nibbles], axis=1)


def _inverse_or_zero(scale: Floats) -> Floats:
    """Return 1 / scale, or 0 where the scale is 0, so that a block of equal values stores zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _around_zero(name: str, gguf_id: int, bits: int, block_bytes: int) -> Format:
    decode = partial(decode_around_zero, bits=bits)
    encode = partial(encode_around_zero, bits=bits)
    return ggml_format(name, gguf_id, (32, 32, block_bytes), decode, encode)


def _from_smallest(name: str, gguf_id: int, bits: int, block_bytes: int) -> Format:
    encode = partial(encode_from_smallest, bits=bits)
    return ggml_format(name, gguf_id, (32, 32, block_bytes), decode_from_smallest, encode)


Q4_0 = _around_zero("Q4_0", 2, bits=4, block_bytes=18)
Q4_1 = _from_smallest("Q4_1", 3, bits=4, block_bytes=20)
Q5_0 = _around_zero("Q5_0", 6, bits=5, block_bytes=22)
Q5_1 = _from_smallest("Q5_1", 7, bits=5, block_bytes=24)
Q8_0 = ggml_format("Q8_0", 8, (32, 32, 34), decode_q8_0, encode_q8_0)
