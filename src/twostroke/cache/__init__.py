"""Key-value pages: their references, how many a request needs, and the prefixes they hold."""

from __future__ import annotations

from twostroke.cache.formats import DEFAULT as DEFAULT_FORMAT
from twostroke.cache.formats import FORMATS
from twostroke.cache.groups import PageGroups
from twostroke.cache.pool import PagePool
from twostroke.cache.prefix import PrefixChain, PrefixHit, PrefixIndex

__all__ = [
    "DEFAULT_FORMAT",
    "FORMATS",
    "PageGroups",
    "PagePool",
    "PrefixChain",
    "PrefixHit",
    "PrefixIndex",
]
