"""A server of several tiny models, as a process, with an engine process for each loaded model."""

from __future__ import annotations

import re
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from support.commands import started
from support.tiny import Tiny, write_tiny_gguf

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

MEMORY_FOR_TWO = "410MB"  # has room for two tiny models, not for three
_LOADED = re.compile(r"Loaded (\S+) in ([\d.]+) s")


@dataclass(frozen=True)
class ModelServer:
    """A running server of several models; `log` is its standard error."""

    http: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path

    def complete(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json={"ignore_eos": True, **body})

    def states(self) -> dict[str, str]:
        models = self.http.get("/v1/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in models}

    @property
    def loaded(self) -> list[str]:
        return [name for name, state in self.states().items() if state == "loaded"]

    def wait_until(self, name: str, state: str) -> None:
        deadline_s = time.monotonic() + 30
        while self.states()[name] != state:
            assert time.monotonic() < deadline_s, f"{name} is never {state}"
            time.sleep(0.02)

    def count(self, metric: str) -> dict[str, float]:
        """Return a metric's value by model."""
        text = self.http.get("/metrics").text
        rows = re.findall(rf'^twostroke_{metric}{{model="([^"]+)"}} (\S+)$', text, re.MULTILINE)
        return {model: float(value) for model, value in rows}

    def load_times(self) -> list[tuple[str, float]]:
        """Return each load so far, with its seconds, from the log."""
        matches = _LOADED.findall(self.log.read_text())
        return [(name, float(seconds)) for name, seconds in matches]


def write_models(folder: Path, names: str = "abc") -> list[str]:
    """Write tiny models, whose answers differ, and return NAME=PATH for each."""
    tinies = {name: Tiny(seed=seed, context_length=2048) for seed, name in enumerate(names)}
    return [
        f"{name}={write_tiny_gguf(folder / f'{name}.gguf', tiny)}" for name, tiny in tinies.items()
    ]


@contextmanager
def serving(
    folder: Path, models: list[str], *options: str, memory: str = MEMORY_FOR_TWO
) -> Iterator[ModelServer]:
    """Yield a server of `models`; SIGTERM ends it afterwards."""
    log = folder / "log"
    fixed = ("--port", "0", "--threads", "1", "--kv-memory", "4MB", "--accept-quality")
    command = ("serve", "--models", ",".join(models), "--memory", memory, *fixed, *options)
    with log.open("wb") as out, started(*command, stderr=out) as process:
        deadline_s = time.monotonic() + 60
        while (match := re.search(r"at (http://\S+),", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        with httpx.Client(base_url=match[1], timeout=120, trust_env=False) as http:
            yield ModelServer(http, process, log)
        process.send_signal(signal.SIGTERM)
        process.wait(40)
