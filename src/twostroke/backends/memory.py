"""`PageMemory`: the bytes of a backend's key-value pages, for those that store or move them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class PageMemory(Protocol):
    """The bytes of equal pages; any thread may use them.

    A page holds all layers of its cache group, in the backend's own form. It may be read while a
    request or a lease refers to it, and written only by the transfer that holds it. Nothing may be
    used after the backend is closed.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""

    @property
    def mapped(self) -> memoryview[Any] | None:
        """All pages, one after another; None if they are not in this process's memory."""

    def read(self, page: int) -> memoryview[Any]:
        """Return the bytes of a page, which must not be changed."""

    def filling(self, page: int) -> AbstractContextManager[memoryview[Any]]:
        """Return what to fill a page by, while the context lasts."""


class MappedPages:
    """The bytes of `num_pages` pages in this process's memory."""

    def __init__(self, memory: memoryview[Any], num_pages: int) -> None:
        self.page_bytes = len(memory) // num_pages
        self.mapped = memory

    def read(self, page: int) -> memoryview[Any]:
        """Return the bytes of a page."""
        start = page * self.page_bytes
        return self.mapped[start : start + self.page_bytes]

    @contextmanager
    def filling(self, page: int) -> Iterator[memoryview[Any]]:
        """Yield the bytes of a page."""
        yield self.read(page)
