"""Measure the time that a router's Redis store adds to a request.

Run it with `make bench WHAT=router-store`. A server that costs almost nothing replaces the engine.
Routers with records in a folder (`--records`) and in Redis (`--store`, synced after each write)
take turns, for a key with limits: one client sends one request after another, then 16 clients do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.common.report import table
from benchmarks.common.servers import Server, free_port
from benchmarks.serving.router_cost import answer, processor_s
from twostroke.fleet.shared_records import stored
from twostroke.fleet.shared_records.store import open_store
from twostroke.server.auth import stored_keys
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.storage import open_database

Times = tuple[list[float], list[float]]  # of requests, and processor time

_CLIENTS = 16
_LIMITS = KeyLimits(requests_per_minute=10**9, tokens_per_minute=10**12, parallel=1000)
_BODY = {"prompt": "Why is the sky blue?", "max_tokens": 1, "model": "bench"}


def _redis(folder: Path, stack: contextlib.ExitStack) -> str:
    """Start a Redis server that syncs each write; return its URL."""
    port = free_port()
    options = ("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--bind")
    command = ("redis-server", "--port", str(port), "--dir", str(folder), *options, "127.0.0.1")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    url = f"redis://127.0.0.1:{port}"
    for _ in range(100):
        with contextlib.suppress(Exception), open_store(url):
            break
        time.sleep(0.05)
    return url


def _router(name: str, url: str, folder: Path, stack: contextlib.ExitStack) -> tuple[Server, str]:
    """Start a router before the server at `url`; return it with the text of a key."""
    if name == "records":
        with open_database(folder / "records", writes=True, creates=True) as database:
            _, key = stored_keys.add(database, "bench", "bench", limits=_LIMITS)
        options = ("--records", str(folder / "records"))
    else:
        store = _redis(folder, stack)
        with open_store(store) as client:
            _, key = stored.add(client, "bench", "bench", limits=_LIMITS)
        options = ("--store", store)
    code = "from twostroke.cli import main; main()"
    command = (sys.executable, "-c", code, "route", "--no-access-log", "--replica", url, *options)
    return Server(name, command, folder, stack), key


async def _times(router: Server, key: str, num_clients: int, num_requests: int) -> list[float]:
    """Return the seconds of each request."""
    times: list[float] = []
    address = f"http://127.0.0.1:{router.port}/v1/completions"
    async with httpx.AsyncClient(headers={"x-api-key": key}, trust_env=False) as http:

        async def send() -> None:
            for _ in range(num_requests // num_clients):
                began_s = time.perf_counter()
                (await http.post(address, json=_BODY)).raise_for_status()
                times.append(time.perf_counter() - began_s)

        await asyncio.gather(*[send() for _ in range(num_clients)])
    return times


async def _measure(num_requests: int, num_rounds: int) -> dict[tuple[str, int], Times]:
    results: dict[tuple[str, int], Times] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        routers = {}
        for name in ("records", "store"):
            routers[name] = await asyncio.to_thread(_router, name, url, folder, stack)
            await _times(*routers[name], 1, 50)
        for _ in range(num_rounds):
            for name, router in routers.items():
                for count in (1, _CLIENTS):
                    before_s = processor_s(router[0].pid)
                    times = await _times(*router, count, num_requests)
                    processor = (processor_s(router[0].pid) - before_s) / num_requests
                    row = results.setdefault((name, count), ([], []))
                    row[0].extend(times)
                    row[1].append(processor)
        server.close()
    return results


def main() -> None:
    """Print the times of requests with both kinds of records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["TWOSTROKE_REPLICA_KEY"] = "bench"
    results = asyncio.run(_measure(args.requests, args.rounds))
    rows = [
        (
            f"--{name}",
            str(count),
            f"{1e3 * statistics.median(times):.2f} ms",
            f"{1e3 * statistics.quantiles(times, n=100)[-1]:.2f} ms",
            f"{1e6 * statistics.median(processor):.0f} us",
        )
        for (name, count), (times, processor) in results.items()
    ]
    print(table(("router", "clients", "p50", "p99", "processor time"), rows))


if __name__ == "__main__":
    main()
