"""Serves the page's files from memory: a name is a key of a table, never a path of a file."""

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

# Files of other kinds are not served.
MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_NAMED: Final = re.compile(r'(?:href|src)="page/([^"]+)"')
_JOIN: Final = {".css": bundle.style, ".js": bundle.script}

# No foreign or inline scripts, and no text that becomes markup: the browser enforces that a model's
# text reaches the page as text nodes only.
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
    "cache-control": "no-cache",  # stored, but revalidated each time by a short 304
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
    """Answers with a page and the files that it names, some hundred kilobytes."""

    def __init__(self, index: str = INDEX) -> None:
        """Read the files of a page, and join those that import others with them."""
        sources = dict(_read(files(__package__) / "static"))
        page = sources[index]
        self._files = {INDEX: _file(INDEX, page)}
        for name in _NAMED.findall(page):
            join = _JOIN.get(_suffix(name))
            self._files[name] = _file(name, join(sources, name) if join else sources[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the files."""
        return iter(self._files)

    async def file(self, request: Request) -> Response:
        """Answer with one file."""
        return self.respond(request, request.path_params["name"])

    def respond(self, request: Request, name: str = INDEX) -> Response:
        """Return the response with a file, or a 304 if the client has it already.

        Raises:
            HTTPException: no file has that name.
        """
        found = self._files.get(name)
        if found is None:
            raise HTTPException(404)
        headers = _HEADERS | {"etag": found.etag}
        if name == INDEX:
            headers["vary"] = "accept"
        known = request.headers.get("if-none-match", "").split(",")
        if any(tag.strip().removeprefix("W/") in {found.etag, "*"} for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.media_type)


def _file(name: str, text: str) -> _File:
    body = text.encode()
    return _File(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', MEDIA_TYPES[_suffix(name)])


def _read(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths and texts of the files in a folder."""
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _read(entry, f"{name}/")
        elif _suffix(name) in MEDIA_TYPES:
            yield name, entry.read_text("utf-8")


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
