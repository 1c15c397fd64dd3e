"""The messages between rank 0 and the other ranks.

A step is sent as bytes without a message around it: an encoded `StepFrame`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from twostroke.backends.cpu.library import INTERFACE_VERSION
from twostroke.backends.interface import CollectiveTest  # noqa: TC001 - msgspec reads it
from twostroke.backends.sampling.rows import COLUMNS_HASH
from twostroke.core.frozen import Frozen
from twostroke.core.options import ComputeOptions  # noqa: TC001 - likewise
from twostroke.core.transport.frames import MessageFormat
from twostroke.model.program.mesh import Mesh  # noqa: TC001 - likewise

VERSION: Final = 3  # raise it when a message changes


class RankArrival(Frozen, array_like=True, tag=1):
    """The first message of a process that connects to rank 0, as a launcher has started it.

    `command`: a text with the model and parallel options, see `describe_command`.
    """

    rank: int
    num_ranks: int
    command: str = ""


class RankHello(Frozen, array_like=True, tag=2):
    """The first message of a rank to rank 0: its version and its machine.

    `memory_bytes`: free memory of the machine.
    """

    rank: int
    version: str
    host: str
    pid: int
    memory_bytes: int
    num_cores: int


class RankJob(Frozen, array_like=True, tag=3):
    """A message of rank 0 to a rank: the part of the model to load, and the link to join.

    - `model`: a name, or a path on the rank's machine. `model_id`: the hash of its weights.
    - `compute`: the compute options of rank 0.
    - `host_slot`: (index, count) of this rank among the ranks of its machine, which divide threads
      and cores.
    - `level`, `one_arithmetic`: of rank 0; a rank with another `one_arithmetic` cannot take part.
    - `num_states`: slots for recurrent states; 0 for models without such states.
    - `max_rows`: the largest number of rows of a step.
    - `link`: the text by which the rank joins a link of kind `link_kind`.
    """

    rank: int
    mesh: Mesh
    model: str
    model_id: str
    compute: ComputeOptions
    host_slot: tuple[int, int]
    one_arithmetic: bool
    num_pages: int
    page_size: int
    num_states: int
    kv_format: str
    max_rows: int
    tapped_value: str | None
    level: str
    splits_sums: bool
    link_kind: str
    link: str


class RankReady(Frozen, array_like=True, tag=4):
    """A message to rank 0: the rank has loaded its model part, or joined the link again."""

    num_threads: int
    weight_bytes: int
    cache_bytes: int


class RankHeartbeat(Frozen, array_like=True, tag=6):
    """A periodic message of a rank to rank 0, by which rank 0 notices dead and frozen ranks.

    `waits`: whether the rank waits, for a step or in a collective. `progress`: of its link, see
    `Link.progress`. `collective_s`: seconds in collectives since the rank started.
    """

    waits: bool
    progress: int
    collective_s: float = 0.0


class Rank0Heartbeat(Frozen, array_like=True, tag=7):
    """A periodic message of rank 0 to each rank, by which ranks notice that rank 0 is lost."""


class Evaluate(Frozen, array_like=True, tag=8):
    """A message of rank 0: compute a token sequence on separate pages, to evaluate the model.

    `taps`: names of values that rank 0 returns; empty: rank 0 returns logits.
    """

    tokens: list[int]
    taps: tuple[str, ...]
    generated: bool


class CopyPage(Frozen, array_like=True, tag=9):
    """A message of rank 0: copy KV page `source` to page `target`, while no step runs."""

    source: int
    target: int


class MeasureCollectives(Frozen, array_like=True, tag=10):
    """A message of rank 0: take part in a speed test of collectives, while no step runs."""

    test: CollectiveTest


class GetTimes(Frozen, array_like=True, tag=11):
    """A message of rank 0 that asks for the times of a rank's steps; the answer is `RankTimes`."""


class RankTimes(Frozen, array_like=True, tag=12):
    """A message to rank 0: the times of a rank's steps since the last such message.

    `operations`: for each fused operation, its seconds, and the seconds that its threads waited.
    `decode_s`: seconds of decode steps. `decode_waiting_s`: seconds thereof that the rank waited,
    for its next step or in collectives.
    """

    operations: list[tuple[float, float]]
    decode_s: float
    decode_waiting_s: float


class Reset(Frozen, array_like=True, tag=13):
    """A message of rank 0: join the link again, after a failed step or restarts of ranks.

    `link`: the text by which the rank joins.
    """

    link: str


class RankFailed(Frozen, array_like=True, tag=5):
    """A message to rank 0: a rank could not load its part of the model, or compute a step.

    `kind`: the name of an error class in `core/errors.py`. `lost`: the rank itself is well, but
    waited for another rank.
    """

    reason: str
    kind: str
    lost: bool = False


class EndRank(Frozen, array_like=True, tag=14):
    """A message of rank 0: end the rank's process."""


class RankLeaves(Frozen, array_like=True, tag=15):
    """A message to rank 0: the rank's process ends, and must not be started again."""


# The messages of `twostroke doctor --ranks`.


class RankReport(Frozen):
    """What `twostroke doctor --ranks` compares between ranks: the machine, the version, the model.

    `model_id`: the hash of the model's weights. `model_error`: why the weights cannot be opened.
    `obstacles`: for each type of link, why the rank cannot use it; None if it can.
    """

    rank: int
    host: str
    address: str
    interface: str
    version: str
    level: str
    one_arithmetic: bool
    num_cores: int
    memory_bytes: int
    model_id: str | None
    model_error: str | None
    obstacles: dict[str, str | None]


class RankReported(Frozen, array_like=True, tag=16):
    """A message to rank 0: the report of this rank."""

    report: RankReport


class LinkTrial(Frozen, array_like=True, tag=17):
    """A message of rank 0 to another rank: the type of link to test, and the text to join it.

    `kind` None: no type of link can be used by all ranks.
    """

    kind: str | None
    link: str = ""


class LinkTested(Frozen, array_like=True, tag=18):
    """A message to rank 0: this rank has tested the link."""


RankMessage = (
    RankArrival
    | RankHello
    | RankJob
    | RankReady
    | RankFailed
    | RankHeartbeat
    | Rank0Heartbeat
    | Evaluate
    | CopyPage
    | MeasureCollectives
    | GetTimes
    | RankTimes
    | Reset
    | EndRank
    | RankLeaves
    | RankReported
    | LinkTrial
    | LinkTested
)

RECEIVED_BY_RANKS: Final[MessageFormat[RankMessage | bytes]] = MessageFormat(
    RankMessage, takes_bytes=True
)


@cache
def version() -> str:
    """Return the version of the package, kernels and messages, which must be the same on all ranks.

    The result stays the same even if another version is installed while the process runs.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("twostroke")
    except PackageNotFoundError:
        number = "source tree"
    kernels = f"{INTERFACE_VERSION}.{COLUMNS_HASH:016x}"
    return f"{number}, kernels {kernels}, messages {VERSION}"
