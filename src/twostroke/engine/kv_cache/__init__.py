"""The pools of KV cache pages and of recurrent states, and the index of cached prefixes."""

from __future__ import annotations

from twostroke.engine.kv_cache.pool import PagePool
from twostroke.engine.kv_cache.prefix import PrefixChain, PrefixHit, PrefixIndex
from twostroke.engine.kv_cache.states import StatePool

__all__ = ["PagePool", "PrefixChain", "PrefixHit", "PrefixIndex", "StatePool"]
