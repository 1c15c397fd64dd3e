"""What Python's cyclic garbage collector does in a process that answers many streams."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A step of 256 streams makes about a thousand objects, which live until their callers have read
# them: by default that is a collection or two a step, a tenth of its time (make bench-overhead).
_OBJECTS_A_COLLECTION = 10_000


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no cycles while the block runs, which makes none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def ease_collector() -> None:
    """Exempt all present objects from cyclic collection, and collect new ones rarely.

    Call it once the model is loaded, in a process that only serves it. Reference counts free what
    requests leave; cycles stay longer and take a megabyte or two.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # what grows old is compared with what is found now: collected at a quarter of it
    gc.set_threshold(_OBJECTS_A_COLLECTION)
