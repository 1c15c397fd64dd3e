"""Which KV pages are worth storing and loading: rules of `OffloadManager` and of simulations."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_PREFILL_S: Final = 0.1  # of a prompt for which tiers are searched
TOUCH_INTERVAL_S: Final = 60.0  # between two notes of a page's use
MAX_OFFERS: Final = 1000  # that wait to be written
_MAX_LOSS_RATIO: Final = 0.04  # the part of the prefill time that a failed fetch may lose
_MIN_SLACK_S: Final = 0.05  # threads may have to wait as long; at most 1/20 of the prefill time
_MAX_SEEN_KEYS: Final = 1 << 17  # of pages that were computed once


def max_loss_s(prefill_s: float) -> float:
    """Return how many seconds loading stored pages may lose against a prefill of `prefill_s`."""
    return max(_MAX_LOSS_RATIO * prefill_s, min(_MIN_SLACK_S, prefill_s / 20))


def is_worth_loading(
    expected_s: float, *, first_page_s: float, max_expected_s: float, slack_s: float
) -> bool:
    """Whether loading pages is expected to save time.

    Args:
        expected_s: expected seconds to load all pages.
        first_page_s: expected seconds until the first page shows that the tier works.
        max_expected_s: the longest loading time that pays: half of the pages' prefill time, or all
            of it while prefill times are not measured yet.
        slack_s: the number of seconds that may be lost if loading turns out to be slower than
            prefill.
    """
    return expected_s <= max_expected_s and first_page_s <= slack_s / 2


class ComputedPages:
    """The keys of recently computed KV pages, to recognize pages that are computed again."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Sequence[bytes]) -> int:
        """Add the keys of computed pages; return how many of them were computed before."""
        num_seen = 0
        for key in keys:
            num_seen += key in self._keys
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > _MAX_SEEN_KEYS:
            self._keys.popitem(last=False)
        return num_seen


class RecentUses:
    """The times at which cached pages were last used, so that tiers are not told of every use."""

    def __init__(self) -> None:
        self._used_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, last_key: bytes, now_s: float, *, always: bool = False) -> bool:
        """Record a use of a sequence's pages up to `last_key`; return whether tiers must be told.

        Tiers are not told of a use within a minute after the last use that they were told of,
        unless `always` is true.
        """
        used_s = self._used_s.get(last_key, -TOUCH_INTERVAL_S)
        if not always and now_s - used_s < TOUCH_INTERVAL_S:
            return False
        self._used_s[last_key] = now_s
        if len(self._used_s) > MAX_OFFERS:
            self._used_s.popitem(last=False)
        return True
