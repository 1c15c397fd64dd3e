"""The interface between the engine and backends.

`Backend` and its parent protocols `Runner`, `StartRunner` and `RankRunner` are the calls;
`BackendFacts` are sizes and abilities. `PageMemory` gives access to the bytes of KV pages, and
`WeightShard` is one rank's part of a model.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from twostroke.core.frozen import Frozen
from twostroke.model.program.mesh import MeshCoordinate
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult
    from twostroke.model.program import Program
    from twostroke.model.program.mesh import Mesh
    from twostroke.model.program.shard import RankProgram
    from twostroke.model.quant import QuantTensor


class RankFacts(Frozen):
    """Facts of one rank: its machine, coordinate in the mesh, threads and memory use."""

    rank: int
    host: str
    num_threads: int
    weight_bytes: int
    cache_bytes: int
    coordinate: MeshCoordinate = MeshCoordinate(0, 0, 0)


class RankState(Frozen):
    """The current state of a rank, as the server's status reports it.

    `state` is "ready", "lost", "starting" (the rank has not connected yet) or "loading" (it loads
    its weights, or restarts after a failed step). `collective_s`: seconds that the rank has spent
    in collectives, including waits for other ranks; 0.0 if the backend does not measure them.
    """

    facts: RankFacts
    state: str
    collective_s: float = 0.0
    num_restarts: int = 0


class CollectiveTest(Frozen):
    """Parameters of a speed test of the rank link: compute, then run a collective, repeatedly.

    `count`: the number of repetitions. `work`: units of computation before each collective, of a
    few nanoseconds each. `num_bytes`: bytes that each rank sends to all others, if the ranks share
    no memory.
    """

    count: int
    work: int = 0
    num_bytes: int = 4


class BackendFacts(Frozen):
    """Sizes and abilities of a backend. The engine branches on these facts, never on the name.

    - `num_pages`, `page_size`: a page holds `page_size` tokens of one cache group.
    - `num_states`: slots for recurrent states; 0 for models without such states.
    - `windows[g]`: positions that attention of cache group g sees; None: all.
    - `weight_bytes`, `cache_bytes`: memory of the weights and of all pages, of all ranks together.
    - `shared_weight_bytes`: the part of `weight_bytes` that lies in mapped files, which the
      operating system counts as available memory.
    - `level`: instruction set of the kernels, or of the machine limits to compare speeds with.
    - `precision`: everything else that decides how numbers are rounded.
    - `one_arithmetic`: prompt rows and generated rows are computed bit for bit in the same way, so
      cached pages of one kind can be used for the other.
    - `rows_together`: kernels compute this many rows at once. Up to this number, a step takes as
      long as a step with the next power of two rows.
    - `steps_ahead`: how many steps may be in flight when another one is started; above 0 the
      backend is a `StartRunner`.
    - `draws_ahead`: as `steps_ahead`, for steps whose input tokens are drawn by a step in flight
      (`Slice.is_blind`).
    - `stops_rows`: rows without logits are not computed after the last store of keys and values.
    - `ranks`, `link`: the ranks that run the Program together, and the link between them; empty for
      a single process.
    - `mixed_bits`: how many products have how many bits of activations, if the numbers differ.
    """

    name: str
    detail: str
    num_threads: int
    num_pages: int
    page_size: int
    windows: tuple[int | None, ...]
    weight_bytes: int
    cache_bytes: int
    shared_weight_bytes: int = 0
    level: str = "portable"
    precision: str = ""
    one_arithmetic: bool = True
    num_states: int = 0
    rows_together: int = 1
    steps_ahead: int = 0
    draws_ahead: int = 0
    stops_rows: bool = False
    ranks: tuple[RankFacts, ...] = ()
    link: str = ""
    mixed_bits: str = ""

    @property
    def full_detail(self) -> str:
        """Return the backend's description and activation bits as one text, for reports."""
        return f"{self.detail}, {self.mixed_bits}" if self.mixed_bits else self.detail


class Runner(Protocol):
    """Interface by which the engine's loop runs steps of one model over the model's KV pages."""

    @property
    def facts(self) -> BackendFacts:
        """Return the backend's sizes and abilities, which never change."""

    @property
    def pages(self) -> PageMemory | None:
        """Return access to the bytes of the KV pages.

        None if other processes have a part of the pages.
        """

    @property
    def state_memory(self) -> PageMemory | None:
        """Return access to the bytes of the slots for recurrent states: a `PageMemory` of slots.

        None if the model has no such states, or if another process has a part of them.
        """

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step: the rows of all its slices, and a token for each slice that samples.

        A slice is the part of a request that one step computes.
        """

    def forget(self, request: Request) -> None:
        """Drop the backend's state of a finished request, such as its row of the page tables."""

    def close(self) -> None:
        """Free the backend's memory and threads; the backend must not be used afterwards."""


class StartRunner(Runner, Protocol):
    """A runner with several steps in flight, which finish in the order of their starts.

    An error of `start` or `finish` ends only that step. `run` is called only while no step is in
    flight. If a request is in several steps, its slices are consecutive, and `forget` is called
    after the last step.
    """

    def start(self, plan: StepPlan) -> None:
        """Start to compute a step, and return without waiting for its result.

        The caller must not exceed the number of steps in flight that `facts` allow.
        """

    def finish(self) -> StepResult:
        """Wait for the oldest step in flight, and return its result.

        The result's `elapsed_s` counts from the start of the step, or from the end of the previous
        step if that was later.
        """


class RankRunner(StartRunner, Protocol):
    """A runner that computes a model on several ranks, which can be lost.

    `run`, `start` and `finish` may raise `RanksLostError`: all steps in flight are then gone, and
    `recover` must be called.
    """

    def check(self) -> None:
        """Raise RanksLostError if a rank was lost after the last step."""

    def recover(self) -> None:
        """Replace the lost ranks by new processes; the contents of all KV pages are lost.

        Raises:
            TwostrokeError: the ranks cannot be replaced.
        """

    def give_up(self) -> None:
        """Make a running `recover` fail soon, for shutdown; any thread may call this."""

    def states(self) -> Sequence[RankState]:
        """Return the state of each rank; any thread may call this."""


class Backend(Runner, Protocol):
    """A runner that also returns logits and intermediate values of a whole token sequence."""

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits (len(tokens), vocab_size) of a token sequence, to evaluate the model.

        The sequence gets separate KV pages. Its rows are computed as prefill computes them, or as
        decode steps do if `generated` is true. Must not be called while requests are running.
        """

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return intermediate values of the model for a token sequence, each (len(tokens), width).

        `values`: names of values of the Program. The sequence is computed as by `score`.
        """


class PageMemory(Protocol):
    """Access to the bytes of KV pages, for KV transfer and offload; any thread may use it.

    A page holds all layers of its cache group, in the backend's own format; all pages have the same
    size. A page may be read while a request or a lease refers to it. Only the transfer that holds a
    page may write it. Nothing may be used after the backend is closed. Slots for recurrent states
    are read and written in the same way.
    """

    @property
    def page_bytes(self) -> int:
        """Return the number of bytes of a KV page."""

    @property
    def mapped(self) -> memoryview[Any] | None:
        """Return all KV pages as one memory view; None if this process cannot address them."""

    def read(self, page: int) -> memoryview[Any]:
        """Return a read-only view of the bytes of a KV page."""

    def filling(self, page: int) -> AbstractContextManager[memoryview[Any]]:
        """Return a context manager for writing a KV page; it yields a buffer of the page's size.

        When the block ends, the buffer's bytes are in the page.
        """


class MappedPages:
    """Access to `num_pages` KV pages or slots in this process's memory; a `PageMemory`."""

    def __init__(self, memory: memoryview[Any], num_pages: int) -> None:
        self.page_bytes = len(memory) // num_pages
        self.mapped = memory

    def read(self, page: int) -> memoryview[Any]:
        """Return a view of the bytes of a KV page."""
        start = page * self.page_bytes
        return self.mapped[start : start + self.page_bytes]

    @contextmanager
    def filling(self, page: int) -> Iterator[memoryview[Any]]:
        """Yield a writable view of the bytes of a KV page."""
        yield self.read(page)


def block_sizes(tensors: Mapping[str, QuantTensor]) -> dict[str, int]:
    """Return the quantization block size, in values, of each weight tensor.

    Tensors whose columns are stored in another order (GPTQ's `act-order`) are left out.
    """
    return {
        name: tensor.format.block_size for name, tensor in tensors.items() if tensor.order is None
    }


class WeightShard(Frozen, eq=False):
    """One rank's part of a model: its coordinate in the mesh, and its end of the rank link.

    `max_rows`: the largest number of rows of a step. `block_sizes`: if given, sums are split over
    ranks at multiples of these sizes (see `model.program.shard.shard`).
    """

    rank: int
    mesh: Mesh
    max_rows: int
    link: Any  # a `LinkRecord` for the cpu backend, a `TorchLink` for torch
    block_sizes: Mapping[str, int] | None = None

    def parts(self, program: Program, kept_values: Collection[str] = ()) -> tuple[RankProgram, ...]:
        """Return the Programs of all ranks of the mesh, by rank.

        `kept_values`: names of values that rank 0 has with all columns, not only its part.
        """
        return shard(program, self.mesh, kept_values, self.block_sizes)

    def tensors(
        self, part: RankProgram, tensors: Mapping[str, QuantTensor]
    ) -> dict[str, QuantTensor]:
        """Return this rank's part of each weight tensor, as views without copies."""
        rank_tensors = {name: tensors[name].part(*rows) for name, rows in part.weight_rows.items()}
        cut = part.weight_columns.items()
        return rank_tensors | {name: rank_tensors[name].columns(*columns) for name, columns in cut}
