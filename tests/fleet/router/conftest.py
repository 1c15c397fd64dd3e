"""Fake replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.replicas import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fakes() -> Iterator[Loop]:
    """Yield a loop in which fake replicas listen."""
    loop = Loop()
    yield loop
    loop.close()
