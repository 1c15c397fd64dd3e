"""Saves and loads the state of a training: weights and the optimizer's state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError, TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.safetensors import read_safetensors, write_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[np.float32]]

_FILE_NAME = "checkpoint.json"


class Checkpoint(Frozen):
    """The saved state of a training: weights, optimizer, time and steps.

    `about` identifies the model to be trained and the options.
    """

    about: Mapping[str, Any]
    token_ids: tuple[int, ...]
    seconds: float
    num_steps: int
    arrays: Arrays


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a training's checkpoint; the previous one is removed when the new one is complete.

    Raises:
        TwostrokeError: the disk is full, or the folder cannot be written.
    """
    path = folder / f"checkpoint-{checkpoint.num_steps}.safetensors"
    arrays = checkpoint.arrays
    try:
        tensors = {n: QuantTensor.from_floats(a, FORMATS["F32"]) for n, a in arrays.items()}
        write_safetensors(path, tensors)
        facts = {
            "about": dict(checkpoint.about),
            "seconds": checkpoint.seconds,
            "num_steps": checkpoint.num_steps,
            "token_ids": list(checkpoint.token_ids),
            "weights": _digest(path),
        }
        write_checked_json(folder / _FILE_NAME, facts)
        for other in folder.glob("checkpoint-*.safetensors"):
            if other != path:
                other.unlink()
    except OSError as error:
        message = f"The checkpoint cannot be written to {str(folder)!r}: {error.strerror}."
        raise TwostrokeError(message) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_checkpoint(folder: Path, about: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint of a training in a folder; None if there is none.

    Raises:
        UsageError: the checkpoint is damaged, or belongs to another model or other options.
    """
    path = folder / _FILE_NAME
    if not path.is_file():
        return None
    try:
        facts = read_checked_json(path)
        steps = int(facts["num_steps"])
        weights = folder / f"checkpoint-{steps}.safetensors"
        files = read_safetensors(weights)
        if facts.get("weights") not in {None, _digest(weights)}:
            raise ModelFormatError(f"{weights.name!r} is damaged: its digest differs.")
        checkpoint = Checkpoint(
            facts["about"],
            tuple(facts["token_ids"]),
            seconds=float(facts["seconds"]),
            num_steps=steps,
            arrays={name: tensor.dequantize() for name, tensor in files.tensors.items()},
        )
    except (KeyError, TypeError, ValueError, TwostrokeError) as error:
        reason = (
            str(error) if isinstance(error, ModelFormatError) else "a field is missing or damaged."
        )
        raise UsageError(f"{path} cannot be used: {reason} Delete it to start again.") from None
    if checkpoint.about != dict(about):
        raise UsageError(
            f"{folder} holds training for another model or with other options: "
            "use the same options, or another --output."
        )
    return checkpoint
