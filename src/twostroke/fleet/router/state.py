"""GET /api/state of a router: the state of all replicas, for the dashboard and for programs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from twostroke.fleet.router.model_starts import USED_S

if TYPE_CHECKING:
    from twostroke.fleet.router.replica_registry import ReplicaRegistry

_STREAMS_PER_REPLICA: Final = 8
SCRAPE_S: Final = 60.0  # for which a used model counts for autoscalers that look now and then


def fleet_state(fleet: ReplicaRegistry) -> dict[str, Any]:
    """Return the body of `GET /api/state`: the replicas, their queued work, and cache hit rates.

    The work is in seconds. Rates are fractions of the prompts' bytes; beside the hit rate is the
    best possible rate, which counts all bytes that any replica has in its prefix cache.
    """
    dispatcher, now_s = fleet.dispatcher, time.time()
    total = dispatcher.num_units
    models = {name for replica in fleet.ready for name in replica.facts.models}
    models |= set(fleet.starts.models)
    return {
        "policy": fleet.options.policy,
        "warning": fleet.warning,
        "prompt_bytes": total,
        "hit_rate": dispatcher.num_hit_units / total if total else None,
        "best_hit_rate": dispatcher.num_best_hit_units / total if total else None,
        "known_blocks": len(dispatcher.prefix_tree),
        "wanted_replicas": wanted_replicas(fleet, used_within_s=SCRAPE_S),
        "wanted_by_model": {model: wanted_replicas(fleet, model) for model in sorted(models)},
        "startable_models": [
            {
                "name": model.name,
                "waiting": len(model.waiting),
                "start_s": model.start_s,
                "failure": model.failure,
            }
            for model in fleet.starts.models.values()
        ],
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


def wanted_replicas(
    fleet: ReplicaRegistry, model: str | None = None, *, used_within_s: float = USED_S
) -> int:
    """Return how many replicas, of one model or of all, would bring the mean wait to `busy_s`.

    Autoscalers read this number. It is smaller than the present number only if half of the present
    replicas would be enough, and if each replica then has at most `_STREAMS_PER_REPLICA` running
    requests: work counts prompts, not answers. If a replica reports its work, the report is used,
    because a request without streaming looks like work until its end. The work of requests that
    wait for a first replica is the work of their prompts at the fleet's mean speed.

    It is at least one, except for models that may have no replica: it is zero if they have no
    requests, and had none within the last `used_within_s` seconds.
    """
    dispatcher = fleet.dispatcher
    ready = [replica for replica in fleet.ready if model is None or model in replica.facts.models]
    if _is_unused(fleet, model, used_within_s):
        return 0
    starts = fleet.starts.models
    startable = [starts[model]] if model in starts else [] if model else list(starts.values())
    waiting = [request for each in startable for request in each.waiting]
    work_s = sum(
        dispatcher.wait_s(replica.index) if replica.work_s is None else replica.work_s
        for replica in ready
    )
    work_s += dispatcher.mean_unit_s * sum(request.num_units for request in waiting)
    num_for_work = -(-work_s // fleet.options.busy_s)
    if num_for_work > len(ready):
        return int(num_for_work)
    num_open = sum(dispatcher.num_open(replica.index) for replica in ready)
    num_for_streams = -(-num_open // _STREAMS_PER_REPLICA)
    enough = max(1, int(2 * num_for_work), num_for_streams)
    return max(1, min(enough, len(ready))) if num_open else 1


def _is_unused(fleet: ReplicaRegistry, model: str | None, used_within_s: float) -> bool:
    """Return whether a model, or each model of the fleet, may have no replica and needs none now.

    A replica that drains counts: its streams may have to continue at another one.
    """
    starts = fleet.starts.models
    replicas = [
        replica
        for replica in fleet.replicas.values()
        if model is None or model in replica.facts.models
    ]
    served_names = {name for replica in replicas for name in replica.facts.models}
    names = served_names | set(starts) if model is None else {model}
    if not names or not names <= set(starts):
        return False
    is_busy = any(
        fleet.dispatcher.num_open(replica.index)
        or replica.computed.num_requests
        or replica.num_reported
        for replica in replicas
    )
    return not is_busy and not any(starts[name].is_used(used_within_s) for name in names)
