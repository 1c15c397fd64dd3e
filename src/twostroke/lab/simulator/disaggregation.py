"""Prompts that other replicas read, under virtual time: decided as engines decide it."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.disaggregation.placement import (
    TRANSFER_OVERHEAD_S,
    PrefillEngineState,
    PrefillPlacement,
    TransferOverhead,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.disaggregation.placement import RemotePrefill
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer, Transfers
    from twostroke.lab.simulator.replica import Clock, SimulatedReplica
    from twostroke.model.program.cost import StepCost

_NOTHING: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Prefill(Frozen):
    """The first `count` replicas read prompts for the others, by a rule of `DISAGGREGATE`.

    A page has `page_bytes`, and moves at `bytes_per_s`; transfers do not slow each other down.
    """

    count: int
    rule: str
    cost: StepCost
    page_bytes: int
    bytes_per_s: float


class _RemotePrompt(Frozen):
    """A request whose prompt is read elsewhere."""

    ticket: RequestState
    decoder: int
    chosen: RemotePrefill
    reader: Request  # at the replica that reads
    begun_s: float


class SimulatedTransfers:
    """The transfers of a fleet. Replicas that it is asked about show all that they have done."""

    def __init__(
        self, prefill: Prefill, replicas: Sequence[SimulatedReplica], clock: Clock
    ) -> None:
        self._prefill, self._replicas, self._clock = prefill, replicas, clock
        self._choosers = {
            index: PrefillPlacement(
                prefill.rule,
                replicas[index].scheduler,
                cost=prefill.cost,
                page_size=replicas[index].page_size,
                page_bytes=prefill.page_bytes,
            )
            for index in range(prefill.count, len(replicas))
        }
        for replica in replicas:
            replica.notes_pace = True
        self._overheads: defaultdict[tuple[int, int], TransferOverhead] = defaultdict(
            TransferOverhead
        )
        self._away: dict[int, _RemotePrompt] = {}  # by number of the request
        self._unused: dict[int, deque[tuple[Request, Transfer]]] = {
            index: deque() for index in self._choosers
        }

    @property
    def decisions(self) -> dict[str, int]:
        """How many there were, by reason."""
        total: dict[str, int] = {}
        for chooser in self._choosers.values():
            for reason, count in chooser.decisions.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def consider(self, decoder: int, ticket: RequestState) -> tuple[int, Request] | None:
        """Return the replica that reads the prompt of a request that was just queued, and what.

        None if the request's own replica does.
        """
        self._let_go(decoder)
        chooser, replica = self._choosers[decoder], self._replicas[decoder]
        away = [one for one in self._away.values() if one.decoder == decoder]
        held = [len(one.chosen.page_keys) for one in away]
        held += [len(transfer.pages) for _, transfer in self._unused[decoder]]
        others = [self._outlook(decoder, index) for index in range(self._prefill.count)]
        requests = [one.ticket.request for one in away]
        pace = replica.prefill_pace()
        chosen = chooser.consider(
            ticket,
            engines=others,
            remote_requests=requests,
            num_held_pages=sum(held),
            flops_per_s=pace,
        )
        if chosen is None:
            return None
        transfer, request = chosen.transfer, ticket.request
        end = (transfer.first_page + len(transfer.keys)) * replica.page_size
        reader = Request(request.id, request.tokens[:end], end, _NOTHING, seed=request.seed)
        self._away[int(request.id)] = _RemotePrompt(
            ticket, decoder, chosen, reader, self._clock.now_s
        )
        return chosen.engine_index, reader

    def finished(self, number: int) -> float:
        """Return when the pages of a prompt that has been read are where they are needed."""
        one = self._away[number]
        moved_s = len(one.chosen.page_keys) * self._prefill.page_bytes / self._prefill.bytes_per_s
        return max(self._clock.now_s, one.begun_s + moved_s) + TRANSFER_OVERHEAD_S

    def decoder(self, number: int) -> int:
        """Return the replica that answers a request whose prompt is away."""
        return self._away[number].decoder

    def arrive(self, number: int, *, is_read: bool = True) -> None:
        """Let the request use the pages, or read its prompt itself if nobody did."""
        one = self._away.pop(number)
        transfers, wanted = self._transfers(one.decoder), one.chosen.page_keys
        if is_read:
            now_s, overhead = (
                self._clock.now_s,
                self._overheads[one.decoder, one.chosen.engine_index],
            )
            overhead.learn(one.chosen.seconds, now_s - one.begun_s, now_s)
            pages = transfers.allocate(one.chosen.transfer, wanted)
            transfers.add_arrived(one.chosen.transfer, wanted[: len(pages)])
        transfers.drop(one.chosen.transfer)
        self._unused[one.decoder].append((one.ticket.request, one.chosen.transfer))

    def _let_go(self, decoder: int) -> None:
        """Release the pages that arrived for requests that have started."""
        unused = self._unused[decoder]
        for _ in range(len(unused)):
            request, transfer = unused.popleft()
            if request.started_s:
                self._transfers(decoder).end(transfer)
            else:
                unused.append((request, transfer))

    def _transfers(self, decoder: int) -> Transfers:
        return self._replicas[decoder].scheduler.prefix_cache.transfers

    def _outlook(self, decoder: int, index: int) -> PrefillEngineState:
        flops = next(iter(self._choosers.values())).flops
        readers = [one.reader for one in self._away.values() if one.chosen.engine_index == index]
        queue_flops = sum(flops(r.num_computed, r.num_prompt) for r in readers if not r.is_finished)
        pace = self._replicas[index].prefill_pace()
        overhead_s = self._overheads[decoder, index].seconds(self._clock.now_s)
        return PrefillEngineState(queue_flops, pace, self._prefill.bytes_per_s, overhead_s)
