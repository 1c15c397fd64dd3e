"""The prefix index: finds the cached pages of a prompt by a chain of hashes over full pages."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_PAGE, NO_STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache.pool import PagePool

PageKey = tuple[int, bytes]  # the cache group, and the hash of the sequence up to the page's end


class PrefixChain:
    """The hash keys of one sequence's full KV pages; each is hashed once, as the sequence grows.

    `keys[i] = sha256(keys[i - 1] + tokens of page i)`, and the first page follows a hash of the
    salt. So equal keys mean equal tokens from the first token on, and equal salts.
    """

    __slots__ = ("_page_size", "_root", "keys")

    def __init__(self, page_size: int, salt: bytes) -> None:
        self.keys: list[bytes] = []
        self._page_size = page_size
        self._root = sha256(b"twostroke prefix " + salt).digest()

    def extend(self, tokens: Sequence[int], num_pages: int) -> None:
        """Add the hash keys of the first `num_pages` pages of `tokens`, which must be full."""
        keys = self.keys
        first = len(keys)
        if first >= num_pages:
            return
        page_size = self._page_size
        data = array("I", tokens[first * page_size : num_pages * page_size]).tobytes()
        page_bytes = len(data) // (num_pages - first)
        key = keys[-1] if keys else self._root
        for offset in range(0, len(data), page_bytes):
            key = sha256(key + data[offset : offset + page_bytes]).digest()
            keys.append(key)


class PrefixHit(Frozen):
    """The KV pages of a sequence's longest cached prefix.

    Attributes:
        pages: a list for each cache group, as in `Request.pages`.
        num_indexed: how many of the sequence's first pages are indexed in groups with full
            attention. It can exceed `num_pages`: in a group with a sliding window, pages may be
            missing.
        state_slot: the slot of the recurrent state after the prefix, for models with such states.
    """

    pages: list[list[int]]
    num_indexed: int = 0
    state_slot: int = NO_STATE

    @property
    def num_pages(self) -> int:
        """The length of the cached prefix in pages, and of the page list of each cache group."""
        return len(self.pages[0])


class PrefixIndex:
    """Finds the KV pages of a prompt's longest cached prefix, in each cache group.

    All pages that the next row after the prefix reads must be cached: every page in a group with
    full attention, and the last few pages in a group with a sliding window.

    The index holds no references. An inserted page stays, referenced or cached, until the pool
    evicts it. Of two pages with the same key only the first is indexed.

    `reuse_generated=False` is the strict mode, for backends that compute prompt rows and generated
    rows differently. Pages with a generated row are then neither indexed nor reused, so a request's
    tokens never depend on earlier requests.
    """

    def __init__(self, pool: PagePool, *, reuse_generated: bool = True) -> None:
        self.reuse_generated = reuse_generated
        self._pool = pool
        self._pages: list[dict[bytes, int]] = [{} for _ in pool.groups.windows]
        self._keys: dict[int, PageKey] = {}  # by page
        pool.on_evict = self._remove

    def __len__(self) -> int:
        return len(self._keys)

    def chain(self, salt: bytes) -> PrefixChain:
        """Return an empty chain of page keys for a sequence; `salt` separates tenants."""
        return PrefixChain(self._pool.page_size, salt)

    def num_reusable(self, num_tokens: int, num_prompt: int) -> int:
        """Return how many of a sequence's full KV pages may be indexed and reused.

        The sequence has `num_tokens` tokens; the first `num_prompt` are the prompt. In the strict
        mode, pages with generated tokens do not count.
        """
        if not self.reuse_generated and num_prompt < num_tokens:
            num_tokens = num_prompt
        return num_tokens // self._pool.page_size

    def match(self, chain: PrefixChain, tokens: Sequence[int], num_prompt: int) -> PrefixHit:
        """Return the KV pages of the longest cached prefix of `tokens`, and extend their `chain`.

        The prefix leaves at least one token, which must be computed for its logits. The caller must
        share the pages before it allocates any.
        """
        num_pages = self.num_reusable(len(tokens) - 1, num_prompt)
        chain.extend(tokens, num_pages)
        return self.hit(chain.keys[:num_pages])

    def hit(self, keys: list[bytes]) -> PrefixHit:
        """Return the longest cached prefix of a sequence, given the keys of its full KV pages."""
        groups = self._pool.groups
        full_attention_pages = [
            _leading_pages(indexed, keys)
            for indexed, window in zip(self._pages, groups.windows, strict=True)
            if window is None
        ]
        num_indexed = min(map(len, full_attention_pages), default=len(keys))
        if not groups.has_windows:
            return PrefixHit([pages[:num_indexed] for pages in full_attention_pages], num_indexed)
        num_pages = self._num_reachable(keys, num_indexed)
        first_read = groups.first_read_pages(num_pages * groups.page_size)
        pages = [
            [NO_PAGE] * first + [indexed[key] for key in keys[first:num_pages]]
            for indexed, first in zip(self._pages, first_read, strict=True)
        ]
        return PrefixHit(pages, num_indexed if full_attention_pages else num_pages)

    @property
    def num_groups(self) -> int:
        """The number of the model's cache groups."""
        return len(self._pages)

    def contains(self, page_key: PageKey) -> bool:
        """Whether the KV page with this key is indexed."""
        group, key = page_key
        return key in self._pages[group]

    def find(self, page_key: PageKey) -> int:
        """Return the id of the KV page with this key, or `NO_PAGE` if it is not indexed."""
        group, key = page_key
        return self._pages[group].get(key, NO_PAGE)

    def reachable(
        self, keys: Sequence[bytes], first: int, exists: Callable[[PageKey], bool]
    ) -> tuple[int, list[int]]:
        """Return how long a cached prefix could become if pages from elsewhere were fetched.

        Used to decide which pages to load from disk, Redis or another engine. `keys` belong to the
        request's pages from index `first` on; its earlier pages are cached. `exists` says whether a
        page can be fetched. Returns how many of the `keys` belong to the longest prefix after which
        the request could start, and, for each cache group, the index of the first page that the
        request then reads.
        """
        groups, page_size = self._pool.groups, self._pool.page_size
        num_keys = len(keys)
        for group, window in enumerate(groups.windows):
            if window is None:
                for index, key in enumerate(keys[:num_keys]):
                    if not (self.contains((group, key)) or exists((group, key))):
                        num_keys = index
                        break
        index = num_reachable = num_keys
        first_read = groups.first_read_pages((first + num_reachable) * page_size)
        while index > max(0, min(first_read) - first) and groups.has_windows:
            index -= 1
            for group, start in enumerate(first_read):
                if groups.windows[group] is None or start > first + index:
                    continue
                page_key = group, keys[index]
                if not (self.contains(page_key) or exists(page_key)):
                    num_reachable = index  # a longer prefix would read this page
                    first_read = groups.first_read_pages((first + num_reachable) * page_size)
                    break
        return num_reachable, first_read

    def insert(self, group: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Index full, computed KV pages of a cache group under their keys.

        Requests must still hold references to them. Keys that are indexed already keep their page.
        """
        indexed = self._pages[group]
        added = [
            (key, page)
            for key, page in zip(keys, pages, strict=True)
            if indexed.setdefault(key, page) == page
        ]
        for key, page in added:
            self._keys[page] = (group, key)
        self._pool.keep([page for _, page in added])

    def _num_reachable(self, keys: list[bytes], num_pages: int) -> int:
        """Return the length in pages of the longest cached prefix, at most `num_pages`.

        In groups with sliding windows, all pages in the window before the prefix's end are indexed.
        """
        groups = self._pool.groups
        sliding = [group for group, window in enumerate(groups.windows) if window is not None]
        first = groups.first_read_pages(num_pages * groups.page_size)
        index = num_pages
        while index > min(first[group] for group in sliding):
            index -= 1
            if any(first[g] <= index and keys[index] not in self._pages[g] for g in sliding):
                num_pages = index  # any longer prefix would read this page
                first = groups.first_read_pages(num_pages * groups.page_size)
        return num_pages

    def _remove(self, pages: Sequence[int]) -> None:
        """Remove KV pages from the index, because the pool evicts them."""
        for page in pages:
            group, key = self._keys.pop(page)
            del self._pages[group][key]


def _leading_pages(indexed: dict[bytes, int], keys: list[bytes]) -> list[int]:
    """Return the KV pages of the first keys, up to the first key that is not indexed."""
    pages = []
    for key in keys:
        page = indexed.get(key)
        if page is None:
            break
        pages.append(page)
    return pages
