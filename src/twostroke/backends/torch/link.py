"""`TorchLink`: connects ranks by torch.distributed, with NCCL on GPUs and Gloo on CPUs."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch.nn import functional

from twostroke.core.errors import RanksLostError
from twostroke.model.program import ops
from twostroke.model.program.sharding import ColumnParts, RowParts, TokenParts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    Collective = ops.AllGather | ops.AllReduce | ops.Send | ops.Receive

_LOOPBACK: Final = "127.0.0.1"
_TIMEOUT: Final = timedelta(seconds=20)  # for failures that heartbeats do not find in a second


class TorchLink:
    """A rank's end of the connection to other ranks by torch.distributed; implements `Link`.

    Collectives use NCCL on GPUs and Gloo on CPUs.
    """

    kind = "torch"
    files = ()

    def __init__(self, rank: int, num_ranks: int, host: str = _LOOPBACK) -> None:
        """Set this rank's number; the process group is created later.

        `host`: the address at which other ranks reach rank 0.
        """
        self._rank, self._num_ranks, self._host = rank, num_ranks, host
        self._store: dist.Store | None = None  # only on rank 0
        self._address: tuple[str, int] | None = None
        self._teams: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._busy = threading.Lock()  # Gloo's waits cannot be ended by another thread

    @property
    def record(self) -> TorchLink:
        """Return the link itself: the torch backend calls its `apply` for collectives."""
        return self

    def renew(self) -> str:
        """Start a new connection on rank 0, and return the address by which ranks join it.

        The address belongs to a store in which the ranks find each other.
        """
        # Without a socket of ours, the store would listen at all addresses of the machine.
        server = socket.create_server((self._host if self._host == _LOOPBACK else "", 0))
        port: int = server.getsockname()[1]
        self._store = dist.TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            master_listen_fd=server.detach(),
        )
        return f"{self._host}:{port}"

    def join(self, link: str) -> None:
        """Store the address that rank 0's `renew` returned; the first collective connects.

        If a rank is lost before that, the first collective fails.
        """
        with self._busy:
            self._leave()
            host, _, port = link.rpartition(":")
            self._address = host, int(port)

    def begin(self) -> None:
        """Do nothing, because the first collective waits for all ranks."""

    def abort(self) -> None:
        """Leave the process group, which ends the waits of other ranks in collectives.

        Does nothing while this rank itself waits in a collective.
        """
        if self._busy.acquire(blocking=False):
            try:
                self._leave()
            finally:
                self._busy.release()

    def progress(self) -> int:
        """Return 0: a stalled collective of torch.distributed ends by its own timeout."""
        return 0

    def close(self) -> None:
        """Leave the process group, and close the store in which ranks find each other."""
        self.abort()
        self._store = None

    def apply(self, op: Collective, x: Tensor | None, tokens: Tensor, own_rows: slice) -> Tensor:
        """Run a collective operation over all ranks; return this rank's output.

        `x`: this rank's part of the input; rows and terms of other ranks are zeros. `tokens`: of
        all rows of the step. `own_rows`: the rows that this rank computes. An output that this rank
        does not need has no rows.
        """
        num_rows, device = own_rows.stop - own_rows.start, tokens.device
        with self._calling():
            match op:
                case ops.Receive():
                    received = torch.empty(num_rows, op.width, device=device)
                    dist.recv(received, op.sender)
                    return received
                case ops.Send():
                    assert x is not None
                    dist.send(x.contiguous(), op.to)
                    return x[:0]
                case ops.AllGather(parts=ColumnParts(cuts=cuts)):
                    x = torch.empty(num_rows, 0, device=device) if x is None else x
                    return self._join_parts(op, x.T, cuts).T.contiguous()
                case ops.AllGather(parts=RowParts(count=count)):
                    assert x is not None
                    cuts = tuple(len(tokens) * part // count for part in range(count + 1))
                    return self._join_parts(op, x, cuts)
                case ops.AllGather() | ops.AllReduce():
                    if isinstance(op, ops.AllGather) and isinstance(op.parts, TokenParts):
                        num_rows = len(tokens)
                    total = torch.zeros(num_rows, op.width, device=device)
                    total = total if x is None else total.copy_(x)
                    dist.all_reduce(total, group=self._team(op.team))
                    return total

    def _join_parts(self, op: ops.AllGather, x: Tensor, cuts: Sequence[int]) -> Tensor:
        """Gather rows from all ranks of a team; rank i has the rows from `cuts[i]` on.

        Parts are padded to the same size to send them.
        """
        counts = [end - start for start, end in pairwise(cuts)]
        padded = functional.pad(x, (0, 0, 0, max(counts) - len(x))).contiguous()
        reads = op.root is None or op.root == self._rank
        parts = [torch.empty_like(padded) for _ in counts] if reads else []
        if padded.numel() and op.root is None:
            dist.all_gather(parts, padded, group=self._team(op.team))
        elif padded.numel():
            dist.gather(padded, parts or None, dst=op.root, group=self._team(op.team))
        if not reads:
            return x[:0]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _team(self, team: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of a team of ranks, created at its first use."""
        if team not in self._teams:
            assert list(team) == sorted(team), "a group's members are in the order of their ranks"
            self._teams[team] = dist.new_group(list(team), use_local_synchronization=True)
        return self._teams[team]

    def _meet(self) -> None:
        """Connect to all ranks: create their process group, unless it exists already."""
        if dist.is_initialized():
            return
        if self._address is None:
            raise RanksLostError("This rank has left the others.")
        store = self._store or dist.TCPStore(*self._address, timeout=_TIMEOUT)
        kind = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
        hook = sys.excepthook
        dist.init_process_group(
            kind, store=store, rank=self._rank, world_size=self._num_ranks, timeout=_TIMEOUT
        )
        sys.excepthook = hook  # PyTorch's hook would print the rank before each line

    def _leave(self) -> None:
        self._teams.clear()
        self._address = None
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Run the collectives of a `with` block; RanksLostError if torch.distributed fails."""
        with self._busy:
            try:
                self._meet()
                yield
            except RuntimeError as error:  # the class of all errors of torch.distributed
                raise RanksLostError(f"torch.distributed failed: {error}") from error
