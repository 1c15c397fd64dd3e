"""How long a request wants its prompt to be kept in a page cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

# Names of fields that have an effect where there is a page cache.
KEEPING: Final = frozenset({"cache_control", "prompt_cache_retention"})

_MARKED_S: Final = {"5m": 300.0, "1h": 3600.0}  # Anthropic's; 5m where a mark says nothing
_RETAINED_S: Final = {"24h": 86_400.0}  # OpenAI's; "in_memory" is what happens anyway


def marked_s(marks: Iterable[Any]) -> float:
    """Return the longest time that marks `{"type": "ephemeral", "ttl": ...}` ask for."""
    found = [mark for mark in marks if isinstance(mark, dict) and mark.get("type") == "ephemeral"]
    return max((_MARKED_S.get(str(mark.get("ttl") or "5m"), 0.0) for mark in found), default=0.0)


def retained_s(retention: Any) -> float:
    """Return the time that a value of `prompt_cache_retention` asks for."""
    return _RETAINED_S.get(retention, 0.0) if isinstance(retention, str) else 0.0
