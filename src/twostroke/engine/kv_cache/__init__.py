"""The pool of KV cache pages, and the index of the prefixes that they hold."""

from __future__ import annotations

from twostroke.engine.kv_cache.pool import PagePool
from twostroke.engine.kv_cache.prefix import PrefixChain, PrefixHit, PrefixIndex

__all__ = ["PagePool", "PrefixChain", "PrefixHit", "PrefixIndex"]
