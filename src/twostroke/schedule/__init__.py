"""Plans steps: which request computes which of its tokens, and what came of it."""

from __future__ import annotations

from twostroke.schedule.config import SchedulerConfig, SchedulerStats, SchedulerView
from twostroke.schedule.policy import Batched, Continuous, Policy, Queue, make_policy
from twostroke.schedule.scheduler import Scheduler

__all__ = [
    "Batched",
    "Continuous",
    "Policy",
    "Queue",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SchedulerView",
    "make_policy",
]
