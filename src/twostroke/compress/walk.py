"""Rounds a model's products in the order in which they run, each for the inputs that it will get.

The calibration text runs through the model once, one operation after another. A product's inputs
come from products that are already rounded, so later ones make up for the errors of earlier ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.reference.operations import PagedCache, StepState, apply
from twostroke.backends.spans import Span
from twostroke.compress.round import inverse_factor, round_matrix
from twostroke.program import ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.program import Program
    from twostroke.quant import Floats, QuantTensor


def round_products(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    formats: Mapping[str, str],
    pieces: Sequence[Sequence[int]],
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield the rounded weight of each Linear with its name, in the order of the Program.

    `formats` names each one's format (of GRIDS); other weights are used as `tensors` has them. The
    inputs of one operation for all of `pieces` are in memory at a time.
    """
    state = _state(program, pieces)
    last_use = {name: op for op in program.ops for name in op.inputs}
    values: dict[str, Floats] = {}
    known: tuple[str, np.ndarray] | None = None  # a value, and the factor of its moments
    for op in program.ops:
        if isinstance(op, ops.Logits):
            return
        own = {weight.name: tensors[weight.name] for weight in op.weights}
        if isinstance(op, ops.Linear) and op.weight in formats:
            if known is None or known[0] != op.x:
                known = op.x, inverse_factor(values[op.x])
            matrix = own[op.weight].dequantize()
            own[op.weight] = round_matrix(matrix, known[1], formats[op.weight])
            yield op.weight, own[op.weight]
        weights = {name: tensor.dequantize() for name, tensor in own.items()}
        step = StepState(
            state.tokens, state.positions, state.spans, state.sampled, weights, state.cache
        )
        values[op.output] = apply(op, values, step)  # type: ignore[arg-type]
        for name in op.inputs:
            if last_use[name] is op:
                values.pop(name, None)


def _state(program: Program, pieces: Sequence[Sequence[int]]) -> StepState:
    """Return one step that computes all pieces, each a sequence with one page of its own."""
    num_groups, length = len(program.cache_groups), max(map(len, pieces))
    pages = np.arange(num_groups * len(pieces)).reshape(num_groups, -1)
    ends = np.cumsum([len(piece) for piece in pieces])
    spans = tuple(
        Span(slice(int(end) - len(piece), int(end)), 0, pages[:, i : i + 1])
        for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))
    )
    tokens = np.concatenate([np.array(piece, np.int64) for piece in pieces])
    positions = np.concatenate([np.arange(len(piece)) for piece in pieces])
    cache = PagedCache(program, pages.size, length)
    return StepState(tokens, positions, spans, np.zeros(0, np.int64), {}, cache)
