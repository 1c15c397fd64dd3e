"""`make long SUITE=ray`: brings a fleet up on Ray, harms and changes it under load, and ends it.

Each step says how long it took and what the clients saw. Nothing may be left at the end: no
process, no port, no shared memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

_PORT = 8731
_FILE = """
name: check
router: {{port: {port}}}
models:
  - model: smollm2
    replicas: {replicas}
    cpus: 0.5
    options: {{threads: 1, kv-memory: 300MB, context-length: {context}}}
  - model: smollm2
    name: spare
    min_replicas: 0
    scale_down_after: 2
    cpus: 0.5
    options: {{threads: 1, kv-memory: 300MB, no-coalesce: true}}
"""
_UP_S = 20.0  # besides loading
_COLD_S = 10.0  # for a first replica, besides loading
_BACK_S = 30.0
_OURS = ("twostroke.fleet", "ray::_Server", "ray::_Manager", "gcs_server", "raylet")


def main() -> int:
    """Play the campaign; return 0 if every step went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=4, help="of actors and of servers, in turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # A cache of its own has the record of its own Ray; the model is that of the user.
        campaign = Campaign(Path(folder))
        try:
            campaign.play(args.kills)
        finally:
            campaign.twostroke("down", check=False)
        campaign.check_traces()
    print("Faults: " + (", ".join(campaign.faults) or "none"))
    return bool(campaign.faults)


class Campaign:
    """One fleet and its clients."""

    def __init__(self, folder: Path) -> None:
        """Keep the fleet's file in `folder`."""
        self._file = folder / "fleet.yaml"
        self.faults: list[str] = []
        self._before = _traces()

    def play(self, num_kills: int) -> None:
        """Up, kills under load, an update under load, a broken update, one replica less."""
        load_s = self._load_s()
        took_s = self.up(2)
        self._say(f"up, two replicas: {took_s:.1f} s, of which a model's load {load_s:.1f} s")
        self._check(took_s <= _UP_S + load_s, "up is late")
        for number in range(3):
            first_s = self._first_token_s()
            self._say(f"first token of a model without a replica, try {number}: {first_s:.1f} s")
            self._check(0 < first_s <= _COLD_S + load_s, "a start from zero is late")
            self._check(self._is_at_zero(), "a model does not scale to zero")
        with Clients(4) as clients:
            for number in range(num_kills):
                kind = "actor" if number % 2 == 0 else "server"
                server = self._server()
                pid = server if kind == "server" else _parent(server)
                began_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                while not self._is_replaced(server, pid) and time.monotonic() < began_s + _BACK_S:
                    time.sleep(0.2)
                took_s = time.monotonic() - began_s
                self._say(f"{kind} {pid} killed: replaced in {took_s:.1f} s; {clients.summary()}")
                self._check(took_s < _BACK_S, f"the {kind} was not replaced")
            clients.forget()
            took_s = self.up(2, context=4096)
            self._say(f"update: {took_s:.1f} s; {clients.summary()}")
            self._check(clients.num_failed == 0, "an update failed requests")
            failed = self.up(2, context=10**9)
            self._check(failed < 0, "a broken update was not refused")
            self.up(1, context=4096)
            time.sleep(3)
            self._say(f"a broken update, then one replica less: {clients.summary()}")
            self._check(clients.num_failed == 0, "a broken update failed requests")
        began_s = time.monotonic()
        self.twostroke("down")
        self._say(f"down: {time.monotonic() - began_s:.1f} s")

    def up(self, replicas: int, context: int = 2048) -> float:
        """Bring the fleet to what is given; return the seconds, negative if that was refused."""
        text = _FILE.format(port=_PORT, replicas=replicas, context=context)
        self._file.write_text(text)
        began_s = time.monotonic()
        done = self.twostroke("up", str(self._file), "--timeout", "120", check=context < 10**9)
        took_s = time.monotonic() - began_s
        if done.returncode:
            print(f"  {done.stderr.strip().splitlines()[-1]}")
        return -took_s if done.returncode else took_s

    def twostroke(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `twostroke fleet`."""
        command = [sys.executable, "-m", "twostroke", "fleet", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stderr}")
        return done

    def check_traces(self) -> None:
        """See that nothing is left."""
        until_s = time.monotonic() + 10
        while (left := _traces() - self._before) and time.monotonic() < until_s:
            time.sleep(0.2)
        self._check(not left, f"left behind: {sorted(left)}")

    def _load_s(self) -> float:
        """Return how long a server takes to load the model, alone."""
        from twostroke.fleet.cluster.process import ServerProcess

        began_s = time.monotonic()
        server = ServerProcess(("serve", "smollm2", "--threads", "1", "--no-coalesce"), "127.0.0.1")
        while not server.state.is_ready:
            time.sleep(0.05)
        took_s = time.monotonic() - began_s
        server.close(5)
        return took_s

    def _first_token_s(self) -> float:
        """Return the time to the first token of the model `spare`; 0.0 if it is refused."""
        connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=120)
        body = {"model": "spare", "prompt": "Count to ten.", "max_tokens": 8, "stream": True}
        began_s = time.monotonic()
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            is_ok = answer.status == http.client.OK and answer.read1()
            took_s = time.monotonic() - began_s
            answer.read()
            return took_s if is_ok else 0.0
        finally:
            connection.close()

    def _is_at_zero(self) -> bool:
        """Wait until the model `spare` has no replica; return whether it has none in time."""
        until_s = time.monotonic() + _BACK_S
        while time.monotonic() < until_s:
            if not self._status()["pools"][1]["replicas"]:
                return True
            time.sleep(0.5)
        return False

    def _status(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.twostroke("status", "--json").stdout)
        return body

    def _servers(self) -> list[int]:
        """Return the processes of the replicas that are ready."""
        replicas = self._status()["pools"][0]["replicas"]
        return [replica["state"]["pid"] for replica in replicas if replica["phase"] == "ready"]

    def _server(self) -> int:
        """Return the process of a replica; without one, 0 would mean this process and its kin."""
        pid = next((pid for pid in self._servers() if pid), 0)
        if pid <= 0:
            raise SystemExit("no replica is ready")
        return pid

    def _is_replaced(self, server: int, pid: int) -> bool:
        servers = self._servers()
        return len(servers) == 2 and server not in servers and not _lives(pid)

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def _check(self, holds: object, fault: str) -> None:
        if not holds:
            self.faults.append(fault)


class Clients:
    """Threads that stream short answers from the router all the time."""

    def __init__(self, count: int) -> None:
        """Make them."""
        self._counts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def __enter__(self) -> Self:
        """Start."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def num_failed(self) -> int:
        """Requests that were not answered to their end."""
        return sum(count for outcome, count in self._counts.items() if outcome != "answered")

    def forget(self) -> None:
        """Begin to count anew."""
        self._counts.clear()

    def summary(self) -> str:
        """Return what became of the requests."""
        return ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._counts.items()))

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self._counts[self._ask(f"Count from {number} to ten.")] += 1

    def _ask(self, prompt: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=60)
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "stream": True}
        got = b""
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                return f"refused with {answer.status}"
            while chunk := answer.read1():
                got += chunk
        except (OSError, http.client.HTTPException):
            return "cut off after the first byte" if got else "lost before the first byte"
        else:
            return "answered" if b"[DONE]" in got else "ended with an error"
        finally:
            connection.close()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _traces() -> set[str]:
    """Return the processes of fleets and of Ray, and the files of shared memory."""
    results = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue
            if any(program in words for program in _OURS):
                results.add(f"process {path.name}")
    return results


if __name__ == "__main__":
    sys.exit(main())
