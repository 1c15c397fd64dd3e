"""Reads from a model's files how its hidden states are pooled into embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.errors import ModelFormatError
from twostroke.core.files import read_json, read_json_objects

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.models.fields import Fields

# GGUF's numbers (llama.cpp's `llama_pooling_type`); 0 is none.
_GGUF_TYPES: Final = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
# sentence-transformers: the words of `pooling_mode`, and its older flags.
_WORDS: Final = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_PLAIN_MODULES: Final = {"Transformer", "Pooling", "Normalize"}


def gguf_pooling(fields: Fields) -> str | None:
    """Return the word for a file's `*.pooling_type`; None if it has none.

    An unknown number is returned as words, for the error message.
    """
    number = fields.within(f"{fields.text('general.architecture')}.").value("pooling_type")
    if number is None or number == 0:
        return None
    return _GGUF_TYPES.get(number, f"pooling type {number!s:.20}")


def folder_pooling(folder: Path) -> str | None:
    """Return the pooling by the files of sentence-transformers in a folder; None without any.

    Several kinds at once are joined by `+`, as are modules that would follow the pooling.

    Raises:
        ModelFormatError: a file is damaged.
    """
    modules, place = _modules(folder), "1_Pooling"
    config = folder / place / "config.json"
    if not config.is_file():
        return "+".join(modules) or None
    fields = read_json(config)
    ways = [way for flag, way in _FLAGS.items() if fields.get(flag) is True]
    if isinstance(word := fields.get("pooling_mode"), str):
        ways = [_WORDS.get(word, word[:40])]
    return "+".join([*ways, *modules]) or None


def _modules(folder: Path) -> list[str]:
    """Return the modules of `modules.json` other than the usual ones."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    found = []
    for entry in read_json_objects(file):
        kind = entry.get("type")
        if not isinstance(kind, str):
            raise ModelFormatError(f"{file.name!r} has a module without a type.")
        found.append(kind.rpartition(".")[2][:40])
    return [kind for kind in found if kind not in _PLAIN_MODULES]
