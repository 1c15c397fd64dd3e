"""Turns codes, scales and zero points of published folders into tensors of our formats.

Integer codes become one tensor of a grouped format. Floats of 8 and 4 bits (FP8, MXFP8, NVFP4,
MXFP4) keep their codes where our formats can express their scales. Matrices whose columns were
sorted by their groups ("act-order") are put in order: the inputs of a feed-forward's last matrix
are the outputs of the two before it, whose rows take the same order, so no value changes. Other
matrices read normalized rows or merged heads, which other operations read too: such a matrix keeps
its order, and kernels gather its inputs.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS, QuantTensor, assemble, e4m3_tensor, grouped
from twostroke.model.quant.floats import E2M1, E4M3, E8M0

if TYPE_CHECKING:
    from collections.abc import Mapping
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


# A matrix whose inputs are the products of others' outputs: these, by the last part of their names.
_PRODUCERS = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}


def place_columns(
    tensors: Mapping[str, QuantTensor], orders: Mapping[str, NDArray[Any]]
) -> dict[str, QuantTensor]:
    """Return tensors by name that know which inputs their columns belong to.

    Column i of the matrix `name` in `orders` belongs to the input `orders[name][i]`.
    """
    placed = dict(tensors)
    for name, order in orders.items():
        scope, _, last = name.removesuffix(".weight").rpartition(".")
        producers = [f"{scope}.{part}" for part in _PRODUCERS.get(last, ())]
        fits = all(
            f"{p}.weight" in tensors and tensors[f"{p}.weight"].shape[0] == len(order)
            for p in producers
        )
        if producers and fits:
            for producer in producers:
                tensor = placed[f"{producer}.weight"]
                placed[f"{producer}.weight"] = replace(tensor, data=tensor.data[order])
        else:
            placed[name] = replace(placed[name], order=order.astype(np.int32))
    return placed


def fp8_matrix(codes: Bytes, scales: Floats, size: tuple[int, int]) -> QuantTensor:
    """Return E4M3 (outputs, inputs) times a scale for each block of `size`.

    It stays E4M3, unless a row has a block that is cut: then it is bfloat16 where that is exact,
    else float32.
    """
    outputs, inputs = codes.shape
    rows, columns = min(size[0], outputs), min(size[1], inputs)
    scales = np.repeat(scales, rows, axis=0)[:outputs]
    if inputs % columns == 0:
        return e4m3_tensor(codes, scales)
    with np.errstate(over="ignore", invalid="ignore"):
        return exact_floats(E4M3[codes] * np.repeat(scales, columns, axis=1)[:, :inputs])


def fp4_codes(packed: Bytes, scales: Scales, size: int) -> Coded:
    """Return E2M1 uint8 (outputs, inputs / 2), the first of two in the low bits, and scales."""
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
    codes = pairs.reshape(len(packed), -1)
    return Coded(codes, 4, scales, None, np.arange(codes.shape[1]) // size, "e2m1")


def float32_scales(values: Floats) -> Scales:
    """Return float32 values as scales."""
    return Scales("f32", np.ascontiguousarray(values, dtype=np.float32).view(np.uint32))
