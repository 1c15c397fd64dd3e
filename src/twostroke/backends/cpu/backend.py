"""The cpu backend: packed weights, a native plan, and one native call for each step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from ctypes import byref, c_double
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from twostroke.backends.cpu.keys import balances
from twostroke.backends.cpu.library import choose_level, load_library, usual_kv_format
from twostroke.backends.cpu.lower import lower
from twostroke.backends.cpu.plan import NativePlan, PlanLink, PlanPages
from twostroke.backends.cpu.steps import StepArrays, record_of
from twostroke.backends.cpu.team import ActiveThreads, thread_pool
from twostroke.backends.cpu.weights import PackedWeights
from twostroke.backends.interface import BackendFacts
from twostroke.backends.reference.operations import rms_norm
from twostroke.core.errors import RanksLostError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import DEFAULT_ACTIVATION_BITS, ActivationBits, activation_bits_or_map
from twostroke.core.step import StepResult
from twostroke.model.program import ops
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS, PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.cpu.lowered import CpuLowered
    from twostroke.backends.cpu.packed_store import PackedStore
    from twostroke.backends.cpu.plan import MeasuredOpTime
    from twostroke.backends.interface import CollectiveTest, PageMemory, WeightShard
    from twostroke.backends.step_frame import StepFrame
    from twostroke.core.options import Bits
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.model.program import Op, Program
    from twostroke.model.quant import QuantTensor


class CpuBackend:
    """Runs a model on this machine's CPU: native kernels for one instruction-set level."""

    def __init__(  # noqa: PLR0913 - each is a fact that only the caller knows
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        num_threads: int,
        *,
        num_states: int = 0,
        level: str | None = None,
        kv_format: str = DEFAULT_FORMAT,
        activation_bits: int | ActivationBits = DEFAULT_ACTIVATION_BITS,
        release: Callable[[Sequence[QuantTensor]], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        share_threads_with: CpuBackend | None = None,
        tapped_value: str | None = None,
        embeds: bool = False,
        weight_shard: WeightShard | None = None,
        packed_store: PackedStore | None = None,
    ) -> None:
        """Pack the weights and reserve the KV pages, which take memory only once they are used.

        Args:
            program: the whole model.
            tensors: its weights, by name.
            num_pages: KV pages.
            page_size: tokens of a page, a multiple of 16.
            num_threads: threads that compute.
            num_states: slots for recurrent states.
            level: the instruction-set level; None: the best that runs here.
            kv_format: a name in `model.program.kv_layout.FORMATS`.
            activation_bits: a value of `core.options.ACTIVATION_BITS`, or the bits of each product.
            release: called with tensors that are not read again.
            progress: called with the bytes of weights packed so far, and of all weights.
            share_threads_with: a backend whose threads this backend uses, because two sets of
                threads would spin against each other. This backend must be closed first.
            tapped_value: the value of the Program that steps return for the rows that draw tokens.
            embeds: steps return the normed last hidden states of slices that ask for them;
                `tapped_value` can then only be the last hidden state.
            weight_shard: this backend is one rank of several; it holds and computes its part of the
                model. On ranks other than 0, steps run only by `follow`.
            packed_store: stores the packed weights for later starts; None: they are not stored.

        Raises:
            BackendError: the level cannot be used, or the Program cannot be run.
            MemoryLimitError: weights or pages do not fit.
        """
        assert page_size % 16 == 0, "kernels handle 16 tokens of a page at once"
        choice = choose_level(level)
        self._program, self._weight_shard = program, weight_shard
        self._bits = activation_bits_or_map(activation_bits)
        self._norm = _last_norm(program, tensors) if embeds else None
        tapped = self._tapped(tapped_value)
        rank_program, rank_tensors = _own_part(program, tensors, weight_shard)
        self._lowered, library = self._lower([tapped] if tapped else []), load_library(choice.level)
        kv_balances = balances(rank_program, tensors, kv_format)
        pages = PlanPages(num_pages, page_size, kv_format, kv_balances, num_states)
        with ExitStack() as opened:  # frees threads and weights if a later step fails
            if share_threads_with is None:
                self._pool = opened.enter_context(thread_pool(library, num_threads))
            else:
                self._pool = share_threads_with._pool  # noqa: SLF001
            weights = PackedWeights(library, rank_tensors, self._lowered, packed_store)
            self._weights = weights
            opened.callback(weights.close)
            link = PlanLink(weight_shard.link, weight_shard.max_rows) if weight_shard else None
            self._plan = NativePlan(
                library,
                self._pool,
                program=rank_program,
                lowered=self._lowered,
                weights=weights,
                pages=pages,
                link=link,
            )
            opened.callback(self._plan.close)
            weights.pack(self._pool, release, progress)
            self._opened = opened.pop_all()
        self._crowded = ActiveThreads(library, self._pool, num_threads)
        self.facts = replace(
            self._facts_of(choice.level, num_threads, activation_bits, pages),
            stops_rows=weight_shard is None and tapped_value is None,
            weight_bytes=weights.num_bytes,
            shared_weight_bytes=weights.num_shared_bytes,
            cache_bytes=_cache_bytes(rank_program, pages),
        )
        self._steps = self._step_arrays(tapped, returns_tapped=tapped_value is not None)

    @property
    def pages(self) -> PageMemory | None:
        """Return access to the bytes of the KV pages; None if other ranks have parts of them."""
        return self._plan.page_memory() if self._weight_shard is None else None

    @property
    def state_memory(self) -> PageMemory | None:
        """Return access to the slots for recurrent states.

        None if the model has no such states, or if there are several ranks.
        """
        return self._plan.state_memory() if self._weight_shard is None else None

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and draw a token for each slice that samples."""
        self.fill(plan)
        return self.compute(plan)

    def fill(self, plan: StepPlan) -> None:
        """Write a step's input arrays; the next call of `compute` computes the step."""
        self._weights.share()
        self._start_s = time.perf_counter()
        self._sampled = self._steps.fill(plan)

    def encode_step(self) -> bytes:
        """Return the step that `fill` wrote as a message to other ranks; call it once a step."""
        return self._steps.encode_step()

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute the step that `fill` wrote, and draw the step's tokens."""
        sampled, step = self._sampled, self._steps.record
        self._plan.run(step)
        tokens, logprobs, hidden, scores = self._steps.results(plan, sampled)
        states = self._steps.states(plan)
        if states:
            assert self._norm is not None, "built to draw tokens, not to embed texts"
            with np.errstate(all="ignore"):  # readers check for numbers that are not finite
                states = [self._norm(x=rows) for rows in states]
        elapsed_s = time.perf_counter() - self._start_s
        is_crowded = self._crowded.after_step(elapsed_s)
        return StepResult(
            tokens,
            logprobs,
            elapsed_s=elapsed_s,
            kernel_s=step.kernel_s,
            hidden=hidden,
            scores=scores,
            states=states,
            collective_s=step.collective_s,
            crowded_s=elapsed_s if is_crowded else 0.0,
            row_states=self._steps.row_states(plan) if self._weight_shard is None else None,
        )

    def follow(self, frame: StepFrame) -> float:
        """Compute this rank's part of a step that rank 0 sent.

        Returns the seconds that the rank spent in collectives.
        """
        self._weights.share()
        step = record_of(frame)
        self._plan.run(step)
        return float(step.collective_s)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits (len(tokens), vocab_size) of a token sequence; see `Backend.score`.

        Rows are computed as in prefill or, if `generated`, as in decode steps. Must not be called
        while requests are running.
        """
        logits = self._program.ops[-1].output
        return self.trace(tokens, [logits], generated=generated)[logits]

    def score_with(self, bits: Bits, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits of a token sequence if products have `bits` bits of activations.

        The rows are computed as decode steps compute them. Used to choose activation bits.
        """
        logits = np.empty((len(tokens), self._program.vocab_size), np.float32)
        lowered = lower(self._program, activation_bits=bits)
        self._plan.evaluate(lowered, tokens, logits, [], generated=True)
        return logits

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return the intermediate values named `values`, each (len(tokens), width), by name.

        The token sequence is computed as by `score`; see `Backend.trace`.
        """
        widths, logits = self._program.value_widths, self._program.ops[-1].output
        arrays = {name: np.empty((len(tokens), widths[name]), np.float32) for name in values}
        taps = [name for name in arrays if name != logits]
        self._plan.evaluate(
            self._lower(taps),
            tokens,
            arrays.get(logits),
            [arrays[name] for name in taps],
            generated=generated,
        )
        return arrays

    @property
    def fused(self) -> tuple[tuple[Op, ...], ...]:
        """Return the Program's operations in groups: the kernels compute each group as one."""
        return self._lowered.parts

    def times(self) -> list[MeasuredOpTime]:
        """Return the time of each operation group in `fused` since the last call.

        The times are summed over steps.
        """
        return self._plan.times()

    def measure_collectives(self, test: CollectiveTest) -> tuple[list[float], list[float]]:
        """Time `test.count` collectives between ranks.

        Returns, for each collective, this rank's seconds of computing before it, and its seconds in
        it, including waits for other ranks. All ranks must call this at the same time.

        Raises:
            RanksLostError: another rank ended, or the link to it broke.
        """
        assert self._weight_shard is not None
        computing_s, collective_s = (c_double * test.count)(), (c_double * test.count)()
        if load_library(self.facts.level).ts_link_measure(
            byref(self._weight_shard.link),
            test.count,
            test.work,
            test.num_bytes,
            computing_s,
            collective_s,
        ):
            raise RanksLostError("Another rank of the model has ended, or does not answer.")
        return list(computing_s), list(collective_s)

    def copy_page(self, source: int, target: int) -> None:
        """Copy a KV page to another page; must not be called while a step runs."""
        self._plan.copy_page(source, target)

    def forget(self, request: Request) -> None:
        """Drop the backend's state of a finished request, such as its row of the page tables."""
        self._steps.forget(request)

    def close(self) -> None:
        """Free the backend's memory and threads; may be called twice."""
        self._opened.close()

    def _facts_of(
        self,
        level: str,
        num_threads: int,
        activation_bits: int | ActivationBits,
        pages: PlanPages,
    ) -> BackendFacts:
        """Return the backend's facts; the sizes of weights and pages are still 0."""
        library = load_library(level)
        return BackendFacts(
            name="cpu",
            detail=_detail(level, num_threads, activation_bits, pages.kv_format),
            level=level,
            precision=f"{activation_bits} {pages.kv_format}",
            mixed_bits=_mixed_bits(activation_bits),
            num_threads=num_threads,
            num_pages=pages.num_pages,
            page_size=pages.page_size,
            windows=tuple(group.window for group in self._program.cache_groups),
            weight_bytes=0,
            cache_bytes=0,
            one_arithmetic=bool(library.ts_one_arithmetic()),
            rows_together=library.ts_linear_rows_together(),
            num_states=pages.num_states if self._program.state_layers else 0,
            steps_ahead=len(self._weight_shard.mesh.stages) - 1 if self._weight_shard else 0,
        )

    def _tapped(self, value: str | None) -> str | None:
        """Return the name of the value that steps return: `value`, or the states to embed."""
        tapped = self._norm.args[0].x if self._norm else value
        assert value in (None, tapped), "a step can return one value"
        return tapped

    def _step_arrays(self, tapped: str | None, *, returns_tapped: bool) -> StepArrays:
        facts = self.facts
        tapped_width = 0 if tapped is None else self._program.value_widths[tapped]
        groups = PageGroups(facts.page_size, facts.windows)
        longest = groups.max_tokens(facts.num_pages, self._program.context_length)
        steps = StepArrays(
            len(facts.windows),
            facts.page_size,
            -(-longest // facts.page_size),
            one_arithmetic=facts.one_arithmetic,
            tapped_width=tapped_width,
            returns_tapped=returns_tapped,
            has_states=bool(self._program.state_layers),
            sends_best=self._weight_shard is not None and not self._weight_shard.link.shared,
        )
        if self._weight_shard is not None:
            steps.tables.note_changes()
        return steps

    def _lower(self, taps: Sequence[str]) -> CpuLowered:
        bits, weight_shard = self._bits, self._weight_shard
        if weight_shard is None:
            return lower(self._program, taps, activation_bits=bits)
        from twostroke.backends.cpu.shared import lower_rank  # not needed by a single process

        parts = weight_shard.parts(self._program, taps)
        return lower_rank(parts, weight_shard.rank, taps, activation_bits=bits)


def _cache_bytes(program: Program, pages: PlanPages) -> int:
    """Return the bytes of a plan's KV pages and of its slots for recurrent states."""
    page_bytes = program.page_bytes(pages.page_size, FORMATS[pages.kv_format])
    return pages.num_pages * page_bytes + pages.num_states * program.state_bytes


def _own_part(
    program: Program, tensors: Mapping[str, QuantTensor], weight_shard: WeightShard | None
) -> tuple[Program, Mapping[str, QuantTensor]]:
    if weight_shard is None:
        return program, tensors
    part = weight_shard.parts(program)[weight_shard.rank]
    return part.program, weight_shard.tensors(part, tensors)


def _last_norm(
    program: Program, tensors: Mapping[str, QuantTensor]
) -> partial[NDArray[np.float32]]:
    """Return the model's final norm as a function of hidden states `x` (rows, width).

    Embeddings need the norm's result. The kernel of the logits computes the norm as well, but does
    not return its result.
    """
    norm = next(op for op in program.ops if op.output == program.last_states)
    assert isinstance(norm, ops.RMSNorm), "logits are computed from a norm"
    assert norm.weight is not None
    return partial(rms_norm, norm, weight=tensors[norm.weight].dequantize())


def _mixed_bits(bits: int | ActivationBits) -> str:
    return bits.describe() if isinstance(bits, ActivationBits) else ""


def _detail(
    level: str, num_threads: int, activation_bits: int | ActivationBits, kv_format: str
) -> str:
    parts = [level, counted_noun(num_threads, "thread")]
    is_mixed = isinstance(activation_bits, ActivationBits)
    if not is_mixed and activation_bits != DEFAULT_ACTIVATION_BITS:
        parts.append(f"{activation_bits}-bit activations")
    if kv_format != usual_kv_format(level):
        parts.append(f"{kv_format} keys and values")
    return ", ".join(parts)
