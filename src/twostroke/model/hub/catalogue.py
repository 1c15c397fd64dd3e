"""Models with short names (catalogue.toml), and models that are named by a Python package."""

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
    """A file inside a wheel: a model, or a piece of one."""

    package: str
    version: str
    path: str

    @property
    def requirement(self) -> str:
        """The exact release, in pip's words."""
        return f"{self.package}=={self.version}"


class HubFile(Frozen):
    """A file in a repository of the hub at a commit."""

    repository: str
    revision: str
    path: str

    def __str__(self) -> str:
        """The name as users type it, with the commit."""
        return f"hf:{self.repository}:{self.path}@{self.revision}"

    @property
    def url(self) -> str:
        """The file's address at the hub or its mirror."""
        path = f"{self.repository}/resolve/{self.revision}/{quote(self.path)}"
        return f"{env.hub_endpoint()}/{path}"


class PackagedModel(Frozen):
    """A model file, which comes from the hub or is joined from `parts` in order.

    `hub` is the publisher's file on the hub, which is tried first. The parts come from Python
    packages, for machines that cannot reach the hub. A model may have only one of the two sources.
    Users type `name`; `file_name` is the file's name in the cache, and `good_for` a short
    description. Size, checksum, licence, family and number format are None for a model that is
    named by its package. `draft` names a good draft model for this model.
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
    facts = dict(entry)
    del facts["reason"]
    address = [facts.pop(key, None) for key in ("repository", "revision", "file")]
    hub = HubFile(*address) if all(address) else None
    if "package" not in facts:
        return PackagedModel(name, parts=(), hub=hub, **facts)
    package, version, path = (facts.pop(key) for key in ("package", "version", "path"))
    parts = []
    for index in range(facts.pop("num_parts", 1)):
        numbers = {"index": index, "n": index + 1}
        part_package = package.format(**numbers)
        folder = part_package.replace("-", "_")
        parts.append(WheelPart(part_package, version, path.format(folder=folder, **numbers)))
    return PackagedModel(name, parts=tuple(parts), hub=hub, **facts)


_ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

CATALOGUE: Final = {name: _read_entry(name, entry) for name, entry in _ENTRIES.items()}
