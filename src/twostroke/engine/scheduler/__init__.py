"""Scheduling: which requests compute tokens in each step, and how many tokens of each request."""

from __future__ import annotations

from twostroke.engine.scheduler.config import SchedulerConfig, SchedulerStats, SchedulerView
from twostroke.engine.scheduler.policy import Batched, Continuous, Policy, make_policy
from twostroke.engine.scheduler.scheduler import Scheduler

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
