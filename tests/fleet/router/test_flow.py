"""A request flows one way through the router: few functions, few values that come back."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.replicas import Exchange, FakeReplica, Loop, live_router
from twostroke.fleet.router import app, forward
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from types import CodeType, FrameType

_BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
_FLOW = (app.__file__, forward.__file__)  # the files that one reads to follow a request
_PACKAGE = str(Path(app.__file__).parents[2])


class Flow:
    """The functions of `_FLOW`, and those that they call directly, which one request passes."""

    def __init__(self) -> None:
        """Start without a function."""
        self.functions: set[CodeType] = set()
        self.returns: set[CodeType] = set()

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        """Count a call or a return in the thread of the router, as `sys.setprofile` asks."""
        code, caller = frame.f_code, frame.f_back
        is_called_here = caller is not None and caller.f_code.co_filename in _FLOW
        if not code.co_filename.startswith(_PACKAGE) or code.co_name.startswith("<"):
            return
        if event == "call" and (is_called_here or code.co_filename in _FLOW):
            self.functions.add(code)
        # A coroutine that waits gives a future to the event loop, which is no return.
        has_value = value is not None and not asyncio.isfuture(value)
        if event == "return" and is_called_here and has_value:
            self.returns.add(code)


async def stream_slowly(exchange: Exchange) -> None:
    """Write events one by one, so that the router passes on each alone."""
    await exchange.begin_events()
    for _ in range(3):
        await asyncio.sleep(0.05)
        await exchange.chunk(b'data: {"id":"chatcmpl-1"}\n\n')
    await exchange.say(b"0\r\n\r\n")


@pytest.mark.parametrize("keeps_usage", [False, True])
def test_a_chat_request_passes_20_functions_and_6_returns(
    keeps_usage: bool, fakes: Loop, tmp_path: Path
) -> None:
    replica, flow = fakes.start(FakeReplica()), Flow()

    async def set_profile(profile: Any) -> None:
        sys.setprofile(profile)

    replica.behaviour = stream_slowly
    with ExitStack() as stack:
        records = stack.enter_context(closing(Records(tmp_path))) if keeps_usage else None
        router = stack.enter_context(live_router(replica.url, records=records))
        assert router.loop is not None
        for profile in (None, flow.profile):  # the first request opens a connection
            asyncio.run_coroutine_threadsafe(set_profile(profile), router.loop).result(10)
            httpx.post(f"{router.url}/v1/chat/completions", json=_BODY, trust_env=False)
        asyncio.run_coroutine_threadsafe(set_profile(None), router.loop).result(10)
    names = sorted(code.co_qualname for code in flow.functions)
    assert "ProxiedRequest.send_to" in names
    assert len(names) <= 20, names
    assert len(flow.returns) <= 6, sorted(code.co_qualname for code in flow.returns)
