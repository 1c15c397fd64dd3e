"""How long a request wants its prompt to be kept in a page cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from twostroke.server.body import field

if TYPE_CHECKING:
    from collections.abc import Iterable

# Names of fields that have an effect where there is a page cache.
KEEPING: Final = frozenset({"cache_control", "prompt_cache_retention"})

_MARKED_S: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}  # by `ttl`
_RETAINED_S: Final = {"24h": 86_400.0}


class CacheControlField(field.TaggedObject, tag="ephemeral"):
    """Anthropic's mark: what stands before it is to be kept, for 5 minutes if it says nothing."""

    ttl: Literal["5m", "1h"] | None = None


CacheControl = Annotated[
    CacheControlField | None, field.keeping('`{"type": "ephemeral", "ttl": "1h"}` or `"5m"`')
]
# OpenAI's reference has in_memory, which is what happens anyway; its SDKs have written in-memory.
Retention = Annotated[
    Literal["24h", "in_memory", "in-memory"] | None,
    field.keeping("`24h`", "in_memory", "in-memory"),
]


def marked_s(marks: Iterable[CacheControlField | None]) -> float:
    """Return the longest time that marks ask for."""
    return max((_MARKED_S[mark.ttl] for mark in marks if mark is not None), default=0.0)


def retained_s(retention: str | None) -> float:
    """Return the time that a value of `prompt_cache_retention` asks for."""
    return _RETAINED_S.get(retention or "", 0.0)
