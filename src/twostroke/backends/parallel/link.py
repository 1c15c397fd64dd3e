"""`Link`: how the ranks' kernels reach each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Link(Protocol):
    """One rank's end of what connects all of them.

    Rank 0 calls `renew` for the text with which all can join, and sends it; all call `join` with
    it, and rank 0 `begin` once all have. After `abort` every wait of every rank ends with an
    error, until they have joined again.
    """

    @property
    def kind(self) -> str:
        """Its name in `LINKS`."""

    @property
    def files(self) -> tuple[int, ...]:
        """Open files that other ranks of this machine must inherit."""

    @property
    def record(self) -> Any:
        """What the backend needs: a `LinkRecord` for the cpu backend."""

    def renew(self) -> str:
        """Return what ranks need to join from now on; only on rank 0."""

    def join(self, link: str) -> None:
        """Meet the other ranks."""

    def begin(self) -> None:
        """Let steps run, now that all have joined; only on rank 0."""

    def abort(self) -> None:
        """End all waits of all ranks; any thread may call it at any time."""

    def progress(self) -> int:
        """Return a number that changes when bytes move; odd inside a collective.

        Always 0 for what cannot stall, or notices it itself. Any thread may call it.
        """

    def close(self) -> None:
        """Give everything back."""


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
        from twostroke.backends.parallel.links.link_type import choose_kind, open_link

        opened = open_link(choose_kind(kind), rank, num_ranks, level)
        try:
            opened.join(link)
        except BaseException:
            opened.close()
            raise
        return opened

    return join


# How ranks other than 0 join a kind of link: rank, number of ranks, level, text of `renew`.
LINKS: dict[str, Callable[[int, int, str, str], Link]] = {
    "shared": _join_shared,
    "torch": _join_torch,
    **{kind: _join_hosts(kind) for kind in ("ucx", "gloo")},
}
