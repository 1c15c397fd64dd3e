"""Quantized blocks for tests: random blocks, and the integers and scales in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.model.quant import FORMATS_BY_KERNEL_ID
from twostroke.model.quant.floats import E2M1
from twostroke.model.quant.format import unpack_planes
from twostroke.model.quant.grouped import KERNEL_FORMATS
from twostroke.model.quant.iq_quants import CODEBOOKS, IQ4_LEVELS
from twostroke.model.quant.k_quants import unpack_scales
from twostroke.model.quant.legacy_quants import unpack_codes

if TYPE_CHECKING:
    from twostroke.model.quant.iq_quants import Codebook

FORMATS = {fmt.name: fmt for fmt in FORMATS_BY_KERNEL_ID.values()}
GROUPED = {fmt.name for fmt in KERNEL_FORMATS}
BOOKS = {codebook.name: codebook for codebook in CODEBOOKS}
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "TQ2_0": (64,), **dict.fromkeys(BOOKS, (0,)),
}  # fmt: skip


class Parts(Frozen):
    """The parts of quantized blocks: a weight is scale * quant + minimum.

    Integer products multiply the quants. `scales` and `minimums` are float32 (outputs, sub-blocks),
    `quants` int64 (outputs, sub-blocks, inputs of a sub-block).
    """

    scales: np.ndarray
    minimums: np.ndarray
    quants: np.ndarray

    def weights(self) -> np.ndarray:
        """Return float32 (outputs, inputs)."""
        weights: np.ndarray = self.quants.astype(np.float32) * self.scales[..., None]
        if self.minimums.size:
            weights = weights + self.minimums[..., None]
        return weights.reshape(len(weights), -1)


def random_source(name: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return random blocks (outputs, bytes), with extreme codes and scales of all signs."""
    fmt = FORMATS[name]
    source = rng.integers(0, 256, (shape[0], fmt.num_bytes(shape[1])), dtype=np.uint8)
    source[rng.random(source.shape) < 0.1] = 0xFF
    source[rng.random(source.shape) < 0.1] = 0x00
    source[rng.random(source.shape) < 0.05] = 0x80
    set_halves(name, source, rng)
    return source


def set_halves(name: str, source: np.ndarray, rng: np.random.Generator) -> None:
    """Write float16 scales into the blocks, some of them zero, some the smallest subnormal."""
    blocks = source.reshape(-1, FORMATS[name].block_bytes)
    if name in GROUPED:
        scales = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float32)
        scales[rng.random(len(blocks)) < 0.05] = 0
        blocks[:, :4] = scales[:, None].view(np.uint8)
        if name.endswith("_Z"):
            blocks[:, 4] %= 17  # GPTQ stores zero points less one
        return
    if codebook := BOOKS.get(name):
        blocks[:, 2 : 2 + codebook.num_groups] %= 32
        codes = blocks[:, 2 + codebook.num_groups :]
        codes %= len(codebook.levels)
        codes[codebook.levels[codes] == 0] = (
            0  # three magnitudes in two bits: the fourth is in no file
        )
    for start in HALVES[name]:
        halves = (rng.standard_normal(len(blocks)) * 0.02).astype(np.float16)
        halves[rng.random(len(blocks)) < 0.05] = 0
        halves[rng.random(len(blocks)) < 0.05] = np.float16(6e-8)
        blocks[:, start : start + 2] = halves[:, None].view(np.uint8)


def take_apart(name: str, source: np.ndarray) -> Parts:
    """Return the parts of blocks (outputs, bytes)."""
    if name in GROUPED:
        return take_groups_apart(name, source)
    if codebook := BOOKS.get(name):
        return take_book_apart(codebook, source)
    blocks = source.reshape(-1, FORMATS[name].block_bytes)
    halves = [
        np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
        for start in HALVES[name]
    ]
    quants = quants_of(name, blocks)
    scale_steps, minimum_steps = steps_of(name, blocks)
    scales = halves[0] * scale_steps.astype(np.float32)
    minimums = np.zeros((0, 0), np.float32)
    if len(halves) == 2:
        sign = -1 if name.endswith("_K") else 1
        minimums = sign * halves[1] * minimum_steps.astype(np.float32)
    outputs = len(source)
    return Parts(
        scales.reshape(outputs, -1),
        minimums.reshape(outputs, -1),
        quants.reshape(outputs, -1, quants.shape[1] // scales.shape[1]),
    )


def take_groups_apart(name: str, source: np.ndarray) -> Parts:
    """Return the parts of grouped weights; the scale of a group of 128 is repeated four times.

    A sub-block has 32 inputs.
    """
    fmt = FORMATS[name]
    blocks = source.reshape(-1, fmt.block_bytes)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    has_zero = name.endswith("_Z")
    codes = blocks[:, 4 + has_zero :]
    if not name.startswith("INT8"):
        codes = unpack_planes(codes, 4, run=1)
    if name.startswith("E2M1"):
        quants, scales = (2 * E2M1)[codes].astype(np.int64), scales * np.float32(0.5)
    else:
        half = 128 if name.startswith("INT8") else 8
        quants = codes.astype(np.int64) - (blocks[:, 4:5].astype(np.int64) if has_zero else half)
    size = min(fmt.block_size, 32)
    shared = np.repeat(scales, fmt.block_size // size, axis=1)
    outputs = len(source)
    return Parts(
        shared.reshape(outputs, -1),
        np.zeros((0, 0), np.float32),
        quants.reshape(outputs, -1, size),
    )


def take_book_apart(codebook: Codebook, source: np.ndarray) -> Parts:
    """Return the parts of a codebook format's blocks, in the form that the kernels use."""
    scales, codes = codebook.parts(source.reshape(-1, codebook.format.block_bytes))
    outputs = len(source)
    return Parts(
        scales.reshape(outputs, -1),
        np.zeros((0, 0), np.float32),
        codebook.levels[codes].astype(np.int64).reshape(outputs, -1, codebook.group),
    )


def quants_of(name: str, blocks: np.ndarray) -> np.ndarray:
    """Return the integers of blocks, int64 (blocks, values)."""
    match name:
        case "Q8_0":
            return blocks[:, 2:].view(np.int8).astype(np.int64)
        case "IQ4_NL" | "IQ4_XS":
            start = 2 if name == "IQ4_NL" else 8
            return IQ4_LEVELS[unpack_planes(blocks[:, start:], 4, run=16)].astype(np.int64)
        case "Q4_0" | "Q4_1":
            codes, offset = unpack_planes(blocks[:, -16:], 4, run=16), 8 * (name == "Q4_0")
        case "Q5_0" | "Q5_1":
            codes, offset = unpack_codes(blocks[:, -20:]), 16 * (name == "Q5_0")
        case "Q2_K":
            codes, offset = unpack_planes(blocks[:, 16:80], 2, run=32), 0
        case "Q3_K":
            codes, offset = unpack_planes(blocks[:, 32:96], 2, run=32), 4
            codes |= unpack_planes(blocks[:, :32], 1, run=32) << np.uint8(2)
        case "TQ2_0":
            codes, offset = unpack_planes(blocks[:, :64], 2, run=32), 1
        case "Q6_K":
            codes, offset = unpack_planes(blocks[:, :128], 4, run=64), 32
            codes |= unpack_planes(blocks[:, 128:192], 2, run=32) << np.uint8(4)
        case _:
            codes, offset = unpack_planes(blocks[:, -128:], 4, run=32), 0
            if name == "Q5_K":
                codes |= unpack_planes(blocks[:, 16:48], 1, run=32) << np.uint8(4)
    return codes.astype(np.int64) - offset


def steps_of(name: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers that multiply a block's float16 scale and minimum, by sub-block."""
    match name:
        case "Q2_K":
            return blocks[:, :16] & 15, blocks[:, :16] >> 4
        case "Q4_K" | "Q5_K":
            return unpack_scales(blocks[:, 4:16])
        case "Q6_K":
            steps = blocks[:, 192:208].view(np.int8)
        case "Q3_K":
            low = unpack_planes(blocks[:, 96:104], 4, run=8)
            high = unpack_planes(blocks[:, 104:108], 2, run=4)
            steps = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
        case "IQ4_XS":
            low = unpack_planes(blocks[:, 4:8], 4, run=1)
            high = unpack_planes(blocks[:, 2:4], 2, run=1)
            steps = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
        case "TQ2_0":
            steps = np.ones((len(blocks), 8), np.int8)
        case _:
            steps = np.ones((len(blocks), 1), np.int8)
    return steps, steps
