"""Whether a plan answers its question, by rules that do not use the planner."""

from __future__ import annotations

import math
from typing import Any

_ROUNDING = 1 + 1e-9


def is_kept(plan: dict[str, Any]) -> bool:
    """Assert that a chosen plan is possible; return whether it meets its objectives."""
    question, memory = plan["question"], plan["memory"]
    row, load = plan["chosen"], plan["user_load"]
    assert question["prompt"] + question["output"] <= plan["context_length"]
    if memory["usable"] is not None:
        used_bytes = memory["weights"] + row["streams"] * memory["kv_per_request"]
        assert used_bytes <= memory["usable"] * _ROUNDING
    assert question["streams"] in {None, row["streams"]}
    for part in (row, *plan["loads"], load or {}):
        for name, value in part.items():
            is_number = isinstance(value, (int, float))
            assert not is_number or (math.isfinite(value) and value >= 0), (name, value)
    if load is not None and question["ttft_s"] is None:
        rate = load["requests_per_s"] * load["users_per_replica"] / load["num_users"]
        num_waiting = load["users_per_replica"] - rate * load["think_s"]
        assert num_waiting <= row["streams"] * 1.01, "users queue for their turn"
    seen = row if load is None else load
    times = ((seen["ttft_s"], question["ttft_s"]), (seen["tpot_s"], question["tpot_s"]))
    return all(limit is None or value <= limit * _ROUNDING for value, limit in times)


def check_refused(plan: dict[str, Any]) -> None:
    """Assert that a plan without an answer says why, and has no figures."""
    assert plan["chosen"] is None
    assert plan["verdict"]
    assert not plan["loads"]
    assert plan["user_load"] is None
