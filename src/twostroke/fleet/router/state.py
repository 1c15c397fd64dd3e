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

    The work is in seconds. Cache hit rates are fractions of the prompts' bytes. A second rate is
    the best possible hit rate: it counts all bytes that any replica has in its prefix cache.
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
    """Return how many replicas would bring the mean wait to the option `busy_s`.

    Autoscalers read this number, for one model or, if `model` is None, for all models. The number
    is smaller than the current number of replicas only if half of them would be enough, and if each
    remaining replica would have at most `_STREAMS_PER_REPLICA` running requests. The second rule is
    needed because work counts the prefill of prompts, but not the decoding of answers.

    A replica's own report of its work is preferred to the router's estimate, because the router
    counts a request without streaming as work until its end. For requests that wait for a first
    replica, the work is the prefill of their prompts at the fleet's mean speed.

    The number is at least one, except for models that may have no replica: for them it is zero if
    no request runs, waits or has arrived within the last `used_within_s` seconds.
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

    A draining replica's requests count, since another replica may have to continue their streams.
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
