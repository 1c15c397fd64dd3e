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
VERSION: Final = 2  # of the form of pages: raise it when the meaning of their bytes changes
# Levels whose kernels agree bit for bit.
_ARITHMETIC_LEVELS = {"avx2": "vector", "avx_vnni": "vector", "avx512": "vector"}


class KvCacheSpec(Frozen):
    """What determines the bytes of a KV page, besides its tokens and the tenant's salt.

    Engines with equal specs can use each other's stored pages. Tokens and salt are in a page's key.

    Attributes:
        model: a digest of the weights and of the Program, the model's list of operations.
        kv_format: the number format of keys and values.
        page_bytes: bytes of a page.
        groups: the page size and the windows of the cache groups.
        arithmetic: the backend, the family of instruction-set levels and the bits of activations;
            engines that agree in these compute equal results, bit for bit.
        only_prompts: whether pages with generated tokens are never reused
            (`PrefixIndex.reuse_generated` is False).
        version: the version of the pages' byte layout.
        state_bytes: bytes of a snapshot of the recurrent states; 0 for models without such states.
    """

    model: str
    kv_format: str
    page_bytes: int
    groups: PageGroups
    arithmetic: str
    only_prompts: bool
    version: int = VERSION
    state_bytes: int = 0

    @property
    def digest(self) -> bytes:
        """The spec's digest of 32 bytes, which stays the same when classes are renamed."""
        groups = f"PageGroups(page_size={self.groups.page_size}, windows={self.groups.windows})"
        text = (
            f"PageKind(model={self.model!r}, kv_format={self.kv_format!r}, "
            f"page_bytes={self.page_bytes}, groups={groups}, arithmetic={self.arithmetic!r}, "
            f"only_prompts={self.only_prompts}, version={self.version})"
        )
        if self.state_bytes:
            text += f" with states of {self.state_bytes} bytes"
        return blake2b(text.encode(), digest_size=32).digest()

    def name(self, key: PageKey) -> bytes:
        """Return the name under which tiers store the KV page with a key: `NAME_BYTES` bytes."""
        group, chain_key = key
        data = self.digest + group.to_bytes(4, "little") + chain_key
        return blake2b(data, digest_size=NAME_BYTES, person=b"twostroke page").digest()

    def state_name(self, key: bytes) -> bytes:
        """Return the name under which tiers store the snapshot after the page with this key."""
        return blake2b(
            self.digest + key, digest_size=NAME_BYTES, person=b"twostroke state"
        ).digest()


class PageValue(Frozen):
    """The value of a stored KV page or snapshot, by which tiers choose which of them to evict.

    Attributes:
        saved_s: seconds to compute the page's sequence, divided by the number of its pages. For a
            snapshot, seconds to compute the tokens since the snapshot before it.
        index: the page's index in the sequence. A snapshot has the index of the next page.
        used_s: last use of the sequence, in seconds since 1970.
        keep_s: how long the sequence must stay after its last use.
        previous_name: name of the previous page of the cache group, without which this page is
            useless; empty for the first page.
    """

    saved_s: float
    index: int
    used_s: float
    keep_s: float = 0.0
    previous_name: bytes = b""

    @property
    def keep_until_s(self) -> float:
        """The time until which the page must stay, in seconds since 1970.

        If the page need not stay, this is the time of its last use.
        """
        return self.used_s + self.keep_s


class OffloadTier(Protocol):
    """Stores KV pages and snapshots by name, on disk or in Redis. Any thread may call it.

    A snapshot of the recurrent states is stored like a page, with another size. Failures are logged
    and never raised.
    """

    @property
    def title(self) -> str:
        """The tier's name in metrics."""

    @property
    def is_writable(self) -> bool:
        """Whether the tier stores KV pages now: no recent write has failed."""

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return which of these names the tier probably has KV pages for."""

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Fill a KV page from the tier; return False, with undefined content, if that fails.

        It fails if the stored page is missing or damaged.
        """

    def offer(self, name: bytes, page: memoryview[Any], value: PageValue) -> bool:
        """Store a KV page, or record another use if it is stored; return whether it was written."""

    def probe(self) -> float:
        """Return the shortest measured time to read a stored page, in seconds; 0 if unknown."""

    def size(self) -> tuple[int, int] | None:
        """Return the number of stored KV pages and of their bytes; None if they are not known."""

    def close(self) -> None:
        """Close the tier's files and connections."""


def kv_cache_spec(
    card: ModelCard, options: EngineOptions, size: CacheSize, backend: Backend
) -> KvCacheSpec:
    """Return the spec that stored KV pages of a model on a backend must match.

    Raises:
        UsageError: the pages are not in this process's memory.
    """
    facts, memory = backend.facts, backend.pages
    level = _ARITHMETIC_LEVELS.get(facts.level, facts.level)
    if memory is None:
        reason = "needs one process with all pages: the backend cpu or gpu, without ranks."
        raise UsageError(reason, field=options.offload.field if options.offload.is_used else "role")
    return KvCacheSpec(
        model=card.identity,
        kv_format=size.kv_format,
        page_bytes=memory.page_bytes,
        groups=PageGroups(facts.page_size, facts.windows),
        arithmetic=f"{facts.name} {level} {options.compute.resolved_bits}",
        state_bytes=0 if backend.state_memory is None else backend.state_memory.page_bytes,
        only_prompts=not facts.one_arithmetic and options.cache.strict_prefix,
    )
