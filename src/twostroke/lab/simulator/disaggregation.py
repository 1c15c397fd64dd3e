"""Disaggregated prefill in a simulation, with the placement decisions of real engines."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_STATE, Request
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

_ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class PrefillSettings(Frozen):
    """Settings of simulated disaggregation, in which the first replicas prefill for the others.

    Attributes:
        count: number of prefill replicas.
        rule: which prompts the prefill replicas prefill, a value of `DISAGGREGATE`.
        cost: work of a step.
        page_bytes: size of a KV page.
        bytes_per_s: speed of a KV transfer. Simultaneous transfers do not slow each other down.
        state_bytes: size of a snapshot of the recurrent states; 0 for models without such states.
    """

    count: int
    rule: str
    cost: StepCost
    page_bytes: int
    bytes_per_s: float
    state_bytes: int = 0


class _RemotePrompt(Frozen):
    """A simulated request whose prompt a prefill replica computes.

    `decoder` is the index of the replica that decodes the request, `prefill_request` the request
    that the prefill replica got, and `start_s` the time of the decision.
    """

    state: RequestState
    decoder: int
    placement: RemotePrefill
    prefill_request: Request
    start_s: float


class SimulatedTransfers:
    """Decides where prompts are prefilled in a simulation, and simulates the KV transfers.

    Before each call, the replicas must have applied all steps that have ended (`catch_up`).
    """

    def __init__(
        self, prefill: PrefillSettings, replicas: Sequence[SimulatedReplica], clock: Clock
    ) -> None:
        self._prefill = prefill
        self._replicas = replicas
        self._clock = clock
        self._placements = {
            index: PrefillPlacement(
                prefill.rule,
                replicas[index].scheduler,
                cost=prefill.cost,
                page_size=replicas[index].page_size,
                page_bytes=prefill.page_bytes,
                state_bytes=prefill.state_bytes,
            )
            for index in range(prefill.count, len(replicas))
        }
        for replica in replicas:
            replica.records_prefill_speed = True
        self._overheads: defaultdict[tuple[int, int], TransferOverhead] = defaultdict(
            TransferOverhead
        )
        self._remote: dict[int, _RemotePrompt] = {}  # by number of the request
        self._arrived: dict[int, deque[tuple[Request, Transfer]]] = {
            index: deque() for index in self._placements
        }

    @property
    def decisions(self) -> dict[str, int]:
        """How many prompts were prefilled on a prefill replica, or not, by reason."""
        total: dict[str, int] = {}
        for placement in self._placements.values():
            for reason, count in placement.decisions.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def consider(self, decoder: int, state: RequestState) -> tuple[int, Request] | None:
        """Decide where the prompt of a newly queued request is prefilled.

        Returns the index of a prefill replica and the request for it; None if `decoder`, the
        replica that decodes the request, prefills it, too.
        """
        self._release_used_pages(decoder)
        replica = self._replicas[decoder]
        remote = [prompt for prompt in self._remote.values() if prompt.decoder == decoder]
        num_held_pages = sum(len(prompt.placement.page_keys) for prompt in remote)
        num_held_pages += sum(len(transfer.pages) for _, transfer in self._arrived[decoder])
        placement = self._placements[decoder].consider(
            state,
            engines=[self._prefill_state(decoder, index) for index in range(self._prefill.count)],
            remote_requests=[prompt.state.request for prompt in remote],
            num_held_pages=num_held_pages,
            flops_per_s=replica.prefill_flops_per_s(),
        )
        if placement is None:
            return None
        transfer, request = placement.transfer, state.request
        end = (transfer.first_page + len(transfer.keys)) * replica.page_size
        prefill_request = Request(
            request.id, request.tokens[:end], end, _ONE_TOKEN, seed=request.seed
        )
        self._remote[int(request.id)] = _RemotePrompt(
            state, decoder, placement, prefill_request, start_s=self._clock.now_s
        )
        return placement.engine_index, prefill_request

    def arrival_s(self, number: int) -> float:
        """Return when a prompt's KV pages arrive at the replica that decodes the request.

        `number` is the request's number in the workload.
        """
        prompt = self._remote[number]
        num_bytes = len(prompt.placement.page_keys) * self._prefill.page_bytes
        if prompt.placement.transfer.missing_state is not None:
            num_bytes += self._prefill.state_bytes
        sent_s = prompt.start_s + num_bytes / self._prefill.bytes_per_s
        return max(self._clock.now_s, sent_s) + TRANSFER_OVERHEAD_S

    def decoder(self, number: int) -> int:
        """Return the index of the replica that decodes a request, while its prompt is prefilled."""
        return self._remote[number].decoder

    def arrive(self, number: int, *, is_prefilled: bool = True) -> None:
        """Give a prompt's KV pages to the replica that decodes the request.

        If `is_prefilled` is false, there are no pages, and that replica computes the prompt.
        """
        prompt = self._remote.pop(number)
        placement = prompt.placement
        transfers = self._transfers(prompt.decoder)
        if is_prefilled:
            now_s = self._clock.now_s
            overhead = self._overheads[prompt.decoder, placement.engine_index]
            overhead.learn(placement.seconds, now_s - prompt.start_s, now_s)
            pages = transfers.allocate(placement.transfer, placement.page_keys)
            transfers.add_arrived(placement.transfer, placement.page_keys[: len(pages)])
            is_missing = placement.transfer.missing_state is not None
            if is_missing and transfers.allocate_state(placement.transfer) != NO_STATE:
                transfers.add_state(placement.transfer)
        transfers.drop(placement.transfer)
        self._arrived[prompt.decoder].append((prompt.state.request, placement.transfer))

    def _release_used_pages(self, decoder: int) -> None:
        """End the KV transfers of requests that have started on the replica that decodes them."""
        arrived = self._arrived[decoder]
        for _ in range(len(arrived)):
            request, transfer = arrived.popleft()
            if request.started_s:
                self._transfers(decoder).end(transfer)
            else:
                arrived.append((request, transfer))

    def _transfers(self, decoder: int) -> Transfers:
        return self._replicas[decoder].scheduler.prefix_cache.transfers

    def _prefill_state(self, decoder: int, index: int) -> PrefillEngineState:
        """Return a prefill replica's queue and speed, as a decode replica knows them."""
        flops = next(iter(self._placements.values())).flops
        requests = [
            prompt.prefill_request
            for prompt in self._remote.values()
            if prompt.placement.engine_index == index
        ]
        queue_flops = sum(
            flops(request.num_computed, request.num_prompt)
            for request in requests
            if not request.is_finished
        )
        flops_per_s = self._replicas[index].prefill_flops_per_s()
        overhead_s = self._overheads[decoder, index].seconds(self._clock.now_s)
        return PrefillEngineState(queue_flops, flops_per_s, self._prefill.bytes_per_s, overhead_s)
