"""A stand-in for the Hugging Face hub's HTTP interface, for its real client, with faults on demand.

Sources: the hub's API as huggingface_hub 2.4 uses it (`/api/models/...`, `/resolve/...`), and the
headers in its documentation of the cache and of downloads.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from twostroke.core.errors import DownloadError
from twostroke.core.frozen import Frozen
from twostroke.model import loader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = (".gguf", ".safetensors", "tokenizer.json")  # what a repository keeps outside of git
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_standin"


@dataclass
class Repo:
    """A repository with one revision, `main`."""

    files: dict[str, bytes]
    licence: str | None = "apache-2.0"
    gated: bool = False
    private: bool = False
    commit: str = COMMIT


class HubRequest(Frozen):
    """A received request."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """The repositories, the received requests, and the faults of the next responses.

    `refusals` are statuses, with headers, of the next responses. `cuts` are the numbers of bytes
    after which the next transfers are interrupted.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[HubRequest] = field(default_factory=list)
    refusals: deque[tuple[int, dict[str, str]]] = field(default_factory=deque)
    cuts: deque[int] = field(default_factory=deque)
    damaged: bool = False
    longer: bool = False
    knows_ranges: bool = True
    nonsense: bytes | None = None
    pause_s: float = 0.0

    @property
    def transfers(self) -> list[HubRequest]:
        """The requests for the bytes of large files."""
        return [request for request in self.requests if request.path.startswith("/cdn/")]

    def blob(self, digest: str) -> bytes | None:
        """Return a large file by its SHA-256."""
        for repo in self.repos.values():
            for content in repo.files.values():
                if hashlib.sha256(content).hexdigest() == digest:
                    return content
        return None


@contextmanager
def hub_at(cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a hub on a free port, which the client uses as the real one; its cache is `cache`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    patch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache.with_name("token")))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Where it would note which agent it thinks to run under.
    patch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache.with_name("agents")), raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(name: str, kind: type[Exception] = DownloadError) -> str:
    """Return the message of a refused pull of that name."""
    with pytest.raises(kind) as caught:
        loader.pull(name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def stored(cache: Path) -> list[str]:
    """Return the names of the files in the hub's cache."""
    results = (path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
    return sorted(name for name in results if not name.startswith((".locks/", "CACHEDIR.TAG")))


def partials(cache: Path) -> list[Path]:
    """Return the files of interrupted downloads in the hub's cache."""
    return sorted(cache.rglob("*.incomplete"))


def git_sha1(content: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *arguments: Any) -> None:
        del arguments

    def answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # newer clients ask who runs them
            self.send(404, b"{}")
            return
        authorization = self.headers.get("Authorization")
        hub.requests.append(
            HubRequest(self.command, path, self.headers.get("Range"), authorization)
        )
        if hub.refusals:
            status, headers = hub.refusals.popleft()
            self.send(status, b"{}", headers)
        elif hub.nonsense is not None:
            self.send(200, hub.nonsense)
        elif path.startswith("/cdn/"):
            self.transfer(hub.blob(path.split("/")[-1]) or b"")
        elif path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/", 3)
            revision = rest[1] if rest and rest[0] == "revision" else "main"
            self.describe(f"{owner}/{name}", revision)
        else:
            owner, name, kind, revision, file = path.lstrip("/").split("/", 4)
            assert kind == "resolve"
            self.resolve(f"{owner}/{name}", revision, file)

    def repo(self, name: str, revision: str) -> Repo | None:
        """Return a repository that may be seen, or answer why not."""
        repo = self.hub.repos.get(name)
        token = self.headers.get("Authorization")
        if token not in {None, f"Bearer {TOKEN}", "Bearer other"}:
            self.refuse(401, None, "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and token is None):
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif revision not in {"main", repo.commit}:
            self.refuse(404, "RevisionNotFound", "Revision not found")
        else:
            return repo
        return None

    def describe(self, name: str, revision: str) -> None:
        repo = self.repo(name, revision)
        if repo is None:
            return
        siblings = []
        for path, content in repo.files.items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content)}
            entry["blobId"] = git_sha1(content)
            if path.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        body: dict[str, Any] = {"id": name, "sha": repo.commit, "siblings": siblings, "tags": []}
        body |= {"gated": repo.gated, "private": repo.private}
        if repo.licence:
            body["cardData"] = {"license": repo.licence}
        self.send(200, json.dumps(body).encode())

    def resolve(self, name: str, revision: str, file: str) -> None:
        repo = self.repo(name, revision)
        if repo is None:
            return
        token = self.headers.get("Authorization")
        if repo.gated and token != f"Bearer {TOKEN}":
            self.refuse(403 if token else 401, "GatedRepo", "Access to this model is restricted")
            return
        content = repo.files.get(file)
        if content is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": repo.commit}
        if not file.endswith(LARGE):
            self.transfer(content, headers | {"ETag": f'"{git_sha1(content)}"'})
            return
        digest = hashlib.sha256(content).hexdigest()
        # Another host's name: a token must not follow there.
        headers["Location"] = f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{digest}"
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self.send(302, b"", headers)

    def transfer(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        hub, start = self.hub, 0
        byte_range = self.headers.get("Range")
        total = len(content)
        if hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if hub.longer:
            content += b"more"
        headers = {"Accept-Ranges": "bytes", **(headers or {})}
        end = len(content)
        if byte_range and hub.knows_ranges:
            first, last = byte_range.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
        is_part = start > 0 or end < len(content)
        self.send(206 if is_part else 200, content[start:end], headers)

    def refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message}
        if code:
            headers["X-Error-Code"] = code
        self.send(status, json.dumps({"error": message}).encode(), headers)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(body)
        if self.hub.cuts and self.path.startswith("/cdn/"):
            end = min(end, self.hub.cuts.popleft())
        for begin in range(0, end, 65536):
            time.sleep(self.hub.pause_s)
            try:
                self.wfile.write(body[begin : min(end, begin + 65536)])
            except OSError:  # the client has left
                break
        if end < len(body):
            self.close_connection = True
