"""Runs a single step of a chosen shape: the real scheduler plans it, and it runs repeatedly."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions
from twostroke.core.request import NO_PAGE, Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan, StepResult
from twostroke.engine.kv_cache import PagePool, StatePool
from twostroke.engine.scheduler import Scheduler, SchedulerConfig, make_policy
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.gpu.backend import GpuBackend
    from twostroke.backends.parallel.backend import ParallelBackend
    from twostroke.model.program import Program
    from twostroke.model.program.kv_layout import PageGroups

    PagedBackend = CpuBackend | GpuBackend | ParallelBackend

NUM_CYCLES: Final = 3  # further steps, by which the scheduler is timed

FILL_ROWS: Final = 256  # rows per step while contexts are filled
_MAX_COMPUTED_CONTEXT: Final = 512  # tokens of a context that are computed
_STATES_PER_STREAM: Final = 3  # slots: one is read, one written, one is the next stream's


class StepShape(Frozen):
    """The shape of a step to be measured: a decode step of several streams, or a prefill step.

    In a decode step, `num_streams` requests each compute a row after `context` tokens. With a
    `num_prompt` above 0, the step computes the first `num_prompt` tokens of one request.
    """

    num_streams: int = 1
    context: int = 0
    num_prompt: int = 0

    @classmethod
    def decode(cls, num_streams: int, context: int) -> StepShape:
        """Return the shape of a decode step of several streams, each after `context` tokens."""
        return cls(num_streams, context)

    @classmethod
    def prefill(cls, num_tokens: int) -> StepShape:
        """Return the shape of a step that computes one whole prompt of `num_tokens`."""
        return cls(num_prompt=num_tokens)

    @property
    def batch(self) -> BatchShape:
        """The shape of the step as the cost model describes it."""
        if self.num_prompt:
            return BatchShape.prefill(self.num_prompt)
        return BatchShape.decode((self.context,) * self.num_streams)

    @property
    def name(self) -> str:
        """A name of the step for people, such as "decode, 16 streams after 512 tokens"."""
        if self.num_prompt:
            return f"prefill, {counted_noun(self.num_prompt, 'token', form=',')}"
        streams = counted_noun(self.num_streams, "stream")
        return f"decode, {streams} after {counted_noun(self.context, 'token', form=',')}"

    def check(self, program: Program) -> None:
        """Raise UsageError if a request of the step would exceed the model's context."""
        if self.num_tokens > program.context_length:
            request, option = (
                (f"a prompt of {self.num_prompt:,}", "--prefill")
                if self.num_prompt
                else (f"steps after {counted_noun(self.context, 'token', form=',')}", "--context")
            )
            limit = max(0, program.context_length - self.num_written)
            raise UsageError(
                f"The context of {program.name} has "
                f"{counted_noun(program.context_length, 'token', form=',')}, too few for "
                f"{request}: {option} may be up to {limit}."
            )

    def num_pages(self, groups: PageGroups) -> int:
        """Return how many KV pages the step's requests need, including the scheduler's reserve.

        Pages before a sliding window are counted, too, since they are not freed while the context
        is filled.

        `groups` computes how many pages each cache group needs.
        """
        pages_per_request = -(-self.num_tokens // groups.page_size) + 1
        return self.num_streams * len(groups.windows) * pages_per_request

    @property
    def num_states(self) -> int:
        """The number of slots for recurrent states, in models that have such states."""
        return self.num_streams * _STATES_PER_STREAM

    @property
    def num_written(self) -> int:
        """How many tokens each request of the step generates while the step is measured.

        They are the first token, and a token in each further step.
        """
        return 1 if self.num_prompt else 2 + NUM_CYCLES

    @property
    def num_tokens(self) -> int:
        """The number of tokens of each request when the measurement ends."""
        return (self.num_prompt or self.context) + self.num_written


class SingleStep:
    """Runs a step of a chosen shape on a backend again and again, to time it.

    The backend serves nothing else until `close`. Only the beginning of the context is computed,
    for one stream. Its KV pages are copied for the rest of the context and for other streams,
    because times do not depend on the values in them. New tokens differ, so that steps use
    different experts.
    """

    def __init__(self, backend: PagedBackend, program: Program, shape: StepShape) -> None:
        """Fill the contexts of the step's requests, and plan the step with the real scheduler.

        The backend must have enough KV pages, and enough slots for recurrent states.
        """
        facts = backend.facts
        pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
        num_tokens = shape.num_prompt or shape.context
        config = SchedulerConfig(
            context_length=program.context_length,
            max_running=shape.num_streams,
            token_budget=shape.num_streams * num_tokens,
            max_waiting_requests=shape.num_streams,
            max_waiting_tokens=shape.num_streams * num_tokens,
        )
        self._backend = backend
        self._shape = shape
        states = StatePool(facts.num_states) if facts.num_states else None
        policy = make_policy(BatchOptions())
        self._scheduler = Scheduler(config, pool, None, policy, states=states)
        self._rng = random.Random(0)
        self._vocab_size = program.vocab_size
        self._prompt = self._tokens(num_tokens)
        self._requests: list[Request] = []
        for _ in range(shape.num_streams):
            self._add()
        plan = self._plan()
        if not shape.num_prompt:
            self._fill(plan)
            self._scheduler.commit(plan, self._result(shape.num_streams))
            plan = self._plan()
        self.plan = plan
        assert BatchShape.of(plan) == shape.batch

    def run(self) -> StepResult:
        """Compute the step; each call computes the same step with the same result."""
        return self._backend.run(self.plan)

    def scheduler_times(self) -> list[float]:
        """Return the seconds that the scheduler takes for each of a few further steps.

        These steps are also computed, so that processor caches are as during serving. The measured
        step is committed before.
        """
        self._scheduler.commit(self.plan, self._result(self._shape.num_streams))
        times_s = []
        for _ in range(NUM_CYCLES):
            if self._shape.num_prompt:
                self._add()
            start_s = time.perf_counter()
            plan = self._plan()
            planned_s = time.perf_counter()
            self._backend.run(plan)
            result = self._result(self._shape.num_streams)
            computed_s = time.perf_counter()
            self._scheduler.commit(plan, result)
            times_s.append(planned_s - start_s + time.perf_counter() - computed_s)
        return times_s

    def close(self) -> None:
        """Make the backend forget the requests of the step."""
        for request in self._requests:
            self._backend.forget(request)

    def _add(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._shape.num_written)
        name = f"stream {len(self._requests)}"
        request = Request(name, list(self._prompt), len(self._prompt), params, seed=0)
        self._requests.append(request)
        self._scheduler.add(request)

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan()
        assert plan is not None
        assert len(plan.slices) == self._shape.num_streams, "a stream does not fit"
        return plan

    def _fill(self, plan: StepPlan) -> None:
        """Fill the contexts of the step's requests with KV pages.

        The beginning of the first request is computed, and its pages are copied.
        """
        first, page_size = plan.slices[0], self._backend.facts.page_size
        num_rows = min(first.count, max(_MAX_COMPUTED_CONTEXT, page_size))
        for start in range(first.start, num_rows, FILL_ROWS):
            count = min(FILL_ROWS, num_rows - start)
            slice_ = Slice(
                first.request, start, count, samples=False, write_state=first.write_state
            )
            self._backend.run(StepPlan((slice_,)))
        num_filled = None if num_rows == first.count else num_rows // page_size
        for slice_ in plan.slices:
            for pages, targets in zip(first.request.pages, slice_.request.pages, strict=True):
                sources = pages[:num_filled]
                for index, target in enumerate(targets):
                    source = sources[index % len(sources)]
                    assert NO_PAGE not in {source, target}
                    if source != target:
                        self._backend.copy_page(source, target)

    def _result(self, num_tokens: int) -> StepResult:
        """Return a step result with random tokens, because greedy tokens repeat themselves."""
        return StepResult(self._tokens(num_tokens), [None] * num_tokens)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]
