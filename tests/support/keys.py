"""API keys in records, and a server that accepts them."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from support.servers import live_server
from twostroke.server.auth import stored_keys as kept
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records, open_database

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from support.servers import LiveServer
    from twostroke.server.http.api_key import Key


def add(folder: Path, name: str = "app", tenant: str = "anna", **facts: Any) -> tuple[Key, str]:
    with open_database(folder, writes=True, creates=True) as db:
        return kept.add(db, name, tenant, **facts)


def revoke(folder: Path, key: Key) -> None:
    with open_database(folder, writes=True) as db:
        kept.change(db, kept.find(db, key.id), revoked_at=time.time())


@contextmanager
def keyed_server(
    folder: Path,
    tmp_path: Path,
    file: Path | None = None,
    engine: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[LiveServer]:
    """Yield a server with API keys, as `serve --records` starts it."""
    with closing(Records(folder)) as records:
        keys = ApiKeys.read(file, None, folder)
        serving = ServeOptions(drain_s=1, api_keys=keys, **options)
        with live_server(tmp_path, serving, records=records, **engine) as live:
            yield live
