"""Send valid and invalid requests generated from the server's OpenAPI document.

Run it with `make long SUITE=api`.

Schemathesis makes them and checks the answers; it runs in an environment of its own. The server is
one of a tiny random model, or `--model NAME` for a real one. Afterwards it must be healthy, idle
and hardly larger than before, and give the answer that it gave at the beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
TINY = "tiny"
_START_S = 120
_IDLE_S = 60
_MOST_GROWTH_BYTES = 256 * 1024 * 1024
_PLAIN = {"prompt": "The sky is", "max_tokens": 16, "temperature": 0, "logprobs": 2}


def main() -> int:
    """Ask, and return 0 if all that was answered was as described."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--model", default=TINY, help="a model of the catalogue, or 'tiny'")
    parser.add_argument("--cases", type=int, default=300, help="most random requests an operation")
    parser.add_argument("--seed", type=int, help="the same requests again")
    parser.add_argument("--workers", type=int, default=1, help="requests at a time")
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    known_options, rest = parser.parse_known_args()
    program = shutil.which(known_options.schemathesis)
    if program is None:
        parser.error(f"there is no program {known_options.schemathesis}")
    command = [
        *(str(Path(program).absolute()), "--config-file", str(FOLDER / "schemathesis.toml")),
        *("run", "--phases", known_options.phases, "--max-examples", str(known_options.cases)),
        *("--workers", str(known_options.workers), "--continue-on-failure"),
        *(("--seed", str(known_options.seed)) if known_options.seed is not None else ()),
        *rest,
    ]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(FOLDER)}
    with tempfile.TemporaryDirectory() as folder, _server(known_options.model, folder) as url:
        before, size = _plain(url), _size(url)
        finished_run = subprocess.run(
            [*command, f"{url}/openapi.json"], env=environment, cwd=folder, check=False
        )
        faults = _faults(url, before, size)
    for fault in faults:
        print(f"afterwards: {fault}")
    return int(bool(finished_run.returncode or faults))


def _faults(url: str, before: Any, size: float) -> list[str]:
    """Return what is wrong with the server after all these requests."""
    faults = []
    health = _get(f"{url}/health")
    if health["status"] != "ok":
        faults.append(f"its health is {health}")
    deadline = time.monotonic() + _IDLE_S
    while any((held_resources := _held_resources(url)).values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if any(held_resources.values()):
        faults.append(f"it still holds {held_resources}")
    if (answer := _plain(url)) != before:
        faults.append(f"the plain answer was {before} and is {answer}")
    growth = _size(url) - size
    print(f"memory of the server: {size / 2**20:.0f} MiB, and {growth / 2**20:+.0f} MiB since")
    if growth > _MOST_GROWTH_BYTES:
        faults.append("it has grown by more than it may")
    return faults


def _plain(url: str) -> Any:
    """Return the answer to a plain request, but for what is new each time."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(_PLAIN).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"]


def _held_resources(url: str) -> dict[str, float]:
    names = ("requests_running", "requests_waiting", "referenced_pages")
    return {name: _metric(url, f"twostroke_{name}") for name in names}


def _size(url: str) -> float:
    return _metric(url, "process_resident_memory_bytes")


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        match = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert match is not None, name
    return float(match[1])


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def _server(model: str, folder: str) -> Iterator[str]:
    """Serve a model, and yield the address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    tiny = [str(ROOT / "tests" / "support" / "serve_tiny.py"), folder, str(port), "5", "roomy"]
    real = ["-m", "twostroke", "serve", model, "--port", str(port)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *(tiny if model == TINY else real)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            deadline = time.monotonic() + _START_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("The server does not start.")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
