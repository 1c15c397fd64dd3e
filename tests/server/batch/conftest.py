"""A server with an empty database, for two tenants; its clients belong to the first tenant."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from support.servers import live_server
from support.waiting import wait_for
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.http.limits import RequestLimits
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import LiveServer

LIMITS = RequestLimits(
    max_batch_lines=60,
    max_open_batches=2,
    max_body_bytes=4000,
    max_batch_bytes=20_000,
    max_file_bytes=100_000,
    max_files_bytes=250_000,
)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Records]:
    """Return the database and file folder of `server`."""
    with closing(Records(tmp_path / "records")) as opened:
        yield opened


@pytest.fixture
def server(tmp_path: Path, records: Records) -> Iterator[LiveServer]:
    """Start a server, and wait at the end of the test until it is idle."""
    keys = ApiKeys({"k": "anna", "other": "ben"})
    options = ServeOptions(drain_s=1, api_keys=keys, limits=LIMITS)
    with live_server(tmp_path, options, records=records) as live:
        live.http.headers["authorization"] = "Bearer k"
        yield live
        live.backend.gate.set()
        wait_for(lambda: live.num_busy == 0)
