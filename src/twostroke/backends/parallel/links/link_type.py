"""The types of links between hosts, and the choice of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.backends.parallel.links import gloo, ucx
from twostroke.backends.parallel.links.host_link import HostLink
from twostroke.backends.parallel.links.ucx import UcxEngine
from twostroke.core.errors import BackendError, UsageError, nearest
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.backends.parallel.links.host_link import LinkEngine


class LinkType(Frozen):
    """A type of link between hosts, such as UCX or Gloo.

    `obstacle()`: returns why the link cannot be used on this machine; None if it can. `version()`:
    returns the version of the link's library. `engine(rank, num_ranks, level)`: creates a rank's
    engine; `level` is the instruction-set level of the kernels.
    """

    obstacle: Callable[[], str | None]
    version: Callable[[], str]
    engine: Callable[[int, int, str], LinkEngine]


# Fastest first (benchmarks/engine/links.py).
LINK_TYPES: Final = {
    "ucx": LinkType(ucx.obstacle, ucx.version, UcxEngine),
    "gloo": LinkType(
        gloo.obstacle,
        gloo.version,
        lambda rank, num_ranks, _: gloo.GlooEngine(rank, num_ranks),
    ),
}


def choose_link_type(requested: str | None = None) -> str:
    """Return the name of the requested link type, by default of the fastest usable type.

    Raises:
        UsageError: the requested link type does not exist.
        BackendError: the requested link type, or every type, cannot be used here.
    """
    if requested is not None and requested not in LINK_TYPES:
        names = ", ".join(LINK_TYPES)
        raise UsageError(
            f"TWOSTROKE_LINK must be one of {names}, got '{requested}'."
            f"{nearest(requested, LINK_TYPES)}"
        )
    obstacles = {}
    for kind in (requested,) if requested else LINK_TYPES:
        obstacle = obstacles[kind] = LINK_TYPES[kind].obstacle()
        if obstacle is None:
            return kind
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in obstacles.items())
    raise BackendError(f"No link between hosts can be used here. {reasons}")


def open_link(kind: str, rank: int, num_ranks: int, level: str, host: str = "") -> HostLink:
    """Create a rank's end of a link of type `kind`.

    `host`: the address of rank 0, only needed on rank 0.
    """
    return HostLink(kind, rank, num_ranks, host, LINK_TYPES[kind].engine(rank, num_ranks, level))
