"""Reads from a model's files how its hidden states are pooled into embeddings."""

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
# sentence-transformers: the words of `pooling_mode`, and its older flags.
_WORDS: Final = {"lasttoken": "last"}
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_PLAIN_MODULES: Final = {"Transformer", "Pooling", "Normalize"}


class _Module(msgspec.Struct):
    """An entry of `modules.json`; `type` is the path of a class."""

    type: str


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
    ways: list[str] = []
    config = folder / "1_Pooling" / "config.json"
    if is_there(config):
        fields = read_json(config)
        ways = [way for flag, way in _FLAGS.items() if fields.get(flag) is True]
        if isinstance(word := fields.get("pooling_mode"), str):
            ways = [_WORDS.get(word, word[:40])]
    file = folder / "modules.json"
    if is_there(file):
        modules = decode_json(read_small_file(file), list[_Module], file.name)
        kinds = [module.type.rpartition(".")[2][:40] for module in modules]
        ways += [kind for kind in kinds if kind not in _PLAIN_MODULES]
    return "+".join(ways) or None
