"""From codes, scales and zero points to one tensor of a grouped format."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS, QuantTensor, assemble, grouped
from twostroke.model.quant.small_floats import E2M1, E8M0

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.quant import Bytes, Floats

_LOW_HALF = np.uint32(0xFFFF)  # of a float32: zero where it is exact in bfloat16


class Scales(Frozen, eq=False):
    """Scales (rows, columns) as they are stored: integers with their bits, and their type."""

    kind: str  # a name that `grouped` knows
    raw: NDArray[Any]

    def transposed(self) -> Scales:
        """Return the same scales with rows and columns exchanged."""
        return Scales(self.kind, self.raw.T)

    def columns(self, which: NDArray[Any]) -> Scales:
        """Return some columns."""
        return Scales(self.kind, self.raw[:, which])


class Coded(Frozen, eq=False):
    """A matrix (outputs, inputs) of codes, as an assembler reads it.

    `zeros` uint8 (outputs, groups) are in the middle of the codes where there are none. `scales`
    and `zeros` may have one row for all outputs. `group_of` (inputs,) is the group of each input.
    With the table "e2m1" codes are its numbers.
    """

    codes: Bytes
    bits: int
    scales: Scales
    zeros: Bytes | None
    group_of: NDArray[Any]
    table: str | None = None


class Assembled(Frozen, eq=False):
    """A tensor, whose column i belongs to the input `order[i]`, or to the input i if it is None."""

    tensor: QuantTensor
    order: NDArray[Any] | None = None


def assemble_groups(coded: Coded) -> Assembled:
    """Return codes in a grouped format, bit for bit in value.

    Inputs are sorted by their groups, if they are not yet. What no grouped format holds becomes
    floats: groups that are not multiples of 32 inputs, and zero points of 8 bits.
    """
    order = None
    groups, codes = coded.group_of, coded.codes
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable")
        groups, codes = groups[order], codes[:, order]
    block = _block(groups, 16 if coded.table else 32)
    codes, zeros = _widened(codes, coded)
    if block is None or (zeros is not None and coded.bits > 4):
        return Assembled(exact_floats(coded_values(coded)))
    which = groups[::block]
    outputs = len(codes)
    raw = np.broadcast_to(coded.scales.raw[:, which], (outputs, len(which)))
    scales = np.ascontiguousarray(raw)[:, :, None].view(np.uint8)
    if zeros is not None:
        zeros = np.broadcast_to(zeros[:, which], raw.shape)
    bits = 4 if coded.bits <= 4 else 8
    fmt = grouped(bits, block, coded.scales.kind, zero=zeros is not None, table=coded.table)
    return Assembled(assemble(fmt, codes, scales, zeros), order)


def coded_values(coded: Coded) -> Floats:
    """Return the values of codes as float32 (outputs, inputs), in the inputs' order."""
    which = coded.group_of
    if coded.table:
        values = E2M1[coded.codes]
    else:
        values = coded.codes.astype(np.float32)
        values -= 1 << (coded.bits - 1) if coded.zeros is None else coded.zeros[:, which]
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scale_values(coded.scales)[:, which]
    return values


def scale_values(scales: Scales) -> Floats:
    """Return scales as float32."""
    raw = np.ascontiguousarray(scales.raw).view(np.uint8)
    if scales.kind == "e8m0":
        return E8M0[raw]
    return FORMATS[scales.kind.upper()].dequantize(raw)


def exact_floats(values: Floats) -> QuantTensor:
    """Return values as bfloat16 where that is exact, else as float32."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    exact = not (values.view(np.uint32) & _LOW_HALF).any()
    return QuantTensor.from_floats(values, FORMATS["BF16" if exact else "F32"])


def _widened(codes: Bytes, coded: Coded) -> tuple[Bytes, Bytes | None]:
    """Return codes and zero points for 4 or 8 bits; no zero points if all are in the middle."""
    middle = 1 << (coded.bits - 1)
    zeros = coded.zeros
    if zeros is not None and (zeros == middle).all():
        zeros = None
    shift = (8 if coded.bits <= 4 else 128) - middle
    if shift and zeros is None:
        codes = codes + np.uint8(shift)
    return codes, zeros


def _block(groups: NDArray[Any], least: int) -> int | None:
    """Return the inputs of a block that divides all runs of equal `groups`, None if none does.

    Kernels take multiples of 32 inputs.
    """
    inputs = len(groups)
    if inputs % 32:
        return None
    edges = np.flatnonzero(np.diff(groups)) + 1
    run = gcd(inputs, *map(int, edges))
    for size in (run, 128, 64, 32, least):
        whole_row = size == inputs and size % 16 == 0
        if run % size == 0 and (whole_row or size % 128 == 0 or size in {96, 64, 32, least}):
            return size
    return None
