"""Key-value pages: who refers to them, and which prefix they hold."""

from __future__ import annotations

from twostroke.cache.pool import PagePool
from twostroke.cache.prefix import PrefixChain, PrefixIndex

__all__ = ["PagePool", "PrefixChain", "PrefixIndex"]
