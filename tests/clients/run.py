"""Run other projects' clients, unchanged, against our server with a real model.

Run it with `make long SUITE=clients`.

Each client has an environment of its own in `.venv-clients`, made on first use, and a script beside
this file that makes its ordinary calls and prints a line for each. The server is started here.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.model.hub import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
_START_S = 120


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its script, the packages that it needs, and the options of its server."""

    script: str
    packages: tuple[str, ...] = ()  # of PyPI or of npm
    serve: tuple[str, ...] = ()


_ANY_MODEL = ("--any-model", "--context-length", "400")  # so that each answer ends soon
_NPM_AI = ("ai@7", "@ai-sdk/openai@4", "@ai-sdk/openai-compatible@3", "@ai-sdk/anthropic@4")
CLIENTS = {
    "openai": Client("openai_python.py", ("openai>=2",)),
    "openai-js": Client("openai_javascript.mjs", ("openai@6",)),
    "openai-suite": Client(
        "sdk_suite.py",
        ("openai[aiohttp]>=3,<4", "pytest>=9", "pytest-asyncio>=1.4", "inline-snapshot", "rich"),
        serve=_ANY_MODEL,
    ),
    "anthropic": Client("anthropic_python.py", ("anthropic>=0.70",)),
    "anthropic-suite": Client(
        "sdk_suite.py",
        (
            *("anthropic[aiohttp]>=2,<3", "pytest>=9", "pytest-asyncio>=1.4", "inline-snapshot"),
            *("rich", "http-snapshot[httpx]==0.1.9", "respx", "dirty-equals", "time-machine"),
        ),
        serve=_ANY_MODEL,
    ),
    "litellm": Client("litellm_python.py", ("litellm>=1.70", "mcp")),  # which its tools need
    "ollama": Client("ollama_python.py", ("ollama>=0.6",)),
    "ollama-js": Client("ollama_javascript.mjs", ("ollama@0",)),
    "langchain": Client(
        "langchain_python.py",
        ("langchain>=1,<2", "langchain-openai>=1,<2", "langchain-anthropic>=1,<2"),
    ),
    "llamaindex": Client("llamaindex_python.py", ("llama-index-llms-openai-like>=0.8,<0.9",)),
    "vercel": Client("vercel_ai.mjs", (*_NPM_AI, "zod@4")),
    "vercel-zod": Client("vercel_zod.mjs", (*_NPM_AI, "zod@4")),
    "instructor": Client("instructor_python.py", ("instructor>=1,<2", "pydantic[email]>=2")),
    "pydantic-ai": Client(
        "pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]>=2,<3", "pydantic[email]>=2")
    ),
    "openai-agents": Client(
        "openai_agents.py", ("openai-agents>=0.24,<0.25", "pydantic[email]>=2")
    ),
    "aider": Client("aider_command.py", ("aider-chat>=0.86,<0.87",)),
    "requests": Client("requests_of_programs.py"),
    "llm": Client("llm_command.py", ("llm>=0.27",)),
    "llama-server": Client(
        "llama_server_python.py", ("langchain-llama-cpp>=0.1", "llamastat", "swaag")
    ),
    "lm-eval": Client(  # and transformers beside it, which reads the same file (some 2 GB)
        "lm_eval_harness.py",
        ("lm-eval[api,hf]>=0.4.13", "gguf", "torch==2.13.0"),
        # As near to transformers as can be: int16 keys and values, the default on x86, add up to
        # 0.052 nats a token, on the list of numbers among the texts.
        serve=("--activation-bits", "15", "--kv-format", "f16"),
    ),
}


def main() -> int:
    """Run the clients, and return 0 if all made their calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    args = parser.parse_args()
    if unknown := set(args.clients) - set(CLIENTS):
        parser.error(f"there is no client {', '.join(sorted(unknown))}: {', '.join(CLIENTS)}")
    failed = []
    environment = os.environ | {"MODEL": args.model, "MODEL_FILE": str(resolve(args.model))}
    with ExitStack() as stack:
        servers: dict[tuple[str, ...], str] = {}
        for name in args.clients or CLIENTS:
            client = CLIENTS[name]
            if client.serve not in servers:
                server = _server([args.model, *client.serve])
                servers[client.serve] = stack.enter_context(server)
            url = servers[client.serve]
            print(f"== {name}: {', '.join(client.packages)}", flush=True)
            if not _run(client, ENVIRONMENTS / name, environment, url):
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clients made their calls")
    return int(bool(failed))


def _run(client: Client, folder: Path, environment: dict[str, str], url: str) -> bool:
    make = _node if client.script.endswith(".mjs") else _python
    command = make(client, folder)
    mine = {"BASE_URL": f"{url}/v1", "ROOT_URL": url}
    mine["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    return not subprocess.run(command, env=environment | mine, cwd=folder, check=False).returncode


@contextmanager
def _server(arguments: list[str]) -> Iterator[str]:
    """Serve a model, and yield the address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "twostroke", "serve", *arguments, "--port", str(port)]
    command.append("--no-access-log")  # the clients say what they did
    with (
        tempfile.TemporaryDirectory() as records,
        subprocess.Popen([*command, "--records", records]) as process,
    ):
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


def _python(client: Client, folder: Path) -> list[str]:
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != repr(client.packages):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *client.packages]
        if client.packages:
            subprocess.run(install, check=True)
        ready.write_text(repr(client.packages))
    return [str(python), str(FOLDER / client.script)]


def _node(client: Client, folder: Path) -> list[str]:
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != repr(client.packages):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages]
        subprocess.run(install, check=True, cwd=folder)
        ready.write_text(repr(client.packages))
    script = folder / client.script  # modules are looked for from where a script lies
    script.write_text((FOLDER / client.script).read_text())
    return ["node", str(script)]


if __name__ == "__main__":
    sys.exit(main())
