"""`Link`: the connection by which the kernels of ranks exchange values, and its types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Link(Protocol):
    """One rank's end of the connection over which the kernels of all ranks run collectives.

    Rank 0 calls `renew` and sends the resulting text to the other ranks. All ranks call `join` with
    this text, and rank 0 then calls `begin`. After `abort`, every wait of every rank ends with an
    error, until the ranks have joined again.
    """

    @property
    def kind(self) -> str:
        """Return the link type's name, a key of `LINKS`."""

    @property
    def files(self) -> tuple[int, ...]:
        """Return the open files that rank processes on this machine must inherit."""

    @property
    def record(self) -> Any:
        """Return the object for collectives: a `LinkRecord` for cpu, a `TorchLink` for torch."""

    def renew(self) -> str:
        """Start a new connection, and return the text by which ranks join it; only on rank 0."""

    def join(self, link: str) -> None:
        """Connect to the other ranks; `link` is the text that `renew` returned on rank 0."""

    def begin(self) -> None:
        """Allow collectives, after all ranks have joined; only on rank 0."""

    def abort(self) -> None:
        """End all waits of all ranks in collectives; any thread may call this at any time."""

    def progress(self) -> int:
        """Return a counter that changes when the link moves bytes, and is odd inside a collective.

        A link whose counter stands still has stalled. Links that cannot stall, or detect a stall
        themselves, always return 0. Any thread may call this.
        """

    def close(self) -> None:
        """Free the connections and memory of this rank's end of the link."""


def _join_shared(rank: int, num_ranks: int, level: str, link: str) -> Link:
    from twostroke.backends.parallel.shared import join_shared

    return join_shared(rank, num_ranks, level, link)


def _join_torch(rank: int, num_ranks: int, level: str, link: str) -> Link:
    from twostroke.backends.torch.link import TorchLink

    del level
    torch_link = TorchLink(rank, num_ranks)
    torch_link.join(link)
    return torch_link


def _join_hosts(kind: str) -> Callable[[int, int, str, str], Link]:
    def join(rank: int, num_ranks: int, level: str, link: str) -> Link:
        from twostroke.backends.parallel.links.link_type import choose_link_type, open_link

        opened = open_link(choose_link_type(kind), rank, num_ranks, level)
        try:
            opened.join(link)
        except BaseException:  # also after Ctrl-C: shared memory and sockets must not stay
            opened.close()
            raise
        return opened

    return join


# Functions by which ranks other than 0 join a type of link. Arguments: rank, number of ranks,
# instruction-set level, and the text of `renew`.
LINKS: dict[str, Callable[[int, int, str, str], Link]] = {
    "shared": _join_shared,
    "torch": _join_torch,
    **{kind: _join_hosts(kind) for kind in ("ucx", "gloo")},
}
