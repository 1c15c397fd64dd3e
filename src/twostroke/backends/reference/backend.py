"""The reference backend: interprets a Program in NumPy, one operation after another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends import BackendFacts
from twostroke.backends.reference.operations import PagedCache, StepState, apply
from twostroke.backends.spans import Span, flatten, pooled_rows
from twostroke.cache import FORMATS
from twostroke.core.hardware import num_cores
from twostroke.core.step import StepResult
from twostroke.sample.reference import draw_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
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
        *,
        tapped_value: str | None = None,
    ) -> None:
        """Dequantize the Program's weights and reserve its pages.

        Steps return `tapped_value` for the rows in which they draw.
        """
        self._program, self._tapped_value = program, tapped_value
        self._logits = program.ops[-1].output
        self._weights = {name: tensors[name].dequantize() for name in program.weight_shapes}
        self._cache = PagedCache(program, num_pages, page_size)
        self.facts = BackendFacts(
            name="reference",
            detail="NumPy float32",
            num_threads=num_cores(),
            num_pages=num_pages,
            page_size=page_size,
            windows=tuple(group.window for group in program.cache_groups),
            weight_bytes=sum(weight.nbytes for weight in self._weights.values()),
            cache_bytes=num_pages * program.page_bytes(page_size, FORMATS["f32"]),
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        started = time.perf_counter()
        state = StepState(*flatten(plan.slices), self._weights, self._cache, plan.external)
        self._cache.copy_pages(state.spans)
        tapped, last = self._tapped_value, self._program.last_states
        values = self._forward(state, {last} if tapped is None else {last, tapped})
        drawn, scores = draw_all(plan, values[self._logits])
        hidden = None if tapped is None else values[tapped][state.sampled[plan.draws]]
        states = [values[last][rows] for rows in pooled_rows(plan.slices)]
        elapsed_s = time.perf_counter() - started
        tokens, logprobs = [token for token, _ in drawn], [report for _, report in drawn]
        return StepResult(tokens, logprobs, elapsed_s, elapsed_s, hidden, scores, states)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits of a sequence; see `Backend.score`."""
        return self.trace(tokens, (self._logits,), generated=generated)[self._logits]

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return values of the Program for a sequence; see `Backend.trace`."""
        del generated  # one arithmetic for all rows
        count, num_groups = len(tokens), len(self.facts.windows)
        cache = PagedCache(self._program, num_groups, count)  # a page for each group
        span = Span(slice(0, count), 0, np.arange(num_groups)[:, None])
        rows = np.arange(count)
        state = StepState(np.array(tokens), rows, (span,), rows, self._weights, cache)
        kept = self._forward(state, set(values))
        return {name: kept[name] for name in values}

    def forget(self, request: Request) -> None:
        """Keep nothing of a request."""

    def close(self) -> None:
        """Drop weights and pages."""
        self._weights = {}

    def _forward(self, state: StepState, kept: set[str]) -> dict[str, NDArray[np.float32]]:
        """Return the values that are `kept` and those that nothing reads, the logits among them."""
        last_use = {name: op for op in self._program.ops for name in op.inputs}
        values: dict[str, NDArray[np.float32]] = {}
        with np.errstate(all="ignore"):  # numbers that are not finite reach the logits
            for op in self._program.ops:
                values[op.output] = apply(op, values, state)
                for name in op.inputs:
                    if last_use[name] is op and name not in kept:
                        del values[name]
        return values
