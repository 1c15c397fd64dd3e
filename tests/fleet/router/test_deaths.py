"""A short form of `make long SUITE=deaths`."""

from __future__ import annotations

import asyncio

import pytest

from exact.deaths import campaign


@pytest.mark.slow
def test_streams_of_all_protocols_continue_at_other_replicas() -> None:
    kinds = ["kill", "engine kill", "drain"]
    seen, metrics = asyncio.run(campaign(3, kinds=kinds, num_tokens=80))
    assert seen.wrong == []
    assert seen.ends["whole"] > 10
    assert "twostroke_router_continued_requests_total 0.0" not in metrics
