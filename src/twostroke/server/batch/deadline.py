"""How long a batch may still run, whatever becomes of the clock.

Until the machine starts anew, only the time since its start counts, which nobody can set. After
that only the clock knows how long it was off; then a batch has at most its whole window.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

if TYPE_CHECKING:
    from twostroke.server.batch.batch import Batch

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what differs after each start of the machine."""
    return _BOOT_ID.read_text("ascii").strip()


def since_boot_s() -> float:
    """Return the seconds since the machine's start, those of its sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def anchored(batch: Batch) -> Batch:
    """Return a batch with its deadline in this machine's time."""
    left_s, boot = seconds_left(batch), boot_id()
    return replace(batch, boot=boot, deadline_s=since_boot_s() + left_s)


def seconds_left(batch: Batch) -> float:
    """Return the seconds until the rest of a batch is not run."""
    if batch.boot == boot_id():
        return batch.deadline_s - since_boot_s()
    window_s = batch.expires_at - batch.since["validating"]
    return min(window_s, batch.expires_at - time.time())
