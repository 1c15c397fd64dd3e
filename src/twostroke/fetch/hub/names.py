"""How models of the hub are named: `hf:owner/repo[:file][@revision]`, or the address of a page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from twostroke.core.errors import UsageError

FORM = "hf:owner/repo[:file or quantization][@revision]"
DEFAULT_REVISION = "main"

_REPO = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"hf:(?P<repo>{_REPO})(?::(?P<file>[^@:]+))?(?:@(?P<revision>[^@:]+))?")
_BARE = re.compile(rf"(?P<repo>{_REPO})(?::[^@:/]+)?(?:@[^@:]+)?")
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<rest>.+)", re.IGNORECASE
)
_NOT_MODELS = ("datasets", "spaces", "kernels", "docs", "blog", "papers", "collections")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, what of it is wanted, and of which revision.

    `file` is the path of a file in the repository, a quantization such as `Q4_K_M`,
    `safetensors`, or None for whatever suits best.
    """

    repo: str
    file: str | None = None
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        """The name as it is typed."""
        file = f":{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision != DEFAULT_REVISION else ""
        return f"hf:{self.repo}{file}{revision}"


def parse(name: str) -> HubName | None:
    """Return what `name` says of the hub, or None if it names something else.

    Raises:
        UsageError: it is meant for the hub, but not of the form that names there have.
    """
    if page := _PAGE.fullmatch(name):
        return _checked(_from_page(page["rest"], name), name)
    if not name.lower().startswith("hf:"):
        return None
    match = _NAME.fullmatch("hf:" + name[3:].removeprefix("//"))
    if match is None:
        raise UsageError(f"{name!r} is not of the form {FORM}.", param="model")
    found = HubName(match["repo"], match["file"], match["revision"] or DEFAULT_REVISION)
    return _checked(found, name)


def suggestion(name: str) -> str:
    """Return a hint for a name that looks like a repository without its prefix, or nothing."""
    return f" Did you mean 'hf:{name}'?" if _BARE.fullmatch(name) else ""


def is_safe_path(path: str) -> bool:
    """Whether a path inside a repository stays inside it, on every file system."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _from_page(rest: str, name: str) -> HubName:
    """Read the part of an address behind the host: a repository's page, a folder's, or a file's."""
    path = unquote(urlsplit(f"x:/{rest}").path).strip("/")
    repo, _, tag = path.partition(":")
    parts = repo.split("/")
    if parts[0] in _NOT_MODELS or not re.fullmatch(_REPO, "/".join(parts[:2])):
        raise UsageError(f"{name!r} is not the page of a model: name it {FORM}.", param="model")
    kind = parts[2] if len(parts) > 2 else ""
    if kind in {"blob", "resolve", "raw"} and len(parts) > 4:
        return HubName("/".join(parts[:2]), "/".join(parts[4:]), parts[3])
    if kind == "tree" and len(parts) == 4:
        return HubName("/".join(parts[:2]), tag or None, parts[3])
    if kind:
        raise UsageError(f"{name!r} is not the page of a model: name it {FORM}.", param="model")
    return HubName(repo, tag or None)


def _checked(name: HubName, typed: str) -> HubName:
    safe = all(is_safe_path(part) for part in (name.revision, name.file or "x"))
    if not safe or ".." in name.repo or "--" in name.repo:
        raise UsageError(f"{typed!r} is not of the form {FORM}.", param="model")
    return name
