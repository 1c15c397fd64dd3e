"""Rounds of random operations on scheduler, engine and supervisor, each from a seed."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from support.scheduler_machine import SchedulerMachine
from support.service_machine import ServiceMachine

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

NUM_OPERATIONS = 3_000  # of a round, or some more
_NUM_CHOICES = 50  # of operations, before another scheduler is put together


def play_service(seed: int, counts: Counter[str]) -> None:
    """Play a round of a server and its engine."""
    counts["rounds of a service"] += 1
    with tempfile.TemporaryDirectory() as folder:
        machine = ServiceMachine(random.Random(seed), Path(folder), counts)
        asyncio.run(machine.run(NUM_OPERATIONS))


def play_scheduler(seed: int, counts: Counter[str]) -> None:
    """Play a round of schedulers."""
    rng = random.Random(seed)

    class Machine(SchedulerMachine):
        pools: ClassVar[bool] = rng.random() < 0.3

    Machine.counts = counts
    counts["rounds of schedulers"] += 1
    enough = counts["operations"] + NUM_OPERATIONS
    while counts["operations"] < enough:
        machine = Machine()
        machine.build(seed=rng.getrandbits(32), num_pages=rng.randint(1, 20))
        for _ in range(_NUM_CHOICES):
            _operate(machine, rng)
        machine.teardown()


def _operate(machine: SchedulerMachine, rng: random.Random) -> None:
    """Perform one of the operations that are possible now."""
    seed, dt_s = rng.getrandbits(32), rng.choice((0.0, 0.1, 2.0))
    draft_seed = rng.choice((None, seed, seed))
    possible: list[Callable[[], None]] = [
        machine.flush,
        lambda: machine.change_limits(seed=seed),
        lambda: machine.add(seed=seed, count=rng.randint(1, 8)),
        lambda: machine.move(seed=seed, count=rng.randint(1, 9)),
        lambda: machine.steps(count=rng.randint(1, 25), dt_s=dt_s, draft_seed=draft_seed),
    ]
    if machine.live:
        possible.append(lambda: machine.end(seed=seed, count=rng.randint(1, 3)))
    if len(machine.in_flight) <= machine.steps_ahead:
        possible.append(machine.plan)
    if len(machine.in_flight) > machine.num_started:
        possible += [lambda: machine.add_drafts(seed=seed), lambda: machine.recall(seed=seed)]
    if machine.in_flight:
        possible += [machine.land, lambda: machine.lose(seed=seed)]
    rng.choice(possible)()
