"""`make long SUITE=fleet`: requests that end the engines that compute them, behind a router.

Six servers of a tiny model stand behind a router. Their engines die of two characters: of one in
their first step, of the other while they write. A text with such a character is sent on every path
that an engine computes, whole and as a stream, then again on the other paths, beside requests that
are harmless. It may end three engines, and then must be refused in the form of its protocol. The
harmless ones must get the answers that they always get.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.common.servers import Server, our_command
from support.tiny import infill_metadata, vocabulary, write_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

_TESTS = Path(__file__).resolve().parent.parent
_NUM_SERVERS, _MOST_DEATHS = 6, 3
_KILLER, _LATE_KILLER = "~", "^"
_DEATHS = re.compile(r"^twostroke_engine_deaths_total (\S+)$", re.MULTILINE)
_TOKENS = 12


def _user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# By path: a body with a text. Those of embeddings are not streamed, and write nothing.
ANSWERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": _user_message(text), "max_tokens": _TOKENS},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": _TOKENS},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": _TOKENS},
    "/v1/messages": lambda text: {"messages": _user_message(text), "max_tokens": _TOKENS},
    "/completion": lambda text: {"prompt": text, "n_predict": _TOKENS},
    "/infill": lambda text: {"input_prefix": text, "input_suffix": "", "n_predict": _TOKENS},
    "/api/chat": lambda text: {
        "messages": _user_message(text),
        "options": {"num_predict": _TOKENS},
    },
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": _TOKENS}},
}
EMBEDDINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/embeddings": lambda text: {"content": text},
    "/api/embed": lambda text: {"input": text},
    "/api/embeddings": lambda text: {"prompt": text},
}


class Fleet:
    """A router, its servers, and clients that ask harmless things."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """Start all processes; the stack ends them."""
        model = write_tiny_gguf(folder / "tiny.gguf", metadata=infill_metadata())
        tokens, _ = vocabulary()
        os.environ["KILLER_TOKEN"] = str(tokens.index(_KILLER))
        os.environ["LATE_KILLER_TOKEN"] = str(tokens.index(_LATE_KILLER))
        paths = [str(_TESTS / "support" / "killer_hook"), str(_TESTS.parent / "src")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        command = (*our_command(str(model), 1), "--accept-quality", "--kv-memory", "4MB")
        names = [f"server-{number}" for number in range(_NUM_SERVERS)]
        self.servers = [Server(name, command, folder, stack) for name in names]
        named = [("--replica", f"http://127.0.0.1:{server.port}") for server in self.servers]
        route = (
            sys.executable,
            "-m",
            "twostroke",
            "route",
            *(word for two in named for word in two),
        )
        self.router = Server("router", (*route, "--wait", "30"), folder, stack)
        url = f"http://127.0.0.1:{self.router.port}"
        self.http = stack.enter_context(httpx.Client(base_url=url, timeout=120, trust_env=False))
        self.wrong: list[str] = []
        self.statuses = Counter[int]()
        self._is_over = threading.Event()

    @property
    def num_deaths(self) -> int:
        """How many engines have died."""
        return sum(self._deaths_of(server) for server in self.servers)

    def _deaths_of(self, server: Server) -> int:
        url = f"http://127.0.0.1:{server.port}/metrics"
        match = _DEATHS.search(httpx.get(url, timeout=20, trust_env=False).text)
        return int(float(match[1])) if match else 0

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a request that takes the likeliest tokens."""
        greedy: dict[str, Any] = {"model": "bench", "temperature": 0, "stream": False}
        if path.startswith("/api/"):
            body = {**body, "options": {"temperature": 0, **body.get("options", {})}}
        return self.http.post(path, json=greedy | body)

    def try_killer(self, path: str, text: str, *, is_stream: bool) -> None:
        """Send a killer until it is refused, and then again on all paths."""
        body = {**(ANSWERS | EMBEDDINGS)[path](text), "stream": is_stream}
        before, case_name = (
            self.num_deaths,
            f"{path} {'as a stream' if is_stream else 'whole'} {text}",
        )
        for _ in range(_MOST_DEATHS + 1):  # a stream that has begun is not sent again by the router
            answer = self.post(path, body)
            self.statuses[answer.status_code] += 1
            if answer.status_code == 400:
                break
        if answer.status_code != 400 or "died while they computed this request" not in answer.text:
            self.wrong.append(f"{case_name}: {answer.status_code} {answer.text[:200]}")
        for other, make in {**ANSWERS, **(EMBEDDINGS if _KILLER in text else {})}.items():
            second_answer = self.post(other, make(text))
            if second_answer.status_code != 400:
                self.wrong.append(f"{case_name}, again at {other}: {second_answer.status_code}")
        if (count := self.num_deaths - before) > _MOST_DEATHS:
            self.wrong.append(f"{case_name}: {count} engines died")
        print(f"{case_name}: {count} deaths", flush=True)

    def ask_harmless(self, number: int) -> None:
        """Ask the same things again and again, and compare their answers."""
        expected: dict[str, str] = {}
        with httpx.Client(base_url=self.http.base_url, timeout=120, trust_env=False) as http:
            while not self._is_over.is_set():
                text = f"hello {number} {len(expected) % 4}"
                body = {"model": "bench", "prompt": text, "temperature": 0, "max_tokens": 24}
                answer = http.post("/v1/completions", json=body)
                result = answer.text
                if answer.status_code == 200:
                    result = answer.json()["choices"][0]["text"]
                if expected.setdefault(text, result) != result or answer.status_code != 200:
                    self.wrong.append(f"{text!r}: {answer.status_code} {result[:200]!r}")

    def run(self) -> None:
        """Try all killers beside two clients."""
        clients = [threading.Thread(target=self.ask_harmless, args=(n,)) for n in range(2)]
        for client in clients:
            client.start()
        try:
            for path in ANSWERS:
                for is_stream in (False, True):
                    for char in (_KILLER, _LATE_KILLER):
                        text = f"{path} {is_stream} {char}"
                        self.try_killer(path, text, is_stream=is_stream)
            for path in EMBEDDINGS:
                self.try_killer(path, f"{path} {_KILLER}", is_stream=False)
        finally:
            self._is_over.set()
            for client in clients:
                client.join()


def campaign() -> list[str]:
    """Return what went wrong."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fleet = Fleet(Path(folder), stack)
        fleet.run()
        print(f"{fleet.num_deaths} deaths; answers by status: {dict(fleet.statuses)}")
        return fleet.wrong


def main() -> int:
    """Print what went wrong; return 1 if something did."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    wrong = campaign()
    for fault_text, count in Counter(wrong).most_common(20):
        print(f"  WRONG, {count} times: {fault_text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
