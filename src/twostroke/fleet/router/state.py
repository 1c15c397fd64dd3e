"""GET /api/state of a router: the state of all replicas, for the dashboard and for programs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twostroke.fleet.router.replica_registry import ReplicaRegistry

_STREAMS_PER_REPLICA: Final = 8


def fleet_state(fleet: ReplicaRegistry) -> dict[str, Any]:
    """Return the body of `GET /api/state`: the replicas, their queued work, and cache hit rates.

    The work is in seconds. Rates are fractions of the prompts' bytes; beside the hit rate is the
    best possible rate, which counts all bytes that any replica has in its prefix cache.
    """
    dispatcher, now_s = fleet.dispatcher, time.time()
    total = dispatcher.num_units
    models = {name for replica in fleet.ready for name in replica.facts.models}
    return {
        "policy": fleet.options.policy,
        "warning": fleet.warning,
        "prompt_bytes": total,
        "hit_rate": dispatcher.num_hit_units / total if total else None,
        "best_hit_rate": dispatcher.num_best_hit_units / total if total else None,
        "known_blocks": len(dispatcher.prefix_tree),
        "wanted_replicas": wanted_replicas(fleet),
        "wanted_by_model": {model: wanted_replicas(fleet, model) for model in sorted(models)},
        "replicas": [
            {
                "url": replica.url,
                "state": replica.state.value,
                "reason": replica.reason,
                "trusts_router": replica.trusts_router,
                "since_s": now_s - replica.since_s,
                "models": replica.facts.models,
                "version": replica.facts.version,
                "work_s": dispatcher.wait_s(replica.index),
                "running": dispatcher.num_open(replica.index),
                "pace_s_per_kb": 1000 * dispatcher.unit_s[replica.index],
                "horizon_s": replica.horizon_s,
                "prefill_per_decode": replica.prefill_per_decode,
                "requests": replica.num_requests,
                "lost_before_first_byte": replica.num_lost_before,
                "lost_after_first_byte": replica.num_lost_after,
                "prompt_tokens": replica.num_prompt_tokens,
                "cached_tokens": replica.num_cached_tokens,
            }
            for replica in fleet.replicas.values()
        ],
    }


def wanted_replicas(fleet: ReplicaRegistry, model: str | None = None) -> int:
    """Return how many replicas, of one model or of all, would bring the mean wait to `busy_s`.

    Autoscalers read this number. It is smaller than the present number only if half of the present
    replicas would be enough, and if each replica then has at most `_STREAMS_PER_REPLICA` running
    requests: work counts prompts, not answers. It is at least one. If a replica reports its work,
    the report is used, because a request without streaming looks like work until its end.
    """
    dispatcher = fleet.dispatcher
    ready = [replica for replica in fleet.ready if model is None or model in replica.facts.models]
    work_s = sum(
        dispatcher.wait_s(replica.index) if replica.work_s is None else replica.work_s
        for replica in ready
    )
    num_for_work = -(-work_s // fleet.options.busy_s)
    if num_for_work > len(ready):
        return int(num_for_work)
    num_open = sum(dispatcher.num_open(replica.index) for replica in ready)
    num_for_streams = -(-num_open // _STREAMS_PER_REPLICA)
    enough = max(1, int(2 * num_for_work), num_for_streams)
    return min(enough, len(ready)) if num_open else 1
