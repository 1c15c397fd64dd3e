"""What Python's cyclic garbage collector does in a process that answers many streams."""

from __future__ import annotations

import gc

# A step of 256 streams makes about a thousand objects, which live until their callers have read
# them: by default that is a collection or two a step, a tenth of its time (make bench-overhead).
_OBJECTS_A_COLLECTION = 50_000


def ease_collector() -> None:
    """Never look again at what exists now, and seldom at what is to come.

    To be called once the model is loaded, by a program that does nothing but serve it. What
    requests leave behind is freed by its reference counts; cycles wait longer, some megabytes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_A_COLLECTION)
