"""Converts packed codes to values in registers, inside kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from twostroke.backends.gpu.kernels.bytes import e4m3_lines, e4m3_numbers
from twostroke.backends.gpu.kernels.common import prefetch

if TYPE_CHECKING:
    from typing import Any

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.weight_layout import PackedLayout


def has_offset(layout: PackedLayout) -> bool:
    """Return whether a packed layout adds an offset to scaled codes."""
    return layout.offset is not None or layout.scales == "k"


def code_constants(gpu: Gpu, layout: PackedLayout, *, is_centered: bool) -> dict[str, Any]:
    """Return a layout's compile-time constants for kernels that convert codes to 16-bit numbers.

    If codes are not centered, converted numbers have `SHIFT` added, since that costs nothing. The
    kernels then subtract `SHIFT` times the sum of inputs, together with the minimum. `ASSEMBLY` has
    PTX for each step, or the name of a table; "" means that Triton code converts.
    """
    shift = -layout.half if is_centered else _MAGIC[gpu.element][2]
    assembly = without_assembly(layout)
    if not gpu.is_interpreted:
        assembly = tuple(
            _codes_assembly(layout, gpu.element, step, is_centered=is_centered)
            for step in range(layout.steps)
        )
    return _constants(layout, shift, assembly)


def number_constants(gpu: Gpu, layout: PackedLayout) -> dict[str, Any]:
    """Return a layout's compile-time constants for kernels that convert codes to float32.

    The numbers have `SHIFT` added. `ASSEMBLY` has PTX, or the name of a table, for each step and
    plane.
    """
    count, shift = layout.steps * layout.planes, layout.half
    if gpu.is_interpreted:
        return _constants(layout, shift, (layout.table or "",) * count)
    if not layout.table:
        shift += 384 if layout.bits == 8 else 128
    return _constants(
        layout, shift, tuple(_number_assembly(layout, index) for index in range(count))
    )


def _constants(layout: PackedLayout, shift: int, assembly: tuple[str, ...]) -> dict[str, Any]:
    return {
        "BITS": layout.bits,
        "GROUP": layout.group,
        "COLUMNS": layout.columns,
        "PLANES": layout.planes,
        "STEPS": layout.steps,
        "SCALES": layout.scales,
        "OFFSET": layout.offset or "",
        "SHIFT": shift,
        "ASSEMBLY": assembly,
    }


def without_assembly(layout: PackedLayout) -> tuple[str, ...]:
    """Return the constant `ASSEMBLY` for kernels in which Triton code converts packed codes."""
    return (layout.table or "",) * layout.steps


# For pairs of an element type: the bits of a number n to which small codes can be or-ed, the bits
# of 1.0, and n.
_MAGIC: Final = {
    torch.float16: (0x6400_6400, 0x3C00_3C00, 1024),
    torch.bfloat16: (0x4300_4300, 0x3F80_3F80, 128),
    torch.float32: (0, 0, 0),  # only used by interpreted kernels
}


def _codes_assembly(
    layout: PackedLayout, element: torch.dtype, step: int, *, is_centered: bool
) -> str:
    """Return PTX that converts the packed codes of two words to 16-bit numbers.

    It yields two numbers for each plane. A code is or-ed into the low bits of 128 (bfloat16) or
    1024 (float16), which adds the code.
    """
    if layout.table == "e4m3":
        lines = [".reg .b32 t, u, v;", "shl.b32 t, $2, 8;"]
        lines += [*e4m3_lines("$0", "t", element), *e4m3_lines("$1", "$2", element)]
        return "{" + " ".join(lines) + "}"
    magic, one_bits, number = _MAGIC[element]
    kind = "bf16x2" if element == torch.bfloat16 else "f16x2"
    word = f"${layout.planes}"
    half = 128 if layout.bits == 8 else layout.half
    less = _repeat_twice(-number - half, element)
    lines = [
        ".reg .b32 t, u, one, less;",
        f"mov.b32 one, {one_bits:#x};",
        f"mov.b32 less, {less:#x};",
    ]
    for plane in range(layout.planes):
        out = f"${plane}"
        source = word
        if plane:
            lines.append(f"shr.b32 t, {word}, {16 // layout.planes * plane};")
            source = "t"
        if layout.bits == 8:
            lines += _signed_bytes(out, source, element)
            continue
        lines.append(f"lop3.b32 {out}, {source}, 0x000f000f, {magic:#x}, 0xea;")  # a & b | c
        if layout.bits > 4:
            lines += _upper_bits(out, "$5", layout, step, plane)
        if is_centered:
            lines.append(f"fma.rn.{kind} {out}, {out}, one, less;")
    return "{" + " ".join(lines) + "}"


def _number_assembly(layout: PackedLayout, index: int) -> str:
    """Return PTX that converts one plane of two words' packed codes to two float32 numbers.

    A code is or-ed into the low bits of 128 in bfloat16, whose bits are the upper half of float32;
    a code of 8 bits is or-ed into 256.
    """
    step, plane = divmod(index, layout.planes)
    lines = [".reg .b32 t, u, v;"]
    if layout.bits == 8 and not layout.table:
        for out, shift in (("$0", 8 * plane - 15), ("$1", 8 * plane + 1)):
            lines.append(f"shl.b32 t, $2, {-shift};" if shift < 0 else f"shr.b32 t, $2, {shift};")
            lines.append(f"lop3.b32 {out}, t, 0x007f8000, 0x43c00000, 0x6a;")  # a & b ^ c
        return "{" + " ".join(lines) + "}"
    if layout.table:
        lines.append(f"shl.b32 t, $2, {8 - 8 * plane};")
        lines += e4m3_lines("t", "t", torch.bfloat16)
    else:
        magic = _MAGIC[torch.bfloat16][0]
        lines.append(f"shr.b32 t, $2, {4 * plane};")
        lines.append(f"lop3.b32 t, t, 0x000f000f, {magic:#x}, 0xea;")  # a & b | c
        if layout.bits > 4:
            lines += _upper_bits("t", "$3", layout, step, plane)
    return "{" + " ".join([*lines, "shl.b32 $0, t, 16;", "and.b32 $1, t, 0xffff0000;"]) + "}"


def _signed_bytes(out: str, source: str, element: torch.dtype) -> list[str]:
    magic = _MAGIC[element][0]
    if element == torch.float16:
        return [
            f"and.b32 u, {source}, 0x00ff00ff;",
            f"xor.b32 u, u, {magic | 0x0080_0080:#x};",
            f"fma.rn.f16x2 {out}, u, one, less;",
        ]
    # 128 plus the lower seven bits, minus 128, or minus 256 if the eighth bit is set.
    return [
        f"lop3.b32 u, {source}, 0x00800080, {0x8000_8000 | magic:#x}, 0xea;",
        f"lop3.b32 {out}, {source}, 0x007f007f, {magic:#x}, 0xea;",
        f"fma.rn.bf16x2 {out}, {out}, one, u;",
    ]


def _upper_bits(out: str, source: str, layout: PackedLayout, step: int, plane: int) -> list[str]:
    count = layout.bits - 4
    per_word = 8 if count == 1 else 16
    left = 4 - count * (step * layout.planes + plane) % per_word
    shift = f"shl.b32 u, {source}, {left};" if left >= 0 else f"shr.b32 u, {source}, {-left};"
    mask = 0x0010_0010 if count == 1 else 0x0030_0030
    return [shift, f"lop3.b32 {out}, u, {mask:#x}, {out}, 0xea;"]


def _repeat_twice(value: float, element: torch.dtype) -> int:
    bits = torch.tensor(value, dtype=element).view(torch.int16).item() & 0xFFFF
    return int(bits) << 16 | int(bits)


@triton.jit
def fetch_codes(codes, TILE: tl.constexpr, PART_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
                TILES: tl.constexpr, COUNT: tl.constexpr, ENABLED: tl.constexpr):  # fmt: skip
    """Prefetch the first packed codes of a program into the L2 cache, if ENABLED.

    COUNT: tiles of outputs.
    """
    if ENABLED:
        LINES: tl.constexpr = TILE // 64  # of 128 bytes
        end = tl.minimum((tl.program_id(1) + 1) * PART_BLOCKS, BLOCKS) * LINES
        line = tl.program_id(1) * (PART_BLOCKS * LINES) + tl.arange(0, 256 // COUNT)
        line = tl.minimum(line, end - 1).to(tl.int64)
        for tile_index in tl.static_range(COUNT):
            tile = tl.minimum(tl.program_id(2) * COUNT + tile_index, TILES - 1).to(tl.int64)
            prefetch(codes + (tile * (BLOCKS * LINES) + line) * 64)


@triton.jit
def unpack_codes(word, high, element: tl.constexpr, step: tl.constexpr, BITS: tl.constexpr,
           PLANES: tl.constexpr, SHIFT: tl.constexpr, ASSEMBLY: tl.constexpr):  # fmt: skip
    """Unpack a word of codes; return each plane's codes plus SHIFT.

    For E4M3, returns the numbers divided by 256.
    """
    if ASSEMBLY[step] == "e4m3":
        pair = word.to(tl.uint16, bitcast=True)
        return e4m3_numbers(pair & 0xFF, element), e4m3_numbers(pair >> 8, element)
    elif ASSEMBLY[step] != "":
        if PLANES == 2:
            a, b = tl.inline_asm_elementwise(
                asm=ASSEMBLY[step], constraints="=&r,=&r,r", args=[word],
                dtype=(tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
            return a.to(element, bitcast=True), b.to(element, bitcast=True)
        else:
            if BITS == 4:
                a, b, c, d = tl.inline_asm_elementwise(
                    asm=ASSEMBLY[step], constraints="=&r,=&r,=&r,=&r,r", args=[word],
                    dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
                )  # fmt: skip
            else:
                a, b, c, d = tl.inline_asm_elementwise(
                    asm=ASSEMBLY[step], constraints="=&r,=&r,=&r,=&r,r,r", args=[word, high],
                    dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
                )  # fmt: skip
            return (
                a.to(element, bitcast=True),
                b.to(element, bitcast=True),
                c.to(element, bitcast=True),
                d.to(element, bitcast=True),
            )
    elif PLANES == 2:
        return ((word << 8) >> 8).to(element), (word >> 8).to(element)
    else:
        return (
            _code(word, high, plane=0, element=element, step=step, BITS=BITS, SHIFT=SHIFT),
            _code(word, high, plane=1, element=element, step=step, BITS=BITS, SHIFT=SHIFT),
            _code(word, high, plane=2, element=element, step=step, BITS=BITS, SHIFT=SHIFT),
            _code(word, high, plane=3, element=element, step=step, BITS=BITS, SHIFT=SHIFT),
        )


@triton.jit
def unpack_number(word, upper, index: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr,
              ASSEMBLY: tl.constexpr):  # fmt: skip
    """Unpack one plane of a word's codes to float32, plus SHIFT; see `number_constants`."""
    plane: tl.constexpr = index % PLANES
    if ASSEMBLY[index] == "e4m3":
        pair = word.to(tl.uint16, bitcast=True)
        return e4m3_numbers((pair >> (8 * plane)) & 0xFF, tl.float32)
    elif ASSEMBLY[index] != "":
        if BITS % 4 != 0:
            bits = tl.inline_asm_elementwise(
                asm=ASSEMBLY[index], constraints="=&r,=&r,r,r", args=[word, upper],
                dtype=tl.int32, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            bits = tl.inline_asm_elementwise(
                asm=ASSEMBLY[index], constraints="=&r,=&r,r", args=[word], dtype=tl.int32,
                is_pure=True, pack=2,
            )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    elif PLANES == 2:
        return ((word << (8 - 8 * plane)) >> 8).to(tl.float32)
    else:
        return _code(
            word, upper, plane=plane, element=tl.float32, step=index // PLANES, BITS=BITS,
            SHIFT=0,
        )  # fmt: skip


@triton.jit
def _code(word, high, plane: tl.constexpr, element: tl.constexpr, step: tl.constexpr,
          BITS: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    code = (word >> (4 * plane)) & 15
    if BITS == 5:
        code |= ((high >> ((step * 4 + plane) % 8)) & 1) << 4
    elif BITS == 6:
        code |= ((high >> ((step * 8 + plane * 2) % 16)) & 3) << 4
    return (code + SHIFT).to(element)


@triton.jit
def _float16_of(word, shift: tl.constexpr):
    return ((word >> shift) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_group_value(at, index: tl.constexpr, SCALES: tl.constexpr, OUTPUTS: tl.constexpr):
    """Load the scale or offset of a quantization group; two 16-bit values share a word."""
    if SCALES == "f32":
        return tl.load(at + index * OUTPUTS)
    else:
        word = tl.load(at + index // 2 * OUTPUTS).to(tl.uint32, bitcast=True)
        if SCALES == "f16":
            return _float16_of(word, 16 * (index % 2))
        else:
            return ((word >> (16 * (index % 2))) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _byte(word, index: tl.constexpr):
    return ((word >> (8 * index)) & 0xFF).to(tl.float32)


@triton.jit
def load_headers(at, SCALES: tl.constexpr, OUTPUTS: tl.constexpr):
    """Load the four words of a tile's k-quant header (Q4_K, Q5_K); zeros for other formats."""
    if SCALES[-1] != "k":
        return 0, 0, 0, 0
    else:
        return (
            tl.load(at).to(tl.uint32, bitcast=True),
            tl.load(at + OUTPUTS).to(tl.uint32, bitcast=True),
            tl.load(at + 2 * OUTPUTS).to(tl.uint32, bitcast=True),
            tl.load(at + 3 * OUTPUTS).to(tl.uint32, bitcast=True),
        )


@triton.jit
def scale_and_offset(headers, scales, offsets, block, index: tl.constexpr, GROUP: tl.constexpr,
           SCALES: tl.constexpr, OFFSET: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """Return the scale and offset of quantization group `index` of a tile."""
    if SCALES == "k":
        step: tl.constexpr = index % 4
        if index < 4:
            first, second = headers[1] & 0x3F3F3F3F, headers[2] & 0x3F3F3F3F
        else:
            first = (headers[3] & 0x0F0F0F0F) | ((headers[1] >> 2) & 0x30303030)
            second = ((headers[3] >> 4) & 0x0F0F0F0F) | ((headers[2] >> 2) & 0x30303030)
        return _float16_of(headers[0], 0) * _byte(first, step), -(
            _float16_of(headers[0], 16) * _byte(second, step)
        )
    elif SCALES == "q6_k":
        shift: tl.constexpr = 24 - 8 * (index % 4)
        signed = (headers[index // 4] << shift).to(tl.int32, bitcast=True) >> 24
        return tl.load(offsets + block * OUTPUTS) * signed.to(tl.float32), 0.0
    else:
        words: tl.constexpr = 256 // GROUP if SCALES == "f32" else 128 // GROUP
        scale = _load_group_value(scales + block * (words * OUTPUTS), index, SCALES, OUTPUTS)
        if OFFSET == "":
            return scale, 0.0
        else:
            offset = _load_group_value(
                offsets + block * (128 // GROUP * OUTPUTS), index, "f16", OUTPUTS
            )
            if OFFSET == "zero":
                return scale, -scale * offset
            else:
                return scale, offset


@triton.jit
def load_upper_bits(high_at, block, step: tl.constexpr, BITS: tl.constexpr, STEP: tl.constexpr):
    """Load the word with the upper bits of a step's 5-bit or 6-bit codes."""
    if BITS == 5:
        return tl.load(high_at + block * STEP).to(tl.int16)
    elif BITS == 6:
        return tl.load(high_at + (block * 2 + step // 2) * STEP)
    else:
        return 0
