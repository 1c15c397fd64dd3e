"""The interface of KV offload tiers, and the names under which they store pages."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.backends.interface import Backend
    from twostroke.backends.kv_size import CacheSize
    from twostroke.core.options import EngineOptions
    from twostroke.engine.kv_cache.prefix import PageKey
    from twostroke.engine.model_card import ModelCard

NAME_BYTES: Final = 32
VERSION: Final = 2  # raised whenever the bytes of a page mean something else than before


class KvCacheSpec(Frozen):
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
        """32 bytes that stand for the kind, from a text that renamed classes do not change."""
        groups = f"PageGroups(page_size={self.groups.page_size}, windows={self.groups.windows})"
        text = (
            f"PageKind(model={self.model!r}, kv_format={self.kv_format!r}, "
            f"page_bytes={self.page_bytes}, groups={groups}, arithmetic={self.arithmetic!r}, "
            f"only_prompts={self.only_prompts}, version={self.version})"
        )
        return blake2b(text.encode(), digest_size=32).digest()

    def name(self, key: PageKey) -> bytes:
        """Return the page's name outside of the pool, `NAME_BYTES` long."""
        group, chain = key
        parts = self.digest + group.to_bytes(4, "little") + chain
        return blake2b(parts, digest_size=NAME_BYTES, person=b"twostroke page").digest()


class PageValue(Frozen):
    """What a page is worth: the seconds that computing its sequence takes, for each of its pages.

    `place` is the page's place in the sequence, and `before` the name of the page before it in its
    cache group, without which it is of no use; empty for the first. The sequence was used at
    `used_s`, in seconds since 1970, and is to stay until `keep_s` later.
    """

    saved_s: float
    place: int
    used_s: float
    keep_s: float = 0.0
    before: bytes = b""

    @property
    def until_s(self) -> float:
        """When it was used, or until when it is to stay."""
        return self.used_s + self.keep_s


class OffloadTier(Protocol):
    """Keeps pages by name. Any thread may call it; it logs what fails, and raises nothing."""

    @property
    def title(self) -> str:
        """Its name in metrics."""

    @property
    def is_writable(self) -> bool:
        """Whether the last write did not fail, or was long ago."""

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return those of the names that it seems to have."""

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Fill a page; False if it is not there or damaged, whatever the page then contains."""

    def offer(self, name: bytes, page: memoryview[Any], worth: PageValue) -> bool:
        """Keep a page; return whether it was written. If it is there, note another use."""

    def probe(self) -> float:
        """Return how few seconds a page takes now; 0 if that cannot be measured."""

    def size(self) -> tuple[int, int] | None:
        """Return how many pages it has, and their bytes; None if it does not know."""

    def close(self) -> None:
        """Give back files and connections."""


_ALIKE = {"avx2": "vector", "avx512": "vector"}  # levels whose kernels agree bit for bit


def page_kind(
    card: ModelCard, options: EngineOptions, size: CacheSize, backend: Backend
) -> KvCacheSpec:
    """Return the kind of a backend's pages.

    Raises:
        UsageError: they are not all in this process's memory.
    """
    facts, memory = backend.facts, backend.pages
    level = _ALIKE.get(facts.level, facts.level)
    if memory is None:
        reason = "needs one process with all pages: the backend cpu or gpu, without ranks."
        raise UsageError(reason, field=options.offload.field if options.offload.is_used else "role")
    return KvCacheSpec(
        model=card.identity,
        kv_format=size.kv_format,
        page_bytes=memory.page_bytes,
        groups=PageGroups(facts.page_size, facts.windows),
        arithmetic=f"{facts.name} {level} {options.compute.resolved_bits}",
        only_prompts=not facts.one_arithmetic and options.cache.strict_prefix,
    )
