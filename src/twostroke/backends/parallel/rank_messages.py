"""What rank 0 and the other ranks tell each other, besides steps."""

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
    """Who a rank is: the first message to rank 0. `memory_bytes` are free."""

    rank: int
    version: str
    host: str
    pid: int
    memory_bytes: int
    num_cores: int


class RankJob(Frozen):
    """What a rank is to load: its part of a model, and how it reaches the other ranks.

    `model` is a name or a path on the rank's machine, and `model_id` must be that of its files.
    `compute` is what rank 0 was asked for; this rank has a share of the machine's threads and
    cores: it is number `place[0]` of `place[1]` ranks there. `level` is that of rank 0; ranks whose
    prompts are computed otherwise (`one_arithmetic`) cannot take part.
    No step has more than `max_rows` rows. `link` is what the kind of link needs to find the
    others.
    """

    rank: int
    mesh: Mesh
    model: str
    model_id: str
    compute: ComputeOptions
    place: tuple[int, int]
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
    """A rank has loaded its part, or has begun again after a failed step."""

    num_threads: int
    weight_bytes: int
    cache_bytes: int


class RankHeartbeat(Frozen):
    """A rank lives.

    `progress` is that of its link; `waits`: for a step, or inside a collective. `collective_s` are
    its seconds in collectives since it started.
    """

    waits: bool
    progress: int
    collective_s: float = 0.0


class Evaluate(Frozen):
    """A sequence to compute on separate pages; the values `taps`, or logits, leave it on rank 0."""

    tokens: list[int]
    taps: tuple[str, ...]
    generated: bool


class CopyPage(Frozen):
    """A page that becomes a copy of another, while no step runs."""

    source: int
    target: int


class RankTimes(Frozen):
    """What a rank's steps took since it was asked before.

    `operations` has for each fused operation its seconds, and how many of them its threads waited.
    In decode steps the rank waited for `decode_waiting_s` of `decode_s` seconds: for its next step,
    or in collectives.
    """

    operations: list[tuple[float, float]]
    decode_s: float
    decode_waiting_s: float


class Reset(Frozen):
    """A step failed or ranks are new: join them again, with `link`."""

    link: str


class RankFailed(Frozen):
    """A rank's part of a step, or its start, failed.

    `kind` is the name of an error class in `core/errors.py`. With `lost` the rank only waited for
    another one.
    """

    reason: str
    kind: str
    lost: bool = False


@cache
def version() -> str:
    """Return what must be the same on all ranks: the package's version and the kernels'.

    It stays what it was at first, even if another version is installed under a running process.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("twostroke")
    except PackageNotFoundError:
        number = "source tree"
    return f"{number}, kernels {INTERFACE_VERSION}"


def pack(message: Frozen) -> bytes:
    """Return a message's body."""
    return msgspec.json.encode(message)


def unpack(body: bytes, kind: type[T]) -> T:
    """Return the message of a body.

    Raises:
        BackendError: it is not one.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BackendError(f"A rank sent a {kind.__name__} that cannot be read: {error}.") from None
