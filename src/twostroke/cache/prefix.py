"""Which page holds which prefix: a chain of hashes over full pages."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.cache.pool import PagePool


class PrefixChain:
    """The keys of one sequence's full pages, hashed once each as the sequence grows.

    `keys[i] = sha256(keys[i - 1] + tokens of page i)`, and before the first page stands a hash of
    the salt: equal keys mean equal tokens from the first on, and an equal salt.
    """

    __slots__ = ("_page_size", "_root", "keys")

    def __init__(self, page_size: int, salt: bytes) -> None:
        self.keys: list[bytes] = []
        self._page_size = page_size
        self._root = sha256(b"twostroke prefix " + salt).digest()

    def extend(self, tokens: Sequence[int], num_pages: int) -> None:
        """Hash the pages of `tokens` up to the first `num_pages`, all of them full."""
        keys = self.keys
        first = len(keys)
        if first >= num_pages:
            return
        size = self._page_size
        data = array("I", tokens[first * size : num_pages * size]).tobytes()
        num_bytes = len(data) // (num_pages - first)
        key = keys[-1] if keys else self._root
        for at in range(0, len(data), num_bytes):
            key = sha256(key + data[at : at + num_bytes]).digest()
            keys.append(key)


class PrefixIndex:
    """Finds the pages of the longest computed prefix.

    It holds no references. A page that was inserted stays, referenced or cached, until the pool
    evicts it, which removes its key. Of two pages with the same key the first stays and the later
    one is not indexed: it serves its own request and becomes free with it.

    `reuse_generated` False is the strict mode for backends that compute prompt rows and generated
    rows differently: a page with a generated row is then neither indexed nor, for a request that
    generated its tokens itself, taken from the index, so that a request's tokens never depend on
    what was computed before it.
    """

    def __init__(self, pool: PagePool, *, reuse_generated: bool = True) -> None:
        self.reuse_generated = reuse_generated
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._pages)

    def chain(self, salt: bytes) -> PrefixChain:
        """Start the keys of a sequence under `salt`."""
        return PrefixChain(self._pool.page_size, salt)

    def num_reusable(self, num_tokens: int, num_prompt: int) -> int:
        """How many pages of `num_tokens` tokens, `num_prompt` of them prompt, may be indexed."""
        if not self.reuse_generated and num_prompt < num_tokens:
            num_tokens = num_prompt
        return num_tokens // self._pool.page_size

    def match(self, chain: PrefixChain, tokens: Sequence[int], num_prompt: int) -> list[int]:
        """Return the pages of the longest known prefix of `tokens`, whose keys `chain` holds.

        At least one token is left over: it must be computed for its logits. The caller shares the
        pages before it allocates any.
        """
        num_pages = self.num_reusable(len(tokens) - 1, num_prompt)
        chain.extend(tokens, num_pages)
        known = self._pages
        pages = []
        for key in chain.keys[:num_pages]:
            page = known.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, key: bytes, page: int) -> bool:
        """Offer a full, computed, referenced page; return whether it is now the one for `key`."""
        first = self._pages.setdefault(key, page)
        if first != page:
            return False
        self._keys[page] = key
        self._pool.keep(page)
        return True

    def check(self) -> None:
        """Assert that keys and pages are one to one and that the pool keeps just these pages."""
        assert {page: key for key, page in self._pages.items()} == self._keys
        kept = {page for page in range(self._pool.num_pages) if self._pool.is_kept(page)}
        assert kept == set(self._keys), f"indexed {set(self._keys)}, kept {kept}"

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
