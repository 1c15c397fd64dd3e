"""GET /api/state: a fleet at one moment, for people and for programs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twostroke.fleet.router.replica_registry import ReplicaRegistry

_STREAMS: Final = 8


def fleet_state(fleet: ReplicaRegistry) -> dict[str, Any]:
    """Return the replicas with their work in seconds, and the hit rate beside the best possible.

    Rates are shares of the prompts' bytes; the best possible one has all that any replica holds.
    """
    dispatcher, now_s = fleet.dispatcher, time.time()
    total = dispatcher.num_units
    return {
        "policy": fleet.options.policy,
        "warning": fleet.warning,
        "prompt_bytes": total,
        "hit_rate": dispatcher.num_hit / total if total else None,
        "best_hit_rate": dispatcher.num_best / total if total else None,
        "known_blocks": len(dispatcher.known),
        "wanted_replicas": wanted(fleet),
        "wanted_by_model": {
            model: wanted(fleet, model)
            for model in sorted({name for one in fleet.ready for name in one.facts.models})
        },
        "replicas": [
            {
                "url": one.url,
                "state": one.state.value,
                "reason": one.reason,
                "trusts_router": one.trusts_router,
                "since_s": now_s - one.since_s,
                "models": one.facts.models,
                "version": one.facts.version,
                "work_s": dispatcher.wait_s(one.place),
                "running": dispatcher.num_open(one.place),
                "pace_s_per_kb": 1000 * dispatcher.pace_s[one.place],
                "horizon_s": one.horizon_s,
                "prefill_per_decode": one.prefill_per_decode,
                "requests": one.num_requests,
                "lost_before_first_byte": one.num_failed,
                "lost_after_first_byte": one.num_errors,
                "prompt_tokens": one.num_prompt_tokens,
                "cached_tokens": one.num_cached_tokens,
            }
            for one in fleet.replicas.values()
        ],
    }


def wanted(fleet: ReplicaRegistry, model: str | None = None) -> int:
    """Return how many replicas, or of those of a model, bring the mean wait to `busy_s`; or one.

    Fewer than there are only if half as many would still be enough, and as many as leave each
    replica at most `_STREAMS` of the requests that run: work counts prompts, not answers. Replicas
    that say how much work they have are believed: answers that are not streamed have their first
    byte at their end, and seem to be work until then.
    """
    dispatcher = fleet.dispatcher
    ready = [one for one in fleet.ready if model is None or model in one.facts.models]
    work_s = sum(
        one.work_s if one.work_s is not None else dispatcher.wait_s(one.place) for one in ready
    )
    asked = -(-work_s // fleet.options.busy_s)
    if asked > len(ready):
        return int(asked)
    num_open = sum(dispatcher.num_open(one.place) for one in ready)
    enough = max(1, int(2 * asked), -(-num_open // _STREAMS))
    return min(enough, len(ready)) if num_open else 1
