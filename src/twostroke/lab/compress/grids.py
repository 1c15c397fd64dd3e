"""Block formats for rounding: the levels and scales of values, and packing into bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant.floats import encode_bfloat
from twostroke.model.quant.format import half_bytes, pack_planes
from twostroke.model.quant.iq_quants import IQ4_LEVELS, pack_iq4_xs
from twostroke.model.quant.k_quants import pack_q3_k, pack_q6_k, pack_super_blocks
from twostroke.model.quant.legacy_quants import pack_codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from twostroke.model.quant import Bytes, Floats

    Packer = Callable[[Floats, Floats, Bytes], Bytes]


class RoundedGroups(Frozen, eq=False):
    """A matrix rounded to a block format, as groups of values that share a scale.

    Attributes:
        levels: the rounded values in units of the scale, int8 (groups, values); if the format has a
            table of levels, indices into this table.
        scales: the groups' scales (groups, 1); in formats with super-blocks, whole multiples of
            `tops`.
        smallest: the groups' smallest values (groups, 1); in formats with super-blocks, whole
            multiples of `bottoms`.
        tops: scale of each super-block's scales (super-blocks, 1).
        bottoms: scale of each super-block's smallest values (super-blocks, 1).
    """

    levels: NDArray[np.int8]
    scales: Floats
    smallest: Floats
    tops: Floats
    bottoms: Floats

    @property
    def scale_multiples(self) -> Floats:
        """The groups' scales as whole multiples of `tops`.

        Shaped (super-blocks, groups of a super-block).
        """
        return _shares(self.scales, self.tops)

    @property
    def minimum_multiples(self) -> Floats:
        """The groups' negated smallest values as whole multiples of `bottoms`.

        Shaped (super-blocks, groups of a super-block).
        """
        return _shares(-self.smallest, self.bottoms)


class BlockGrid(Frozen):
    """The values that a block format can store, for rounding a matrix.

    A value is its group's scale times a level, plus the group's smallest value in formats that
    store one.

    Attributes:
        pack: converts a rounded matrix to bytes (blocks, block_bytes).
        low, high: range of levels that are whole numbers.
        peaks: levels that the value farthest from zero may get; each gives a candidate for the
            scale. Empty for formats with a smallest value.
        table: the levels of a format with uneven levels; empty if levels are whole numbers.
        group: how many values share a scale.
        num_groups: how many groups a super-block has.
        shares: range of the whole numbers that store the groups' scales in a super-block; a group's
            scale is its number times a float16.
        has_bfloat_scales: scales are bfloat16 instead of float16.
        has_whole_zeros: smallest values are whole multiples of the scale.
    """

    pack: Callable[[RoundedGroups], Bytes]
    low: int
    high: int
    peaks: tuple[float, ...] = ()
    table: tuple[float, ...] = ()
    group: int = 32
    num_groups: int = 1
    shares: tuple[int, int] = (0, 0)
    has_bfloat_scales: bool = False
    has_whole_zeros: bool = False


def _shares(values: Floats, units: Floats) -> Floats:
    rows = values.reshape(len(units), -1)
    return np.rint(np.divide(rows, units, out=np.zeros_like(rows), where=units != 0))


def _pack_around_zero(rounded: RoundedGroups, bits: int) -> Bytes:
    codes = rounded.levels.astype(np.float32) + np.float32(1 << (bits - 1))
    return np.concatenate([half_bytes(rounded.scales), pack_codes(codes, bits)], axis=1)


def _pack_from_smallest(rounded: RoundedGroups, bits: int) -> Bytes:
    codes = pack_codes(rounded.levels.astype(np.float32), bits)
    return np.concatenate([half_bytes(rounded.scales), half_bytes(rounded.smallest), codes], axis=1)


def _pack_bytes(rounded: RoundedGroups) -> Bytes:
    return np.concatenate([half_bytes(rounded.scales), rounded.levels.view(np.uint8)], axis=1)


def _pack_nl(rounded: RoundedGroups) -> Bytes:
    codes = pack_planes(rounded.levels.view(np.uint8), 4, run=16)
    return np.concatenate([half_bytes(rounded.scales), codes], axis=1)


def _pack_xs(rounded: RoundedGroups) -> Bytes:
    return pack_iq4_xs(
        rounded.tops, rounded.scale_multiples, rounded.levels.view(np.uint8).reshape(-1, 256)
    )


def _pack_k(rounded: RoundedGroups, bits: int) -> Bytes:
    shares = rounded.scale_multiples.astype(np.uint8), rounded.minimum_multiples.astype(np.uint8)
    codes = rounded.levels.view(np.uint8).reshape(-1, 256)
    return pack_super_blocks((rounded.tops, rounded.bottoms), shares, codes, bits)


def _pack_groups_of_16(rounded: RoundedGroups, half: int, pack: Packer) -> Bytes:
    codes = (rounded.levels + np.int8(half)).view(np.uint8).reshape(-1, 256)
    return pack(rounded.tops, rounded.scale_multiples, codes)


def _groups_of_16(half: int, pack: Packer, peaks: tuple[float, ...], max_share: int) -> BlockGrid:
    shares = -max_share, max_share - 1
    pack_levels = partial(_pack_groups_of_16, half=half, pack=pack)
    return BlockGrid(pack_levels, -half, half - 1, peaks, group=16, num_groups=16, shares=shares)


def group_grid(bits: int, group: int, dtype: str) -> BlockGrid:
    """Return the values to which compressed-tensors folders round: groups with F16 or BF16 scales.

    Groups of 4 bits have zero points, groups of 8 bits have none.
    """
    is_bfloat = dtype == "BF16"
    pack_scale = encode_bfloat if is_bfloat else half_bytes
    pack = partial(_pack_group, pack_scale=pack_scale, has_zeros=bits == 4)
    if bits == 4:
        return BlockGrid(
            pack, 0, 15, group=group, has_bfloat_scales=is_bfloat, has_whole_zeros=True
        )
    peaks = 127.0, 126.0, -128.0, -127.0
    return BlockGrid(pack, -128, 127, peaks, group=group, has_bfloat_scales=is_bfloat)


def _pack_group(
    rounded: RoundedGroups, pack_scale: Callable[[Floats], Bytes], *, has_zeros: bool
) -> Bytes:
    scales = pack_scale(rounded.scales)
    if not has_zeros:
        return np.concatenate([scales, rounded.levels.view(np.uint8) ^ np.uint8(0x80)], axis=1)
    zeros = _shares(-rounded.smallest, rounded.scales).astype(np.uint8)
    codes = pack_planes(rounded.levels.view(np.uint8), 4, run=1)
    return np.concatenate([scales, zeros, codes], axis=1)


def _peaks(half: int) -> tuple[float, ...]:
    peaks = tuple(-half * factor for factor in np.linspace(0.8, 1.25, 13).tolist())
    return peaks + tuple(half * factor for factor in np.linspace(0.8, 1.1, 7).tolist())


def _around_zero(bits: int) -> BlockGrid:
    half = 1 << (bits - 1)
    return BlockGrid(partial(_pack_around_zero, bits=bits), -half, half - 1, _peaks(half))


def _from_smallest(bits: int) -> BlockGrid:
    return BlockGrid(partial(_pack_from_smallest, bits=bits), 0, (1 << bits) - 1)


def _super_blocks(bits: int) -> BlockGrid:
    high = (1 << bits) - 1
    return BlockGrid(partial(_pack_k, bits=bits), 0, high, num_groups=8, shares=(0, 63))


_IQ4_TABLE = tuple(IQ4_LEVELS.tolist())
_IQ4_PEAKS = tuple(np.linspace(-165, -95, 15).tolist() + np.linspace(95, 145, 9).tolist())
_Q6_PEAKS = (-33.0, -32.5, -32.0, -31.5, -31.0, -30.5, -30.0, 31.0)

GRIDS = {
    "Q4_0": _around_zero(4),
    "Q4_1": _from_smallest(4),
    "Q5_0": _around_zero(5),
    "Q5_1": _from_smallest(5),
    "Q8_0": BlockGrid(_pack_bytes, -127, 127, (127.0, 126.0, 125.0)),
    "IQ4_NL": BlockGrid(_pack_nl, -127, 113, _IQ4_PEAKS, _IQ4_TABLE),
    "IQ4_XS": BlockGrid(
        _pack_xs, -127, 113, _IQ4_PEAKS, _IQ4_TABLE, num_groups=8, shares=(-32, 31)
    ),
    "Q3_K": _groups_of_16(4, pack_q3_k, _peaks(4), 32),
    "Q4_K": _super_blocks(4),
    "Q5_K": _super_blocks(5),
    "Q6_K": _groups_of_16(32, pack_q6_k, _Q6_PEAKS, 128),
}
