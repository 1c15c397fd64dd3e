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

# Reasons of decisions, as metrics and the server's state call them.
FASTER_REMOTE: Final = "there"  # a prefill engine takes fewer seconds, or the rule is "always"
FASTER_LOCAL: Final = "here"  # this engine takes fewer seconds
NO_MISSING_PAGES: Final = "short"  # no full page is missing that is not on its way already
NO_ENGINE: Final = "gone"  # no prefill engine is connected
NO_ROOM: Final = "full"  # the pool has no room for more transfers
REASONS: Final = (FASTER_REMOTE, FASTER_LOCAL, NO_MISSING_PAGES, NO_ENGINE, NO_ROOM)

TRANSFER_OVERHEAD_S: Final = 0.005  # of a transfer, without recent measurements
_HALF_LIFE_S: Final = 10.0  # of measured overheads
_DEFAULT_FLOPS_PER_S: Final = 50e9  # speed of prefill without measurements
_NEW_WEIGHT: Final = 0.2  # of a new measurement in the moving average
_TYPICAL_PROMPT_TOKENS: Final = 1024  # length of prompts whose lengths are not known one by one


class MissingPrefill(Frozen):
    """The work for the pages of a prompt that are not cached in the decode engine.

    The pages are either computed, which takes `flops`, or fetched from a prefill engine, which
    moves `num_bytes`.
    """

    flops: float
    num_bytes: int


class LocalPrefill(Frozen):
    """The decode engine's load and speed, to predict the time of prefilling a prompt there.

    Attributes:
        queue_flops: work of prompts that wait or are prefilled.
        flops_per_s: speed of prefill; 0 without measurements.
        num_steps: number of steps in which the prompt would be prefilled.
        max_outputs: for each running stream, the maximum number of tokens still to come. Each of
            these `num_steps` steps delays all streams that get a token in it.
    """

    queue_flops: float
    flops_per_s: float
    num_steps: int = 1
    max_outputs: Sequence[int] = ()


class PrefillEngineState(Frozen):
    """The load and the speeds of a prefill engine.

    Attributes:
        queue_flops: work of prompts that wait or are prefilled.
        flops_per_s: speed of prefill; 0 without measurements.
        bytes_per_s: speed of fetching pages.
        overhead_s: the part of a transfer's time that is not queueing, computing or fetching.
    """

    queue_flops: float
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float


class RemotePrefill(Frozen):
    """A KV transfer that has begun: a prefill engine computes a request's prompt.

    Attributes:
        engine_index: index of the prefill engine.
        transfer: the claims on the pages.
        page_keys: the pages to fetch.
        flops: work of the missing part of the prompt.
        seconds: expected duration.
    """

    engine_index: int
    transfer: Transfer
    page_keys: list[PageKey]
    flops: float
    seconds: float


class PrefillPlacement:
    """Decides whether a prefill engine or this decode engine prefills a prompt.

    Callers hold the engine loop's lock.

    Attributes:
        rule: one of `DISAGGREGATE`: "auto", "always" or "never".
        decisions: number of decisions, by reason.
    """

    def __init__(
        self,
        rule: str,
        scheduler: Scheduler,
        *,
        cost: StepCost,
        page_size: int,
        page_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        """Decide where the prompts of `scheduler`'s requests are prefilled.

        `cost` computes the work of prompts. `state_bytes` is the size of a snapshot of the
        recurrent states, for models with such states.
        """
        self.rule = rule
        self.decisions: Counter[str] = Counter()
        self._scheduler = scheduler
        self._transfers = scheduler.prefix_cache.transfers
        self._cost = cost
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._state_bytes = state_bytes

    def consider(
        self,
        state: RequestState,
        *,
        engines: Sequence[PrefillEngineState],
        remote_requests: Sequence[Request],
        num_held_pages: int,
        flops_per_s: float,
    ) -> RemotePrefill | None:
        """Let a prefill engine compute a waiting request's prompt, if that is faster.

        Returns the KV transfer that has begun, or None to prefill the prompt in this engine.

        Args:
            state: the request.
            engines: the connected prefill engines.
            remote_requests: requests whose prompts prefill engines are computing.
            num_held_pages: pages of all transfers.
            flops_per_s: speed of prefill in this engine; 0 without measurements.
        """
        if self.rule == "never":
            return None
        transfer = self._transfers.begin(state) if engines else None
        page_keys: list[PageKey] = []
        if transfer is not None:
            last_key = transfer.keys[-1]  # the prefill engine's state is that after its prompt
            page_keys = self._transfers.select_missing(
                transfer, exists=lambda _: True, has_state=lambda key: key == last_key
            )
        remote_prefill = None
        if transfer is None or transfer.is_complete:
            reason = NO_MISSING_PAGES if engines else NO_ENGINE
        elif len(page_keys) + num_held_pages > self._transfers.max_held_pages:
            reason = NO_ROOM
        else:
            first = transfer.first_page * self._page_size
            end = first + len(transfer.keys) * self._page_size
            num_bytes = len(page_keys) * self._page_bytes
            num_bytes += 0 if transfer.missing_state is None else self._state_bytes
            work = MissingPrefill(self.flops(first, end), num_bytes)
            local = self._local_prefill(
                state.request, remote_requests, num_missing=end - first, flops_per_s=flops_per_s
            )
            index, seconds = choose_engine(self.rule, work, local, engines)
            reason = FASTER_LOCAL
            if index is not None:
                reason = FASTER_REMOTE
                remote_prefill = RemotePrefill(
                    engine_index=index,
                    transfer=transfer,
                    page_keys=page_keys,
                    flops=work.flops,
                    seconds=seconds,
                )
        self.decisions[reason] += 1
        if transfer is not None and remote_prefill is None:
            self._transfers.end(transfer)
        return remote_prefill

    def flops(self, first: int, end: int) -> float:
        """Return the FLOPs of prefilling a prompt's tokens from index `first` to `end`."""
        return self._cost.of(BatchShape.prefill(end - first, first)).flops if end > first else 0.0

    def _local_prefill(
        self,
        request: Request,
        remote_requests: Sequence[Request],
        *,
        num_missing: int,
        flops_per_s: float,
    ) -> LocalPrefill:
        """Return this engine's load and speed, for prefilling a request's prompt here.

        The load includes neither the request itself nor queued prompts that prefill engines
        compute.
        """
        num_queued, max_outputs = self._scheduler.backlog()
        num_queued -= sum(len(other.tokens) for other in (request, *remote_requests))
        # Remote requests will soon decode here, too.
        max_outputs += [other.params.max_tokens or sys.maxsize for other in remote_requests]
        typical_flops = self.flops(0, _TYPICAL_PROMPT_TOKENS)
        step_tokens = max(1, self._scheduler.config.token_budget - len(max_outputs))
        return LocalPrefill(
            queue_flops=max(0, num_queued) * typical_flops / _TYPICAL_PROMPT_TOKENS,
            flops_per_s=flops_per_s,
            num_steps=-(-num_missing // step_tokens),
            max_outputs=max_outputs,
        )


def choose_engine(
    rule: str, work: MissingPrefill, local: LocalPrefill, engines: Sequence[PrefillEngineState]
) -> tuple[int | None, float]:
    """Choose the prefill engine for a prompt; return its index, and the seconds expected there.

    The index, in `engines`, is None if this engine should prefill the prompt: because the `rule` is
    "never", there are no engines, or it is faster here (with the rule "auto"). The seconds are
    predicted for the fastest prefill engine; 0 if no engine is considered.
    """
    speeds = [local.flops_per_s, *(engine.flops_per_s for engine in engines)]
    default_flops_per_s = max(speeds) or _DEFAULT_FLOPS_PER_S  # for engines without measurements
    seconds = [remote_prefill_s(work, engine, default_flops_per_s) for engine in engines]
    best = min(range(len(seconds)), key=seconds.__getitem__, default=None)
    if best is None or rule == "never":
        return None, 0.0
    if rule == "always" or seconds[best] < local_prefill_s(work, local, default_flops_per_s):
        return best, seconds[best]
    return None, seconds[best]


def local_prefill_s(
    work: MissingPrefill,
    local: LocalPrefill,
    default_flops_per_s: float = _DEFAULT_FLOPS_PER_S,
) -> float:
    """Return the seconds that prefilling a prompt in this engine costs all its requests.

    The result is the time that the prompt waits for earlier prompts, plus the time by which chunks
    of the prompt delay each running stream until the stream ends. `work` is the missing part of the
    prompt, and `local` the engine's load. `default_flops_per_s` is used while this engine's speed
    is not measured.
    """
    num_delayed = sum(min(1.0, count / local.num_steps) for count in local.max_outputs)
    flops = local.queue_flops + work.flops * (1 + num_delayed)
    return flops / (local.flops_per_s or default_flops_per_s)


def remote_prefill_s(
    work: MissingPrefill,
    engine: PrefillEngineState,
    default_flops_per_s: float = _DEFAULT_FLOPS_PER_S,
) -> float:
    """Return the seconds until a prefill engine has computed a prompt and sent its KV pages.

    `work` is the missing part of the prompt. Pages are fetched while later pages are computed.
    `default_flops_per_s` is used while the engine's speed is not measured.
    """
    flops = engine.queue_flops + work.flops
    computing_s = flops / (engine.flops_per_s or default_flops_per_s)
    return max(computing_s, work.num_bytes / engine.bytes_per_s) + engine.overhead_s


class TransferOverhead:
    """The part of KV transfers' time that is not queueing, computing or fetching, for one engine.

    Measurements lose weight with time. Otherwise an engine that was slow once would get no prompt
    again.
    """

    def __init__(self) -> None:
        self._extra_s = 0.0
        self._measured_s = 0.0

    def seconds(self, now_s: float) -> float:
        """Return the expected overhead of the next KV transfer, in seconds."""
        remaining: float = 0.5 ** ((now_s - self._measured_s) / _HALF_LIFE_S)
        return TRANSFER_OVERHEAD_S + self._extra_s * remaining

    def learn(self, expected_s: float, took_s: float, now_s: float) -> None:
        """Learn from a KV transfer's duration, for which `remote_prefill_s` gave `expected_s`.

        `took_s` is the measured duration, and `now_s` the time at which the transfer ended.
        """
        seconds = self.seconds(now_s) + _NEW_WEIGHT * (took_s - expected_s)
        self._extra_s = max(0.0, seconds) - TRANSFER_OVERHEAD_S
        self._measured_s = now_s
