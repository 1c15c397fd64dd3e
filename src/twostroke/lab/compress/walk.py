"""Rounds a model's products in the order in which they run, calibrated on their actual inputs.

The calibration text runs through the model once, operation by operation. A product's inputs come
from products that are already rounded, so later products compensate errors of earlier ones.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.backends.reference.operations import PagedCache, ReferenceStepState, apply
from twostroke.backends.reference.recurrent import StateMemory
from twostroke.backends.spans import RowSpan
from twostroke.core.message_text import counted_noun
from twostroke.lab.compress.equalize import divided_moments
from twostroke.lab.compress.round import damped_moments, outer_products
from twostroke.lab.compress.threads import own_threads
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from twostroke.lab.compress.equalize import ChannelEqualizer
    from twostroke.lab.compress.round import Moments
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import Floats, QuantTensor

    Rounder = Callable[[str, Floats, Moments], QuantTensor]  # name, weight, moments of its inputs

_NOTICE_INTERVAL: Final = 14  # matrices
_NUM_PARTS: Final = 4  # of the text; fixed, since sums must not depend on the number of threads


def round_products(
    program: Program,
    tensors: Mapping[str, QuantTensor],
    names: Collection[str],
    pieces: Sequence[Sequence[int]],
    round_weight: Rounder,
    load_rounded: Callable[[str], QuantTensor | None] = lambda _: None,
    *,
    equalizer: ChannelEqualizer | None = None,
) -> Iterator[tuple[str, QuantTensor]]:
    """Round the matrices `names` in the order of the Program, on the inputs that they really get.

    Each matrix is rounded for its inputs in the model with all earlier matrices rounded. Only the
    inputs of one operation for all `pieces` are in memory at a time. The result does not depend on
    the number of threads.

    Args:
        program: the model.
        tensors: all weights.
        names: weights to round.
        pieces: calibration text as token sequences.
        round_weight: rounds a weight for the moments of its inputs.
        load_rounded: returns a weight that was rounded before; None if there is none.
        equalizer: moves factors between matrices before they are rounded.

    Yields:
        The name and the rounded weight of each matrix.
    """
    current = dict(tensors)
    products: dict[str, list[str]] = {}  # weights by their input
    for op in program.ops:
        if isinstance(op, ops.Linear) and op.weight in names:
            products.setdefault(op.x, []).append(op.weight)
    moments: Moments | None = None
    with own_threads() as pool:
        streams = [
            CalibrationStream(program, pieces[i::_NUM_PARTS])
            for i in range(min(_NUM_PARTS, len(pieces)))
        ]
        for op in program.ops:
            if isinstance(op, ops.Logits):
                return
            if isinstance(op, ops.Linear) and op.weight in names:
                if op.weight == products[op.x][0]:
                    moments = None  # frees memory
                    factors = None if equalizer is None else equalizer.load(op.x, op.in_width)
                    is_new = equalizer is not None and factors is None
                    if is_new or any(load_rounded(name) is None for name in products[op.x]):
                        sums = pool.map(outer_products, [stream.values[op.x] for stream in streams])
                        moments = damped_moments(sums, pool.map)
                    if equalizer is not None:
                        if factors is None:
                            assert moments is not None
                            factors = equalizer.choose(op.x, moments, current)
                        current |= equalizer.move(op.x, factors, current)
                        for stream in streams:
                            stream.values[op.x] = stream.values[op.x] / factors
                        moments = moments and divided_moments(moments, factors)
                tensor = load_rounded(op.weight)
                if tensor is None:
                    assert moments is not None
                    tensor = round_weight(op.weight, current[op.weight].dequantize(), moments)
                yield op.weight, tensor
                current[op.weight] = tensor
            weights = {weight.name: current[weight.name].dequantize() for weight in op.weights}
            list(pool.map(partial(CalibrationStream.run, op=op, weights=weights), streams))


def with_progress(
    matrices: Iterable[tuple[str, QuantTensor]], total: int, notice: Callable[[str], None]
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield rounded matrices unchanged, and report the progress from time to time."""
    start_s = time.perf_counter()
    for count, matrix in enumerate(matrices, start=1):
        yield matrix
        if count % _NOTICE_INTERVAL == 0 or count == total:
            left_s = (time.perf_counter() - start_s) * (total / count - 1)
            notice(f"Rounded {count} of {counted_noun(total, 'matrix')}, {left_s:.0f} s left")


class CalibrationStream:
    """Calibration sequences that run through a model, one operation at a time.

    `values` has the values that later operations read, by name: (tokens of all sequences, width).
    Each sequence has its own KV page.
    """

    def __init__(self, program: Program, pieces: Sequence[Sequence[int]]) -> None:
        num_groups, length = len(program.cache_groups), max(map(len, pieces))
        pages = np.arange(num_groups * len(pieces)).reshape(num_groups, -1)
        ends = np.cumsum([len(piece) for piece in pieces])
        self._spans = tuple(
            RowSpan(
                slice(int(end) - len(piece), int(end)), 0, pages[:, i : i + 1], write_states=(i,)
            )
            for i, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        )
        self._tokens = np.concatenate([np.array(piece, np.int64) for piece in pieces])
        self._positions = np.concatenate([np.arange(len(piece)) for piece in pieces])
        self._cache = PagedCache(program, pages.size, length)
        self._recurrent = StateMemory(program, len(pieces))
        self._last_use = {name: op for op in program.ops for name in op.inputs}
        self.values: dict[str, Floats] = {}

    def run(self, op: Op, weights: Mapping[str, Floats]) -> None:
        """Compute the operation `op` for all sequences.

        `weights` are the model's weights by name. Values that no later operation reads are dropped.
        """
        sampled = np.arange(len(self._tokens))
        step = ReferenceStepState(
            tokens=self._tokens,
            positions=self._positions,
            spans=self._spans,
            sampled=sampled,
            weights=weights,
            cache=self._cache,
            recurrent=self._recurrent,
        )
        self.values[op.output] = apply(op, self.values, step)  # type: ignore[arg-type]
        for name in op.inputs:
            if self._last_use[name] is op:
                self.values.pop(name, None)
