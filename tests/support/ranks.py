"""Ranks of the cpu backend as threads of this process, which share memory or use a link."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ctypes import addressof, c_char, c_void_p, memmove, string_at
from queue import Queue
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from support.cpu import PAGE_SIZE
from twostroke.backends.cpu.keys import balances
from twostroke.backends.cpu.library import load_library
from twostroke.backends.cpu.plan import NativePlan, PlanLink, PlanPages
from twostroke.backends.cpu.records import (
    AllGatherFunction,
    LinkRecord,
    ReceiveFunction,
    SendFunction,
    StepRecord,
)
from twostroke.backends.cpu.shared import lower_rank, shared_bytes
from twostroke.backends.cpu.steps import StepArrays
from twostroke.backends.cpu.team import thread_pool
from twostroke.backends.cpu.weights import PackedWeights
from twostroke.backends.interface import WeightShard
from twostroke.core.step import StepResult
from twostroke.model.program.kv_layout import KV_SPLIT_TOKENS, PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from support.cpu import Model
    from twostroke.backends.cpu.lowered import CpuLowered
    from twostroke.core.options import Bits
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.model.program.mesh import Mesh


class Post:
    """A link between threads: sent values wait in a queue until they are received."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], Queue[bytes]] = {}
        self._lock = threading.Lock()
        self.is_cut = False
        self.sent: list[int] = []  # bytes of what was sent, except in gathers

    def record(self, rank: int, num_ranks: int) -> LinkRecord:
        """Return the record of a rank's end of the link, for the kernels."""

        def all_gather(
            _: Any, team: Any, size: int, part_address: int, whole_address: int, num_bytes: Any
        ) -> int:
            members = list(team[:size])
            for i, member in enumerate(members):
                if member == rank:
                    data = string_at(part_address, num_bytes[i])
            for member in members:
                self._queue(rank, member).put(data)
            for i, member in enumerate(members):
                result = self._queue(member, rank).get()
                assert len(result) == num_bytes[i]
                memmove(whole_address, result, len(result))
                whole_address += len(result)
            return int(self.is_cut)

        def send(_: Any, to: int, data: int, num_bytes: int) -> int:
            self._queue(rank, to).put(string_at(data, num_bytes))
            self.sent.append(num_bytes)
            return int(self.is_cut)

        def receive(_: Any, sender: int, data: int, num_bytes: int) -> int:
            result = self._queue(sender, rank).get()
            assert len(result) == num_bytes
            memmove(data, result, num_bytes)
            return int(self.is_cut)

        functions = AllGatherFunction(all_gather), SendFunction(send), ReceiveFunction(receive)
        return LinkRecord(None, rank, num_ranks, None, 0, *functions)

    def _queue(self, sender: int, receiver: int) -> Queue[bytes]:
        with self._lock:
            return self._queues.setdefault((sender, receiver), Queue())


class ThreadRanks:
    """Runs step plans as a backend does, with a plan for each rank of a mesh."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        level: str,
        num_pages: int,
        *,
        threads: int = 1,
        max_rows: int = 1024,
        kv_format: str = "f16",
        activation_bits: Bits = 15,
        num_states: int = 0,
        post: Post | None = None,
        kept_values: Sequence[str] = (),
    ) -> None:
        program, tensors = model
        self.program, self.mesh, self.library = program, mesh, load_library(level)
        self.bits, self.num_ranks = activation_bits, mesh.num_ranks
        self.num_states = num_states if program.state_layers else 0
        self.parts = WeightShard(0, mesh, max_rows, None).parts(program, kept_values)
        size = shared_bytes(self.parts, max_rows)
        self.page_size = mesh.num_kv_ranks * KV_SPLIT_TOKENS if mesh.kv_by_tokens else PAGE_SIZE
        all_pages = num_pages * len(program.cache_groups)
        self._open = ExitStack()
        self._memory = mmap.mmap(-1, size)
        self._first_byte = c_char.from_buffer(self._memory)
        self.shared = addressof(self._first_byte)
        self.plans: list[NativePlan] = []
        self.lowered: list[CpuLowered] = []
        for rank in range(mesh.num_ranks):
            link = LinkRecord(None, rank, mesh.num_ranks, self.shared, size)
            if post is not None:
                link = post.record(rank, mesh.num_ranks)
            lowered = lower_rank(self.parts, rank, activation_bits=activation_bits)
            pool = self._open.enter_context(thread_pool(self.library, threads))
            share = WeightShard(rank, mesh, max_rows, link)
            rank_tensors = share.tensors(self.parts[rank], tensors)
            weights = PackedWeights(self.library, rank_tensors, lowered)
            self._open.callback(weights.close)
            part = self.parts[rank].program
            end = PlanLink(link, max_rows)
            balanced = balances(part, tensors, kv_format)
            pages = PlanPages(all_pages, self.page_size, kv_format, balanced, num_states)
            plan = NativePlan(self.library, pool, part, lowered, weights, pages, link=end)
            self._open.callback(plan.close)
            weights.pack(pool, None, None)
            self.plans.append(plan)
            self.lowered.append(lowered)
        self._workers = self._open.enter_context(ThreadPoolExecutor(mesh.num_ranks))
        self.windows = tuple(group.window for group in program.cache_groups)
        self.facts = self
        self.one_arithmetic = bool(self.library.ts_one_arithmetic())
        self._steps = self._step_arrays(num_pages, sends_best=post is not None)

    def _step_arrays(self, num_pages: int, *, sends_best: bool) -> StepArrays:
        longest = PageGroups(self.page_size, self.windows).max_tokens(
            num_pages, self.program.context_length
        )
        return StepArrays(
            len(self.windows),
            self.page_size,
            -(-longest // self.page_size),
            one_arithmetic=self.one_arithmetic,
            sends_best=sends_best,
            has_states=bool(self.program.state_layers),
        )

    def __enter__(self) -> Self:
        """Return the ranks; the `with` block ends them."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the resources of all ranks."""
        self._open.close()
        del self._first_byte

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan on all ranks, and sample on rank 0."""
        sampled = self._steps.fill(plan)
        records = [self._steps.record]
        for _ in self.plans[1:]:
            records.append(StepRecord.from_buffer_copy(self._steps.record))
            records[-1].samples = records[-1].results = records[-1].taps = None
        self.together(lambda rank: self.plans[rank].run(records[rank]))
        tokens, logprobs, hidden, scores = self._steps.results(plan, sampled)
        return StepResult(tokens, logprobs, 1.0, 1.0, hidden, scores)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits of a sequence."""
        return self.trace(tokens, [self.program.ops[-1].output], generated=generated)[
            self.program.ops[-1].output
        ]

    def trace(
        self, tokens: Sequence[int], names: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return values of a sequence that rank 0 holds completely, by name."""
        widths, logits = self.program.value_widths, self.program.ops[-1].output
        results = {name: np.empty((len(tokens), widths[name]), np.float32) for name in names}
        taps = [name for name in names if name != logits]
        self.together(
            lambda rank: self.plans[rank].evaluate(
                lower_rank(self.parts, rank, taps, activation_bits=self.bits),
                tokens,
                results.get(logits) if rank == 0 else None,
                [results[name] for name in taps] if rank == 0 else [],
                generated=generated,
                has_logits=logits in results,
            )
        )
        return results

    def together(self, body: Callable[[int], None]) -> None:
        """Call `body(rank)` on all ranks at once; raise the first error."""
        for done in list(self._workers.map(_caught(body), range(self.num_ranks))):
            if done is not None:
                raise done

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request."""
        self._steps.forget(request)

    def abort(self) -> None:
        """End all waits of ranks for each other."""
        self.library.ts_link_abort(c_void_p(self.shared))

    def reset(self) -> None:
        """Let ranks wait for each other again, after `abort`."""
        self.library.ts_link_reset(c_void_p(self.shared))


def _caught(body: Callable[[int], None]) -> Callable[[int], BaseException | None]:
    def call(rank: int) -> BaseException | None:
        try:
            body(rank)
        except BaseException as error:  # noqa: BLE001 - given to the caller
            return error
        return None

    return call
