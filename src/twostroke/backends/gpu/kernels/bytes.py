"""Numbers in eight bits. Of keys and values each head of a token has a float16 scale.

`int8` is the cpu backend's format (ADR 0011): keys are spread by a Hadamard matrix before they are
rounded, and queries by the same. `fp8` is E4M3, whose numbers are made of bits, so that every GPU
has it; those of weights, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from twostroke.backends.gpu.launch import Gpu


def assembly(gpu: Gpu, kv_format: str) -> str:
    """Return PTX that makes numbers of four codes of E4M3; for int8 plain code does as well."""
    if gpu.is_interpreted or kv_format != "fp8":
        return ""
    lines = [".reg .b32 t, u, v;"]
    for out, places in (("$0", 0x1404), ("$1", 0x3424)):
        lines.append(f"prmt.b32 t, $2, 0, {places:#x};")
        lines += e4m3_lines(out, "t", gpu.element)
    return "{" + " ".join(lines) + "}"


def e4m3_lines(out: str, source: str, element: torch.dtype) -> list[str]:
    """Return PTX that makes two numbers of the codes in the upper bytes of two words."""
    shift, mask = (1, 0x3F80_3F80) if element == torch.float16 else (4, 0x07F0_07F0)
    lines = [f"shr.b32 u, {source}, {shift};", f"and.b32 u, u, {mask:#x};"]
    lines.append(f"lop3.b32 {out}, {source}, 0x80008000, u, 0xea;")  # a & b | c
    if element == torch.bfloat16:  # times 2^112, for its exponents begin lower
        lines += ["mov.b32 u, 0x77807780;", "mov.b32 v, 0x80008000;"]
        lines.append(f"fma.rn.bf16x2 {out}, {out}, u, v;")
    return lines


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
def bounded(x):
    """Return numbers as pages can hold them; what is not a number, too."""
    return tl.maximum(tl.where(x < 65504.0, x, 65504.0), -65504.0)


@triton.jit
def rounded(x, largest, KV: tl.constexpr):
    """Return the codes of bounded heads (pairs, dims), int32, and their scales (pairs,), float16.

    `largest` (pairs,) are the sizes that codes must reach.
    """
    most: tl.constexpr = 127.0 if KV == "int8" else 448.0
    scale = (largest / most).to(tl.float16)
    exact = scale.to(tl.float32)
    x /= tl.where(exact == 0, 1.0, exact)[:, None]
    x = tl.minimum(tl.maximum(x, -most), most)
    if KV == "int8":
        return ((x + 12582912.0) - 12582912.0).to(tl.int32), scale  # 1.5 * 2^23: it rounds
    return e4m3_codes(x), scale


@triton.jit
def e4m3_codes(x):
    """Return the nearest codes of numbers up to 448, int32."""
    size = tl.abs(x)
    # Below 2^-6 numbers are multiples of 2^-9; above, three bits of the mantissa stay.
    small = ((size * 512 + 12582912.0) - 12582912.0).to(tl.int32)
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, large)
    return tl.where(x < 0, code | 0x80, code)


@triton.jit
def numbers_of(codes, element: tl.constexpr, KV: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return codes as numbers of a type; those of E4M3 are 256 times too small."""
    if ASSEMBLY != "":
        halves = tl.inline_asm_elementwise(ASSEMBLY, "=&r,=&r,r", [codes], tl.int16, True, 4)
        return halves.to(element, bitcast=True)
    elif KV == "fp8":
        return e4m3_numbers(codes.to(tl.uint16), element)
    else:
        return codes.to(element)


@triton.jit
def e4m3_numbers(codes, element: tl.constexpr):
    """Return uint16 codes as numbers that are 256 times too small."""
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(element)


@triton.jit
def scales_at(at, KV: tl.constexpr):
    """Return what the numbers of heads are multiplied by, float32."""
    scale = tl.load(at).to(tl.float32)
    return scale * 256 if KV == "fp8" else scale
