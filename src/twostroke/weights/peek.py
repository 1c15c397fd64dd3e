"""Tells from the beginning of a model's file whether it can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import read_json
from twostroke.models import ARCHITECTURES
from twostroke.quant import FORMATS
from twostroke.weights.gguf import peek_gguf
from twostroke.weights.hf_model import hf_fields, hf_spec

if TYPE_CHECKING:
    from pathlib import Path


def peek_family(path: Path, name: str) -> str | None:
    """Return the family of the model whose GGUF file or config.json begins as `path` does.

    None if more of the file is needed to tell. Errors call the file `name`.

    Raises:
        ModelFormatError: its family or a number format is not supported, or it is damaged.
    """
    if not name.endswith(".gguf"):
        return hf_spec(hf_fields(name, read_json(path)), name).architecture
    peek = peek_gguf(path)
    if peek is None:
        return None
    if peek.architecture not in ARCHITECTURES:
        raise ModelFormatError(
            f"{name!r} is of the family {peek.architecture[:40]!r}, which is not supported yet; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    if peek.unsupported:
        raise ModelFormatError(
            f"{name!r} has numbers of type {', '.join(peek.unsupported)}, which are not supported; "
            f"supported: {', '.join(FORMATS)}. Name another quantization."
        )
    return peek.architecture
