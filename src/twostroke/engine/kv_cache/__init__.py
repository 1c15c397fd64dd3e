"""Key-value pages: their references, how many a request needs, and the prefixes they hold."""

from __future__ import annotations

from twostroke.engine.kv_cache.pool import PagePool
from twostroke.engine.kv_cache.prefix import PrefixChain, PrefixHit, PrefixIndex

__all__ = ["PagePool", "PrefixChain", "PrefixHit", "PrefixIndex"]
