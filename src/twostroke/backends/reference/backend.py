"""The reference backend: interprets a Program in NumPy, one operation after another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends import BackendFacts
from twostroke.backends.reference.operations import PagedCache, Span, StepState, apply
from twostroke.core.machine import num_cores
from twostroke.core.step import StepResult
from twostroke.sample.reference import draw

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan
    from twostroke.program import Program
    from twostroke.quant import QuantTensor


class ReferenceBackend:
    """Runs a Program in float32 on dequantized weights."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
    ) -> None:
        """Dequantize the Program's weights and reserve its pages."""
        self._program = program
        self._weights = {name: tensors[name].dequantize() for name in program.weight_shapes}
        self._cache = PagedCache(program.cache_layers, num_pages, page_size)
        self.facts = BackendFacts(
            name="reference",
            detail="NumPy float32",
            level="portable",
            num_threads=num_cores(),
            num_pages=num_pages,
            page_size=page_size,
            one_arithmetic=True,
            weight_bytes=sum(weight.nbytes for weight in self._weights.values()),
            cache_bytes=num_pages * page_size * program.cache_bytes_per_token(4),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        started = time.perf_counter()
        logits = self._forward(*_flatten(plan.slices), self._cache)
        sampling = [s.request for s in plan.slices if s.samples]
        drawn = [draw(request, row) for request, row in zip(sampling, logits, strict=True)]
        elapsed = time.perf_counter() - started
        return StepResult([t for t, _ in drawn], [p for _, p in drawn], elapsed, elapsed)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits (len(tokens), vocab_size) of a sequence."""
        del generated  # one arithmetic for all rows
        count = len(tokens)
        cache = PagedCache(self._program.cache_layers, 1, count)
        span = Span(slice(0, count), 0, np.zeros(1, np.int64))
        return self._forward(np.array(tokens), np.arange(count), (span,), np.arange(count), cache)

    def forget(self, request: Request) -> None:
        """Keep nothing of a request."""

    def close(self) -> None:
        """Drop weights and pages."""
        self._weights = {}

    def _forward(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        spans: tuple[Span, ...],
        sampled: NDArray[np.int64],
        cache: PagedCache,
    ) -> NDArray[np.float32]:
        state = StepState(tokens, positions, spans, sampled, self._weights, cache)
        last_use = {name: op for op in self._program.ops for name in op.inputs}
        values: dict[str, NDArray[np.float32]] = {}
        for op in self._program.ops:
            values[op.output] = apply(op, values, state)
            for name in op.inputs:
                if last_use[name] is op:
                    del values[name]
        return values[self._program.ops[-1].output]


def _flatten(
    slices: tuple[Slice, ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[Span, ...], NDArray[np.int64]]:
    """Return the step's tokens, positions, spans and sampled rows."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    sampled: list[int] = []
    for part in slices:
        end = part.start + part.count
        rows = slice(len(tokens), len(tokens) + part.count)
        tokens += part.request.tokens[part.start : end]
        positions += range(part.start, end)
        spans.append(Span(rows, part.start, np.array(part.request.pages, np.int64)))
        if part.samples:
            sampled.append(rows.stop - 1)
    return np.array(tokens), np.array(positions), tuple(spans), np.array(sampled, np.int64)
