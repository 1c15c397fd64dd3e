"""The cpu backend: packed weights, a native plan, and one native call a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends import BackendFacts, check_values
from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.backends.cpu.lower import lower
from twostroke.backends.cpu.plan import NativePlan, PlanPages
from twostroke.backends.cpu.states import LastNorm
from twostroke.backends.cpu.steps import StepArrays
from twostroke.backends.cpu.team import create_pool
from twostroke.backends.cpu.weights import PackedWeights
from twostroke.cache import DEFAULT_FORMAT, FORMATS, PageGroups
from twostroke.core.config import DEFAULT_ACTIVATION_BITS
from twostroke.core.errors import BackendError, UsageError
from twostroke.core.step import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.cpu.lower import Lowered
    from twostroke.backends.cpu.plan import OpTime
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.program import Op, Program
    from twostroke.quant import QuantTensor

_PAGE_UNIT = 16  # tokens


class CpuBackend:
    """Runs a Program on this machine's processor."""

    def __init__(  # noqa: PLR0913 - facts that only the builder knows
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        num_threads: int,
        *,
        level: str | None = None,
        kv_format: str = DEFAULT_FORMAT,
        activation_bits: int = DEFAULT_ACTIVATION_BITS,
        release: Callable[[Sequence[QuantTensor]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        share_threads_with: CpuBackend | None = None,
        tapped_value: str | None = None,
        embeds: bool = False,
    ) -> None:
        """Pack the weights and reserve the pages, which take memory only once they are used.

        `level` None means the best one, `kv_format` is a name in `cache.FORMATS`,
        `activation_bits` one of `core.config.ACTIVATION_BITS`. A backend that is given another in
        `share_threads_with` must be closed first: two sets of threads would spin against each
        other. `release(tensors)` is called with tensors that are not read again, `progress(done,
        total)` with bytes of weights as they are packed. Steps return `tapped_value` for the rows
        that draw; with `embeds` they return the normed last hidden states of slices that ask for
        them, and `tapped_value` can only be the last hidden state.

        Raises:
            BackendError: the level cannot be used, or the Program cannot be run.
            MemoryLimitError: weights or pages do not fit.
            UsageError: a page size that is not a multiple of 16, or fewer than one thread.
        """
        if page_size < 1 or page_size % _PAGE_UNIT:
            reason = f"must be a multiple of {_PAGE_UNIT}, got {page_size}."
            raise UsageError(reason, field="page_size")
        if num_threads < 1:
            raise UsageError(f"must be at least 1, got {num_threads}.", field="num_threads")
        choice = choose_level(level)
        self._program, self._kv_format, self._activation_bits = program, kv_format, activation_bits
        self._scored = lower(program, activation_bits=activation_bits)
        self._lowered = self._scored
        self._norm = LastNorm(program, tensors) if embeds else None
        tapped = tapped_value if self._norm is None else self._norm.hidden
        assert tapped_value in (None, tapped), "a step can return one value"
        if tapped is not None:
            self._lowered = lower(program, (tapped,), activation_bits=activation_bits)
        self._library = load_library(choice.level)
        self._weights: PackedWeights | None = None
        self._plan: NativePlan | None = None
        self._owns_pool = share_threads_with is None
        shared = None if share_threads_with is None else share_threads_with._pool  # noqa: SLF001
        self._pool: int | None = shared or create_pool(self._library, num_threads)
        try:
            pages = PlanPages(num_pages, page_size, kv_format)
            self._prepare(tensors, pages, release, progress)
        except BaseException:
            self.close()  # even on Ctrl-C: the weights are large
            raise
        self.facts = facts = self._facts(pages, choice.level, num_threads)
        longest = PageGroups(page_size, facts.windows).most_tokens(
            num_pages, program.context_length
        )
        self._steps = StepArrays(
            len(facts.windows),
            page_size,
            -(-longest // page_size),
            one_arithmetic=facts.one_arithmetic,
            tapped_width=0 if tapped is None else program.value_widths[tapped],
            returns_tapped=tapped_value is not None,
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        started = time.perf_counter()
        sampled = self._steps.fill(plan)
        step = self._steps.record
        self._loaded[2].run(step)
        tokens, logprobs, hidden, scores = self._steps.results(plan, sampled)
        states = [self._normed(rows) for rows in self._steps.states(plan)]
        elapsed_s = time.perf_counter() - started
        return StepResult(tokens, logprobs, elapsed_s, step.kernel_s, hidden, scores, states)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits (len(tokens), vocab_size) of a sequence, on separate pages.

        Its rows are computed as prompt, or as `generated` ones. For evaluation; must not be called
        while requests are running.
        """
        logits = np.empty((len(tokens), self._program.vocab_size), np.float32)
        self._evaluate(self._scored, tokens, logits, (), generated=generated)
        return logits

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return values of the Program, each (len(tokens), its width), by name; else as `score`.

        Raises:
            UsageError: a value that the Program does not have.
        """
        check_values(self._program, values)
        widths = self._program.value_widths
        found = {name: np.empty((len(tokens), widths[name]), np.float32) for name in values}
        taps = [name for name in found if name != self._program.ops[-1].output]
        lowered = lower(self._program, taps, activation_bits=self._activation_bits)
        logits = found.get(self._program.ops[-1].output)
        kept = [found[name] for name in taps]
        self._evaluate(lowered, tokens, logits, kept, generated=generated)
        return found

    @property
    def fused(self) -> tuple[tuple[Op, ...], ...]:
        """The Program's operations as a step runs them, those of one kernel together."""
        return self._lowered.parts

    def times(self) -> list[OpTime]:
        """Return what each of `fused` has taken since the last call, in all steps together."""
        return self._loaded[2].times()

    def copy_page(self, source: int, target: int) -> None:
        """Let one page hold what another does; must not be called while a step runs."""
        self._loaded[2].copy_page(source, target)

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a finished request."""
        self._steps.forget(request)

    def close(self) -> None:
        """Give back memory and threads; closing twice does no harm."""
        if self._plan is not None:
            self._plan.close()
        if self._weights is not None:
            self._weights.close()
        if self._pool is not None and self._owns_pool:
            self._library.ts_pool_destroy(self._pool)
        self._plan, self._weights, self._pool = None, None, None

    def _facts(self, pages: PlanPages, level: str, num_threads: int) -> BackendFacts:
        page_bytes = self._program.page_bytes(pages.page_size, FORMATS[pages.kv_format])
        return BackendFacts(
            name="cpu",
            detail=_detail(level, num_threads, self._activation_bits, pages.kv_format),
            level=level,
            num_threads=num_threads,
            num_pages=pages.num_pages,
            page_size=pages.page_size,
            windows=tuple(group.window for group in self._program.cache_groups),
            one_arithmetic=bool(self._library.ts_one_arithmetic()),
            rows_together=self._library.ts_linear_rows_together(),
            weight_bytes=self._loaded[1].num_bytes,
            cache_bytes=pages.num_pages * page_bytes,
        )

    @property
    def _loaded(self) -> tuple[int, PackedWeights, NativePlan]:
        """The pool, the weights and the plan, which are there until `close`."""
        if self._pool is None or self._weights is None or self._plan is None:
            raise BackendError("The cpu backend was closed.")
        return self._pool, self._weights, self._plan

    def _normed(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._norm is None:
            raise BackendError("This backend was built to draw tokens, not to embed texts.")
        return self._norm(rows)

    def _prepare(
        self,
        tensors: Mapping[str, QuantTensor],
        pages: PlanPages,
        release: Callable[[Sequence[QuantTensor]], None] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        assert self._pool is not None
        lowered = self._lowered
        self._weights = PackedWeights(self._library, tensors, lowered.matrices, lowered.vectors)
        program = self._program
        self._plan = NativePlan(self._library, self._pool, program, lowered, self._weights, pages)
        self._weights.pack(self._pool, release, progress)

    def _evaluate(
        self,
        lowered: Lowered,
        tokens: Sequence[int],
        logits: NDArray[np.float32] | None,
        taps: Sequence[NDArray[np.float32]],
        *,
        generated: bool,
    ) -> None:
        """Compute a sequence on separate pages; see `NativePlan.evaluate`."""
        pool, weights, _ = self._loaded
        page_size = self.facts.page_size
        num_groups = len(self.facts.windows)
        num_pages = num_groups * -(-len(tokens) // page_size)
        pages = PlanPages(num_pages, page_size, self._kv_format)
        plan = NativePlan(self._library, pool, self._program, lowered, weights, pages)
        try:
            plan.evaluate(tokens, logits, taps, num_groups=num_groups, generated=generated)
        finally:
            plan.close()


def _detail(level: str, num_threads: int, activation_bits: int, kv_format: str) -> str:
    parts = [level, f"{num_threads} threads"]
    if activation_bits != DEFAULT_ACTIVATION_BITS:
        parts.append(f"{activation_bits}-bit activations")
    if kv_format != DEFAULT_FORMAT:
        parts.append(f"{kv_format} keys and values")
    return ", ".join(parts)
