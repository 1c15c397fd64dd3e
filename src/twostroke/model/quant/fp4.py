"""MXFP4 and NVFP4 of GGUF files: E2M1 numbers in groups that share a small float as scale."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant.floats import E4M3, E8M0, nearest_e4m3
from twostroke.model.quant.format import Bytes, Floats, Format, pack_planes, unpack_planes
from twostroke.model.quant.grouped import grouped

if TYPE_CHECKING:
    from collections.abc import Callable

_DOUBLED_MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], dtype=np.float32)  # doubled, as in ggml
_DOUBLED_MIDDLES = (_DOUBLED_MAGNITUDES[1:] + _DOUBLED_MAGNITUDES[:-1]) / 2


def _nv_scales() -> Floats:
    """Return the values of NVFP4's scale codes, as ggml reads them.

    They are E4M3 numbers without a sign, except code 0x7F, which is zero.
    """
    codes = np.arange(256) & 0x7F
    scales: Floats = E4M3[codes]
    scales[0x7F], scales[0xFF] = 0, 480
    return scales


class _Fp4Layout(Frozen, eq=False):
    """The layout of an MXFP4 or NVFP4 block: `num_groups` scales, then the groups' codes."""

    group: int
    num_groups: int
    scales: Floats  # the scale of each code
    nearest: Callable[[Floats], Bytes]  # returns scale codes for groups' largest magnitudes

    @property
    def kernel(self) -> Format:
        return grouped(4, self.group, "f32", table="e2m1")

    def to_kernel(self, data: Bytes) -> Bytes:
        """Convert rows of blocks, uint8 (rows, row_bytes), to the layout that kernels read."""
        size = self.num_groups + self.num_groups * self.group // 2
        blocks = data.reshape(-1, size)
        scales = self.scales[blocks[:, : self.num_groups]].reshape(-1, 1)
        packed = np.ascontiguousarray(blocks[:, self.num_groups :])
        codes = unpack_planes(packed, 4, run=self.group // 2).reshape(-1, self.group)
        groups = np.concatenate([scales.view(np.uint8), pack_planes(codes, 4, run=1)], axis=1)
        return groups.reshape(len(data), -1)


def _decode(layout: _Fp4Layout, blocks: Bytes) -> Floats:
    return layout.kernel.dequantize(layout.to_kernel(blocks))


def _encode(layout: _Fp4Layout, values: Floats) -> Bytes:
    groups = values.reshape(-1, layout.group)
    scales = layout.nearest(np.abs(groups).max(axis=1, keepdims=True))
    half_scales = layout.scales[scales] * np.float32(0.5)
    with np.errstate(divide="ignore", invalid="ignore"):
        doubled = np.where(half_scales > 0, groups / half_scales, np.float32(0))
    codes = np.searchsorted(_DOUBLED_MIDDLES, np.abs(doubled)).astype(np.uint8)
    codes |= np.where((doubled < 0) & (codes > 0), np.uint8(8), np.uint8(0))
    packed = pack_planes(codes, 4, run=layout.group // 2)
    parts = [part.reshape(len(values), -1) for part in (scales, packed)]
    return np.concatenate(parts, axis=1)


def _nearest_mx(largest: Floats) -> Bytes:
    """Return the MXFP4 scale code for the largest magnitude of each group.

    The scale is a power of two, chosen so that the magnitude divided by it is from 4 to below 8.
    """
    _, exponent = np.frexp(largest)
    codes: Bytes = np.where(largest > 0, exponent + 124, 0).astype(np.uint8)
    return codes


def _nearest_nv(largest: Floats) -> Bytes:
    return nearest_e4m3(largest / np.float32(6))


def _format(name: str, gguf_id: int, layout: _Fp4Layout) -> Format:
    return Format(
        name,
        kernel_id=layout.kernel.kernel_id,
        group_size=layout.group,
        block_size=layout.group * layout.num_groups,
        block_bytes=layout.num_groups + layout.group * layout.num_groups // 2,
        decode=partial(_decode, layout),
        encode=partial(_encode, layout),
        gguf_id=gguf_id,
        to_kernel=layout.to_kernel,
    )


MXFP4 = _format("MXFP4", 39, _Fp4Layout(32, 1, E8M0, _nearest_mx))
NVFP4 = _format("NVFP4", 40, _Fp4Layout(16, 4, _nv_scales(), _nearest_nv))
