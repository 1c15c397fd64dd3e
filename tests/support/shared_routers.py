"""Routers that share keys, limits and usage in a Redis server."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from support.accounts import SECRET
from support.replicas import live_router
from twostroke.fleet.shared_records import stored
from twostroke.fleet.shared_records.records import SharedRecords
from twostroke.fleet.shared_records.store import StoreConnection, open_store
from twostroke.server.auth.keys import ApiKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.replicas import LiveRouter
    from support.stores import Store
    from twostroke.server.http.api_key import Key


@contextmanager
def sharing_router(
    store: Store,
    *urls: str,
    secret: str = SECRET,
    api_key: str | None = None,
    clock: Callable[[], float] = time.time,
    max_wait_s: float = 5.0,
    **options: Any,
) -> Iterator[LiveRouter]:
    """Yield a router before the servers at `urls`, as `route --store` starts it."""
    with open_store(store.url) as client:
        shared_keys = [key for key, _ in stored.all_keys(client)]
    keys = ApiKeys.read(None, api_key, shared=shared_keys)
    assert keys is not None
    keys.set_router_key(secret)
    records = SharedRecords(StoreConnection(store.url), keys, secret, max_wait_s, clock)
    facts = {"shared_records": records, "api_keys": keys, "replica_key": secret, **options}
    with live_router(*urls, **facts) as router:
        yield router


def add_key(store: Store, name: str = "app", tenant: str = "anna", **facts: Any) -> tuple[Key, str]:
    """Add an API key to the store."""
    with open_store(store.url) as client:
        return stored.add(client, name, tenant, **facts)


def used(store: Store) -> list[tuple[str, int, int, int, int]]:
    """Return the key, requests, input, cached and output tokens of each owner of usage."""
    with open_store(store.url) as client:
        amounts = stored.amounts(client, "0000", "9999")
    return [(amount.owner.key, *amount[1:]) for amount in amounts]
