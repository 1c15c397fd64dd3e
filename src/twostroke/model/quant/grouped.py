"""Number formats of quantized safetensors models (GPTQ, AWQ, ...): groups that share a scale."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant.fit import code_rounder, fit_scale
from twostroke.model.quant.floats import (
    E2M1,
    E4M3,
    E8M0,
    decode_bfloat,
    encode_bfloat,
    nearest_e2m1,
    nearest_e4m3,
    nearest_e8m0,
)
from twostroke.model.quant.format import (
    Bytes,
    Floats,
    Format,
    half_bytes,
    pack_planes,
    unpack_planes,
)
from twostroke.model.quant.tensor import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable

SCALE_BYTES: Final = {"f16": 2, "bf16": 2, "f32": 4, "e8m0": 1, "e4m3": 1}

# The numbers of `WeightType` in native/linear/linear.h, by bits, zero point, table, and group.
KERNEL_IDS: Final = {
    (4, False, None, 32): 256,
    (4, False, None, 128): 257,
    (4, True, None, 32): 258,
    (4, True, None, 128): 259,
    (8, False, None, 32): 260,
    (8, False, None, 128): 261,
    (4, False, "e2m1", 16): 262,
    (4, False, "e2m1", 32): 263,
}
NO_KERNEL: Final = -1

_DECODE_SCALE: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "f16": lambda raw: raw.view(np.float16).astype(np.float32),
    "bf16": decode_bfloat,
    "f32": lambda raw: raw.view(np.float32),
    "e8m0": lambda raw: E8M0[raw],
    "e4m3": lambda raw: E4M3[raw],
}
_ENCODE_SCALE: Final[dict[str, Callable[[Floats], Bytes]]] = {
    "f16": half_bytes,
    "bf16": encode_bfloat,
    "f32": lambda scales: scales.view(np.uint8),
    "e8m0": nearest_e8m0,
    "e4m3": nearest_e4m3,
}
_DOUBLED_E2M1: Final = E2M1 * np.float32(2)  # whole numbers
_TRIAL_PEAKS: Final = {
    4: (-8.5, -8.0, -7.5, -7.0, 7.0, 7.5),
    8: (-128.0, -127.5, 127.0, 127.5),
}


@cache
def grouped(
    bits: int, group: int, scale: str, *, zero: bool = False, table: str | None = None
) -> Format:
    """Return the number format in which `group` integer codes of a row share a scale.

    `bits` is 4 or 8; `scale` names the scales' type, in `SCALE_BYTES`; with `zero` a group also has
    a zero point. With the `table` "e2m1" codes stand for E2M1 floats.

    Raises:
        ValueError: `group` is not a multiple of 16, or there is no such combination.
    """
    if bits not in (4, 8) or group < 16 or group % 16 or scale not in SCALE_BYTES:
        raise ValueError(f"there is no format of {bits} bits in groups of {group} with {scale}")
    if table not in (None, "e2m1") or (table and (bits != 4 or zero)):
        raise ValueError(f"there is no format of {bits} bits with table {table}")
    layout = _GroupedLayout(bits, group, scale, zero, table)
    return Format(
        layout.name,
        kernel_id=KERNEL_IDS.get((bits, zero, table, layout.kernel_group), NO_KERNEL),
        group_size=group,
        block_size=group,
        block_bytes=layout.head_bytes + layout.code_bytes,
        decode=partial(_decode, layout),
        encode=partial(_encode, layout),
        to_kernel=None if scale == "f32" and layout.kernel_group == group else layout.to_kernel,
    )


def assemble(fmt: Format, codes: Bytes, scales: Bytes, zeros: Bytes | None = None) -> QuantTensor:
    """Return a quantized tensor in a grouped format from its codes, scales and zero points.

    Codes are uint8 (rows, inputs), a byte each. `scales` are uint8 (rows, groups, bytes of a
    scale); `zeros` are uint8 (rows, groups), for a format with zero points. `fmt` comes from
    `grouped`.
    """
    rows, inputs = codes.shape
    groups = inputs // fmt.block_size
    parts = [np.ascontiguousarray(scales).reshape(rows * groups, -1)]
    if zeros is not None:
        parts.append(zeros.reshape(-1, 1))
    blocks = np.ascontiguousarray(codes).reshape(rows * groups, -1)
    code_bytes = fmt.block_bytes - sum(part.shape[1] for part in parts)
    parts.append(blocks if code_bytes == fmt.block_size else pack_planes(blocks, 4, run=1))
    data = np.concatenate(parts, axis=1).reshape(rows, -1)
    return QuantTensor(fmt, (rows, inputs), data)


def scale_rows(tensor: QuantTensor, factors: Floats) -> QuantTensor:
    """Multiply each row of a quantized matrix by a power of two, which changes only its scales."""
    scale = tensor.format.name.split("_")[2].lower()
    blocks = tensor.data.reshape(len(factors), -1, tensor.format.block_bytes).copy()
    size = SCALE_BYTES[scale]
    raw = np.ascontiguousarray(blocks[:, :, :size]).reshape(-1, size)
    scales = _DECODE_SCALE[scale](raw) * np.repeat(factors, blocks.shape[1])[:, None]
    blocks[:, :, :size] = _ENCODE_SCALE[scale](scales).reshape(*blocks.shape[:2], size)
    return QuantTensor(tensor.format, tensor.shape, blocks.reshape(tensor.data.shape))


class _GroupedLayout(Frozen):
    """A block of a grouped format: a scale, perhaps a zero point, and the packed codes."""

    bits: int
    group: int
    scale: str
    zero: bool
    table: str | None

    @property
    def name(self) -> str:
        codes_name = (self.table or f"int{self.bits}").upper()
        return f"{codes_name}_G{self.group}_{self.scale.upper()}{'_Z' if self.zero else ''}"

    @property
    def head_bytes(self) -> int:
        """The number of bytes of a block's scale and zero point."""
        return SCALE_BYTES[self.scale] + self.zero

    @property
    def code_bytes(self) -> int:
        return self.group * self.bits // 8

    @property
    def kernel_group(self) -> int:
        """The group size that the kernels have, to which `to_kernel` converts.

        A larger group is cut into groups of this size. A group that is not a multiple of it is
        padded, which requires that the group is a whole row.
        """
        if self.table is not None:
            return 32 if self.group % 32 == 0 else 16
        return 128 if self.group >= 128 else 32

    def scales_of(self, blocks: Bytes) -> Floats:
        """Return the scales of blocks (n, block_bytes), float32 (n, 1)."""
        raw = np.ascontiguousarray(blocks[:, : SCALE_BYTES[self.scale]])
        return _DECODE_SCALE[self.scale](raw)

    def codes_of(self, blocks: Bytes) -> Bytes:
        """Return the codes of the values in blocks (n, block_bytes), uint8 (n, group)."""
        packed = blocks[:, self.head_bytes :]
        return packed if self.bits == 8 else unpack_planes(packed, 4, run=1)

    def to_kernel(self, data: Bytes) -> Bytes:
        """Convert rows of blocks, uint8 (rows, row_bytes), to the layout that kernels read."""
        rows = len(data)
        head = self.head_bytes
        size = self.kernel_group * self.bits // 8
        blocks = np.ascontiguousarray(data).reshape(-1, head + self.code_bytes)
        count = -(-self.code_bytes // size)
        if self.group % self.kernel_group:
            assert len(blocks) == rows, f"{self.name} has groups that are not whole rows"
            blocks = np.pad(blocks, ((0, 0), (0, count * size - self.code_bytes)))
        out = np.empty((len(blocks), count, 4 + self.zero + size), np.uint8)
        out[:, :, :4] = self.scales_of(blocks).view(np.uint8)[:, None]
        if self.zero:
            out[:, :, 4] = blocks[:, head - 1, None]
        out[:, :, 4 + self.zero :] = blocks[:, head:].reshape(-1, count, size)
        return out.reshape(rows, -1)


def _decode(layout: _GroupedLayout, blocks: Bytes) -> Floats:
    scales = layout.scales_of(blocks)
    codes = layout.codes_of(blocks)
    if layout.table:
        # As the kernels compute it; halving is exact for all but the very smallest scales.
        return _DOUBLED_E2M1[codes] * (scales * np.float32(0.5))
    values = codes.astype(np.float32)
    if layout.zero:
        values -= blocks[:, layout.head_bytes - 1, None].astype(np.float32)
    else:
        values -= np.float32(1 << (layout.bits - 1))
    values *= scales
    return values


def _encode(layout: _GroupedLayout, values: Floats) -> Bytes:
    """Quantize values to blocks of a grouped format.

    The scale is rounded to its stored type first; codes are computed with the rounded scale.
    """
    max_code = np.float32((1 << layout.bits) - 1)
    half = np.float32(1 << (layout.bits - 1))
    parts = []
    if layout.zero:
        low = np.minimum(values.min(axis=1, keepdims=True), np.float32(0))
        high = np.maximum(values.max(axis=1, keepdims=True), np.float32(0))
        parts.append(_ENCODE_SCALE[layout.scale]((high - low) / max_code))
        inverse = _inverse(_DECODE_SCALE[layout.scale](parts[0]))
        zeros = np.clip(np.rint(-low * inverse), np.float32(0), max_code)
        parts.append(zeros.astype(np.uint8))
        codes = np.clip(np.rint(values * inverse) + zeros, np.float32(0), max_code).astype(np.uint8)
    elif layout.table:
        largest = np.abs(values).max(axis=1, keepdims=True)
        target_code = np.float32(
            4 if layout.scale == "e8m0" else 6
        )  # 4: the largest power of two in E2M1
        parts.append(_ENCODE_SCALE[layout.scale](largest / target_code))
        codes = nearest_e2m1(values * _inverse(_DECODE_SCALE[layout.scale](parts[0])))
    else:
        nearest = code_rounder(-int(half), int(half) - 1)
        peaks = _TRIAL_PEAKS[layout.bits]
        fitted = fit_scale(values, nearest, peaks)
        if layout.scale == "e8m0":
            fitted = np.abs(fitted)
        parts.append(_ENCODE_SCALE[layout.scale](fitted))
        codes = (nearest(values * _inverse(_DECODE_SCALE[layout.scale](parts[0]))) + half).astype(
            np.uint8
        )
    parts.append(codes if layout.bits == 8 else pack_planes(codes, 4, run=1))
    return np.concatenate(parts, axis=1)


def _inverse(scales: Floats) -> Floats:
    """Return 1 / scales for quantization, or 0 where a scale is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


KERNEL_FORMATS: Final = tuple(
    grouped(bits, group, "f32", zero=zero, table=table) for bits, zero, table, group in KERNEL_IDS
)
