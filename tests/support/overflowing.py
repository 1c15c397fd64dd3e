"""A router with an overflow file, requests to it, and its state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from support.accounts import SECRET
from support.replicas import LiveRouter, live_router
from support.vendors import CHAT, HELLO, overflow_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.vendors import FakeVendor

NOBODY = "http://127.0.0.1:9"  # the address of a replica that is down
_CLIENT_TIMEOUT_S = 30.0


@contextmanager
def overflow_router(
    folder: Path,
    *vendors: FakeVendor,
    urls: tuple[str, ...] = (NOBODY,),
    wait_s: float = 0.05,
    **changes: Any,
) -> Iterator[LiveRouter]:
    """Yield a router before the replicas at `urls`, whose overflow file names the vendors.

    A request waits `wait_s` for a replica. `changes` are fields of the file.
    """
    path = overflow_file(folder, *vendors, **changes)
    with live_router(*urls, overflow=path, wait_s=wait_s) as router:
        yield router


def post(
    router: LiveRouter, path: str = CHAT, headers: Any = None, **fields: Any
) -> httpx.Response:
    """Send a short chat with these further fields."""
    url, body = router.url + path, {**HELLO, **fields}
    return httpx.post(url, json=body, headers=headers, timeout=_CLIENT_TIMEOUT_S, trust_env=False)


def begin(router: LiveRouter, **fields: Any) -> Callable[[], int]:
    """Send a chat in a thread; return a function that waits for the status."""
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(post, router, **fields)
    pool.shutdown(wait=False)
    return lambda: answer.result(_CLIENT_TIMEOUT_S).status_code


def overflow_state(router: LiveRouter) -> Any:
    """Return what the router says of both sides; it may have keys."""
    headers = {"authorization": f"Bearer {SECRET}"}
    url = f"{router.url}/api/state"
    return httpx.get(url, headers=headers, trust_env=False).json()["overflow"]


def side(router: LiveRouter, number: int = 0) -> Any:
    """Return what the router says of an upstream."""
    return overflow_state(router)["upstreams"][number]
