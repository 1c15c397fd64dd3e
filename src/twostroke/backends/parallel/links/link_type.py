"""The kinds of links between hosts, and which of them to take."""

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
    """A kind of link: why it cannot be used here (None: it can), its version, its engine.

    `engine` takes the rank, the number of ranks, and the level of native code.
    """

    obstacle: Callable[[], str | None]
    version: Callable[[], str]
    engine: Callable[[int, int, str], LinkEngine]


# Fastest first (benchmarks/engine/links.py).
KINDS: Final = {
    "ucx": LinkType(ucx.obstacle, ucx.version, UcxEngine),
    "gloo": LinkType(
        gloo.obstacle,
        gloo.version,
        lambda rank, num_ranks, _: gloo.GlooEngine(rank, num_ranks),
    ),
}


def choose_kind(wanted: str | None = None) -> str:
    """Return the wanted kind of link, or the fastest that can be used here.

    Raises:
        UsageError: there is no such kind.
        BackendError: it cannot be used here, or none can.
    """
    if wanted is not None and wanted not in KINDS:
        names = ", ".join(KINDS)
        raise UsageError(
            f"TWOSTROKE_LINK must be one of {names}, got '{wanted}'.{nearest(wanted, KINDS)}"
        )
    obstacles = {}
    for kind in (wanted,) if wanted else KINDS:
        obstacle = obstacles[kind] = KINDS[kind].obstacle()
        if obstacle is None:
            return kind
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in obstacles.items())
    raise BackendError(f"No link between hosts can be used here. {reasons}")


def open_link(kind: str, rank: int, num_ranks: int, level: str, host: str = "") -> HostLink:
    """Return a rank's end of a link; only rank 0 needs `host`, the address that others know."""
    return HostLink(kind, rank, num_ranks, host, KINDS[kind].engine(rank, num_ranks, level))
