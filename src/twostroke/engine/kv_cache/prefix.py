"""Finds the page of each known prefix, by a chain of hashes over full pages."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.core.request import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.engine.kv_cache.pool import PagePool

PageKey = tuple[int, bytes]  # the cache group, and the key of the sequence up to the page's end


class PrefixChain:
    """The keys of one sequence's full pages, hashed once each as the sequence grows.

    `keys[i] = sha256(keys[i - 1] + tokens of page i)`, and the first page follows a hash of the
    salt: equal keys mean equal tokens from the first on, and equal salts.
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


class PrefixHit(Frozen):
    """The first `num_places` pages of a sequence, as `Request.pages` holds them: a list a group.

    `num_known` is the number of places known in the groups without a window.
    """

    pages: list[list[int]]
    num_known: int = 0

    @property
    def num_places(self) -> int:
        """How many pages long the prefix is."""
        return len(self.pages[0])


class PrefixIndex:
    """Finds the pages of the longest computed prefix in each cache group.

    A row after the prefix must find all that it reads: every page in a group without a window, and
    the last few in a group with one.

    The index holds no references. An inserted page stays, referenced or cached, until the pool
    evicts it. Of two pages with the same key only the first is indexed.

    `reuse_generated=False` is the strict mode for backends that compute prompt rows and generated
    rows differently. Pages with a generated row are then neither indexed nor reused, so a request's
    tokens never depend on earlier requests.
    """

    def __init__(self, pool: PagePool, *, reuse_generated: bool = True) -> None:
        self.reuse_generated = reuse_generated
        self._pool = pool
        self._pages: list[dict[bytes, int]] = [{} for _ in pool.groups.windows]
        self._keys: dict[int, tuple[int, bytes]] = {}  # group and key of each page
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._keys)

    def chain(self, salt: bytes) -> PrefixChain:
        """Start the keys of a sequence under `salt`."""
        return PrefixChain(self._pool.page_size, salt)

    def num_reusable(self, num_tokens: int, num_prompt: int) -> int:
        """Return how many pages of a sequence may be indexed, `num_prompt` tokens of it prompt."""
        if not self.reuse_generated and num_prompt < num_tokens:
            num_tokens = num_prompt
        return num_tokens // self._pool.page_size

    def match(self, chain: PrefixChain, tokens: Sequence[int], num_prompt: int) -> PrefixHit:
        """Return the pages of the longest known prefix of `tokens`, and extend their `chain`.

        At least one token is left, which must be computed for its logits. The caller shares the
        pages before it allocates any.
        """
        num_pages = self.num_reusable(len(tokens) - 1, num_prompt)
        chain.extend(tokens, num_pages)
        return self.hit(chain.keys[:num_pages])

    def hit(self, keys: list[bytes]) -> PrefixHit:
        """Return the pages of the longest known prefix of the places with these keys."""
        num_pages, groups = len(keys), self._pool.groups
        runs = [
            _leading(known, keys)
            for known, window in zip(self._pages, groups.windows, strict=True)
            if window is None
        ]
        num_known = min(map(len, runs), default=num_pages)
        if not groups.has_windows:
            return PrefixHit([run[:num_known] for run in runs], num_known)
        num_places = self._num_reachable(keys, num_known)
        pages = [
            [NO_PAGE] * first + [known[key] for key in keys[first:num_places]]
            for known, first in zip(
                self._pages, groups.first_seen(num_places * groups.page_size), strict=True
            )
        ]
        return PrefixHit(pages, num_known if runs else num_places)

    @property
    def num_groups(self) -> int:
        """How many cache groups there are."""
        return len(self._pages)

    def knows(self, key: PageKey) -> bool:
        """Whether the page of a group's key is indexed."""
        group, chain = key
        return chain in self._pages[group]

    def find(self, key: PageKey) -> int:
        """Return the page of a group's key, or `NO_PAGE`."""
        group, chain = key
        return self._pages[group].get(chain, NO_PAGE)

    def reachable(
        self, keys: Sequence[bytes], first: int, exists: Callable[[PageKey], bool]
    ) -> tuple[int, list[int]]:
        """Return how many `keys` a request could start after with what exists elsewhere.

        `keys` are those of its places from `first` on; earlier places are known. Also returns the
        first place that is then read in each group.
        """
        groups, size = self._pool.groups, self._pool.page_size
        num = len(keys)
        for group, window in enumerate(groups.windows):
            if window is None:
                has = (self.knows((group, k)) or exists((group, k)) for k in keys[:num])
                num = next((at for at, is_there in enumerate(has) if not is_there), num)
        at = total = num
        firsts = groups.first_seen((first + total) * size)
        while at > max(0, min(firsts) - first) and groups.has_windows:
            at -= 1
            for group, start in enumerate(firsts):
                key = group, keys[at]
                if groups.windows[group] is None or start > first + at:
                    continue
                if not (self.knows(key) or exists(key)):
                    total = at  # a longer prefix would read this page
                    firsts = groups.first_seen((first + total) * size)
                    break
        return total, firsts

    def insert(self, group: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Index full, computed, referenced pages of a group, unless their `keys` have others."""
        place, owners = self._pages[group].setdefault, self._keys
        pairs = zip(keys, pages, strict=True)
        added = [(key, page) for key, page in pairs if place(key, page) == page]
        for key, page in added:
            owners[page] = (group, key)
        self._pool.keep([page for _, page in added])

    def _num_reachable(self, keys: list[bytes], num_places: int) -> int:
        """Return the most places, up to `num_places`, whose windows have only known pages."""
        groups = self._pool.groups
        sliding = [g for g, window in enumerate(groups.windows) if window is not None]
        first = groups.first_seen(num_places * groups.page_size)
        place = num_places
        while place > min(first[group] for group in sliding):
            place -= 1
            if any(first[g] <= place and keys[place] not in self._pages[g] for g in sliding):
                num_places = place  # any longer prefix would read this page
                first = groups.first_seen(num_places * groups.page_size)
        return num_places

    def _forget(self, pages: Sequence[int]) -> None:
        forget = self._keys.pop
        for page in pages:
            group, key = forget(page)
            del self._pages[group][key]


def _leading(known: dict[bytes, int], keys: list[bytes]) -> list[int]:
    """Return the pages of the first keys, up to one that is unknown."""
    pages = []
    for key in keys:
        page = known.get(key)
        if page is None:
            break
        pages.append(page)
    return pages
