"""Mixtures of experts: their matrices as stacks, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from twostroke.backends.gpu.kernels import pointwise, product, products_packed, routing
from twostroke.backends.gpu.kernels.packed import PackedMatrix, pack_stack
from twostroke.backends.gpu.kernels.products_tiles import SAME_ROWS
from twostroke.backends.gpu.kernels.routing import Grouped
from twostroke.backends.gpu.stored import is_stack_packed, stacks_of
from twostroke.core.frozen import Frozen
from twostroke.model.quant import QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from twostroke.backends.gpu.kernels.common import Parts
    from twostroke.backends.gpu.launch import Gpu
    from twostroke.model.program import ops

    Convert = Callable[[QuantTensor, Tensor], None]

_MOST_ROWS: Final = 128  # of a block of dense products


class ExpertWeights(Frozen, eq=False):
    """A mixture's matrices on the device, each stack (experts, outputs, inputs).

    `wide` are gates and, below them, ups in one stack; or two stacks if formats differ.
    """

    wide: tuple[Tensor | PackedMatrix, ...]
    down: Tensor | PackedMatrix

    @property
    def stacks(self) -> tuple[Tensor | PackedMatrix, ...]:
        """All of them."""
        return *self.wide, self.down

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(x.num_bytes if isinstance(x, PackedMatrix) else x.nbytes for x in self.stacks)


class Values(Frozen, eq=False):
    """What a mixture reads and writes.

    `x` is (rows, width), and `scores` come with their bias; `choice` says what they mean. `routes`
    is int32. Of each pair of row and expert, `hidden` has gates and ups, `gated` (pairs, ffn_width)
    the input of the last product in the element type, and `terms` its result times the share.
    """

    x: Tensor
    scores: tuple[Parts, Tensor | None]
    choice: routing.ExpertSelection
    routes: Tensor
    hidden: Parts
    gated: Tensor
    terms: Parts


def load(
    gpu: Gpu, op: ops.MixtureOfExperts, tensors: Mapping[str, QuantTensor], convert: Convert
) -> ExpertWeights:
    """Bring a mixture's matrices to the device.

    A stack of one format that kernels read stays packed; `convert` writes the matrices of others.
    """
    *wide, down = (_stack(gpu, stack, convert) for stack in stacks_of(op, tensors))
    return ExpertWeights(tuple(wide), down)


def launch(
    gpu: Gpu,
    header: Tensor,
    num_rows: int,
    op: ops.MixtureOfExperts,
    weights: ExpertWeights,
    values: Values,
) -> None:
    """Write the terms of `num_rows` rows; their reader adds up those of a row."""
    packed = [stack for stack in weights.stacks if isinstance(stack, PackedMatrix)]
    most = [products_packed.most_in_block(gpu, stack) for stack in packed]
    least = 8 if len(packed) == len(weights.stacks) else 16
    limits = least, min(most, default=_MOST_ROWS)
    if gpu.same_tokens:  # one block, whatever else is in the step
        limits = (SAME_ROWS,) * 2
    routes = routing.routes_in(values.routes, num_rows, len(op.experts), op.num_used, limits)
    routing.launch(gpu, header, num_rows, *values.scores, routes, values.choice)
    first = 0
    for stack in weights.wide:
        width = stack.width if isinstance(stack, PackedMatrix) else stack.shape[1]
        columns = values.hidden.columns(first, width)
        _multiply(gpu, values.x, stack, columns, Grouped(routes, op.num_used))
        first += width
    gate, up = (values.hidden.columns(at, op.ffn_width) for at in (0, op.ffn_width))
    given = num_rows * op.num_used, (gate, None), (up, None), op.activation, values.gated
    pointwise.activate(gpu, routes.header, *given)
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
    """Return a stack whose matrices have the outputs of all `experts[i]`, one below the other."""
    first = experts[0]
    width, depth = sum(tensor.shape[0] for tensor in first), first[0].shape[1]
    if is_stack_packed([tensor for parts in experts for tensor in parts]):
        joined = (
            QuantTensor(first[0].format, (width, depth), np.concatenate([t.data for t in parts]))
            for parts in experts
        )
        return pack_stack(joined, len(experts), gpu.device)
    shape = len(experts), width, depth
    stack = torch.empty(shape, dtype=gpu.element, device=gpu.device)
    for matrix, parts in zip(stack, experts, strict=True):
        at = 0
        for tensor in parts:
            convert(tensor, matrix[at : at + tensor.shape[0]])
            at += tensor.shape[0]
    return stack
