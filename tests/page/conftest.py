"""A real browser, a real server with the real model, and pages that must have no complaint."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FOLDER = Path(__file__).parent
_ANSWER_MS = 60_000
_CALM = {"width": 1440, "height": 900}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as `page`, so that none can be forgotten."""
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.page)


@dataclass
class Server:
    """A server process that can be stopped and started again at the same address."""

    models: list[str]
    port: int
    key: str | None = None
    process: subprocess.Popen[bytes] | None = None
    options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [sys.executable, "-m", "twostroke", "serve", *self.models]
        command += ["--port", str(self.port), "--drain", "0", *self.options]
        keys = {} if self.key is None else {"TWOSTROKE_API_KEY": self.key}
        surroundings = {**os.environ, **keys}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=surroundings)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def _served_page(
    model: Path, key: str | None = None, names: str = "smollm2", options: tuple[str, ...] = ()
) -> Iterator[Server]:
    several = ["--models", ",".join(f"{name}={model}" for name in names.split())]
    models = several if " " in names else [str(model), "--name", names]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(models, port, key, options=options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The system's browser; skips where there is none, or nothing to drive it with."""
    playwright = pytest.importorskip("playwright.sync_api", reason="run by `make long SUITE=page`")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with it
        browser = driver.chromium.launch(executable_path=path, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser: Any, smollm2_path: Path) -> Iterator[Server]:
    """One server for the tests that leave it as they found it."""
    with _served_page(smollm2_path) as server:
        yield server


@pytest.fixture
def own_server(browser: Any, smollm2_path: Path) -> Iterator[Server]:
    """A server that the test may stop."""
    with _served_page(smollm2_path) as server:
        yield server


@pytest.fixture
def key_server(browser: Any, smollm2_path: Path) -> Iterator[Server]:
    """A server that asks for the key "sk-right"."""
    with _served_page(smollm2_path, "sk-right") as server:
        yield server


@pytest.fixture
def doctor_server(browser: Any, smollm2_path: Path) -> Iterator[Server]:
    """A server that compares prompts."""
    with _served_page(smollm2_path, options=("--prompt-doctor",)) as server:
        yield server


@pytest.fixture
def models_server(browser: Any, smollm2_path: Path) -> Iterator[Server]:
    """A server of two models, which are loaded when they are asked for."""
    with _served_page(smollm2_path, names="first second") as server:
        yield server


@pytest.fixture
def gap_server(browser: Any, real_model: Callable[[str], Path]) -> Iterator[Server]:
    """A server whose model fills gaps; skips where that is not in the cache."""
    with _served_page(real_model("qwen2.5-coder-0.5b")) as server:
        yield server


@dataclass
class Visit:
    """A page with the things that people do on it."""

    page: Any
    complaints: list[str]

    def send(self, text: str, *, wait: bool = True) -> None:
        """Write a message and press Enter."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        if wait:
            self.wait_answered()

    def wait_answered(self) -> None:
        self.page.wait_for_selector(".send:not(.stop)", timeout=_ANSWER_MS)
        self.page.wait_for_selector(".reply:not(.busy) .tools", timeout=_ANSWER_MS)

    def wait_for(self, condition: str) -> None:
        """Wait until something is so; the driver's own way needs eval, which the page forbids."""
        deadline = time.monotonic() + _ANSWER_MS / 1000
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(30)

    def set(self, **settings: object) -> None:
        """Fill in settings by their names."""
        for name, value in settings.items():
            field = self.page.locator(f"#setting-{name}")
            if not field.is_visible():
                self.page.click(f".panel details:has(#setting-{name}) summary")
            if isinstance(value, bool):
                field.set_checked(value)
            elif field.evaluate("field => field.tagName") == "SELECT":
                field.select_option(str(value))
            else:
                field.fill(str(value))

    def write(self, text: str) -> None:
        """Go to the mode for texts and write one."""
        self.page.click("[data-kind=text]")
        self.page.fill("#text", text)

    def continue_text(self) -> None:
        """Have the model continue the text, and wait until it has."""
        self.page.click(".continue")
        self.wait_continued()

    def wait_continued(self) -> None:
        self.page.wait_for_selector(".continue:not(.stop)", timeout=_ANSWER_MS)
        self.wait_for("!document.querySelector('.reply.busy')")

    def tell(self, *answers: list[dict[str, Any]]) -> None:
        """Have chat requests answered by these deltas, one list after the other."""
        left = list(answers)
        self.page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(**_stream(left.pop(0)))
        )

    def answers(self) -> list[str]:
        """The texts of the answers that are shown."""
        return [answer.inner_text() for answer in self.page.query_selector_all(".reply .body")]


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open a page; whatever the browser complains about fails the test.

    `allowed` are parts of complaints that the test provokes.
    """
    contexts = []

    def open_page(
        server: Server, path: str = "", allowed: tuple[str, ...] = (), **options: Any
    ) -> Visit:
        context = browser.new_context(**({"viewport": _CALM} | options))
        page = context.new_page()
        visit = Visit(page, [])
        contexts.append((context, visit, allowed))
        page.on("console", lambda message: _note(visit, message))
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.goto(server.url + path)
        page.wait_for_selector("#lamp[data-state=ok]")
        return visit

    yield open_page
    for context, visit, allowed in contexts:
        context.close()
        left = [
            complaint
            for complaint in visit.complaints
            if not any(part in complaint for part in allowed)
        ]
        assert not left


def _stream(deltas: list[dict[str, Any]]) -> dict[str, str]:
    end = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
    parts: list[dict[str, Any]] = [{"index": 0, "delta": delta} for delta in deltas]
    parts.append({"index": 0, "delta": {}, "finish_reason": end})
    chunks = [json.dumps({"choices": [part]}) for part in parts]
    body = "".join(f": keep-alive\n\ndata: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    return {"content_type": "text/event-stream", "body": body}


def _note(visit: Visit, message: Any) -> None:
    if message.type in {"error", "warning"}:
        visit.complaints.append(message.text)
