"""Runs a function on a large stack, in a thread of low priority.

llguidance follows rules that refer to one another by recursion, one frame each. The stack must hold
as many as fit into the longest text; only the used part takes memory.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Given = TypeVar("Given")
Found = TypeVar("Found")

_NICENESS: Final = 10
_STACK_BYTES: Final = 512 << 20
_stack_lock = threading.Lock()  # the size of new stacks is the process's


def on_large_stack(function: Callable[[Given], Found], given: Given) -> Found:
    """Return what `function` returns, called in a separate thread with a large stack."""
    with ThreadPoolExecutor(1, "twostroke-grammar", _lower_priority) as thread, _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            work = thread.submit(function, given)
        finally:
            threading.stack_size(before)
    return work.result()


def _lower_priority() -> None:
    """Lower this thread's priority, where the system has priorities of threads."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
