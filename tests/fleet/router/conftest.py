"""Fake replicas, and a stand-in for a vendor's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.replicas import Loop
from support.vendors import FakeVendor, start_vendor

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fakes() -> Iterator[Loop]:
    """Yield a loop in which fake replicas listen."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def vendor(fakes: Loop) -> FakeVendor:
    """Return a vendor that answers every request with its key."""
    return start_vendor(fakes)
