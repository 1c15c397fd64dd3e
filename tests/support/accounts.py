"""A router that records usage, and the usage that it has recorded."""

from __future__ import annotations

import asyncio
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from support.replicas import Exchange, LiveRouter, live_router
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.auth.usage import amounts
from twostroke.server.storage import Records, open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


SECRET = "router-secret"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}


@contextmanager
def accounting(folder: Path, *urls: str, **options: Any) -> Iterator[LiveRouter]:
    """Yield a router with records, as `route --records` starts it."""
    with closing(Records(folder)) as records:
        keys = ApiKeys.read(None, None, folder)
        assert keys is not None
        facts = {"records": records, "api_keys": keys, "replica_key": SECRET, **options}
        with live_router(*urls, **facts) as router:
            yield router


def post(router: LiveRouter, key: str, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {**BODY, **fields} if path == CHAT else fields
    headers = {"x-api-key": key}
    return httpx.post(router.url + path, json=body, headers=headers, timeout=30, trust_env=False)


def used(folder: Path) -> list[tuple[str, str, str, int, int, int, int]]:
    with open_database(folder) as db:
        result = amounts(db, "0000", "9999")
    return [
        (amount.owner.key, amount.owner.tenant, amount.owner.model, *amount[1:])
        for amount in result
    ]


def whole_response(body: object) -> Callable[[Exchange], Any]:
    """Return a fake server's handler that answers with `body` in one piece, not as a stream."""

    async def behave(exchange: Exchange) -> None:
        await exchange.answer(body)

    return behave


async def asleep(_exchange: Exchange) -> None:
    await asyncio.sleep(30)
