"""Send the costliest bodies of every path that computes in the server or the router.

Run it with `make long SUITE=floods`.

The paths come from the server's own routes, the bodies from its OpenAPI document: for each field a
long word, digits, many items, many keys, deep nesting, repeated and unknown names. They are sent
one by one, as the largest bodies that the server reads. Then the costliest of each path is sent
several times and abandoned, beside a stream and small requests of another tenant. Nobody may be
kept from the event loop for longer than one decoding takes, small requests may wait for a bounded
amount of work, work must end with its client, memory must stay within a bound, and tenants must
take turns. At last all bodies go through a router.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from support.floods import FORMS, KEYS, NEEDED, Flood
from support.replicas import FakeReplica, Loop, live_router
from support.servers import live_server
from support.waiting import wait_for
from twostroke.fleet.router.paths import COMPUTED_PATHS
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from support.replicas import Exchange
    from support.servers import LiveServer

_MOST_SHOWN = 10


def main() -> int:
    """Flood a server and a router, and return 0 if nobody else noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=16, help="of each path")
    parser.add_argument("--megabytes", type=float, default=7.5, help="of each body")
    parser.add_argument("--seed", type=int, default=0, help="which bodies, where there are more")
    args = parser.parse_args()
    logging.getLogger("twostroke.serve").setLevel(logging.ERROR)  # not each unknown field
    num_bytes, wrong = int(args.megabytes * 1e6), []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        options = ServeOptions(drain_s=1, api_keys=ApiKeys(dict(KEYS)))
        records = stack.enter_context(closing(Records(folder / "records")))
        server = stack.enter_context(live_server(folder, options, records=records))
        wrong += _flood_server(server, args.bodies, num_bytes, args.seed)
        wrong += _flood_router(server, args.bodies, num_bytes, args.seed)
    for line in wrong:
        print(line)
    print(f"{len(wrong)} faults")
    return int(bool(wrong))


def _flood_server(server: LiveServer, max_requests: int, num_bytes: int, seed: int) -> list[str]:
    assert server.thread.loop is not None
    document = server.api.description()
    with closing(Flood(server.url, server.thread.loop, document)) as flood:
        for path in (*NEEDED, *FORMS):
            flood.send(path, num_bytes=num_bytes, max_bodies=max_requests, seed=seed)
            body = flood.costliest(path)
            flood.abandon(server, path, body)
            flood.take_turns(server, path, body)
            print(f"{path}: {body.label}", flush=True)
        for route in server.api.routes():
            for method in sorted(set(route.methods or ()) - {"HEAD"}):
                flood.send_request(method, route.path)
        _show("server", flood)
        print(f"  tenants competed for turns on {flood.num_competed} paths")
        return flood.wrong


def _flood_router(server: LiveServer, max_requests: int, num_bytes: int, seed: int) -> list[str]:
    """Send all bodies to a router before a replica that answers at once."""

    async def answer(exchange: Exchange) -> None:
        replica.seen.clear()  # the bodies are large
        await exchange.answer({"ok": True})

    replica = FakeReplica()
    replica.load, replica.behaviour = {}, answer
    with closing(Loop()) as loop, live_router(loop.start(replica).url) as router:
        wait_for(lambda: bool(router.router.fleet.ready))
        described = server.api.description()
        assert router.loop is not None
        with closing(Flood(router.url, router.loop, described)) as flood:
            for path in COMPUTED_PATHS:
                if path in NEEDED:
                    flood.send(path, num_bytes=num_bytes, max_bodies=max_requests, seed=seed)
            _show("router", flood)
            return flood.wrong


def _show(name: str, flood: Flood) -> None:
    """Print the costliest requests."""
    print(f"{name}: {len(flood.costs)} bodies; processor seconds, and without others:")
    for cost in sorted(flood.costs, key=lambda cost: -cost[0])[:_MOST_SHOWN]:
        used_s, held_s, path, body = cost
        print(f"  {used_s:.2f} {held_s:.3f} {path}, {body.label}")
    print(f"  at most {max(cost[1] for cost in flood.costs):.3f} without others", flush=True)


if __name__ == "__main__":
    sys.exit(main())
