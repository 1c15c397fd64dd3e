"""Kills and stops the processes of a prefill and a decode engine during KV transfers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.common.quiet import descendants
from benchmarks.common.servers import MODEL_NAME, Server, free_port, our_command
from support.tiny import Tiny, write_tiny_gguf
from twostroke import LLM, SamplingParams
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDES = ("prefill", "decode")
KINDS = ("kill engine", "stop engine", "kill server")
CARRIER_KINDS = ("kill carrier", "stop carrier")  # of processes in which NIXL runs
_TOKENS, _CONTEXT = 8, 4096
_MOMENT_S = 1.0  # in which a fault happens, after prompts were sent; reading them takes longer
_ANSWERED_S, _BACK_S = 30.0, 30.0
# Large enough for prompts to be read in several steps that take some time.
_MODEL = Tiny(num_layers=6, hidden_size=256, ffn_size=1024, context_length=_CONTEXT)


class Pair:
    """A prefill server and a decode server, with their clients."""

    def __init__(self, path: Path, stack: ExitStack, http: httpx.AsyncClient, link: str) -> None:
        """Start both servers; `link` is their --peer-link, "" for shared memory."""
        self._path, self._stack, self._http = path, stack, http
        host = "127.0.0.2" if link else "127.0.0.1"  # the former is not known as this machine
        self._peer, self._link = f"{host}:{free_port()}", link
        self.servers: dict[str, Server] = {}
        for side in SIDES:
            self.start(side)

    def start(self, side: str) -> None:
        """Start one of the servers, also after it was killed."""
        roles = {
            "prefill": ("--role", "prefill", "--peer-address", self._peer),
            "decode": ("--role", "decode", "--prefill-peer", self._peer, "--disaggregate"),
        }
        always = ("always",) if side == "decode" else ()
        command = (*our_command(str(self._path), 1), "--accept-quality", "--no-access-log")
        size = ("--context-length", str(_CONTEXT), "--token-budget", "64", "--dashboard")
        link = ("--peer-link", self._link) if self._link else ()
        server_command = (*command, *size, *roles[side], *always, *link)
        self.servers[side] = Server(side, server_command, self._path.parent, self._stack)

    async def harm(self, side: str, kind: str) -> None:
        """Send a signal to a server or to its engine process, which may be stopped already."""
        server = self.servers[side].pid
        how, target = kind.split()
        signal_ = signal.SIGSTOP if how == "stop" else signal.SIGKILL
        if target == "server":
            os.kill(server, signal_)
            return
        name = b"twostroke.engine." + (
            b"process" if target == "engine" else b"disaggregation.nixl_process"
        )
        until_s = time.monotonic() + _BACK_S
        while not (
            results := [descendant for descendant in descendants(server) if _is(descendant, name)]
        ):
            assert time.monotonic() < until_s, f"The {side} server starts no {target}."
            await asyncio.sleep(0.05)
        os.kill(results[0], signal_)

    async def send_prompt(self, prompt: Sequence[int]) -> str:
        """Return an answer's text, or `error: ` and the message that the client got."""
        body = {"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": _TOKENS}
        body |= {"temperature": 0, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.servers['decode'].port}/v1/completions"
        try:
            payload = (await self._http.post(url, json=body)).json()
        except httpx.HTTPError as error:
            return f"error: {type(error).__name__}"
        if "error" in payload:
            return f"error: {payload['error']['code']}"
        text: str = payload["choices"][0]["text"]
        return text

    async def trouble(self) -> str:
        """Return a description of what is wrong on idle servers; "" if all is well."""
        result = ""
        for side, server in self.servers.items():
            try:
                url = f"http://127.0.0.1:{server.port}/api/state"
                state = (await self._http.get(url)).json()
            except (httpx.HTTPError, json.JSONDecodeError):
                return f"{side} does not answer"
            part = (state.get("handover") or {}).get("lender" if side == "prefill" else "borrower")
            if part is None or state["pages"]["held"]:
                result = f"{side} holds {state.get('pages', {}).get('held')} pages"
            elif side == "prefill" and part["num_reading"]:
                result = f"{part['num_reading']} prompts are being read"
            elif side == "decode" and (part["peers"][0]["state"], part["peers"][0]["num_open"]) != (
                "up",
                0,
            ):
                result = f"the peer is {part['peers'][0]}"
        return result

    async def transfers(self) -> dict[str, int]:
        """Return the decode engine's number of KV transfers since its start, by outcome."""
        url = f"http://127.0.0.1:{self.servers['decode'].port}/api/state"
        body: dict[str, int] = (await self._http.get(url)).json()["handover"]["borrower"][
            "transfers"
        ]
        return body


async def _fault(
    pair: Pair, side: str, kind: str, prompts: list[list[int]], texts: list[str], rng: random.Random
) -> tuple[Counter[str], list[str]]:
    """Cause one fault; return the outcomes of the requests, and a list of what was wrong."""
    counts, wrong = Counter[str](), list[str]()
    began_s = time.monotonic()
    requests = [asyncio.create_task(pair.send_prompt(prompt)) for prompt in prompts]
    await asyncio.sleep(rng.uniform(0.0, _MOMENT_S))
    await pair.harm(side, kind)
    done, unanswered = await asyncio.wait(requests, timeout=_ANSWERED_S)
    for task in unanswered:
        task.cancel()
        wrong.append("a request hangs")
    for task, text in zip(requests, texts, strict=True):
        if task not in done:
            continue
        answer = task.result()
        if answer == text:
            counts["answered"] += 1
        elif answer.startswith("error: ") and side == "decode" and "carrier" not in kind:
            counts[answer] += 1
        else:
            wrong.append(f"{answer!r} in place of {text!r}")
    counts[f"{side} {kind}, seconds"] += round(time.monotonic() - began_s)
    if kind == "kill server":
        await asyncio.to_thread(pair.start, side)
    wrong += await _at_rest(pair)
    if (later_text := await pair.send_prompt(prompts[0])) != texts[0]:
        wrong.append(f"{later_text!r} afterwards")
    return counts, [f"{side}, {kind}: {fault}" for fault in wrong]


async def _at_rest(pair: Pair) -> list[str]:
    """Wait until the engines are connected and hold nothing; return what is wrong otherwise."""
    deadline = time.monotonic() + _BACK_S
    while trouble := await pair.trouble():
        if time.monotonic() > deadline:
            return [trouble]
        await asyncio.sleep(0.05)
    return []


async def campaign(
    folder: Path,
    faults: Sequence[tuple[str, str]],
    seed: int,
    together: int = 4,
    most_tokens: int = 3000,
    first: int = 0,
    link: str = "",
) -> tuple[Counter[str], list[str]]:
    """Cause faults, each a side and a kind, while `together` prompts are running.

    `first` is the index of the first fault. `link` is the engines' --peer-link, "" for shared
    memory. Returns the outcomes of the requests, and a list of what was wrong.
    """
    rng = random.Random(f"{seed} {first}")
    path = write_tiny_gguf(folder / "m.gguf", _MODEL)
    prompts = [
        [rng.randrange(3, 250) for _ in range(rng.randint(most_tokens // 2, most_tokens))]
        for _ in range(together * len(faults[first:]))
    ]
    options = EngineOptions(
        ComputeOptions(num_threads=1),
        CacheOptions(context_length=_CONTEXT),
        speculation=SpeculationOptions("off"),
        accept_quality=True,
    )
    with LLM(path, options) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
        texts = [choices[0].text for choices in llm.generate(prompts, greedy)]
    counts, wrong = Counter[str](), list[str]()
    async with httpx.AsyncClient(timeout=_ANSWERED_S, trust_env=False) as http:
        with ExitStack() as stack:
            pair = Pair(path, stack, http, link)
            wrong += await _at_rest(pair)
            for number, (side, kind) in enumerate(faults[first:]):
                print(f"\rfault {first + number}", end="", file=sys.stderr, flush=True)
                part = slice(number * together, (number + 1) * together)
                seen = await _fault(pair, side, kind, prompts[part], texts[part], rng)
                counts += seen[0]
                wrong += seen[1]
            counts.update({f"transfers {k}": n for k, n in (await pair.transfers()).items()})
    return counts, wrong


def _is(pid: int, name: bytes) -> bool:
    with contextlib.suppress(OSError):
        return name in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
