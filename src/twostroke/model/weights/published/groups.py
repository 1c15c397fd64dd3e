"""Converts codes, scales and zero points of published models to tensors of our formats.

Integer codes become one tensor of a grouped format. Floats of 8 and 4 bits (FP8, MXFP8, NVFP4,
MXFP4) keep their codes where our formats can express their scales.

GPTQ may sort a matrix's columns by their groups ("act-order"). For the last matrix of a
feed-forward, this order is moved to the two matrices before it: their outputs are its inputs, so
their rows are reordered, and no value changes. For other matrices this is impossible, since other
operations read the same inputs. Such a matrix keeps its order, and kernels gather its inputs.
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

_LOW_HALF = np.uint32(0xFFFF)  # bits of a float32 that bfloat16 does not have


class Scales(Frozen, eq=False):
    """The quantization scales (rows, columns) of a matrix, as their file stores them.

    `raw` has the bits of each scale as an integer, and `kind` names the number format.
    """

    kind: str  # the name of a scale type of `grouped`
    raw: NDArray[Any]

    def transposed(self) -> Scales:
        """Return the quantization scales with rows and columns exchanged."""
        return Scales(self.kind, self.raw.T)

    def columns(self, indexes: NDArray[Any]) -> Scales:
        """Return the columns of the scales at `indexes`."""
        return Scales(self.kind, self.raw[:, indexes])


class CodedMatrix(Frozen, eq=False):
    """A matrix (outputs, inputs) as a quantized model stores it: codes, scales and zero points.

    A weight is (code - zero point) * scale. `zeros` is uint8 (outputs, groups); None: all zero
    points are in the middle of the codes' range. `scales` and `zeros` may have one row for all
    outputs. `group_of` (inputs,) is the group of each input. With the `table` "e2m1", codes stand
    for E2M1 floats.
    """

    codes: Bytes
    bits: int
    scales: Scales
    zeros: Bytes | None
    group_of: NDArray[Any]
    table: str | None = None


class AssembledMatrix(Frozen, eq=False):
    """A quantized weight tensor, whose columns may be in another order than the layer's inputs.

    Column i belongs to the input `order[i]`, or to input i if `order` is None.
    """

    tensor: QuantTensor
    order: NDArray[Any] | None = None


def assemble_groups(coded: CodedMatrix) -> AssembledMatrix:
    """Convert a quantized model's matrix to a number format of the kernels, with the same values.

    Inputs are sorted by their groups, if they are not sorted yet. A matrix that no such format can
    express becomes floats: if groups are not multiples of 32 inputs, or if zero points have 8 bits.
    """
    order = None
    groups, codes = coded.group_of, coded.codes
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable")
        groups, codes = groups[order], codes[:, order]
    block = _block_size(groups, 16 if coded.table else 32)
    codes, zeros = _widen_codes(codes, coded)
    if block is None or (zeros is not None and coded.bits > 4):
        return AssembledMatrix(exact_floats(coded_values(coded)))
    group_of_block = groups[::block]
    outputs = len(codes)
    raw = np.broadcast_to(coded.scales.raw[:, group_of_block], (outputs, len(group_of_block)))
    scales = np.ascontiguousarray(raw)[:, :, None].view(np.uint8)
    if zeros is not None:
        zeros = np.broadcast_to(zeros[:, group_of_block], raw.shape)
    bits = 4 if coded.bits <= 4 else 8
    fmt = grouped(bits, block, coded.scales.kind, zero=zeros is not None, table=coded.table)
    return AssembledMatrix(assemble(fmt, codes, scales, zeros), order)


def coded_values(coded: CodedMatrix) -> Floats:
    """Dequantize a matrix of codes to float32 (outputs, inputs), in the inputs' order."""
    groups = coded.group_of
    if coded.table:
        values = E2M1[coded.codes]
    else:
        values = coded.codes.astype(np.float32)
        values -= 1 << (coded.bits - 1) if coded.zeros is None else coded.zeros[:, groups]
    with np.errstate(over="ignore", invalid="ignore"):
        values *= scale_values(coded.scales)[:, groups]
    return values


def scale_values(scales: Scales) -> Floats:
    """Convert quantization scales to float32."""
    raw = np.ascontiguousarray(scales.raw).view(np.uint8)
    if scales.kind == "e8m0":
        return E8M0[raw]
    return FORMATS[scales.kind.upper()].dequantize(raw)


def exact_floats(values: Floats) -> QuantTensor:
    """Return values as a bfloat16 tensor if that loses nothing, else as a float32 tensor."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    exact = not (values.view(np.uint32) & _LOW_HALF).any()
    return QuantTensor.from_floats(values, FORMATS["BF16" if exact else "F32"])


def _widen_codes(codes: Bytes, coded: CodedMatrix) -> tuple[Bytes, Bytes | None]:
    """Convert codes and zero points to 4 or 8 bits, the sizes that number formats have.

    Returned zero points are None if all are in the middle of the codes' range.
    """
    middle = 1 << (coded.bits - 1)
    zeros = coded.zeros
    if zeros is not None and (zeros == middle).all():
        zeros = None
    shift = (8 if coded.bits <= 4 else 128) - middle
    if shift and zeros is None:
        codes = codes + np.uint8(shift)
    return codes, zeros


def _block_size(groups: NDArray[Any], min_block: int) -> int | None:
    """Return the largest group size of a number format that divides all groups of a matrix.

    `groups` (inputs,) is the group of each input, in order. Kernels take multiples of 32 inputs.
    Returns None if no size is possible.
    """
    inputs = len(groups)
    if inputs % 32:
        return None
    edges = np.flatnonzero(np.diff(groups)) + 1
    run = gcd(inputs, *map(int, edges))
    for size in (run, 128, 64, 32, min_block):
        whole_row = size == inputs and size % 16 == 0
        if run % size == 0 and (whole_row or size % 128 == 0 or size in {96, 64, 32, min_block}):
            return size
    return None


# Matrices whose outputs are the inputs of a feed-forward's last matrix, by their short names.
_PRODUCERS = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3")}


def reorder_columns(
    tensors: Mapping[str, QuantTensor], orders: Mapping[str, NDArray[Any]]
) -> dict[str, QuantTensor]:
    """Undo, where possible, the sorting of some matrices' inputs.

    Column i of the matrix `name` in `orders` belongs to the input `orders[name][i]`. If the inputs
    are the outputs of other matrices alone (gate and up compute the inputs of down), the rows of
    these matrices are put in the same order. Otherwise the tensor gets the order as
    `QuantTensor.order`.
    """
    reordered = dict(tensors)
    for name, order in orders.items():
        scope, _, last = name.removesuffix(".weight").rpartition(".")
        producers = [f"{scope}.{part}" for part in _PRODUCERS.get(last, ())]
        fits = all(
            f"{p}.weight" in tensors and tensors[f"{p}.weight"].shape[0] == len(order)
            for p in producers
        )
        if producers and fits:
            for producer in producers:
                tensor = reordered[f"{producer}.weight"]
                reordered[f"{producer}.weight"] = replace(tensor, data=tensor.data[order])
        else:
            reordered[name] = replace(reordered[name], order=order.astype(np.int32))
    return reordered


def fp8_matrix(codes: Bytes, scales: Floats, size: tuple[int, int]) -> QuantTensor:
    """Return an FP8 matrix: E4M3 codes (outputs, inputs) times a scale for each block of `size`.

    The tensor keeps E4M3, unless a row ends inside a block: then it is bfloat16 if that loses
    nothing, else float32.
    """
    outputs, inputs = codes.shape
    rows, columns = min(size[0], outputs), min(size[1], inputs)
    scales = np.repeat(scales, rows, axis=0)[:outputs]
    if inputs % columns == 0:
        return e4m3_tensor(codes, scales)
    with np.errstate(over="ignore", invalid="ignore"):
        return exact_floats(E4M3[codes] * np.repeat(scales, columns, axis=1)[:, :inputs])


def fp4_codes(packed: Bytes, scales: Scales, size: int) -> CodedMatrix:
    """Return a matrix of FP4 (E2M1) codes, which are packed two in a byte.

    The first of two codes is in the low bits. `packed` is uint8 (outputs, inputs / 2); a group has
    `size` inputs.
    """
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
    codes = pairs.reshape(len(packed), -1)
    return CodedMatrix(
        codes=codes,
        bits=4,
        scales=scales,
        zeros=None,
        group_of=np.arange(codes.shape[1]) // size,
        table="e2m1",
    )


def float32_scales(values: Floats) -> Scales:
    """Return float32 values as quantization scales."""
    return Scales("f32", np.ascontiguousarray(values, dtype=np.float32).view(np.uint32))
