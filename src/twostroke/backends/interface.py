"""The interface between the engine and backends: what a backend is, can do, and reports.

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
    """Where one of several ranks runs, which part of the model it has, and how much that is."""

    rank: int
    host: str
    num_threads: int
    weight_bytes: int
    cache_bytes: int
    place: MeshCoordinate = MeshCoordinate(0, 0, 0)


class RankState(Frozen):
    """How a rank is now.

    `state` is "ready", "lost", "starting" (nothing was heard of it yet), or "loading" (its part, or
    it begins again after a failed step). `collective_s` are its seconds in collectives since it
    started, waiting for other ranks included; 0.0 if the backend does not measure them.
    """

    facts: RankFacts
    state: str
    collective_s: float = 0.0
    num_restarts: int = 0


class Meetings(Frozen):
    """What ranks do to measure their link: compute alike, then meet, `count` times.

    Each rank's computing has `work` parts of some nanoseconds. Where ranks share no memory, each
    gives `num_bytes` to all others.
    """

    count: int
    work: int = 0
    num_bytes: int = 4


class BackendFacts(Frozen):
    """Facts about a backend. The engine branches on these, never on the name.

    There are `num_pages` pages, each for `page_size` tokens of any one cache group; rows of group
    g see `windows[g]` positions. `level` names the instruction set of the kernels, or the one that
    the backend's speed is compared with, `precision` what else decides how numbers are rounded.
    With `one_arithmetic` prompt rows and generated rows are computed alike, bit for bit, so that
    pages filled by either serve the other. Up to `rows_together` rows take as long as the next
    power of two of them, because kernels compute that many at once. With `steps_ahead` it is a
    `StartRunner`, and a step may be started while that many others are in flight. `draws_ahead`
    says the same, and that rows may follow tokens which these draw (`Slice.is_blind`). If it
    `stops_rows`, those without logits are not computed after the last store. `ranks` are
    those that run the Program together, if they are several, and `link` names what connects them;
    the sizes include all of them. `mixed_bits` says how many products have how many bits of
    activations, where these differ.
    """

    name: str
    detail: str
    num_threads: int
    num_pages: int
    page_size: int
    windows: tuple[int | None, ...]
    weight_bytes: int
    cache_bytes: int
    level: str = "portable"
    precision: str = ""
    one_arithmetic: bool = True
    rows_together: int = 1
    steps_ahead: int = 0
    draws_ahead: int = 0
    stops_rows: bool = False
    ranks: tuple[RankFacts, ...] = ()
    link: str = ""
    mixed_bits: str = ""

    @property
    def full_detail(self) -> str:
        """The detail with `mixed_bits`, for measurements."""
        return f"{self.detail}, {self.mixed_bits}" if self.mixed_bits else self.detail


class Runner(Protocol):
    """Runs steps of one Program over its own key-value pages: all that the engine's loop needs."""

    @property
    def facts(self) -> BackendFacts:
        """Sizes and abilities, fixed for the backend's life."""

    @property
    def pages(self) -> PageMemory | None:
        """The bytes of its pages; None if they are not all in this process's memory."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a finished request."""

    def close(self) -> None:
        """Give back memory and threads; the backend is not used afterwards."""


class StartRunner(Runner, Protocol):
    """A runner that may have several steps in flight, finished in the order of their starts.

    An error ends the one step that was to be started or finished. `run` is called only while no
    step is in flight. A request is in several of them only with consecutive slices, and `forget` is
    called after the last of them.
    """

    def start(self, plan: StepPlan) -> None:
        """Start a step, while no more others are in flight than `facts` allow."""

    def finish(self) -> StepResult:
        """Return the result of the step that was started first.

        Its `elapsed_s` is without the time before the step's predecessor was finished.
        """


class RankRunner(StartRunner, Protocol):
    """A runner over several ranks, which may be lost.

    `RanksLostError` may be raised by `run`, `start` and `finish`: then no step is in flight any
    more, and `recover` must be called.
    """

    def check(self) -> None:
        """Raise RanksLostError if a rank was lost while no step was in flight."""

    def recover(self) -> None:
        """Replace the lost ranks; what was on any page is lost.

        Raises:
            TwostrokeError: they cannot be replaced.
        """

    def give_up(self) -> None:
        """Let `recover` fail soon, because nobody needs it; another thread calls this."""

    def states(self) -> Sequence[RankState]:
        """Return how each rank is now; any thread may call it."""


class Backend(Runner, Protocol):
    """A runner that can also show what it computes."""

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> NDArray[np.float32]:
        """Return the logits (len(tokens), vocab_size) of a sequence, on separate pages.

        Its rows are computed as prompt, or as `generated` ones. For evaluation; must not be called
        while requests are running.
        """

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Return values of the Program, each (len(tokens), its width), by name; else as `score`."""


class PageMemory(Protocol):
    """The bytes of equal pages; any thread may use them.

    A page holds all layers of its cache group, in the backend's own form. It may be read while a
    request or a lease refers to it, and written only by the transfer that holds it. Nothing may be
    used after the backend is closed.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def mapped(self) -> memoryview[Any] | None:
        """All pages, one after another; None if they are not in this process's memory."""

    def read(self, page: int) -> memoryview[Any]:
        """Return the bytes of a page, which must not be changed."""

    def filling(self, page: int) -> AbstractContextManager[memoryview[Any]]:
        """Return what to fill a page by, while the context lasts."""


class MappedPages:
    """The bytes of `num_pages` pages in this process's memory."""

    def __init__(self, memory: memoryview[Any], num_pages: int) -> None:
        self.page_bytes = len(memory) // num_pages
        self.mapped = memory

    def read(self, page: int) -> memoryview[Any]:
        """Return the bytes of a page."""
        start = page * self.page_bytes
        return self.mapped[start : start + self.page_bytes]

    @contextmanager
    def filling(self, page: int) -> Iterator[memoryview[Any]]:
        """Yield the bytes of a page."""
        yield self.read(page)


def block_sizes(tensors: Mapping[str, QuantTensor]) -> dict[str, int]:
    """Return how many values a block has of each tensor whose columns are in inputs' order."""
    return {name: one.format.block_size for name, one in tensors.items() if one.order is None}


class WeightShard(Frozen, eq=False):
    """One rank's share of a Program, and its end of the link to the others.

    No step has more than `max_rows` rows. With `block_sizes` sums are split (see `shard`).
    """

    rank: int
    mesh: Mesh
    max_rows: int
    link: Any  # a `LinkRecord` for the cpu backend, a `TorchLink` for torch
    block_sizes: Mapping[str, int] | None = None

    def parts(self, program: Program, kept: Collection[str] = ()) -> tuple[RankProgram, ...]:
        """Return the part of each rank; the values that are `kept` are whole on rank 0."""
        return shard(program, self.mesh, kept, self.block_sizes)

    def tensors(
        self, part: RankProgram, tensors: Mapping[str, QuantTensor]
    ) -> dict[str, QuantTensor]:
        """Return what this rank reads of each weight; nothing is copied."""
        found = {name: tensors[name].part(*rows) for name, rows in part.weight_rows.items()}
        cut = part.weight_columns.items()
        return found | {name: found[name].columns(*columns) for name, columns in cut}
