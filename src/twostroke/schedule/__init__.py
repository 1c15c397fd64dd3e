"""Plans steps: which request computes which of its tokens in each."""

from __future__ import annotations

from twostroke.schedule.config import SchedulerConfig, SchedulerStats, SchedulerView
from twostroke.schedule.policy import Batched, Continuous, Policy, make_policy
from twostroke.schedule.scheduler import Scheduler

__all__ = [
    "Batched",
    "Continuous",
    "Policy",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SchedulerView",
    "make_policy",
]
