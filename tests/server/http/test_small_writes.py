"""The kernel sends the small writes of streams at once."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import TYPE_CHECKING

from support.replicas import FakeReplica, Loop, live_router
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_small_write_does_not_wait_for_an_acknowledgement() -> None:
    def accepted() -> Iterator[socket.socket]:
        state = router._thread._server.server_state
        yield from (
            connection.transport._transport.get_extra_info("socket")
            for connection in state.connections
        )

    with closing(Loop()) as loop, live_router(loop.start(FakeReplica()).url) as router:
        port = int(router.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):
            wait_for(lambda: list(accepted()) != [])
            for connection in accepted():
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
