"""A short form of `make long SUITE=fleet`."""

from __future__ import annotations

import asyncio

import pytest

from exact.fleet import PACED_LOAD, campaign


@pytest.mark.slow
def test_replicas_that_fail_lose_nothing_before_its_first_byte() -> None:
    seen = asyncio.run(campaign(4, load=PACED_LOAD))
    assert seen.wrong == []
    assert seen.ends["answered"] > 4
