"""Serves the web UI's files from memory: a name is looked up in a table, never on the disk."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response

from twostroke.core.frozen import Frozen
from twostroke.server.web_ui import bundle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

INDEX: Final = "index.html"

# Files with other suffixes are not served.
MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_LINKED_FILE: Final = re.compile(r'(?:href|src)="page/([^"]+)"')
_BUNDLERS: Final = {".css": bundle.style, ".js": bundle.script}

# The browser refuses foreign and inline scripts, and text that is parsed as markup, so a model's
# text can only appear as text nodes.
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Final = {
    "cache-control": "no-cache",  # the browser revalidates its copy each time, with a short 304
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class _File(Frozen):
    body: bytes
    etag: str
    media_type: str


class Site:
    """Serves one HTML page of the web UI, with its scripts and styles, from memory."""

    def __init__(self, index: str = INDEX) -> None:
        """Read the HTML page `index`, and bundle its scripts and style sheets."""
        sources = dict(_read(files(__package__) / "static"))
        page = sources[index]
        self._files = {INDEX: _file(INDEX, page)}
        for name in _LINKED_FILE.findall(page):
            bundle_files = _BUNDLERS.get(_suffix(name))
            text = bundle_files(sources, name) if bundle_files else sources[name]
            self._files[name] = _file(name, text)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the page's files: the HTML page, its script and its style sheet."""
        return iter(self._files)

    async def file(self, request: Request) -> Response:
        """Answer GET /page/NAME with a file of the page."""
        return self.respond(request, request.path_params["name"])

    def respond(self, request: Request, name: str = INDEX) -> Response:
        """Return the HTTP response with a file of the page, or 304 if the client's copy is current.

        Raises:
            HTTPException: there is no file with this name (404).
        """
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = _HEADERS | {"etag": file.etag}
        if name == INDEX:
            headers["vary"] = "accept"
        client_etags = request.headers.get("if-none-match", "").split(",")
        if any(tag.strip().removeprefix("W/") in {file.etag, "*"} for tag in client_etags):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)


def _file(name: str, text: str) -> _File:
    body = text.encode()
    return _File(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', MEDIA_TYPES[_suffix(name)])


def _read(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each web UI file in a folder and its subfolders."""
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _read(entry, f"{name}/")
        elif _suffix(name) in MEDIA_TYPES:
            yield name, entry.read_text("utf-8")


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
