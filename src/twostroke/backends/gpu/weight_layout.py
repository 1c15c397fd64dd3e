"""The layout of weights on a GPU, and the bytes that they take; needs no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.model.program import Program
    from twostroke.model.quant import Format, QuantTensor

    Matrix = tuple["PackedLayout", int, int]  # layout, outputs and inputs of a packed matrix

TILE_OUTPUTS: Final = 64
TILE_INPUTS: Final = 256
_SCALE_TYPES: Final = ("F16", "BF16", "F32")


class PackedLayout(Frozen):
    """How the codes of a quantization format are packed for GPU kernels, and converted to numbers.

    - `bits`: 4, 5, 6 or 8. `group`: the number of inputs that share a scale.
    - `half`: subtracted from codes.
    - `scales`: the type of scales, "f16", "bf16" or "f32"; or the kind of a block's header with
      scales, "k" (Q4_K, Q5_K) or "q6_k".
    - `offset`: None, "minimum" (added to scaled codes) or "zero" (subtracted from codes).
    - `table`: "e4m3" if codes are E4M3 numbers.
    - `has_row_scales`: all groups of an output have the same scale.
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
        """Return the number of inputs of a plane (codes at the same bits of a tile's words)."""
        return 16 if self.group == 16 else 32

    @property
    def planes(self) -> int:
        """Return the number of planes of a word: the codes that it holds."""
        return 2 if self.bits == 8 else 4

    @property
    def steps(self) -> int:
        """Return the number of words for each output and column of a tile of packed codes."""
        return TILE_INPUTS // (self.planes * self.columns)


def packed_bytes(layout: PackedLayout, width: int, depth: int) -> int:
    """Return the GPU bytes of a packed matrix, with padding, scales and offsets."""
    has_headers = layout.scales in {"k", "q6_k"}
    tile = TILE_INPUTS * layout.bits // 8  # bytes of an output
    groups = TILE_INPUTS // layout.group
    tile += 16 if has_headers else groups * (4 if layout.scales == "f32" else 2)
    tile += 4 if layout.scales == "q6_k" else 2 * groups * (layout.offset is not None)
    outputs = -(-width // TILE_OUTPUTS) * TILE_OUTPUTS
    return outputs * -(-depth // TILE_INPUTS) * tile


def layout_of(fmt: Format, depth: int) -> PackedLayout | None:
    """Return the packed layout of a quantization format, for rows of `depth` values.

    None if GPU kernels cannot read the format.
    """
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
    if is_row or group % TILE_INPUTS == 0:  # each tile has a copy of the scale, or a pair of copies
        group = TILE_INPUTS if scales == "f32" and not has_zero else TILE_INPUTS // 2
    if TILE_INPUTS % group or group < 32:
        return None
    if table:
        return PackedLayout(bits, group, scales=scales, table=table, has_row_scales=is_row)
    half = 0 if has_zero or bits == 8 else 8
    return PackedLayout(bits, group, half, scales, offset="zero" if has_zero else None)


def grouped_of(fmt: Format) -> tuple[int, bool] | None:
    """Return (bits, whether there are zero points) of a GPTQ-like grouped format, else None.

    The formats are defined in `quant.grouped`.
    """
    parts = fmt.name.split("_")
    if parts[0] not in ("INT4", "INT8") or parts[2] not in _SCALE_TYPES:
        return None
    has_zero = parts[-1] == "Z"
    bits = int(parts[0][3:])
    return None if bits == 8 and has_zero else (bits, has_zero)


def matrix_layout(tensor: QuantTensor) -> PackedLayout | None:
    """Return the packed layout of a matrix on the GPU; None if it is converted to 16 bits."""
    return None if tensor.order is not None else layout_of(tensor.format, tensor.shape[-1])


def runs_of_neighbours(matrices: Sequence[Matrix | None]) -> list[list[int]]:
    """Group neighbouring packed matrices that can be concatenated; return the groups' indices.

    The matrices of a group have the same layout, and all but the last end with a complete tile.
    None stands for a matrix that is not packed, which is a group by itself.
    """
    runs: list[list[int]] = []
    for index, matrix in enumerate(matrices):
        previous = matrices[index - 1] if index else None
        if previous and matrix and previous[0] == matrix[0] and previous[1] % TILE_OUTPUTS == 0:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def stacks_of(
    op: ops.MixtureOfExperts, tensors: Mapping[str, QuantTensor]
) -> list[list[tuple[QuantTensor, ...]]]:
    """Return a mixture's matrices by stack and expert; the last stack has the down matrices.

    Gate and up matrices are in one stack, unless only one of them can be packed.
    """
    gates, ups, downs = (
        [tensors[getattr(expert, part)] for expert in op.experts] for part in ("gate", "up", "down")
    )
    if is_stack_packed(gates) == is_stack_packed(ups) == is_stack_packed([*gates, *ups]):
        return [list(zip(gates, ups, strict=True)), [(tensor,) for tensor in downs]]
    return [[(tensor,) for tensor in part] for part in (gates, ups, downs)]


def is_stack_packed(tensors: Sequence[QuantTensor]) -> bool:
    """Return whether a stack of experts' matrices stays packed on the GPU.

    All must have one format, and columns in the order of inputs.
    """
    (fmt, *others) = {tensor.format.name: tensor.format for tensor in tensors}.values()
    is_plain = not others and all(tensor.order is None for tensor in tensors)
    return is_plain and layout_of(fmt, tensors[0].shape[-1]) is not None


def device_bytes(program: Program, tensors: Mapping[str, QuantTensor]) -> dict[str, int]:
    """Estimate the bytes of each weight in GPU memory, by name.

    Matrices in formats that kernels read stay packed. Matrices of experts do so only if their whole
    stack can, and the per-head matrices of latent attention never.
    """
    heads = [op.matrices for op in program.ops if isinstance(op, ops.HeadLinear)]
    mixes = [op for op in program.ops if isinstance(op, ops.MixtureOfExperts)]
    stacks = [sum(stack, ()) for op in mixes for stack in stacks_of(op, tensors)]
    not_packed = {id(tensor) for stack in stacks if not is_stack_packed(stack) for tensor in stack}
    not_packed |= {id(tensors[name]) for matrices in heads for name in matrices}
    return {
        name: packed_bytes(layout, *tensor.shape)
        if (layout := matrix_layout(tensor)) and id(tensor) not in not_packed
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
