"""The kind of an engine's pages: what another engine must have in common to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError
from twostroke.engine.kv_offload.tier import KvCacheSpec
from twostroke.model.program.kv_groups import PageGroups

if TYPE_CHECKING:
    from twostroke.backends import Backend
    from twostroke.backends.kv_size import CacheSize
    from twostroke.core.options import EngineOptions
    from twostroke.engine.model_card import ModelCard

_ALIKE = {"avx2": "vector", "avx512": "vector"}  # levels whose kernels agree bit for bit


def page_kind(
    card: ModelCard, options: EngineOptions, size: CacheSize, backend: Backend
) -> KvCacheSpec:
    """Return the kind of a backend's pages.

    Raises:
        UsageError: they are not all in this process's memory.
    """
    facts, memory = backend.facts, backend.pages
    level = _ALIKE.get(facts.level, facts.level)
    if memory is None:
        reason = "needs one process with all pages: the backend cpu or gpu, without ranks."
        raise UsageError(reason, field=options.tiers.field if options.tiers.is_used else "role")
    return KvCacheSpec(
        model=card.identity,
        kv_format=size.kv_format,
        page_bytes=memory.page_bytes,
        groups=PageGroups(facts.page_size, facts.windows),
        arithmetic=f"{facts.name} {level} {options.compute.known_bits}",
        only_prompts=not facts.one_arithmetic and options.cache.strict_prefix,
    )
