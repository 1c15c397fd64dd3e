"""Keys and values in eight bits: each head of a token has a float16 scale.

`int8` is the cpu backend's format (ADR 0011): keys are spread by a Hadamard matrix before they are
rounded, and queries by the same. `fp8` is E4M3, whose numbers are made of bits, so that every GPU
has it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread(x, NUM: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr):
    """Multiply neighbours of x (NUM, BLOCK_D), 2^LEVELS at a time, with a Hadamard matrix."""
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(x, (NUM, BLOCK_D >> (level + 1), 2, 1 << level))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        mixed = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
        x = tl.reshape(mixed, (NUM, BLOCK_D))
    return x


@triton.jit
def rounded(x, KV: tl.constexpr):
    """Return the codes of heads (pairs, dims), int32, and their scales (pairs,), float16."""
    x = tl.where(x < 65504.0, x, 65504.0)  # what is not a number, too
    x = tl.maximum(x, -65504.0)
    most: tl.constexpr = 127.0 if KV == "int8" else 448.0
    scale = (tl.max(tl.abs(x), 1) / most).to(tl.float16)
    exact = scale.to(tl.float32)
    x /= tl.where(exact == 0, 1.0, exact)[:, None]
    x = tl.minimum(tl.maximum(x, -most), most)
    if KV == "int8":
        return ((x + 12582912.0) - 12582912.0).to(tl.int32), scale  # 1.5 * 2^23: it rounds
    size = tl.abs(x)
    # Below 2^-6 numbers are multiples of 2^-9; above, three bits of the mantissa stay.
    small = ((size * 512 + 12582912.0) - 12582912.0).to(tl.int32)
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, large)
    return tl.where(x < 0, code | 0x80, code), scale


@triton.jit
def numbers_of(codes, element: tl.constexpr, KV: tl.constexpr):
    """Return codes as numbers of a type; those of E4M3 are 256 times too small."""
    if KV == "fp8":
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(element)
    else:
        return codes.to(element)


@triton.jit
def scales_at(at, inside, KV: tl.constexpr):
    """Return what the numbers of heads are multiplied by, float32."""
    scale = tl.load(at, inside, 0.0).to(tl.float32)
    return scale * 256 if KV == "fp8" else scale
