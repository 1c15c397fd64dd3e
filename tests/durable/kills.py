"""Kill `twostroke serve` with SIGKILL at random moments while batches run.

Run it with `make long SUITE=durable`.

After each kill the next server goes on in the same folder. No result that a client was told of may
be lost, and each batch must end with one result for each line, the same as without kills.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from support.tiny import write_tiny_gguf

NUM_LINES = 120
URL = "/v1/completions"
_ADDRESS = re.compile(r"http://[\d.:]+")


def main() -> int:
    """Kill as often as asked, and print what held; return 0 if all did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance, campaign, began_s = random.Random(args.seed), Campaign(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.kills):
            campaign.round(Path(folder), chance.uniform(0.0, 0.5))
        campaign.round(Path(folder), None)
    print(
        f"{args.kills} kills in {time.monotonic() - began_s:.0f} s, {campaign.num_in_batch} of "
        f"them while lines ran; {campaign.num_batches} batches of {NUM_LINES} lines ended, each "
        f"line with one result; no result was lost"
    )
    return 0


class Campaign:
    """What is known of the batches so far."""

    def __init__(self) -> None:
        """Begin without a batch."""
        self.num_batches = self.num_in_batch = 0
        self._open: str | None = None
        self._num_seen = 0  # results that were reported
        self._answers: dict[str, str] = {}  # without kills they would be the same

    def round(self, folder: Path, kill_after_s: float | None) -> None:
        """Start the server, let it work, and kill it; without a time, wait for the batch's end."""
        model = folder / "tiny.gguf"
        if not model.exists():
            write_tiny_gguf(model)
        command = [sys.executable, "-m", "twostroke", "serve", str(model), "--port", "0"]
        command.append("--no-coalesce")
        command += ["--threads", "1", "--no-access-log", "--records", str(folder / "records")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            output = process.stderr.readline()
            match = _ADDRESS.search(output)
            assert match is not None, f"the server does not start: {output}{process.stderr.read()}"
            with closing(httpx.Client(base_url=match[0], timeout=10, trust_env=False)) as http:
                end_s = time.monotonic() + (60 if kill_after_s is None else kill_after_s)
                with suppress(httpx.HTTPError):
                    self._look(http)
                    while time.monotonic() < end_s and (self._open or kill_after_s is not None):
                        self._look(http)
                        time.sleep(0.01)
            self.num_in_batch += self._open is not None
            process.send_signal(signal.SIGKILL)
        assert kill_after_s is not None or self._open is None, "the last batch does not end"

    def _look(self, http: httpx.Client) -> None:
        if self._open is None:
            self._open, self._num_seen = _begin(http), 0
            return
        response = http.get(f"/v1/batches/{self._open}")
        assert response.status_code == 200, f"a batch is lost: {response.text}"
        batch = response.json()
        counts = batch["request_counts"]
        num_done = counts["completed"] + counts["failed"]
        if batch["status"] not in {"validating", "finalizing"} and counts["total"]:
            is_counting = batch["status"] == "in_progress" and not num_done
            assert num_done >= self._num_seen or is_counting, "results were lost"
            self._num_seen = max(self._num_seen, num_done)
        if batch["status"] == "completed":
            self._check(http, batch)
            self._open = None

    def _check(self, http: httpx.Client, batch: dict[str, Any]) -> None:
        text = http.get(f"/v1/files/{batch['output_file_id']}/content").text
        lines = [json.loads(line) for line in text.splitlines()]
        counts = Counter(line["custom_id"] for line in lines)
        assert counts == Counter(str(i) for i in range(NUM_LINES)), "lines are lost or doubled"
        for line in lines:
            answer = line["response"]["body"]["choices"][0]["text"]
            assert self._answers.setdefault(line["custom_id"], answer) == answer
        self.num_batches += 1


def _begin(http: httpx.Client) -> str:
    """Upload lines, run them, and return the batch's id."""
    lines = []
    for number in range(NUM_LINES):
        body = {"prompt": "hello world", "max_tokens": 8, "seed": number, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": URL, "body": body}
        lines.append(json.dumps(line))
    file = {"file": ("in.jsonl", "\n".join(lines).encode())}
    uploaded = http.post("/v1/files", data={"purpose": "batch"}, files=file).json()
    payload = {"input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h"}
    response = http.post("/v1/batches", json=payload)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


if __name__ == "__main__":
    sys.exit(main())
