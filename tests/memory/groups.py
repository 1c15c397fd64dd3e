"""Serves a model in each kind of control group that limits memory; long prompts must not kill it.

`python tests/memory/groups.py` needs root and Linux. The kinds that cannot be made here are named.
For each kind a server is started in a group with `--mb` megabytes. If it refuses, it is started
again with the `--context-length` that its error advises. Then `--prompts` prompts, each nearly as
long as the context, come at once. Every one must be answered, and the kernel must not have killed
anything. Exit code 1 tells of a failure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS = Path("/sys/fs/cgroup")
_WORDS = ("river", "stone", "cloud", "green", "seven", "walk", "paper", "light")
_ANSWER_TOKENS = 16

# Version, the file that limits, and the limit's level above the server's own group.
KINDS = {
    "version 1, own group": (1, "memory.limit_in_bytes", 0),
    "version 1, the group above": (1, "memory.limit_in_bytes", 1),
    "version 1, three levels up": (1, "memory.limit_in_bytes", 3),
    "version 2, own group": (2, "memory.max", 0),
    "version 2, the group above (a slice of systemd)": (2, "memory.max", 1),
    "version 2, three levels up": (2, "memory.max", 3),
    "version 2, memory.high": (2, "memory.high", 0),
}


def hierarchy(version: int) -> Path | None:
    """Return the folder of the hierarchy that limits memory; None if it is not mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, kind = (part.split() for part in line.split(" - ", 1))
        folder = Path(fields[4])
        if version == 1 and kind[0] == "cgroup" and "memory" in kind[2].split(","):
            return folder
        if version == 2 and kind[0] == "cgroup2":
            controllers = (folder / "cgroup.controllers").read_text().split()
            return folder if "memory" in controllers else None
    return None


@contextmanager
def limited_group(top: Path, version: int, name: str, depth: int, limit: int) -> Iterator[Path]:
    """Yield a new group that is limited `depth` levels above it."""
    outer = top / f"twostroke-test-{os.getpid()}"
    levels = [outer.joinpath(*"abc"[:i]) for i in range(depth + 1)]
    try:
        if version == 2:
            (top / "cgroup.subtree_control").write_text("+memory")
        for level in levels:
            level.mkdir()
            if version == 2 and level != levels[-1]:
                (level / "cgroup.subtree_control").write_text("+memory")
        (outer / name).write_text(str(limit))
        yield levels[-1]
    finally:
        for level in reversed(levels):
            for _ in range(50):
                with suppress(OSError):
                    level.rmdir()
                    break
                time.sleep(0.1)


def num_killed(group: Path) -> int:
    """Return how many processes the kernel has ended for memory in a group or the one above."""
    counts = 0
    for folder in (group, *group.parents):
        for name in ("memory.events.local", "memory.oom_control"):
            with suppress(OSError):
                counts += sum(
                    int(line.split()[1])
                    for line in (folder / name).read_text().splitlines()
                    if line.startswith("oom_kill ")
                )
    return counts


@contextmanager
def limited_server(group: Path, model: str, *options: str) -> Iterator[tuple[int, str]]:
    """Yield a server's port, or 0 and its error."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = [sys.executable, "-m", "twostroke", "serve", model, "--port", "0", *options]
    command.append("--no-coalesce")
    process = subprocess.Popen(
        ["sh", "-c", enter, "sh", *command], stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if port := re.search(r"at http://127\.0\.0\.1:(\d+)", line):
                with ThreadPoolExecutor(1) as reader:
                    reader.submit(process.stderr.read)  # so that its log finds room
                    yield int(port[1]), ""
                    process.terminate()
                return
        yield 0, "".join(lines)
    finally:
        process.terminate()
        process.wait()


def send_request(port: int, num_words: int, seed: int) -> tuple[int, int]:
    """Return the status of an answer, and its number of prompt tokens."""
    draw = random.Random(seed)
    prompt = " ".join(draw.choice(_WORDS) for _ in range(num_words))
    body = {"prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1800)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status, answer.get("usage", {}).get("prompt_tokens", 0)
    except (OSError, http.client.HTTPException, ValueError):
        return 0, 0
    finally:
        connection.close()


def context_of(port: int) -> int:
    """Return the tokens that one request may have."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/api/state")
    state = json.loads(connection.getresponse().read())
    return int(state["model"]["context_length"])


def campaign(group: Path, model: str, num_prompts: int) -> tuple[bool, str]:
    """Serve in a group and send long prompts; return whether all went well, and a sentence."""
    options: tuple[str, ...] = ()
    refusals: list[str] = []
    for _ in range(2):
        with limited_server(group, model, *options) as (port, error):
            if not port:
                advice = re.search(r"--context-length (\d+)", error)
                if advice is None:
                    return "Traceback" not in error, f"refused: {error.strip()}"
                options = ("--context-length", advice[1])
                refusals.append(error.strip())
                continue
            context = context_of(port)
            num_words = context - 2 * _ANSWER_TOKENS  # each word is a token
            with ThreadPoolExecutor(num_prompts) as threads:
                answers = list(
                    threads.map(partial(send_request, port, num_words), range(num_prompts))
                )
            num_right = sum(status == 200 for status, _ in answers)
            killed = num_killed(group)
            tokens = max(count for _, count in answers)
            facts = f"{num_right} of {num_prompts} answered, {killed} killed"
            return num_right == num_prompts and not killed, f"{facts}, {tokens} prompt tokens"
    return False, f"refused although its advice was followed: {' Then: '.join(refusals)}"


def main() -> int:
    """Run all kinds that can be made here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--mb", type=int, default=350)
    parser.add_argument("--prompts", type=int, default=12)
    arguments = parser.parse_args()
    all_went_well = True
    for kind, (version, name, depth) in KINDS.items():
        top = hierarchy(version)
        if top is None:
            print(f"{kind}: cannot be made here", flush=True)
            continue
        with limited_group(top, version, name, depth, arguments.mb * 10**6) as group:
            went_well, sentence = campaign(group, arguments.model, arguments.prompts)
        print(f"{kind}: {sentence}", flush=True)
        all_went_well &= went_well
    return 0 if all_went_well else 1


if __name__ == "__main__":
    sys.exit(main())
