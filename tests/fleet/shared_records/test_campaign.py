"""A short form of `make long SUITE=routers`."""

from __future__ import annotations

import asyncio

import pytest

from exact.routers import campaign
from support.stores import missing


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_routers_that_are_killed_lose_no_count() -> None:
    seen = asyncio.run(campaign(2, num_clients=4, num_tokens=12))
    assert seen.wrong == []
    assert seen.ends["answered at attempt 1"] > 4
    assert seen.ends["sent to a dead router"] + seen.ends["broken by a kill"] > 0
    assert seen.stored.requests > 4
