"""The reference backend: interprets a Program in NumPy, one operation after another.

All ranks of a mesh run in this process, in lockstep.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.interface import BackendFacts
from twostroke.backends.reference.operations import PagedCache, ReferenceStepState
from twostroke.backends.reference.ranks import run_ranks
from twostroke.backends.reference.recurrent import StateMemory
from twostroke.backends.sampling.reference import draw_all
from twostroke.backends.spans import RowSpan, flatten, pooled_rows
from twostroke.core.hardware import num_cores
from twostroke.core.step import StepResult
from twostroke.model.program.kv_layout import FORMATS
from twostroke.model.program.mesh import ONE_RANK
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.interface import PageMemory
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.quant import QuantTensor


class ReferenceBackend:
    """Runs a Program in NumPy, in float32 on dequantized weights: slow, but the definition."""

    def __init__(  # noqa: PLR0913 - each is a fact that only the caller knows
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        *,
        num_states: int = 0,
        tapped_value: str | None = None,
        mesh: Mesh = ONE_RANK,
        splits_sums: bool = False,
    ) -> None:
        """Dequantize the Program's weights and reserve memory for its KV pages.

        `num_states`: slots for recurrent states. `tapped_value`: the name of an intermediate value
        that steps also return, for the rows from which tokens are drawn; used for trained heads.
        `splits_sums`: whether the ranks of `mesh` split sums (see
        `model.program.shard.split_sums`).
        """
        self._program, self._tapped_value, self._mesh = program, tapped_value, mesh
        sizes = {name: tensor.format.block_size for name, tensor in tensors.items()}
        self._block_sizes = sizes if splits_sums else None
        self._logits, self._last = program.ops[-1].output, program.last_states
        self._returned = {self._last} if tapped_value is None else {self._last, tapped_value}
        self._ranks = shard(program, mesh, self._returned, self._block_sizes)
        weights = {name: tensors[name].dequantize() for name in program.weight_shapes}
        self._weights = [
            {
                name: weights[name][slice(*rows)][..., slice(*columns.get(name, (None,)))]
                for name, rows in rank.weight_rows.items()
            }
            for rank in self._ranks
            for columns in (rank.weight_columns,)
        ]
        programs = [rank.program for rank in self._ranks]
        self._caches = [PagedCache(program, num_pages, page_size) for program in programs]
        self._recurrent = [StateMemory(part, num_states) for part in programs]
        self.facts = BackendFacts(
            name="reference",
            detail="NumPy float32",
            num_threads=num_cores(),
            num_pages=num_pages,
            page_size=page_size,
            num_states=num_states if program.state_layers else 0,
            windows=tuple(group.window for group in program.cache_groups),
            weight_bytes=sum(weight.nbytes for weight in weights.values()),
            cache_bytes=sum(
                num_pages * part.page_bytes(page_size, FORMATS["f32"])
                + num_states * part.state_bytes
                for part in programs
            ),
        )

    @property
    def pages(self) -> PageMemory | None:
        """Return access to the bytes of the KV pages; None with several ranks."""
        return self._caches[0].bytes if len(self._caches) == 1 else None

    @property
    def state_memory(self) -> PageMemory | None:
        """Return access to the slots for recurrent states.

        None if the model has no such states, or if there are several ranks.
        """
        has_states = self.facts.num_states > 0 and len(self._recurrent) == 1
        return self._recurrent[0].bytes if has_states else None

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and draw a token for each slice that samples."""
        start_s = time.perf_counter()
        tokens, positions, spans, sampled = flatten(plan.slices)
        states = [
            ReferenceStepState(
                tokens,
                positions,
                spans=spans,
                sampled=sampled,
                weights=weights,
                cache=cache,
                recurrent=recurrent,
                external=plan.external,
            )
            for weights, cache, recurrent in zip(
                self._weights, self._caches, self._recurrent, strict=True
            )
        ]
        for cache in self._caches:
            cache.copy_pages(spans)
        values = run_ranks(self._ranks, states, self._returned)
        tapped = self._tapped_value
        draws, scores = draw_all(plan, values[self._logits])
        hidden = None if tapped is None else values[tapped][sampled[plan.draws]]
        pooled = [values[self._last][rows] for rows in pooled_rows(plan.slices)]
        elapsed_s = time.perf_counter() - start_s
        tokens_drawn, logprobs = [token for token, _ in draws], [report for _, report in draws]
        return StepResult(
            tokens_drawn,
            logprobs,
            elapsed_s=elapsed_s,
            kernel_s=elapsed_s,
            hidden=hidden,
            scores=scores,
            states=pooled,
            row_states=None if tapped is None else values[tapped],
        )

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits (len(tokens), vocab_size) of a token sequence; see `Backend.score`.

        `generated` is ignored, because this backend computes all rows in the same way.
        """
        return self.trace(tokens, (self._logits,), generated=generated)[self._logits]

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return the intermediate values named `values`, each (len(tokens), width), by name.

        The token sequence is computed as by `score`; see `Backend.trace`.
        """
        del generated  # all rows are computed in the same way
        count, num_groups, page_size = len(tokens), len(self.facts.windows), self.facts.page_size
        table = np.arange(num_groups * -(-count // page_size)).reshape(num_groups, -1)
        spans = (RowSpan(slice(0, count), 0, table, write_states=(0,)),)
        rows, ids = np.arange(count), np.array(tokens)
        ranks = shard(self._program, self._mesh, values, self._block_sizes)
        states = [
            ReferenceStepState(
                ids,
                rows,
                spans=spans,
                sampled=rows,
                weights=weights,
                cache=PagedCache(rank.program, table.size, page_size),
                recurrent=StateMemory(rank.program, 1),
            )
            for rank, weights in zip(ranks, self._weights, strict=True)
        ]
        results = run_ranks(ranks, states, values)
        return {name: results[name] for name in values}

    def forget(self, request: Request) -> None:
        """Do nothing, because this backend keeps no state of requests."""

    def close(self) -> None:
        """Free the model's weights."""
        self._weights = []
