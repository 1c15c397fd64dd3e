"""End or stop a server's engine under load, and check what clients see.

Run it with `make long SUITE=kills`.

Half of the streams hold pages, the others wait. Each fault is a kill, a stop or a crash in native
code. All streams must have the tokens that they always have, after a pause for the restart, and
nothing may be left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from processes import exists

from benchmarks.common.quiet import descendants
from benchmarks.common.servers import Server, our_command

_FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}
_SEEN_S = {"kill": 1.0, "crash": 1.0, "stop": 7.0}  # a stop counts only after 5 s of silence
_BACK_S = 5.0  # of computing tokens again, beside what loading takes
_RUNNING, _STREAMS = 8, 20
_PROMPTS = [f"Write a few words about the number {n}." for n in range(12)]
_LONG, _SHORT = 400, 24  # tokens


@dataclass
class Fault:
    """What one fault did: the longest pause of a stream that ran, and the answers."""

    kind: str
    load_s: float
    pause_s: float = 0.0
    num_continued: int = 0
    num_answered: int = 0
    wrong: list[str] = field(default_factory=list)


class Campaign:
    """A server with its clients."""

    def __init__(self, http: httpx.AsyncClient, server: Server, load_s: float, seed: int) -> None:
        """Take a server that has loaded its model in `load_s`."""
        self.http, self.server, self.load_s = http, server, load_s
        self.rng = random.Random(seed)
        self.expected: dict[str, str] = {}
        self.expected_long: list[str] = []

    @property
    def engine(self) -> int:
        """The engine's process."""
        for pid in descendants(self.server.pid):
            with contextlib.suppress(OSError):
                if b"twostroke.engine.process.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    async def stream_answer(
        self, prompt: str, tokens: int, has_begun: asyncio.Event | None = None
    ) -> Any:
        """Stream an answer; return its text, the error's code, and the longest pause in it."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        body["ignore_eos"] = tokens == _LONG
        text, last_s, pause_s = "", 0.0, 0.0
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return "", json.loads(await answer.aread())["error"]["code"], 0.0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                payload = json.loads(line[6:])
                if "error" in payload:
                    return text, payload["error"]["code"], pause_s
                now_s = time.monotonic()
                pause_s, last_s = max(pause_s, now_s - (last_s or now_s)), now_s
                text += payload["choices"][0]["text"]
                if has_begun is not None:
                    has_begun.set()
        return text, "", pause_s

    async def learn(self) -> None:
        """Note what each prompt's answers are without faults."""
        for number, prompt in enumerate(_PROMPTS):
            self.expected[prompt], error, _ = await self.stream_answer(prompt, _SHORT)
            assert not error, error
            if number < _RUNNING:
                text, error, _ = await self.stream_answer(prompt, _LONG)
                assert not error, error
                self.expected_long.append(text)

    async def fault(self, kind: str) -> Fault:
        """Do one fault under load, and compare all answers."""
        result = Fault(kind, self.load_s)
        begins = [asyncio.Event() for _ in range(_RUNNING)]
        running = [
            asyncio.create_task(self.stream_answer(prompt, _LONG, begin))
            for prompt, begin in zip(_PROMPTS, begins, strict=False)
        ]
        await asyncio.gather(*(begin.wait() for begin in begins))
        prompts = [self.rng.choice(_PROMPTS) for _ in range(_STREAMS - _RUNNING)]
        waiting = [asyncio.create_task(self.stream_answer(prompt, _SHORT)) for prompt in prompts]
        await asyncio.sleep(0.2 + 0.2 * self.rng.random())
        pid = self.engine
        os.kill(pid, _FAULTS[kind])
        streams = await asyncio.gather(*running)
        for (text, error, pause_s), expected in zip(streams, self.expected_long, strict=True):
            result.pause_s = max(result.pause_s, pause_s)
            if error or text != expected:
                result.wrong.append(error or f"another answer: {text!r}")
            else:
                result.num_continued += 1
        answers = await asyncio.gather(*waiting)
        for prompt, (text, error, _) in zip(prompts, answers, strict=True):
            if error or text != self.expected[prompt]:
                result.wrong.append(error or f"another answer: {text!r}")
            else:
                result.num_answered += 1
        if result.pause_s > _SEEN_S[kind] + _BACK_S + self.load_s:
            result.wrong.append(f"a pause of {result.pause_s:.2f} s")
        if exists(pid):
            result.wrong.append("the old process is left")
        return result

    async def left(self, before: int) -> list[str]:
        """Return what is left of the load: pages, descriptors, processes."""
        results = []
        state = (await self.http.get("/api/state")).json()
        await asyncio.sleep(1)  # connections end
        if state["pages"]["held"]:
            results.append(f"{state['pages']['held']} pages are held")
        if (now := self.num_files()) > before:
            results.append(f"{now - before} descriptors more than before")
        if (count := len(descendants(self.server.pid))) != 1:
            results.append(f"{count} processes instead of one")
        return results

    def num_files(self) -> int:
        """The server's open files."""
        return len(list(Path(f"/proc/{self.server.pid}/fd").iterdir()))


async def campaign(args: argparse.Namespace, server: Server, load_s: float) -> int:
    """Do all faults; return how many went wrong."""
    limits = httpx.Limits(max_connections=_STREAMS + 4, max_keepalive_connections=0)
    url = f"http://127.0.0.1:{server.port}"
    failed, all_ = 0, list[Fault]()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as http:
        fault_campaign = Campaign(http, server, load_s, args.seed)
        await fault_campaign.learn()
        before = fault_campaign.num_files()
        for number in range(args.kills):
            kind = ("kill", "crash", "stop")[number % 3]
            fault = await fault_campaign.fault(kind)
            all_.append(fault)
            failed += bool(fault.wrong)
            if fault.wrong or number % 20 == 0:
                print(number, kind, f"{fault.pause_s:.2f} s", fault.wrong or "", flush=True)
        left = await fault_campaign.left(before)
    for kind in _FAULTS:
        mine = [stream for stream in all_ if stream.kind == kind]
        if mine:
            pause_s = max(stream.pause_s for stream in mine)
            print(
                f"{kind}: {len(mine)} times; the longest pause of a stream was {pause_s:.2f} s "
                f"(loading takes {load_s:.2f} s)"
            )
    num_continued = sum(stream.num_continued for stream in all_)
    num_answered = sum(stream.num_answered for stream in all_)
    print(f"{num_continued} streams continued, {num_answered} that waited were answered;")
    print(f"{failed} faults went wrong; left: {', '.join(left) or 'nothing'}")
    return failed + len(left)


def main() -> int:
    """Start a server, and do the faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    command = (*our_command(args.model, 2), "--max-running", str(_RUNNING), "--dashboard")
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        began_s = time.monotonic()
        server = Server("Twostroke", (*command, "--no-access-log"), Path(folder_name), stack)
        return min(1, asyncio.run(campaign(args, server, time.monotonic() - began_s)))


if __name__ == "__main__":
    sys.exit(main())
