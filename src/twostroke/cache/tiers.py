"""What lies behind the page pool: places that keep pages by name, and how pages are named."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.cache.groups import PageGroups

PageKey = tuple[int, bytes]  # the cache group, and the key of the sequence up to the page's end

NAME_BYTES: Final = 32
VERSION: Final = 1  # raised whenever the bytes of a page mean something else than before


class PageKind(Frozen):
    """All that decides the bytes of a page besides the tokens and the salt, which its key covers.

    `model` is a digest of weights and Program, `arithmetic` names what computes alike, bit for bit:
    backend, level family, bits of activations. `only_prompts` is true where pages with generated
    rows are kept apart (`PrefixIndex.reuse_generated`). Engines with equal kinds can use each
    other's pages.
    """

    model: str
    kv_format: str
    page_bytes: int
    groups: PageGroups
    arithmetic: str
    only_prompts: bool
    version: int = VERSION

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for the kind."""
        return blake2b(repr(self).encode(), digest_size=32).digest()

    def name(self, key: PageKey) -> bytes:
        """Return the page's name outside of the pool, `NAME_BYTES` long."""
        group, chain = key
        parts = self.digest + group.to_bytes(4, "little") + chain
        return blake2b(parts, digest_size=NAME_BYTES, person=b"twostroke page").digest()


class Tier(Protocol):
    """Keeps pages by name. One thread calls `find` and `fetch`, one other `offer`."""

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return those of the names that it seems to have."""

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Fill a page; False if it is not there or damaged, whatever the page then contains."""

    def offer(self, name: bytes, page: memoryview[Any], saved_s: float) -> bool:
        """Keep a page if that is worth it: it saves `saved_s` of computing; False if not kept."""

    def close(self) -> None:
        """Give back files and connections."""
