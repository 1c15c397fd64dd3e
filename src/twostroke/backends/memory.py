"""`PageMemory`: the bytes of a backend's key-value pages, for those that store or move them."""

from __future__ import annotations

from typing import Any


class PageMemory:
    """The bytes of `num_pages` equal pages, one after another.

    A page holds all layers of its cache group, in the backend's own form. It may be read while a
    request or a lease refers to it, and written only by the transfer that holds it. Views must not
    be used after the backend is closed.
    """

    def __init__(self, memory: memoryview[Any], num_pages: int) -> None:
        self.page_bytes = len(memory) // num_pages
        self.memory = memory

    def __getitem__(self, page: int) -> memoryview[Any]:
        """Return the bytes of a page, which can be written."""
        start = page * self.page_bytes
        return self.memory[start : start + self.page_bytes]
