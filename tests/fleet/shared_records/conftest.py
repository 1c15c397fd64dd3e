"""A Redis server, fake replicas, and routers that share the server."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.replicas import Loop
from support.stores import missing, store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.stores import Store


@pytest.fixture
def redis_store(tmp_path: Path) -> Iterator[Store]:
    """Yield a Redis server, or skip the test where there is none."""
    if reason := missing():
        pytest.skip(reason)
    with store(tmp_path) as running_store:
        yield running_store


@pytest.fixture
def fakes() -> Iterator[Loop]:
    """Yield a loop in which fake replicas listen."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Yield a stack on which a test enters contexts."""
    with ExitStack() as exit_stack:
        yield exit_stack
