"""Tells from the beginning of a model's file whether it can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.files import read_json
from twostroke.models import ARCHITECTURES
from twostroke.models.fields import Fields
from twostroke.weights.gguf import TruncatedError, read_header
from twostroke.weights.hf_model import hf_fields, hf_spec, refuse_architecture
from twostroke.weights.tensors import refuse_unsupported

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
    try:
        header = read_header(path)
    except TruncatedError:
        return None
    fields = Fields(name, header.metadata)
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        refuse_architecture(fields, architecture, ARCHITECTURES)
    refuse_unsupported(name, {one.name: one.dtype for one in header.entries if not one.format})
    return architecture
