"""`OffloadOptions`: where pages stay besides the memory of an engine."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import Field, UsageError
from twostroke.core.frozen import Frozen

DEFAULT_PAGE_CACHE_BYTES: Final = 10_000_000_000
_LEAST_BYTES: Final = 10_000_000
_SCHEMES: Final = ("redis://", "rediss://", "unix://")


class OffloadOptions(Frozen):
    """A folder, a store that machines share, or both; with neither, pages are in memory only.

    `page_cache_bytes` is the most that the folder holds, of all models together; None is 10 GB.
    `page_store` is the URL of a Redis server.
    """

    page_cache: str | None = None
    page_cache_bytes: int | None = None
    page_store: str | None = None

    def __post_init__(self) -> None:
        """Refuse what has no effect."""
        if self.page_cache == "":
            raise UsageError("must name a folder: leave it out, or name one.", field="page_cache")
        if self.page_cache_bytes is not None:
            if self.page_cache is None:
                raise UsageError(
                    "needs {other}.", field="page_cache_bytes", other=Field("page_cache")
                )
            if self.page_cache_bytes < _LEAST_BYTES:
                reason = f"must be at least {_LEAST_BYTES // 10**6}MB."
                raise UsageError(reason, field="page_cache_bytes")
        if self.page_store is not None and not self.page_store.startswith(_SCHEMES):
            reason = f"must be a URL that begins with one of: {', '.join(_SCHEMES)}."
            raise UsageError(reason, field="page_store")

    @property
    def most_bytes(self) -> int:
        """The most that the folder holds."""
        return self.page_cache_bytes or DEFAULT_PAGE_CACHE_BYTES

    @property
    def is_used(self) -> bool:
        """Whether pages stay anywhere."""
        return self.page_cache is not None or self.page_store is not None

    @property
    def field(self) -> str:
        """The option that asks for pages to stay."""
        return "page_store" if self.page_cache is None else "page_cache"
