"""`make test-clients`: programs that others wrote, unchanged, against our server on a real model.

Each client has an environment of its own in `.venv-clients`, made on first use, and a script beside
this file that makes its ordinary calls and prints a line for each. The server is started here.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.fetch import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
_START_S = 120


@dataclass(frozen=True, slots=True)
class Client:
    """A client: its script, and the packages that it needs, of PyPI or of npm."""

    script: str
    packages: tuple[str, ...]


CLIENTS = {
    "openai": Client("openai_python.py", ("openai>=2",)),
    "openai-js": Client("openai_javascript.mjs", ("openai@6",)),
    "anthropic": Client("anthropic_python.py", ("anthropic>=0.70",)),
    "litellm": Client("litellm_python.py", ("litellm>=1.70", "mcp")),  # which its tools need
    "langchain": Client("langchain_python.py", ("langchain-openai>=1",)),
    "ollama": Client("ollama_python.py", ("ollama>=0.6",)),
    "llm": Client("llm_command.py", ("llm>=0.27",)),
    "llama-server": Client(
        "llama_server_python.py", ("langchain-llama-cpp>=0.1", "llamastat", "swaag")
    ),
    "lm-eval": Client(  # and transformers beside it, which reads the same file (some 2 GB)
        "lm_eval_harness.py", ("lm-eval[api,hf]>=0.4.13", "gguf", "torch==2.13.0")
    ),
}


def main() -> int:
    """Run the clients, and return 0 if all made their calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    given = parser.parse_args()
    if unknown := set(given.clients) - set(CLIENTS):
        parser.error(f"there is no client {', '.join(sorted(unknown))}: {', '.join(CLIENTS)}")
    failed = []
    with _server(given.model) as url:
        environment = os.environ | {"BASE_URL": f"{url}/v1", "ROOT_URL": url}
        environment |= {"MODEL": given.model, "MODEL_FILE": str(resolve(given.model))}
        for name in given.clients or CLIENTS:
            client = CLIENTS[name]
            folder = ENVIRONMENTS / name
            print(f"== {name}: {', '.join(client.packages)}", flush=True)
            command = _node(client, folder) if client.script.endswith(".mjs") else None
            command = command or _python(client, folder)
            mine = environment | {"PATH": f"{folder / 'bin'}:{environment['PATH']}"}
            if subprocess.run(command, env=mine, cwd=folder, check=False).returncode:
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clients made their calls")
    return int(bool(failed))


@contextmanager
def _server(model: str) -> Iterator[str]:
    """Serve a model, and yield the address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "twostroke", "serve", model, "--port", str(port)]
    command.append("--no-access-log")  # the clients say what they did
    with subprocess.Popen(command) as process:
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
        subprocess.run(install, check=True)
        ready.write_text(repr(client.packages))
    return [str(python), str(HERE / client.script)]


def _node(client: Client, folder: Path) -> list[str]:
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != repr(client.packages):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages]
        subprocess.run(install, check=True, cwd=folder)
        ready.write_text(repr(client.packages))
    script = folder / client.script  # modules are looked for from where a script lies
    script.write_text((HERE / client.script).read_text())
    return ["node", str(script)]


if __name__ == "__main__":
    sys.exit(main())
