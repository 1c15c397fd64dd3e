"""Reads the sampling parameters that a model's publisher recommends, from the model's files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import RequestError
from twostroke.core.sampling import MODEL_DEFAULT_FIELDS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families.fields import Fields

# The keys of GGUF files, as llama.cpp's converter writes them.
_GGUF_KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_DIGITS: Final = 6  # of float32 numbers: 0.95 is stored as 0.949999988
_logger = logging.getLogger("twostroke.weights")


def folder_sampling(generation_config: Fields) -> SamplingParams:
    """Return the sampling parameters that a model folder's `generation_config.json` recommends.

    Parameters that the file does not have are None. `do_sample` is ignored, since many published
    files have it by accident.
    """
    return _sampling(generation_config, {name: name for name in MODEL_DEFAULT_FIELDS})


def gguf_sampling(fields: Fields) -> SamplingParams:
    """Return the sampling parameters that a GGUF file's metadata recommends.

    Parameters that the metadata does not have are None.
    """
    return _sampling(fields, _GGUF_KEYS)


def _sampling(fields: Fields, keys: Mapping[str, str]) -> SamplingParams:
    """Return the sampling parameters in a model file.

    `keys` maps the name of each parameter to its key in the file. Invalid values are left out with
    a warning.
    """
    values: dict[str, Any] = {}
    for name, key in keys.items():
        value = fields.value(key)
        if value is None:
            continue
        if isinstance(value, float):
            value = float(f"{value:.{_DIGITS}g}")
        if name == "top_k":
            value = _whole_number(value)
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            _logger.warning("%s: %s is not used: %s", fields.name, key, error)
        else:
            values[name] = value
    return SamplingParams(**values)


def _whole_number(value: object) -> object:
    """Return a model file's `top_k` as a whole number.

    -1 becomes 0: both mean that top-k sampling is off.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return 0 if value == -1 else value
