"""The decode engine's side: sends prompts to prefill engines and fetches their KV pages."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from twostroke.core.distributed_options import parse_address
from twostroke.engine.disaggregation.placement import PrefillPlacement
from twostroke.engine.disaggregation.prefill_connection import PrefillEngineConnection
from twostroke.engine.disaggregation.transfer_methods import NixlMemory
from twostroke.engine.disaggregation_stats import DecodeSideStats

if TYPE_CHECKING:
    from twostroke.core.distributed_options import DisaggregationOptions
    from twostroke.core.request import Request
    from twostroke.engine.client import Client
    from twostroke.engine.disaggregation import messages
    from twostroke.engine.scheduler.request_state import RequestState

_SPEED_WINDOW_S: Final = 10  # over which the speed of prefill is measured
_SPEED_AGE_S: Final = 0.5  # after which it is measured again


class DecodeSide:
    """Decides for each new request whether a prefill engine computes its prompt.

    Attributes:
        prefill_engines: connections to the prefill engines.
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
        nixl_memory = NixlMemory(page_file, self._loop.facts.num_pages, spec.page_bytes)
        self.prefill_engines = [
            PrefillEngineConnection(
                parse_address(address, "prefill_peers"),
                secret,
                spec=spec,
                loop=self._loop,
                nixl_memory=nixl_memory,
                link=options.peer_link,
            )
            for address in options.prefill_peers
        ]
        self._pages.on_submit.append(self._consider)
        self._pages.on_end.append(self._on_request_end)
        self._pages.on_close.append(self.close)

    def close(self) -> bool:
        """End all KV transfers and all connections to prefill engines; always returns True."""
        for engine in self.prefill_engines:
            engine.close()
        if self._page_file is not None:
            os.close(self._page_file)
            self._page_file = None
        return True

    def stats(self) -> DecodeSideStats:
        """Return the state of each prefill engine, and sums of KV transfers over all of them."""
        with self._pages.lock:
            outcomes: Counter[str] = Counter()
            for engine in self.prefill_engines:
                outcomes.update(engine.outcomes)
            return DecodeSideStats(
                rule=self._placement.rule,
                peers=tuple(engine.stats() for engine in self.prefill_engines),
                decisions=dict(self._placement.decisions),
                transfers=dict(outcomes),
                num_bytes=sum(engine.num_bytes for engine in self.prefill_engines),
                seconds=sum(engine.seconds for engine in self.prefill_engines),
                expected_s=sum(engine.expected_s for engine in self.prefill_engines),
                fetch_s=sum(engine.fetch_s for engine in self.prefill_engines),
            )

    # The caller of these methods holds the loop's lock.

    def _consider(self, state: RequestState) -> bool:
        """Let a prefill engine prefill a queued request's prompt if that is faster.

        Returns whether a KV transfer was begun.
        """
        connected = [engine for engine in self.prefill_engines if engine.is_up]
        remote_requests = [
            transfer.request
            for engine in self.prefill_engines
            for transfer in engine.transfers.values()
        ]
        remote_prefill = self._placement.consider(
            state,
            engines=[engine.load() for engine in connected],
            remote_requests=remote_requests,
            num_held_pages=sum(engine.num_held_pages for engine in self.prefill_engines),
            flops_per_s=self._measured_speed(),
        )
        self._pages.lock.notify_all()  # claims may have been dropped
        if remote_prefill is None:
            return False
        connected[remote_prefill.engine_index].begin(state.request, remote_prefill)
        return True

    def _on_request_end(self, request: Request) -> None:
        for engine in self.prefill_engines:
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
