"""Rounds a model's products in the order in which they run, each for the inputs that it will get.

The calibration text runs through the model twice at once, one operation after another: with the
right weights, and with those that are rounded so far. A product is moved towards the weight that
gives its right outputs from inputs as they have become, and then rounded; so later ones make up for
the errors of earlier ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.reference.operations import PagedCache, StepState, apply
from twostroke.backends.spans import Span
from twostroke.compress.round import moments_of, round_matrix
from twostroke.program import ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twostroke.compress.round import Moments
    from twostroke.program import Op, Program
    from twostroke.quant import Floats, QuantTensor

_SHARE = 0.5  # of the drift that a product makes up for: more would fit the text itself


def round_products(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    formats: Mapping[str, str],
    pieces: Sequence[Sequence[int]],
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield the rounded weight of each Linear with its name, in the order of the Program.

    `formats` names each one's format (of GRIDS); other weights are used as `tensors` has them. The
    inputs of one operation for all of `pieces` are in memory at a time, twice.
    """
    right, ours = _Stream(program, pieces), _Stream(program, pieces)
    beside = _residuals(program)
    known: tuple[str, Moments] | None = None  # a value, and its moments
    for op in program.ops:
        if isinstance(op, ops.Logits):
            return
        weights = {weight.name: tensors[weight.name].dequantize() for weight in op.weights}
        rounded = dict(weights)
        if isinstance(op, ops.Linear) and op.weight in formats:
            if known is None or known[0] != op.x:
                known = op.x, moments_of(ours.values[op.x])
            drift = (right.values[op.x] - ours.values[op.x]) @ weights[op.weight].T
            if (residual := beside.get(op.output)) is not None:
                drift += right.values[residual] - ours.values[residual]
            target = weights[op.weight] + np.float32(_SHARE) * known[1].solve(
                ours.values[op.x], drift
            )
            tensor = round_matrix(target, known[1], formats[op.weight])
            yield op.weight, tensor
            rounded[op.weight] = tensor.dequantize()
        right.run(op, weights)
        ours.run(op, rounded)


def _residuals(program: Program) -> dict[str, str]:
    """Return for each product that is added to another value that value's name."""
    products = {op.output for op in program.ops if isinstance(op, ops.Linear)}
    added = [op for op in program.ops if isinstance(op, ops.Add)]
    pairs = [(op.a, op.b) for op in added] + [(op.b, op.a) for op in added]
    return {product: other for product, other in pairs if product in products}


class _Stream:
    """All pieces on their way through the model, each a sequence with one page of its own."""

    def __init__(self, program: Program, pieces: Sequence[Sequence[int]]) -> None:
        num_groups, length = len(program.cache_groups), max(map(len, pieces))
        pages = np.arange(num_groups * len(pieces)).reshape(num_groups, -1)
        ends = np.cumsum([len(piece) for piece in pieces])
        self._spans = tuple(
            Span(slice(int(end) - len(piece), int(end)), 0, pages[:, i : i + 1])
            for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        )
        self._tokens = np.concatenate([np.array(piece, np.int64) for piece in pieces])
        self._positions = np.concatenate([np.arange(len(piece)) for piece in pieces])
        self._cache = PagedCache(program, pages.size, length)
        self._last_use = {name: op for op in program.ops for name in op.inputs}
        self.values: dict[str, Floats] = {}

    def run(self, op: Op, weights: Mapping[str, Floats]) -> None:
        """Compute `op`, and forget the values that nothing else needs."""
        sampled = np.zeros(0, np.int64)
        step = StepState(self._tokens, self._positions, self._spans, sampled, weights, self._cache)
        self.values[op.output] = apply(op, self.values, step)  # type: ignore[arg-type]
        for name in op.inputs:
            if self._last_use[name] is op:
                self.values.pop(name, None)
