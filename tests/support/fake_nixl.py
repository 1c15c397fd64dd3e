"""Stand-ins for NIXL processes, within one process, that fail as real ones do."""

from __future__ import annotations

import itertools
import mmap
import threading
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from twostroke.engine.disaggregation import nixl, prefill_side, transfer_methods
from twostroke.engine.disaggregation.messages import NixlAddress
from twostroke.engine.disaggregation.nixl import NixlProcessError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

_MOVE_TIMEOUT_S = 0.3  # after which a move that is stuck is given up
_names = itertools.count(1)


class FakeNixlProcess:
    """A stand-in for `nixl.NixlProcess`; a failed move writes on until the target is closed.

    `choose` says how the next move fails: "fails", "stuck" or not at all.
    """

    processes_by_address: ClassVar[dict[bytes, FakeNixlProcess]] = {}
    choose: ClassVar[Callable[[], str]] = staticmethod(lambda: "")

    def __init__(self, memory: int, num_pages: int, page_bytes: int) -> None:
        memory_map = mmap.mmap(memory, num_pages * page_bytes)
        self.pages = np.frombuffer(memory_map, np.uint8).reshape(num_pages, page_bytes)
        self.address = NixlAddress(str(next(_names)).encode(), 0, 0)
        self.processes_by_address[self.address.metadata] = self
        self._other = self
        self._has_ended, self._writers = threading.Event(), list[threading.Thread]()

    def connect(self, address: NixlAddress, within_s: float) -> None:
        del within_s
        self._other = self.processes_by_address[address.metadata]

    def move(
        self, our_pages: Sequence[int], theirs: Sequence[int], within_s: float, *, is_write: bool
    ) -> None:
        source, target = (self, self._other) if is_write else (self._other, self)
        sources, targets = (our_pages, theirs) if is_write else (theirs, our_pages)
        fault = type(self).choose()
        if fault or source._has_ended.is_set() or target._has_ended.is_set():
            target._corrupt_pages(list(targets))
            if fault == "stuck":
                self._has_ended.wait(within_s)
            self.close()
            raise NixlProcessError("NIXL failed, as it was told.")
        target.pages[list(targets)] = source.pages[list(sources)]

    def probe(self, within_s: float, *, is_write: bool) -> None:
        del within_s, is_write

    def end(self) -> None:
        self._has_ended.set()

    def close(self) -> None:
        self.end()
        for writer in self._writers:
            writer.join()

    def _corrupt_pages(self, targets: list[int]) -> None:
        """Write random bytes to pages until this stand-in has ended."""
        if self._has_ended.is_set():
            return

        def write() -> None:
            while not self._has_ended.wait(0.001):
                self.pages[targets] ^= 0xFF

        self._writers.append(threading.Thread(target=write, daemon=True))
        self._writers[-1].start()


def use_fake_nixl(patch: pytest.MonkeyPatch, choose: Callable[[], str] = lambda: "") -> None:
    """Let engines use fake NIXL processes, as if NIXL was installed."""
    patch.setattr(FakeNixlProcess, "choose", staticmethod(choose))
    for module in (prefill_side, transfer_methods):
        patch.setattr(module, "NixlProcess", FakeNixlProcess)
    for module in (prefill_side, transfer_methods):
        patch.setattr(module, "MOVE_TIMEOUT_S", _MOVE_TIMEOUT_S)
    for module in (nixl, transfer_methods):
        patch.setattr(module, "obstacle", lambda: None)
