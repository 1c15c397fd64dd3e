"""How long Ollama's clients want a model to stay loaded: the field `keep_alive`."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

from twostroke.core.errors import RequestError
from twostroke.server.body import field

KeepAlive = Annotated[
    str | float | None,
    field.doc(
        "How long the model stays loaded after this request, if the server has several: seconds, "
        "or a text such as `5m` or `1h30m`; 0 unloads it at once, a negative number never."
    ),
]

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")
_NUMBER: Final = re.compile(r"[+-]?\d{1,12}(\.\d{0,9})?")


def keep_s(asked: Any) -> float | None:
    """Return the seconds of a request's `keep_alive`, inf for ever; None if it does not say.

    Raises:
        RequestError: it is not a time.
    """
    value: str | float | None = asked.keep_alive
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _seconds(value.strip())
    return math.inf if value < 0 or math.isnan(value) else float(value)


def _seconds(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    bare = text.lstrip("+-")
    parts = _PART.findall(bare)
    if not parts or "".join(number + unit for number, unit in parts) != bare:
        reason = "must be seconds, or a time such as 5m or 1h30m, got '{value}'."
        raise RequestError(reason, field="keep_alive", value=text[:40])
    total_s = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return -total_s if text.startswith("-") else total_s
