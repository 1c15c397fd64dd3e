"""Products of one input with several matrices, each by the kernel for its format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.backends.gpu.kernels import product, products_fp8, products_packed, products_tiles
from twostroke.backends.gpu.kernels.packed import PackedMatrix
from twostroke.backends.gpu.lowered import BufferType, Products
from twostroke.backends.gpu.weight_layout import runs_of_neighbours

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.kernels.products_fp8 import RoundedRows
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.gpu.lowered import GpuLowered
    from twostroke.backends.gpu.weight_layout import Matrix, PackedLayout


def scratch_bytes(
    gpu: Gpu, lowered: GpuLowered, packed: Mapping[str, Matrix], max_rows: int
) -> int:
    """Return the bytes of GPU scratch memory that products of up to `max_rows` rows need."""
    needed = [
        _needed(gpu, matrix, max_rows)
        for record in lowered.records
        if isinstance(record, Products) and lowered.buffers[record.output].kind is BufferType.PARTS
        for matrix in _joined([packed.get(name) for name in record.weights])
    ]
    return max(needed, default=0)


def in_parts(gpu: Gpu, lowered: GpuLowered, packed: Mapping[str, Matrix]) -> frozenset[int]:
    """Return the buffers whose products are partial sums even in steps with many rows.

    All matrices of such a product are multiplied by `products_tiles`; for many rows, other kernels
    write complete sums.
    """

    def is_alone(name: str) -> bool:
        return name in packed and not products_fp8.is_layout_supported(gpu, packed[name][0])

    return frozenset(
        record.output
        for record in lowered.records
        if isinstance(record, Products) and all(map(is_alone, record.weights))
    )


def _joined(matrices: list[Matrix | None]) -> Iterator[Matrix]:
    for run in runs_of_neighbours(matrices):
        if (first := matrices[run[0]]) is not None:
            width = sum(matrix[1] for i in run if (matrix := matrices[i]))
            yield first[0], width, first[2]


def _needed(gpu: Gpu, matrix: Matrix, max_rows: int) -> int:
    layout, width, depth = matrix
    if products_fp8.is_layout_supported(gpu, layout):
        return products_fp8.scratch_bytes(gpu, max_rows, matrix)
    if gpu.same_tokens or max_rows <= products_tiles.max_rows(gpu):
        return 0
    size: int = gpu.element.itemsize * width * depth
    return size


def multiply(
    gpu: Gpu,
    header: Tensor,
    rows: int,
    x: Tensor,
    factors: Sequence[Tensor | PackedMatrix],
    output: Parts,
    *,
    scratch: Tensor,
) -> None:
    """Launch the products of x with several matrices, whose outputs are side by side.

    Each matrix is multiplied by the kernel for its format. `scratch` is memory of `scratch_bytes`.
    """
    first = 0
    rounded: tuple[PackedLayout, RoundedRows] | None = None  # the rows in the scratch memory
    for matrix in factors:
        width = matrix.width if isinstance(matrix, PackedMatrix) else matrix.shape[0]
        columns = output.columns(first, width)
        first += width
        if not isinstance(matrix, PackedMatrix):
            product.launch(gpu, header, rows, x=x, weight=matrix, output=columns)
        elif products_fp8.is_supported(gpu, rows, matrix, columns):
            if rounded is None or rounded[0] != matrix.layout:
                rounded_rows = products_fp8.round_rows(
                    gpu, header, rows, x=x, layout=matrix.layout, scratch=scratch
                )
                rounded = matrix.layout, rounded_rows
            products_fp8.launch(gpu, header, rows, x=rounded[1], weight=matrix, output=columns)
        else:
            if products_packed.is_unpacked(gpu, rows, columns):
                rounded = None
            products_packed.launch(
                gpu, header, rows, x=x, weight=matrix, output=columns, scratch=scratch
            )
