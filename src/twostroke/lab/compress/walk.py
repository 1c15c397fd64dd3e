"""Rounds a model's products in the order in which they run, each for the inputs that it will get.

The calibration text runs through the model once, one operation after another. A product's inputs
come from products that are already rounded, so later ones make up for the errors of earlier ones.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.backends.reference.operations import PagedCache, ReferenceStepState, apply
from twostroke.backends.spans import RowSpan
from twostroke.lab.compress.equalize import divided_moments
from twostroke.lab.compress.round import moments_of, squares_of
from twostroke.lab.compress.threads import own_threads
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from twostroke.lab.compress.equalize import ChannelEqualizer
    from twostroke.lab.compress.round import Moments
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import Floats, QuantTensor

    Rounder = Callable[[str, Floats, Moments], QuantTensor]  # name, weight, moments of its inputs

_NOTICE_EVERY: Final = 14  # matrices
_PARTS: Final = 4  # of the text, each on a thread; sums must not depend on how many of these run


def round_products(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    names: Collection[str],
    pieces: Sequence[Sequence[int]],
    rounded: Rounder,
    known: Callable[[str], QuantTensor | None] = lambda _: None,
    *,
    evener: ChannelEqualizer | None = None,
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield the rounded weight of each Linear in `names`, in the order of the Program.

    Those that `known` returns are not rounded again. Other weights are used as `tensors` has them,
    unless an `evener` changes them. The inputs of one operation for all of `pieces` are in memory
    at a time. The result does not depend on the number of threads.
    """
    held = dict(tensors)
    products: dict[str, list[str]] = {}  # of each value
    for op in program.ops:
        if isinstance(op, ops.Linear) and op.weight in names:
            products.setdefault(op.x, []).append(op.weight)
    moments: Moments | None = None
    with own_threads() as pool:
        streams = [Stream(program, pieces[i::_PARTS]) for i in range(min(_PARTS, len(pieces)))]
        for op in program.ops:
            if isinstance(op, ops.Logits):
                return
            if isinstance(op, ops.Linear) and op.weight in names:
                if op.weight == products[op.x][0]:
                    moments = None  # its room is needed
                    factors = None if evener is None else evener.known(op.x, op.in_width)
                    is_new = evener is not None and factors is None
                    if is_new or any(known(name) is None for name in products[op.x]):
                        squares = pool.map(squares_of, [stream.values[op.x] for stream in streams])
                        moments = moments_of(squares, pool.map)
                    if evener is not None:
                        if factors is None:
                            assert moments is not None
                            factors = evener.choose(op.x, moments, held)
                        held |= evener.move(op.x, factors, held)
                        for stream in streams:
                            stream.values[op.x] = stream.values[op.x] / factors
                        moments = moments and divided_moments(moments, factors)
                tensor = known(op.weight)
                if tensor is None:
                    assert moments is not None
                    tensor = rounded(op.weight, held[op.weight].dequantize(), moments)
                yield op.weight, tensor
                held[op.weight] = tensor
            weights = {weight.name: held[weight.name].dequantize() for weight in op.weights}
            list(pool.map(partial(Stream.run, op=op, weights=weights), streams))


def watched(
    matrices: Iterable[tuple[str, QuantTensor]], total: int, notice: Callable[[str], None]
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield what `round_products` yields, and say now and then how many there were."""
    began = time.perf_counter()
    for count, matrix in enumerate(matrices, start=1):
        yield matrix
        if count % _NOTICE_EVERY == 0 or count == total:
            left_s = (time.perf_counter() - began) * (total / count - 1)
            notice(f"Rounded {count} of {total} matrices, {left_s:.0f} s left")


class Stream:
    """Pieces on their way through the model, each a sequence with one page of its own."""

    def __init__(self, program: Program, pieces: Sequence[Sequence[int]]) -> None:
        num_groups, length = len(program.cache_groups), max(map(len, pieces))
        pages = np.arange(num_groups * len(pieces)).reshape(num_groups, -1)
        ends = np.cumsum([len(piece) for piece in pieces])
        self._spans = tuple(
            RowSpan(slice(int(end) - len(piece), int(end)), 0, pages[:, i : i + 1])
            for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        )
        self._tokens = np.concatenate([np.array(piece, np.int64) for piece in pieces])
        self._positions = np.concatenate([np.arange(len(piece)) for piece in pieces])
        self._cache = PagedCache(program, pages.size, length)
        self._last_use = {name: op for op in program.ops for name in op.inputs}
        self.values: dict[str, Floats] = {}

    def run(self, op: Op, weights: Mapping[str, Floats]) -> None:
        """Compute `op`, and forget the values that nothing else needs."""
        sampled = np.arange(len(self._tokens))
        step = ReferenceStepState(
            self._tokens, self._positions, self._spans, sampled, weights, self._cache
        )
        self.values[op.output] = apply(op, self.values, step)  # type: ignore[arg-type]
        for name in op.inputs:
            if self._last_use[name] is op:
                self.values.pop(name, None)
