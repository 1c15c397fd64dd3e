"""How weights lie on a GPU, and how many bytes they take there; needs no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.model.program import Program
    from twostroke.model.quant import Format, QuantTensor

    Matrix = tuple["PackedLayout", int, int]  # that is packed: outputs and inputs

TILE_OUTPUTS: Final = 64
TILE_INPUTS: Final = 256
_SCALE_TYPES: Final = ("F16", "BF16", "F32")


class PackedLayout(Frozen):
    """How the codes of a format become values.

    `bits` is 4, 5, 6 or 8, and `columns` the inputs of a plane. `group` inputs share a scale.
    `half` is subtracted from codes. `scales` names what the scales are: values, "f16", "bf16" or
    "f32", with `offset` None, "minimum" (added) or "zero" (a code, subtracted before the product);
    or the headers of blocks, "k" (Q4_K, Q5_K) and "q6_k". With the table "e4m3" codes are its
    numbers, and with `has_row_scales` all groups of an output have one scale.
    """

    bits: int
    group: int
    half: int = 0
    scales: str = "f16"
    offset: str | None = None
    table: str | None = None
    has_row_scales: bool = False

    @property
    def columns(self) -> int:
        """Inputs of a plane."""
        return 16 if self.group == 16 else 32

    @property
    def planes(self) -> int:
        """Planes of a word."""
        return 2 if self.bits == 8 else 4

    @property
    def steps(self) -> int:
        """Words for each output and column of a tile."""
        return TILE_INPUTS // (self.planes * self.columns)


def packed_bytes(layout: PackedLayout, width: int, depth: int) -> int:
    """Return how many bytes a matrix takes, padded, with scales and offsets."""
    has_headers = layout.scales in {"k", "q6_k"}
    tile = TILE_INPUTS * layout.bits // 8  # bytes of an output
    groups = TILE_INPUTS // layout.group
    tile += 16 if has_headers else groups * (4 if layout.scales == "f32" else 2)
    tile += 4 if layout.scales == "q6_k" else 2 * groups * (layout.offset is not None)
    outputs = -(-width // TILE_OUTPUTS) * TILE_OUTPUTS
    return outputs * -(-depth // TILE_INPUTS) * tile


def layout_of(fmt: Format, depth: int) -> PackedLayout | None:
    """Return the layout of a format in rows of `depth` values; None for those without kernels."""
    if fmt.name in _LAYOUTS:
        return _LAYOUTS[fmt.name]
    match = grouped_of(fmt)
    table = "e4m3" if fmt.name.startswith("E4M3_") else None
    if match is None and table is None:
        return None
    bits, has_zero = match or (8, False)
    group = fmt.group_size
    is_row = group == depth
    scales = "f32" if table else fmt.name.split("_")[2].lower()
    if is_row or group % TILE_INPUTS == 0:  # each tile has a copy, or two, since some are in pairs
        group = TILE_INPUTS if scales == "f32" and not has_zero else TILE_INPUTS // 2
    if TILE_INPUTS % group or group < 32:
        return None
    if table:
        return PackedLayout(bits, group, scales=scales, table=table, has_row_scales=is_row)
    half = 0 if has_zero or bits == 8 else 8
    return PackedLayout(bits, group, half, scales, offset="zero" if has_zero else None)


def grouped_of(fmt: Format) -> tuple[int, bool] | None:
    """Return bits and whether there are zero points, of formats that `quant.grouped` made."""
    parts = fmt.name.split("_")
    if parts[0] not in ("INT4", "INT8") or parts[2] not in _SCALE_TYPES:
        return None
    has_zero = parts[-1] == "Z"
    bits = int(parts[0][3:])
    return None if bits == 8 and has_zero else (bits, has_zero)


def matrix_layout(tensor: QuantTensor) -> PackedLayout | None:
    """Return how a matrix stays packed; None if it does not."""
    return None if tensor.order is not None else layout_of(tensor.format, tensor.shape[-1])


def together(matrices: Sequence[Matrix | None]) -> list[list[int]]:
    """Return which neighbours are multiplied as one matrix; None is one that is not packed.

    They are packed alike, and each ends with a whole tile.
    """
    runs: list[list[int]] = []
    for index, matrix in enumerate(matrices):
        before = matrices[index - 1] if index else None
        if before and matrix and before[0] == matrix[0] and before[1] % TILE_OUTPUTS == 0:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def stacks_of(
    op: ops.MixtureOfExperts, tensors: Mapping[str, QuantTensor]
) -> list[list[tuple[QuantTensor, ...]]]:
    """Return the matrices of each stack by expert, those of the downs last.

    A gate and an up are neighbours in one stack, unless formats keep them apart.
    """
    gates, ups, downs = (
        [tensors[getattr(expert, part)] for expert in op.experts] for part in ("gate", "up", "down")
    )
    if is_stack_packed(gates) == is_stack_packed(ups) == is_stack_packed([*gates, *ups]):
        return [list(zip(gates, ups, strict=True)), [(tensor,) for tensor in downs]]
    return [[(tensor,) for tensor in part] for part in (gates, ups, downs)]


def is_stack_packed(tensors: Sequence[QuantTensor]) -> bool:
    """Whether a stack of these stays packed: all columns must be in the order of the inputs."""
    (fmt, *others) = {tensor.format.name: tensor.format for tensor in tensors}.values()
    is_plain = not others and all(tensor.order is None for tensor in tensors)
    return is_plain and layout_of(fmt, tensors[0].shape[-1]) is not None


def device_bytes(program: Program, tensors: Mapping[str, QuantTensor]) -> dict[str, int]:
    """Return about how many bytes each weight takes on the device.

    Packed are those in a format that kernels read, of experts if their whole stack has it; those
    of heads are not.
    """
    heads = [op.matrices for op in program.ops if isinstance(op, ops.HeadLinear)]
    mixes = [op for op in program.ops if isinstance(op, ops.MixtureOfExperts)]
    stacks = [sum(stack, ()) for op in mixes for stack in stacks_of(op, tensors)]
    unlike = {id(one) for stack in stacks if not is_stack_packed(stack) for one in stack}
    unlike |= {id(tensors[name]) for matrices in heads for name in matrices}
    return {
        name: packed_bytes(layout, *tensor.shape)
        if (layout := matrix_layout(tensor)) and id(tensor) not in unlike
        else tensor.num_values * (2 if len(tensor.shape) > 1 else 4)
        for name, tensor in tensors.items()
    }


_LAYOUTS: Final = {
    "Q4_0": PackedLayout(4, 32, half=8),
    "Q4_1": PackedLayout(4, 32, offset="minimum"),
    "Q8_0": PackedLayout(8, 32),
    "Q4_K": PackedLayout(4, 32, scales="k"),
    "Q5_K": PackedLayout(5, 32, scales="k"),
    "Q6_K": PackedLayout(6, 16, half=32, scales="q6_k"),
}
