"""Weighs each new request of a decode engine; `simulate` does so too, under virtual time."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.engine.disaggregation import prefill_cost as choice
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.disaggregation.prefill_cost import PrefillEngineState
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler import Scheduler
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer
    from twostroke.model.program.cost import StepCost

_TYPICAL: Final = 1024  # tokens of a prompt in the queue


class RemotePrefill(Frozen):
    """A transfer that was begun: which engine reads the prompt, and the seconds that it takes."""

    index: int
    transfer: Transfer
    wanted: list[PageKey]
    flops: float
    seconds: float


class PrefillPlacement:
    """Decides where prompts are read. Its caller holds the lock of the scheduler's owner.

    Attributes:
        decisions: how many there were, by reason.
    """

    def __init__(
        self, rule: str, scheduler: Scheduler, cost: StepCost, page_size: int, page_bytes: int
    ) -> None:
        """Follow a rule of `DISAGGREGATE`; `cost` counts the work of steps."""
        self.rule = rule
        self.decisions: Counter[str] = Counter()
        self._scheduler, self._transfers = scheduler, scheduler.prefixes.transfers
        self._cost, self._page_size, self._page_bytes = cost, page_size, page_bytes

    def consider(
        self,
        ticket: RequestState,
        others: Sequence[PrefillEngineState],
        away: Sequence[Request],
        num_held: int,
        pace: float,
    ) -> RemotePrefill | None:
        """Begin a transfer for a request that waits, if that pays.

        `away` are requests whose prompts are being read by others, `num_held` the pages of all
        transfers, and `pace` the FLOP/s of reading prompts here, 0 if it was never measured.
        """
        if self.rule == "never":
            return None
        transfer = self._transfers.begin(ticket) if others else None
        wanted = self._transfers.narrow(transfer, lambda _: True) if transfer is not None else []
        if transfer is None or not wanted:
            reason, chosen = choice.SHORT if others else choice.GONE, None
        elif len(wanted) + num_held > self._transfers.most_held:
            reason, chosen = choice.FULL, None
        else:
            chosen = self._choose(ticket, transfer, wanted, others, away, pace)
            reason = choice.HERE if chosen is None else choice.THERE
        self.decisions[reason] += 1
        if transfer is not None and chosen is None:
            self._transfers.end(transfer)
        return chosen

    def flops(self, first: int, end: int) -> float:
        """Return the work of reading a prompt's tokens from `first` to `end`."""
        return self._cost.of(BatchShape.prefill(end - first, first)).flops if end > first else 0.0

    def _choose(
        self,
        ticket: RequestState,
        transfer: Transfer,
        wanted: list[PageKey],
        others: Sequence[PrefillEngineState],
        away: Sequence[Request],
        pace: float,
    ) -> RemotePrefill | None:
        first = transfer.first_place * self._page_size
        end = first + len(transfer.keys) * self._page_size
        work = choice.MissingPrefill(self.flops(first, end), len(wanted) * self._page_bytes)
        here = self._here(ticket.request, away, end - first, pace)
        best, seconds = choice.choose(self.rule, work, here, others)
        return None if best is None else RemotePrefill(best, transfer, wanted, work.flops, seconds)

    def _here(
        self, request: Request, away: Sequence[Request], num_missing: int, pace: float
    ) -> choice.LocalPrefill:
        num_tokens, missing = self._scheduler.backlog()
        num_tokens -= sum(len(one.tokens) for one in (request, *away))
        missing += [one.params.max_tokens or sys.maxsize for one in away]  # they join soon
        queue_flops = max(0, num_tokens) * self.flops(0, _TYPICAL) / _TYPICAL
        step = max(1, self._scheduler.config.token_budget - len(missing))
        return choice.LocalPrefill(queue_flops, pace, -(-num_missing // step), missing)
