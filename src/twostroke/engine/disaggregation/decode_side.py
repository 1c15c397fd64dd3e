"""The decode engine's side: sends prompts to prefill engines and fetches their KV pages."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twostroke.core.distributed_options import parse_address
from twostroke.core.errors import UsageError
from twostroke.core.files import read_regular_file
from twostroke.engine.disaggregation.placement import PrefillPlacement
from twostroke.engine.disaggregation.prefill_connection import PrefillEngineConnection
from twostroke.engine.disaggregation.transfer_methods import NixlMemory
from twostroke.engine.disaggregation_stats import DecodeSideStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.distributed_options import DisaggregationOptions
    from twostroke.core.request import Request
    from twostroke.engine.client import Client
    from twostroke.engine.disaggregation import messages
    from twostroke.engine.scheduler.request_state import RequestState

_LISTING_INTERVAL_S: Final = 0.5  # after which the file of prefill engines is read again
_SUMS: Final = ("num_bytes", "seconds", "expected_s", "fetch_s")  # of transfers
_SPEED_WINDOW_S: Final = 10  # over which the speed of prefill is measured
_SPEED_AGE_S: Final = 0.5  # after which it is measured again


_logger = logging.getLogger("twostroke.handover")


class DecodeSide:
    """Decides for each new request whether a prefill engine computes its prompt.

    Attributes:
        prefill_engines: connections to the prefill engines, by address. A prefill engine that is
            not listed any more keeps its connection until its KV transfers have ended.
    """

    def __init__(
        self,
        client: Client,
        spec: messages.KvCacheSpecMessage,
        *,
        options: DisaggregationOptions,
        secret: bytes,
        page_file: int | None = None,
    ) -> None:
        """Connect to the prefill engines of `options`; retry in the background if they do not run.

        `page_file` is the open file of this engine's KV pages, if NIXL may move them.

        Raises:
            UsageError: the file of prefill engines cannot be read.
        """
        self._page_file = page_file
        self._loop = client.loop
        self._pages = client.loop.pages
        state_memory = self._pages.state_memory
        self._placement = PrefillPlacement(
            options.disaggregate,
            self._pages.scheduler,
            cost=client.card.cost.per_step(),
            page_size=spec.page_size,
            page_bytes=spec.page_bytes,
            state_bytes=0 if state_memory is None else state_memory.page_bytes,
        )
        self._prefill_flops_per_s = 0.0
        self._measured_s = 0.0
        self._nixl_memory = NixlMemory(page_file, self._loop.facts.num_pages, spec.page_bytes)
        self._secret, self._spec, self._link = secret, spec, options.peer_link
        self._fixed_peers = options.prefill_peers
        self._listing = None if options.peer_listing is None else Path(options.peer_listing)
        listed = () if self._listing is None else read_peers(self._listing)
        self.prefill_engines: dict[str, PrefillEngineConnection] = {}
        self._past_outcomes: Counter[str] = Counter()  # of engines that are not listed any more
        self._past_sums = dict.fromkeys(_SUMS, 0.0)
        self._closing = threading.Event()
        self._connect((*self._fixed_peers, *listed))
        self._follower = threading.Thread(target=self._follow, name="twostroke-peers", daemon=True)
        if self._listing is not None:
            self._follower.start()
        self._pages.on_submit.append(self._consider)
        self._pages.on_end.append(self._on_request_end)
        self._pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all KV transfers and all connections to prefill engines; always returns True."""
        self._closing.set()
        if self._listing is not None:
            self._follower.join()
        for engine in self.prefill_engines.values():
            engine.close()
        if self._page_file is not None:
            os.close(self._page_file)
            self._page_file = None
        return True

    def stats(self) -> DecodeSideStats:
        """Return the state of each prefill engine, and sums of KV transfers over all of them."""
        with self._pages.lock:
            engines = list(self.prefill_engines.values())
            outcomes = self._past_outcomes.copy()
            for engine in engines:
                outcomes.update(engine.outcomes)
            return DecodeSideStats(
                rule=self._placement.rule,
                peers=tuple(engine.stats() for engine in engines if not engine.is_retired),
                decisions=dict(self._placement.decisions),
                transfers=dict(outcomes),
                num_bytes=int(self._sum("num_bytes")),
                seconds=self._sum("seconds"),
                expected_s=self._sum("expected_s"),
                fetch_s=self._sum("fetch_s"),
            )

    def _connect(self, addresses: Sequence[str]) -> None:
        """Connect to the prefill engines at these addresses, and retire all other connections.

        A retired connection is closed once it has no KV transfers.
        """
        with self._pages.lock:
            for address, engine in self.prefill_engines.items():
                engine.is_retired = address not in addresses
            new_addresses = [each for each in addresses if each not in self.prefill_engines]
            unused = {
                address: engine
                for address, engine in self.prefill_engines.items()
                if engine.is_retired and engine.is_unused
            }
            for address, engine in unused.items():
                del self.prefill_engines[address]
                self._past_outcomes.update(engine.outcomes)
                for name in _SUMS:
                    self._past_sums[name] += getattr(engine, name)
        for engine in unused.values():
            engine.close()  # takes the lock
        for address in new_addresses:
            connection = PrefillEngineConnection(
                parse_address(address, "prefill_peers"),
                self._secret,
                spec=self._spec,
                loop=self._loop,
                nixl_memory=self._nixl_memory,
                link=self._link,
            )
            with self._pages.lock:
                self.prefill_engines[address] = connection

    def _follow(self) -> None:
        """Read the file of prefill engines again and again, and connect to the engines in it.

        If the file cannot be read, the connections stay as they are.
        """
        assert self._listing is not None
        last_warning = ""
        while not self._closing.wait(_LISTING_INTERVAL_S):
            try:
                listed = read_peers(self._listing)
            except UsageError as error:
                if str(error) != last_warning:
                    last_warning = str(error)
                    _logger.warning("%s The prefill engines stay as they are.", last_warning)
                continue
            last_warning = ""
            self._connect((*self._fixed_peers, *listed))

    def _sum(self, name: str) -> float:
        """Return the sum of a counter (`num_bytes`, ...) over present and past prefill engines."""
        engines = self.prefill_engines.values()
        total: float = sum(getattr(engine, name) for engine in engines)
        return self._past_sums[name] + total

    # The caller of these methods holds the loop's lock.

    def _consider(self, state: RequestState) -> bool:
        """Let a prefill engine prefill a queued request's prompt if that is faster.

        Returns whether a KV transfer was begun.
        """
        engines = self.prefill_engines.values()
        connected = [engine for engine in engines if engine.is_up]
        remote_requests = [
            transfer.request for engine in engines for transfer in engine.transfers.values()
        ]
        remote_prefill = self._placement.consider(
            state,
            engines=[engine.load() for engine in connected],
            remote_requests=remote_requests,
            num_held_pages=sum(engine.num_held_pages for engine in engines),
            flops_per_s=self._measured_speed(),
        )
        self._pages.lock.notify_all()  # claims may have been dropped
        if remote_prefill is None:
            return False
        connected[remote_prefill.engine_index].begin(state.request, remote_prefill)
        return True

    def _on_request_end(self, request: Request) -> None:
        for engine in self.prefill_engines.values():
            engine.request_ended(request)

    def _measured_speed(self) -> float:
        """Return the recent speed of this engine's own prefills in FLOP/s; 0 if unknown."""
        now_s = time.monotonic()
        if now_s - self._measured_s > _SPEED_AGE_S:
            self._measured_s = now_s
            span = self._loop.span(_SPEED_WINDOW_S)
            recent = (span.last.phases - span.first.phases).prefill
            self._prefill_flops_per_s = recent.flops_per_s or span.last.phases.prefill.flops_per_s
        return self._prefill_flops_per_s


def read_peers(path: Path) -> tuple[str, ...]:
    """Return the addresses of prefill engines in a file, one on each line, without comments.

    Raises:
        UsageError: the file cannot be read, or a line is not HOST:PORT.
    """
    try:
        lines = read_regular_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"The prefill engines in {path} cannot be read: {reason}.") from None
    addresses = dict.fromkeys(
        line.strip() for line in lines if line.strip() and not line.strip().startswith("#")
    )
    for address in addresses:
        parse_address(address, "peer_listing")
    return tuple(addresses)
