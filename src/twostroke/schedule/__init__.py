"""Who computes which of their tokens in the next step, and what came of the last one."""

from __future__ import annotations

from twostroke.schedule.config import SchedulerConfig, SchedulerStats
from twostroke.schedule.policy import Continuous, Dynamic, Policy, Queue, Static, make_policy
from twostroke.schedule.scheduler import Scheduler
from twostroke.schedule.view import SchedulerView

__all__ = [
    "Continuous",
    "Dynamic",
    "Policy",
    "Queue",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SchedulerView",
    "Static",
    "make_policy",
]
