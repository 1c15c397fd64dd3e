"""Reads from a model's files how its hidden states are pooled into an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.files import is_there, read_small_file
from twostroke.core.json_io import read_json
from twostroke.model.weights.safetensors import decode_json

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.families.fields import Fields

# GGUF's numbers (llama.cpp's `llama_pooling_type`); 0 is none.
_GGUF_TYPES: Final = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
# sentence-transformers: values of `pooling_mode`, and its older flags.
_NAMES_BY_MODE: Final = {"lasttoken": "last"}
_NAMES_BY_FLAG: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_SUPPORTED_MODULES: Final = {"Transformer", "Pooling", "Normalize"}


class _Module(msgspec.Struct):
    """A step of an embedding model, as sentence-transformers' `modules.json` lists it.

    `type` is the import path of the step's class.
    """

    type: str


def gguf_pooling(fields: Fields) -> str | None:
    """Return how a GGUF file's metadata pools hidden states into an embedding.

    None if the metadata lacks the key `*.pooling_type`. If its number is unknown, a description of
    the number is returned, for the error message.
    """
    number = fields.with_prefix(f"{fields.text('general.architecture')}.").value("pooling_type")
    if number is None or number == 0:
        return None
    return _GGUF_TYPES.get(number, f"pooling type {number!s:.20}")


def folder_pooling(folder: Path) -> str | None:
    """Return how a folder's sentence-transformers files pool hidden states into an embedding.

    None without such files. If they name several poolings, or steps after the pooling, all names
    are joined by `+`, a name that the caller refuses.

    Raises:
        ModelFormatError: a file is damaged.
    """
    poolings: list[str] = []
    config = folder / "1_Pooling" / "config.json"
    if is_there(config):
        fields = read_json(config)
        poolings = [pooling for flag, pooling in _NAMES_BY_FLAG.items() if fields.get(flag) is True]
        if isinstance(word := fields.get("pooling_mode"), str):
            poolings = [_NAMES_BY_MODE.get(word, word[:40])]
    file = folder / "modules.json"
    if is_there(file):
        modules = decode_json(read_small_file(file), list[_Module], file.name)
        kinds = [module.type.rpartition(".")[2][:40] for module in modules]
        poolings += [kind for kind in kinds if kind not in _SUPPORTED_MODULES]
    return "+".join(poolings) or None
