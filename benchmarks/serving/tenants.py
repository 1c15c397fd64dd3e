"""Measure the cost of keys, limits and usage in the server's process, per request.

Run it with `make bench WHAT=overhead`.

An application that answers immediately is called directly, with and without these layers, in
turn; the difference is their cost. The key is one of a thousand in the records, has every limit,
and its usage is written, as on a server. The cost of checking for changed keys twice a second is
measured separately, and so is the router's work on each event of a stream to learn its usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from twostroke.engine.output import Usage
from twostroke.fleet.router.response import Head
from twostroke.fleet.router.usage_meter import TokenRate, UsageMeter
from twostroke.server.auth import stored_keys as kept
from twostroke.server.auth.key_refresher import KeyRefresher
from twostroke.server.auth.keys import ApiKeys, KeyCheck
from twostroke.server.auth.limits import LimitCheck
from twostroke.server.auth.usage import UsageBook
from twostroke.server.auth.usage_header import USAGE_HEADER
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.http.errors import OPENAI
from twostroke.server.http.request_context import STATE_KEY, ServedRequest, served_of
from twostroke.server.storage import Records, open_database

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PATH: Final = "/v1/chat/completions"
_NUM_KEYS: Final = 1000
_MANY: Final = 10**9  # a limit that is never reached
_LIMIT_S: Final = 0.2e-3  # a request


class _Work:
    """Work of an engine that is done."""

    used, num_open = Usage(100, 50, 100), 0


_DONE: Final[Any] = _Work()


async def _answer(scope: Scope, _receive: Receive, send: Send) -> None:
    served_request = served_of(scope)
    served_request.reserve(1000)
    served_request.running = _DONE
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def _unread() -> Message:
    raise AssertionError


async def _drop(_message: Message) -> None:
    pass


async def _run(app: ASGIApp, text: str, usage: UsageBook | None, count: int) -> float:
    """Return the seconds of processor time of a request."""
    began_s = time.process_time()
    for _ in range(count):
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + text.encode())]
        served_request = ServedRequest("req-1", OPENAI, "POST", _PATH)
        state = {STATE_KEY: served_request}
        scope = {"type": "http", "method": "POST", "path": _PATH, "headers": headers}
        await app({**scope, "state": state}, _unread, _drop)
        served_request.end()
        if usage is not None:
            usage.observe(served_request)
    return (time.process_time() - began_s) / count


async def _measure(args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    limits = KeyLimits(requests_per_minute=_MANY, tokens_per_minute=_MANY, parallel=_MANY)
    with open_database(folder, writes=True, creates=True) as db:
        texts = [kept.add(db, f"key{n}", "anna", limits=limits)[1] for n in range(_NUM_KEYS)]
    with closing(Records(folder)) as records:
        keys = ApiKeys.read(None, None, folder)
        assert keys is not None
        usage = UsageBook("model")
        refresher = KeyRefresher(records, keys, usage)
        layers = KeyCheck(LimitCheck(_answer, [_PATH].__contains__), keys)
        results: dict[str, list[float]] = {"without": [], "with": [], "upkeep": []}
        for number in range(args.rounds + 1):
            note(f"Round {number} of {args.rounds}" if number else "Warming up")
            without = await _run(_answer, texts[0], None, args.requests)
            with_ = await _run(layers, texts[number % _NUM_KEYS], usage, args.requests)
            before_s = time.process_time()
            await refresher.start()
            await asyncio.sleep(args.seconds)
            await refresher.stop()
            idle = (time.process_time() - before_s) / args.seconds
            if number:
                for name, value in (("without", without), ("with", with_), ("upkeep", idle)):
                    results[name].append(value)
    return results


def _events(count: int) -> dict[str, float]:
    """Return the seconds of processor time that a router's meter takes of an event, by server."""
    delta = {"index": 0, "delta": {"content": " and"}, "logprobs": None, "finish_reason": None}
    body = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "choices": [delta]}
    event = b"data: " + json.dumps({**body, "created": 1, "model": "model"}).encode() + b"\n\n"
    kind = (b"content-type", b"text/event-stream")
    heads = {"ours": [kind, (USAGE_HEADER, b"9 3 0")], "others": [kind]}
    results = {}
    for name, headers in heads.items():
        meter = UsageMeter(9, 0, TokenRate())
        meter.begin(Head(200, headers), strips_usage=True)
        began_s = time.process_time()
        for _ in range(count):
            meter.take(event)
        results[name] = (time.process_time() - began_s) / count
    return results


def main() -> None:
    """Measure, then print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=positive, default=20_000, help="of a round")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=positive, default=2, help="of upkeep, each round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder_name:
        outcome = asyncio.run(_measure(args, Path(folder_name)))
    cost = [with_ - out for with_, out in zip(outcome["with"], outcome["without"], strict=True)]
    rows = [
        ("a request, its key, limits and usage", spread((1e3 * s for s in cost), 4, " ms")),
        ("upkeep, a second", spread((1e3 * s for s in outcome["upkeep"]), 2, " ms")),
    ]
    events = [_events(10 * args.requests) for _ in range(args.rounds)]
    for name in events[0]:
        times = spread((1e6 * event[name] for event in events), 2, " us")
        rows.append((f"an event at a router, from a server of {name}", times))
    header = (f"processor time; asked at most {1e3 * _LIMIT_S:g} ms a request", "")
    result: dict[str, Any] = {
        **machine_facts(),
        "limit_s": _LIMIT_S,
        "seconds": outcome,
        "events_s": events,
    }
    text = ["## Keys, limits and usage", "", table(header, rows), ""]
    save("tenants", result, "\n".join([*text, caption(result)]))


if __name__ == "__main__":
    main()
