"""The cached KV pages of a prompt in an engine, and the order in which they would be evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.client import Client


def keys_of(client: Client, prompt: Sequence[int]) -> list[bytes]:
    """Return the keys of a prompt's full pages."""
    chain = client.loop.pages.scheduler.prefix_cache.chain(b"")
    assert chain is not None
    chain.extend(prompt, len(prompt) // 16)
    return chain.keys


def young_to_old(client: Client, keys: list[bytes]) -> list[int]:
    """Return the page indices of a prompt's cached pages, the last to be evicted first."""
    with client.loop.pages.lock:
        scheduler = client.loop.pages.scheduler
        index = scheduler.prefix_cache.transfers._index
        place_of = {index.find((0, key)): position for position, key in enumerate(keys)}
        _, cached = scheduler._pool.contents()
        return [place_of[page] for page in reversed(cached) if page in place_of]
