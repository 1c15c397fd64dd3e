"""Files with drawings: refused before the work, and written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from twostroke.core.errors import UsageError
from twostroke.lab.measure.plots import new_figure

PLOTS: Final = (".svg", ".png")


def file_option(suffixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the type and the placeholder of an option that takes such a file."""
    kind = click.Path(path_type=Path, dir_okay=False, writable=True)
    return {"type": kind, "metavar": "|".join(f"FILE{one}" for one in suffixes)}


def check_file(path: Path | None, field: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that could not be written.

    Raises:
        UsageError: its suffix is another, its folder is missing, or matplotlib is.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        reason = f"must end in {' or '.join(suffixes)}, got '{{value}}'."
        raise UsageError(reason, field=field, value=path.name)
    check_folder(path, field)
    new_figure(1, 1)


def check_folder(path: Path, field: str) -> None:
    """Raise UsageError if a file's folder is missing."""
    if not path.absolute().parent.is_dir():
        reason = "is in a folder that does not exist: '{value}'."
        raise UsageError(reason, field=field, value=path.parent)
