"""The messages between rank 0 and the other ranks, apart from steps."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from twostroke.backends.cpu.library import INTERFACE_VERSION
from twostroke.core.errors import BackendError
from twostroke.core.frozen import Frozen
from twostroke.core.options import ComputeOptions  # noqa: TC001 - read when a job is
from twostroke.model.program.mesh import Mesh  # noqa: TC001 - likewise

T = TypeVar("T", bound=Frozen)


class RankHello(Frozen):
    """The first message of a rank to rank 0: its version and its machine.

    `memory_bytes`: free memory of the machine.
    """

    rank: int
    version: str
    host: str
    pid: int
    memory_bytes: int
    num_cores: int


class RankJob(Frozen):
    """A message of rank 0 to a rank: the part of the model to load, and the link to join.

    - `model`: a name, or a path on the rank's machine. `model_id`: the hash of its weights.
    - `compute`: the compute options of rank 0.
    - `host_slot`: (index, count) of this rank among the ranks of its machine, which divide threads
      and cores.
    - `level`, `one_arithmetic`: of rank 0; a rank with another `one_arithmetic` cannot take part.
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
    kv_format: str
    max_rows: int
    tapped_value: str | None
    level: str
    splits_sums: bool
    link_kind: str
    link: str


class RankReady(Frozen):
    """A message to rank 0: the rank has loaded its model part, or joined the link again."""

    num_threads: int
    weight_bytes: int
    cache_bytes: int


class RankHeartbeat(Frozen):
    """A periodic message of a rank to rank 0, by which rank 0 notices dead and frozen ranks.

    `waits`: whether the rank waits, for a step or in a collective. `progress`: of its link, see
    `Link.progress`. `collective_s`: seconds in collectives since the rank started.
    """

    waits: bool
    progress: int
    collective_s: float = 0.0


class Evaluate(Frozen):
    """A message of rank 0: compute a token sequence on separate pages, to evaluate the model.

    `taps`: names of values that rank 0 returns; empty: rank 0 returns logits.
    """

    tokens: list[int]
    taps: tuple[str, ...]
    generated: bool


class CopyPage(Frozen):
    """A message of rank 0: copy KV page `source` to page `target`, while no step runs."""

    source: int
    target: int


class RankTimes(Frozen):
    """A message to rank 0: the times of a rank's steps since the last such message.

    `operations`: for each fused operation, its seconds, and the seconds that its threads waited.
    `decode_s`: seconds of decode steps. `decode_waiting_s`: seconds thereof that the rank waited,
    for its next step or in collectives.
    """

    operations: list[tuple[float, float]]
    decode_s: float
    decode_waiting_s: float


class Reset(Frozen):
    """A message of rank 0: join the link again, after a failed step or with restarted ranks.

    `link`: the text by which the rank joins.
    """

    link: str


class RankFailed(Frozen):
    """A message to rank 0: a rank could not load its part of the model, or compute a step.

    `kind`: the name of an error class in `core/errors.py`. `lost`: the rank itself is well, but
    waited for another rank.
    """

    reason: str
    kind: str
    lost: bool = False


@cache
def version() -> str:
    """Return the version of the package and its kernels, which must be the same on all ranks.

    The result stays the same even if another version is installed while the process runs.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("twostroke")
    except PackageNotFoundError:
        number = "source tree"
    return f"{number}, kernels {INTERFACE_VERSION}"


def pack(message: Frozen) -> bytes:
    """Encode a message between rank 0 and another rank."""
    return msgspec.json.encode(message)


def unpack(body: bytes, kind: type[T]) -> T:
    """Decode a message between rank 0 and another rank, of type `kind`.

    Raises:
        BackendError: the body is not such a message.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"A rank sent a {kind.__name__} that cannot be read: {error}.") from None
