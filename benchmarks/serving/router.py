"""Compare the router with clients that choose replicas themselves, and time its decisions.

Run it with `make bench WHAT=router`.

Two servers with one thread each answer 16 streams: in turn with the router before them, and with
clients that use the two servers themselves. All prompts differ. The server's own TTFT is
subtracted, because queues would hide a millisecond; tokens per second are compared turn by turn.
Then a dispatcher gets to know a million blocks of 1,000 replicas, and its decisions are timed.
Last, the router's own cost is measured before a server that costs almost nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from benchmarks.common.report import ROOT, caption, machine_facts, note, positive, save, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command
from benchmarks.serving.router_cost import router_costs
from twostroke.core.process_tuning import tune_garbage_collector
from twostroke.fleet.routing.dispatch import Dispatcher, RoutingKey
from twostroke.fleet.routing.prompt import bytes_of_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TTFT_S = {"p50": 0.001, "p99": 0.005}
_TOKENS = 0.97
_DECISION_S = {"p50": 50e-6, "p99": 200e-6}
_RAMP_S = 1.5  # from the beginning of a turn, until all streams write
_KEYS, _NUM_MORE_KEYS = 25, 2  # of a prompt of some 50 KB, and of a turn more


class Stream:
    """One answer: seconds to its first token, and when its tokens came.

    `own_s` is what its server says of the time to the first token.
    """

    def __init__(self) -> None:
        self.id, self.ttft_s, self.own_s = uuid4().hex, 0.0, 0.0
        self.at_s: list[float] = []


async def send_request(port: int, fields: dict[str, Any]) -> Stream:
    """Return what a client sees of one streamed completion."""
    body = json.dumps(
        {"model": MODEL_NAME, "stream": True, "temperature": 0, "ignore_eos": True} | fields
    )
    seen, sent_s = Stream(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head += f"X-Request-Id: {seen.id}\r\n\r\n"
    writer.write((head + body).encode())
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            now_s = time.perf_counter()
            seen.ttft_s = seen.ttft_s or now_s - sent_s
            seen.at_s.append(now_s)
        elif line.startswith((b"data: [DONE]", b"HTTP/1.1 5", b"HTTP/1.1 4")):
            break
    writer.close()
    if not seen.at_s:
        raise SystemExit(f"Port {port} gave no tokens: {line!r}")
    return seen


async def crowd(ports: Sequence[int], num_clients: int, seconds: float, args: Any) -> list[Stream]:
    """Return the answers of clients, each of which asks again and again, for some seconds."""
    until_s, seen, rng = time.monotonic() + seconds, list[Stream](), random.Random(args.seed)
    args.seed += 1
    words = args.words

    async def client(number: int) -> None:
        while time.monotonic() < until_s:
            at = rng.randrange(len(words) - args.prompt)
            prompt = f"{rng.random()} " + " ".join(words[at : at + args.prompt])
            # Answers of one length would end together, and then all prompts wait for each other.
            length = rng.randint(args.tokens // 2, 3 * args.tokens // 2)
            fields = {"prompt": prompt, "max_tokens": length}
            seen.append(await send_request(ports[number % len(ports)], fields))

    await asyncio.gather(*[client(number) for number in range(num_clients)])
    return seen


def rate(streams: Sequence[Stream], begin_s: float, end_s: float) -> float:
    """Return the tokens a second between two times."""
    return sum(begin_s <= at < end_s for stream in streams for at in stream.at_s) / (
        end_s - begin_s
    )


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Return the median, and what all but a hundredth are below."""
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))]}


def decisions(num_replicas: int, num_blocks: int, count: int) -> dict[str, float]:
    """Return percentiles of the time of decisions, in seconds."""
    rng, dispatcher = (
        random.Random(1),
        Dispatcher("prefix", time.monotonic, bytes_of_blocks, 2 * num_blocks),
    )
    tune_garbage_collector()  # as the router does, when it starts
    for number in range(num_replicas):
        dispatcher.set_open(dispatcher.add_replica(f"http://10.0.0.1:{number}"), is_open=True)
    texts: list[tuple[int, ...]] = []
    while len(dispatcher.prefix_tree) < num_blocks:
        keys = tuple([rng.getrandbits(64) for _ in range(_KEYS)])
        routed_request = dispatcher.decide(RoutingKey(keys, bytes_of_blocks(_KEYS) + 100, keys[0]))
        assert routed_request is not None
        dispatcher.end(routed_request)
        texts.append(keys)
    routing_keys, open_ = [], []
    for _ in range(count):
        more_keys = tuple([rng.getrandbits(64) for _ in range(_NUM_MORE_KEYS)])
        keys = rng.choice(texts) + more_keys
        routing_keys.append(RoutingKey(keys, bytes_of_blocks(len(keys)), keys[0]))
    wall_s, own_s = [], []
    for routing_key in routing_keys:
        began_s, start_s = time.perf_counter(), time.thread_time()
        routed_request = dispatcher.decide(routing_key)
        own_s.append(time.thread_time() - start_s)
        wall_s.append(time.perf_counter() - began_s)
        open_.append(routed_request)
        if len(open_) > 2 * num_replicas and (oldest := open_.pop(0)) is not None:
            dispatcher.record_first_token(oldest)
            dispatcher.end(oldest)
    result = dict[str, float]()
    for name, values in (("wall", sorted(wall_s)), ("processor", sorted(own_s))):
        result |= {f"{name} p50": values[count // 2], f"{name} p99": values[int(0.99 * count)]}
    return result


def streams(args: argparse.Namespace) -> dict[str, Any]:
    """Return the streams and the rates of both ways, which take turns."""
    seen: dict[str, list[Stream]] = {"own choice": [], "router": []}
    rates: dict[str, list[float]] = {name: [] for name in seen}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = (*our_command(args.model, 1), "--log-format", "json")
        ports = [Server(f"replica {n}", command, folder, stack).port for n in (1, 2)]
        code = "from twostroke.cli import main; main()"
        named = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        route = (sys.executable, "-c", code, "route", "--no-access-log", *named)
        ways = {"own choice": ports, "router": [Server("router", route, folder, stack).port]}
        for number in range(args.rounds + 1):
            note(f"Round {number} of {args.rounds}")
            for name in sorted(ways, reverse=bool(number % 2)):  # a machine's speed drifts
                began_s = time.perf_counter()
                result = asyncio.run(crowd(ways[name], args.clients, args.seconds, args))
                if number:  # the first round only warms up
                    seen[name] += result
                    rates[name].append(rate(result, began_s + _RAMP_S, began_s + args.seconds))
        logs = "".join([path.read_text() for path in folder.glob("replica*.log")])
    own_s = dict(re.findall(r'"request_id": "(\w+)".*?"ttft_s": ([0-9.e-]+)', logs))
    for stream in (*seen["own choice"], *seen["router"]):
        stream.own_s = float(own_s[stream.id])
    pairs = zip(rates["router"], rates["own choice"], strict=True)
    return {
        "gained": statistics.median(routed / direct_s for routed, direct_s in pairs),
        "requests": {name: len(all_) for name, all_ in seen.items()},
        "rates": rates,
        "ttft_s": {n: percentiles(answer.ttft_s for answer in all_) for n, all_ in seen.items()},
        "added_s": {
            n: percentiles(answer.ttft_s - answer.own_s for answer in all_)
            for n, all_ in seen.items()
        },
    }


def main() -> int:
    """Measure, print and keep the tables; return 1 if a limit is missed."""
    args = _arguments()
    args.words = _words()
    result = streams(args)
    added, gained = result["added_s"], result["gained"]
    rows = [
        (f"TTFT {name} beyond the server's own, against own choice", 1e3 * limit,
         1e3 * (added["router"][name] - added["own choice"][name]), "ms")
        for name, limit in _TTFT_S.items()
    ]  # fmt: skip
    timed = decisions(args.replicas, args.blocks, args.decisions)
    rows += [
        (f"a decision, {name}", 1e6 * limit, 1e6 * timed[f"wall {name}"], "us")
        for name, limit in _DECISION_S.items()
    ]
    is_met = gained >= _TOKENS and all(value <= limit for _, limit, value, _ in rows)
    lines = [(name, f"at most {limit:g} {unit}", f"{value:.2f} {unit}")
             for name, limit, value, unit in rows]  # fmt: skip
    lines.insert(2, ("tokens a second", f"at least {_TOKENS:.0%}", f"{gained:.1%}"))
    costs = router_costs(send_request)
    lines += [
        (f"the router's processor time for a {name}", "", f"{1e6 * seconds:.0f} us")
        for name, seconds in costs.items()
    ]
    took = " and ".join(f"{1e6 * timed[f'processor {name}']:.0f}" for name in _DECISION_S)
    notes = (
        f"TTFT p50 and p99, tokens a second: {_all(result, 'own choice')} with own choice, "
        f"{_all(result, 'router')} with the router. A decision takes {took} us of processor time."
    )
    facts = machine_facts()
    under = caption(
        facts,
        f"{args.clients} streams, {result['requests']['own choice']} and "
        f"{result['requests']['router']} requests",
        f"{args.replicas} replicas, {args.blocks:,} blocks",
    )
    text = "\n\n".join([table(("figure", "asked", "reached"), lines), notes, under])
    save("router", {"facts": facts, "streams": result, "decisions": timed, "costs_s": costs}, text)
    return 0 if is_met else 1


def _all(outcome: dict[str, Any], name: str) -> str:
    p50, p99 = [1e3 * outcome["ttft_s"][name][point] for point in ("p50", "p99")]
    return f"{p50:.0f} ms, {p99:.0f} ms, {statistics.median(outcome['rates'][name]):.0f}"


def _words() -> list[str]:
    text = (ROOT / "README.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    return text.split()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=positive, default=16)
    parser.add_argument("--prompt", type=positive, default=12, help="words of a prompt")
    parser.add_argument("--tokens", type=positive, default=40)
    parser.add_argument("--seconds", type=positive, default=6, help="of a turn")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--replicas", type=positive, default=1000)
    parser.add_argument("--blocks", type=positive, default=1_000_000)
    parser.add_argument("--decisions", type=positive, default=20_000)
    parser.set_defaults(seed=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
