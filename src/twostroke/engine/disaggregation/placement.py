"""Decides for each new request whether a prefill engine or this engine computes its prompt.

`twostroke simulate` makes the same decisions under virtual time.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

from twostroke.core.frozen import Frozen
from twostroke.model.program import BatchShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.core.request import Request
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.scheduler import Scheduler
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer
    from twostroke.model.program.cost import StepCost

# Why a prompt is read here or there; the words of metrics and state.
THERE: Final = "there"  # it takes fewer seconds, or the rule says so
HERE: Final = "here"
SHORT: Final = "short"  # no full page is missing that nobody else brings
GONE: Final = "gone"  # no prefill engine is connected
FULL: Final = "full"  # the pool has no room for more transfers
REASONS: Final = (THERE, HERE, SHORT, GONE, FULL)

OVERHEAD_S: Final = 0.005  # of a transfer, as far as nothing was measured lately
_HALF_S: Final = 10.0  # after which half of what was measured is forgotten
_PACE: Final = 50e9  # FLOP/s, until it was measured
_NEW: Final = 0.2  # share of a new measurement
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
        self._scheduler, self._transfers = scheduler, scheduler.prefix_cache.transfers
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
        wanted = (
            self._transfers.select_missing(transfer, lambda _: True) if transfer is not None else []
        )
        if transfer is None or not wanted:
            reason, chosen = SHORT if others else GONE, None
        elif len(wanted) + num_held > self._transfers.max_held_pages:
            reason, chosen = FULL, None
        else:
            chosen = self._choose(ticket, transfer, wanted, others, away, pace)
            reason = HERE if chosen is None else THERE
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
        first = transfer.first_page * self._page_size
        end = first + len(transfer.keys) * self._page_size
        work = MissingPrefill(self.flops(first, end), len(wanted) * self._page_bytes)
        here = self._here(ticket.request, away, end - first, pace)
        best, seconds = choose(self.rule, work, here, others)
        return None if best is None else RemotePrefill(best, transfer, wanted, work.flops, seconds)

    def _here(
        self, request: Request, away: Sequence[Request], num_missing: int, pace: float
    ) -> LocalPrefill:
        num_tokens, missing = self._scheduler.backlog()
        num_tokens -= sum(len(one.tokens) for one in (request, *away))
        missing += [one.params.max_tokens or sys.maxsize for one in away]  # they join soon
        queue_flops = max(0, num_tokens) * self.flops(0, _TYPICAL) / _TYPICAL
        step = max(1, self._scheduler.config.token_budget - len(missing))
        return LocalPrefill(queue_flops, pace, -(-num_missing // step), missing)


class MissingPrefill(Frozen):
    """What is missing of a prompt: FLOPs to compute it, bytes to fetch it."""

    flops: float
    num_bytes: int


class LocalPrefill(Frozen):
    """A decode engine: work that waits or is being done, its pace, and the prompt's effect.

    A prompt is read in `num_steps` steps. Each running stream gets a token in each of them, and
    waits for all of the prompt only if it lacks as many: `missing` are the tokens that they lack.
    """

    queue_flops: float
    flops_per_s: float
    num_steps: int = 1
    missing: Sequence[int] = ()


class PrefillEngineState(Frozen):
    """A prefill engine: work that waits or is being done, its pace, and that of the way.

    `overhead_s` is what transfers took beyond these.
    """

    queue_flops: float
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float


def here_s(work: MissingPrefill, here: LocalPrefill, pace: float = _PACE) -> float:
    """Return the seconds that reading a prompt here costs all requests together.

    The prompt waits for those before it. Each running stream waits for the steps that read it.
    """
    delayed = sum(min(1.0, count / here.num_steps) for count in here.missing)
    return (here.queue_flops + work.flops * (1 + delayed)) / (here.flops_per_s or pace)


def there_s(work: MissingPrefill, there: PrefillEngineState, pace: float = _PACE) -> float:
    """Return the seconds until the pages that another engine computes are here.

    They are fetched while later ones are computed.
    """
    computing_s = (there.queue_flops + work.flops) / (there.flops_per_s or pace)
    return max(computing_s, work.num_bytes / there.bytes_per_s) + there.overhead_s


class Overhead:
    """What transfers from an engine take beyond its queue, computing and moving.

    It is forgotten with time: otherwise an engine that was slow once would get no prompt again.
    """

    def __init__(self) -> None:
        self._extra_s = self._at_s = 0.0

    def seconds(self, now_s: float) -> float:
        """Return what the next one may take."""
        left: float = 0.5 ** ((now_s - self._at_s) / _HALF_S)
        return OVERHEAD_S + self._extra_s * left

    def learn(self, expected_s: float, took_s: float, now_s: float) -> None:
        """Take in a transfer that just ended, of which `there_s` had returned `expected_s`."""
        seconds = self.seconds(now_s) + _NEW * (took_s - expected_s)
        self._extra_s, self._at_s = max(0.0, seconds) - OVERHEAD_S, now_s


def choose(
    rule: str, work: MissingPrefill, here: LocalPrefill, others: Sequence[PrefillEngineState]
) -> tuple[int | None, float]:
    """Return which of the `others` reads a prompt, None for none, and its seconds there."""
    paces = here.flops_per_s, *(there.flops_per_s for there in others)
    pace = max(paces) or _PACE  # of an engine that has not read a prompt yet
    seconds = [there_s(work, there, pace) for there in others]
    best = min(range(len(seconds)), key=seconds.__getitem__, default=None)
    if best is None or rule == "never":
        return None, 0.0
    goes = rule == "always" or seconds[best] < here_s(work, here, pace)
    return (best, seconds[best]) if goes else (None, seconds[best])
