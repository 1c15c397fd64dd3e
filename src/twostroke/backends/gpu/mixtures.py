"""Mixtures of experts: their weights as stacks of matrices, and the launches of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from twostroke.backends.gpu.kernels import pointwise, product, products_packed, routing
from twostroke.backends.gpu.kernels.packed import PackedMatrix, pack_stack
from twostroke.backends.gpu.kernels.products_tiles import SAME_ROWS
from twostroke.backends.gpu.kernels.routing import Grouped
from twostroke.backends.gpu.weight_layout import is_stack_packed, stacks_of
from twostroke.core.frozen import Frozen
from twostroke.model.quant import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.model.program import ops

    Convert = Callable[[QuantTensor, Tensor], None]

_MAX_ROWS: Final = 128  # rows of a block of dense products


class ExpertWeights(Frozen, eq=False):
    """The matrices of a mixture of experts in GPU memory, as stacks (experts, outputs, inputs).

    `wide`: the gate and up matrices. They are one stack, in which an expert's outputs are its
    gates, then its ups; or two stacks if their formats differ.
    """

    wide: tuple[Tensor | PackedMatrix, ...]
    down: Tensor | PackedMatrix

    @property
    def stacks(self) -> tuple[Tensor | PackedMatrix, ...]:
        """Return all stacks of the mixture's matrices."""
        return *self.wide, self.down

    @property
    def num_bytes(self) -> int:
        """Return the bytes of GPU memory of the mixture's matrices."""
        return sum(x.num_bytes if isinstance(x, PackedMatrix) else x.nbytes for x in self.stacks)


class MixtureValues(Frozen, eq=False):
    """The inputs, outputs and intermediate values of a mixture of experts in a step.

    - `x`: (rows, width). `scores`: the router's scores, with bias. `selection`: how scores choose
      experts.
    - `routes`: int32 memory for the (row, expert) pairs.
    - `hidden`: gates and ups of each pair. `gated`: (pairs, ffn_width), the input of the last
      product, in the element type. `terms`: the result of each pair times its weight.
    """

    x: Tensor
    scores: tuple[Parts, Tensor | None]
    selection: routing.ExpertSelection
    routes: Tensor
    hidden: Parts
    gated: Tensor
    terms: Parts


def load(
    gpu: Gpu, op: ops.MixtureOfExperts, tensors: Mapping[str, QuantTensor], convert: Convert
) -> ExpertWeights:
    """Copy the matrices of a mixture of experts to the GPU.

    A stack stays packed if all its matrices have the same format, which kernels read. Matrices of
    other stacks are converted by `convert`.
    """
    *wide, down = (_stack(gpu, stack, convert) for stack in stacks_of(op, tensors))
    return ExpertWeights(tuple(wide), down)


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    op: ops.MixtureOfExperts,
    weights: ExpertWeights,
    values: MixtureValues,
) -> None:
    """Launch a mixture of experts for `num_rows` rows.

    Writes each expert's weighted output for each row; the reader adds the outputs of a row.
    """
    packed = [stack for stack in weights.stacks if isinstance(stack, PackedMatrix)]
    max_block_rows = [products_packed.max_block_rows(gpu, stack) for stack in packed]
    min_block_rows = 8 if len(packed) == len(weights.stacks) else 16
    limits = min_block_rows, min(max_block_rows, default=_MAX_ROWS)
    if gpu.same_tokens:  # the same block for all steps
        limits = (SAME_ROWS,) * 2
    routes = routing.divide_memory(values.routes, num_rows, len(op.experts), op.num_used, limits)
    scores, bias = values.scores
    routing.launch(
        gpu,
        header,
        num_rows,
        scores=scores,
        bias=bias,
        routes=routes,
        choice=values.selection,
    )
    first = 0
    for stack in weights.wide:
        width = stack.width if isinstance(stack, PackedMatrix) else stack.shape[1]
        columns = values.hidden.columns(first, width)
        _multiply(gpu, values.x, stack, columns, Grouped(routes, op.num_used))
        first += width
    gate, up = (values.hidden.columns(at, op.ffn_width) for at in (0, op.ffn_width))
    pointwise.activate(
        gpu,
        routes.header,
        num_rows=num_rows * op.num_used,
        gate=(gate, None),
        up=(up, None),
        activation=op.activation,
        output=values.gated,
    )
    rows = Grouped(routes, 1, is_shared=True)
    _multiply(gpu, values.gated, weights.down, values.terms, rows)


def _multiply(
    gpu: Gpu, x: Tensor, stack: Tensor | PackedMatrix, output: Parts, rows: Grouped
) -> None:
    if isinstance(stack, PackedMatrix):
        products_packed.launch_grouped(gpu, x, stack, output, rows)
    else:
        product.launch_grouped(gpu, x, stack, output, rows)


def _stack(
    gpu: Gpu, experts: Sequence[tuple[QuantTensor, ...]], convert: Convert
) -> Tensor | PackedMatrix:
    """Load a stack of experts' matrices.

    Matrix i has the outputs of all tensors of `experts[i]`.
    """
    first = experts[0]
    width, depth = sum(tensor.shape[0] for tensor in first), first[0].shape[1]
    if is_stack_packed([tensor for tensors_of_expert in experts for tensor in tensors_of_expert]):
        joined = (
            QuantTensor(
                first[0].format, (width, depth), np.concatenate([t.data for t in tensors_of_expert])
            )
            for tensors_of_expert in experts
        )
        return pack_stack(joined, len(experts), gpu.device)
    shape = len(experts), width, depth
    stack = torch.empty(shape, dtype=gpu.element, device=gpu.device)
    for matrix, tensors_of_expert in zip(stack, experts, strict=True):
        first_row = 0
        for tensor in tensors_of_expert:
            convert(tensor, matrix[first_row : first_row + tensor.shape[0]])
            first_row += tensor.shape[0]
    return stack
