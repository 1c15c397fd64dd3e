"""`twostroke route --records` as a process before two servers, which are processes, too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.keys import add
from support.waiting import wait_for
from twostroke.server.auth.usage import amounts
from twostroke.server.http.api_key import KeyLimits
from twostroke.server.storage import open_database

if TYPE_CHECKING:
    from collections.abc import Iterator

_TESTS = Path(__file__).parents[2]
_ROUTE = (sys.executable, "-c", "from twostroke.cli import main; main()", "route")
_ENV = {"PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent / "src")])}
_SECRET = {"TWOSTROKE_REPLICA_KEY": "router-secret"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port: int = free_socket.getsockname()[1]
    return port


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=os.environ | _ENV | _SECRET)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def refusal(*arguments: str, **variables: str) -> tuple[int, str]:
    """Return the exit code and what a router says that does not start."""
    environment = {name: value for name, value in os.environ.items() if name not in _SECRET}
    completed = subprocess.run(
        [*_ROUTE, "--port", "0", "--replica", "http://127.0.0.1:1", *arguments],
        env=environment | _ENV | variables, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return completed.returncode, completed.stderr.decode()


@pytest.mark.slow
def test_a_limit_holds_for_two_servers_together(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    key, text = add(folder, limits=KeyLimits(requests_per_minute=5))
    ports, port = [free_port(), free_port()], free_port()
    url, headers = f"http://127.0.0.1:{port}", {"x-api-key": text}
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}

    def is_up() -> bool:
        try:
            return bool(httpx.get(f"{url}/health", trust_env=False).json()["ready"] == 2)
        except httpx.TransportError:
            return False

    with ExitStack() as stack:
        for number, server_port in enumerate(ports):
            (server_folder := tmp_path / str(number)).mkdir()
            serve = str(_TESTS / "support" / "serve_tiny.py")
            stack.enter_context(
                running(sys.executable, serve, str(server_folder), str(server_port), "5")
            )
        named = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        options = ("--records", str(folder), "--policy", "round-robin", *named)
        stack.enter_context(running(*_ROUTE, "--port", str(port), *options))
        wait_for(is_up, 60)
        results = [
            httpx.post(
                f"{url}/v1/completions", json={**body, "stream": bool(number % 2)},
                headers=headers, timeout=30, trust_env=False,
            )
            for number in range(8)
        ]  # fmt: skip
        assert [result.status_code for result in results][:5] == [200] * 5
        assert results[-1].status_code == 429
        assert results[1].text.endswith("data: [DONE]\n\n")
        num_answered = sum(result.status_code == 200 for result in results)
        state = httpx.get(f"{url}/api/state", headers=headers, trust_env=False).json()
        assert all(replica["requests"] >= 2 for replica in state["replicas"])
        direct = httpx.get(f"http://127.0.0.1:{ports[0]}/v1/models", headers=headers)
        assert direct.status_code == 401  # replicas answer their router alone
        code, message = refusal("--records", str(folder), **_SECRET)
        assert (code, message.count("\n")) == (1, 1)
        assert f"Another server or router uses {folder}" in message
    with open_database(folder) as db:
        [amount] = amounts(db, "0000", "9999")
    assert (amount.owner.key, amount.owner.tenant) == (key.id, "anna")
    num_prompt = results[0].json()["usage"]["prompt_tokens"]
    assert amount[1:] == (num_answered, num_answered * num_prompt, 0, 4 * num_answered)


def test_the_secret_of_the_replicas_is_checked_at_the_start() -> None:
    reasons = {
        "": "TWOSTROKE_REPLICA_KEY is empty",
        "two words": "The key in TWOSTROKE_REPLICA_KEY must be 1 to",
    }
    for secret, reason in reasons.items():
        code, message = refusal(TWOSTROKE_REPLICA_KEY=secret)
        assert (code, message.count("\n")) == (2, 1)
        assert reason in message


def test_records_need_the_secret_of_the_replicas(tmp_path: Path) -> None:
    code, message = refusal("--records", str(tmp_path / "records"))
    assert (code, message.count("\n")) == (2, 1)
    assert "TWOSTROKE_REPLICA_KEY" in message
    assert not (tmp_path / "records").exists()
