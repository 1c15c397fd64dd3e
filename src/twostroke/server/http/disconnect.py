"""Clients that leave: work for them ends, and a connection can be closed at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from twostroke.server.http.errors import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import Receive, Scope

T = TypeVar("T")

ABORT: Final = "twostroke.abort"  # the ASGI extension that closes a connection at once


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return what `work` returns, unless the client leaves first.

    Raises:
        ClientGoneError: it left; `work` was cancelled.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise ClientGoneError("The client left before its answer was ready.")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Return once the client has left; a body that still comes is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def drop(scope: Scope) -> None:
    """Close the connection at once, without the data that the client has not read."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server notices in the loop's next round
