"""Saves and loads the state of training, so that another run can continue it."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from twostroke.core.errors import TwostrokeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = "checkpoint.pt"


def save_checkpoint(folder: Path, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write a checkpoint; an earlier one stays until this one is whole.

    `about` identifies the target model and the options.

    Raises:
        TwostrokeError: the disk is full, or the folder cannot be written.
    """
    path = folder / _NAME
    part = path.with_suffix(".part")
    try:
        torch.save({"about": dict(about), **state}, part)
        part.replace(path)
    except (OSError, RuntimeError) as error:
        message = f"The checkpoint cannot be written to {str(folder)!r}: {error}."
        raise TwostrokeError(message) from None


def load_checkpoint(folder: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state in a folder; None if there is none.

    Raises:
        UsageError: it is damaged, or of another model or other options.
    """
    path = folder / _NAME
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        found = state.pop("about")
    except (OSError, EOFError, RuntimeError, UnpicklingError, KeyError):
        raise UsageError(f"{path} is damaged. Delete it to start again.") from None
    if found != dict(about):
        raise UsageError(
            f"{folder} holds heads that were trained for another model or with other options: "
            "use the same options, or another --output."
        )
    return state
