"""Numbers of 8 bits in KV pages: int8 and fp8, with a float16 scale for each head of a token.

`int8` is the cpu backend's format (ADR 0011): keys and queries are multiplied by a Hadamard matrix
before keys are rounded. `fp8` is E4M3. Its codes are converted by bit operations, so that it works
on every GPU. The same conversion is used for E4M3 weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from twostroke.backends.gpu.launch import Gpu


def assembly(gpu: Gpu, kv_format: str) -> str:
    """Return PTX that converts four E4M3 codes of KV pages to numbers.

    Empty if Triton code converts them, as in the interpreter.
    """
    if gpu.is_interpreted or kv_format != "fp8":
        return ""
    lines = [".reg .b32 t, u, v;"]
    for out, selectors in (("$0", 0x1404), ("$1", 0x3424)):
        lines.append(f"prmt.b32 t, $2, 0, {selectors:#x};")
        lines += e4m3_lines(out, "t", gpu.element)
    return "{" + " ".join(lines) + "}"


def e4m3_lines(out: str, source: str, element: torch.dtype) -> list[str]:
    """Return PTX lines that convert two E4M3 codes, in the upper bytes of 16-bit words."""
    shift, mask = (1, 0x3F80_3F80) if element == torch.float16 else (4, 0x07F0_07F0)
    lines = [f"shr.b32 u, {source}, {shift};", f"and.b32 u, u, {mask:#x};"]
    lines.append(f"lop3.b32 {out}, {source}, 0x80008000, u, 0xea;")  # a & b | c
    if element == torch.bfloat16:  # times 2^112, because bfloat16 has a larger exponent bias
        lines += ["mov.b32 u, 0x77807780;", "mov.b32 v, 0x80008000;"]
        lines.append(f"fma.rn.bf16x2 {out}, {out}, u, v;")
    return lines


@triton.jit
def hadamard_transform(x, NUM: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr):
    """Multiply each group of 2^LEVELS neighbours of x (NUM, BLOCK_D) by a Hadamard matrix.

    Keys in int8 are transformed before they are rounded.
    """
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(x, (NUM, BLOCK_D >> (level + 1), 2, 1 << level))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        mixed = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
        x = tl.reshape(mixed, (NUM, BLOCK_D))
    return x


@triton.jit
def clamp_to_float16(x):
    """Return numbers limited to the range of float16; NaN becomes 65504."""
    return tl.maximum(tl.where(x < 65504.0, x, 65504.0), -65504.0)


@triton.jit
def quantize(x, largest, KV: tl.constexpr):
    """Quantize heads of keys or values (pairs, dims) to 8 bits; return codes and scales.

    Codes are int32, scales (pairs,) are float16. `largest` (pairs,): the largest absolute value of
    each head, which gets the largest code.
    """
    max_code: tl.constexpr = 127.0 if KV == "int8" else 448.0
    scale = (largest / max_code).to(tl.float16)
    exact = scale.to(tl.float32)
    x /= tl.where(exact == 0, 1.0, exact)[:, None]
    x = tl.minimum(tl.maximum(x, -max_code), max_code)
    if KV == "int8":
        return ((x + 12582912.0) - 12582912.0).to(tl.int32), scale  # adding 1.5 * 2^23 rounds
    return e4m3_codes(x), scale


@triton.jit
def e4m3_codes(x):
    """Return the nearest E4M3 codes, int32, of numbers from -448 to 448."""
    size = tl.abs(x)
    # Numbers below 2^-6 are rounded to multiples of 2^-9, others to three bits of mantissa.
    small = ((size * 512 + 12582912.0) - 12582912.0).to(tl.int32)
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, large)
    return tl.where(x < 0, code | 0x80, code)


@triton.jit
def codes_to_numbers(codes, element: tl.constexpr, KV: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Convert 8-bit codes of KV pages to numbers; numbers of E4M3 codes are divided by 256."""
    if ASSEMBLY != "":
        halves = tl.inline_asm_elementwise(
            asm=ASSEMBLY, constraints="=&r,=&r,r", args=[codes], dtype=tl.int16, is_pure=True,
            pack=4,
        )  # fmt: skip
        return halves.to(element, bitcast=True)
    elif KV == "fp8":
        return e4m3_numbers(codes.to(tl.uint16), element)
    else:
        return codes.to(element)


@triton.jit
def e4m3_numbers(codes, element: tl.constexpr):
    """Convert E4M3 codes, in uint16, to their numbers divided by 256."""
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(element)


@triton.jit
def load_scales(at, KV: tl.constexpr):
    """Load the scales of 8-bit keys or values as float32.

    Scales of E4M3 codes are multiplied by 256, because the numbers of codes are divided by 256.
    """
    scale = tl.load(at).to(tl.float32)
    return scale * 256 if KV == "fp8" else scale
