"""Key-value pages: who refers to them, how many are needed, and which prefix they hold."""

from __future__ import annotations

from twostroke.cache.groups import PageGroups
from twostroke.cache.pool import PagePool
from twostroke.cache.prefix import PrefixChain, PrefixHit, PrefixIndex

__all__ = ["PageGroups", "PagePool", "PrefixChain", "PrefixHit", "PrefixIndex"]
