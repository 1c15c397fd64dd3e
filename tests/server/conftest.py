"""One server that all tests share which leave it unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.servers import LiveServer, live_server
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start the server once for all tests."""
    with live_server(tmp_path_factory.mktemp("serve")) as server:
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """Yield the shared server, and wait after the test until it is idle again."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server that refuses fields without effect, and limits above the context."""
    options = ServeOptions(drain_s=1, is_strict=True, strict_limits=True)
    with live_server(tmp_path_factory.mktemp("strict"), options) as server:
        yield server


@pytest.fixture
def hello(shared_server: LiveServer) -> dict[str, object]:
    """Return request fields that make the random model answer "hello"."""
    token = shared_server.client.card.tokenizer.find("hello")
    return {"logit_bias": {str(token): 100}, "temperature": 0}
