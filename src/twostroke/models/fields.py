"""Typed, bounded reading of what a model file says about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.core.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Far above every known model, and low enough that a damaged file cannot ask for the moon.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1 << 10
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31

_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """The values of file `name` by key; each reading checks type and range.

    Every fault is a ModelFormatError that names the file, the key and the limit.
    """

    name: str
    values: Mapping[str, Any]

    def fault(self, text: str) -> NoReturn:
        """Raise a ModelFormatError about this file."""
        raise ModelFormatError(f"{self.name!r} {text}.")

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, high: int, *, low: int = 1, default: Any = _REQUIRED) -> int:
        """Return the whole number at `key`, from `low` to `high`, or `default` if there is none."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            self.fault(f"has {key} = {_shown(value)}, not a whole number from {low} to {high}")
        return value

    def number(self, key: str, *, default: Any = _REQUIRED) -> float:
        """Return the finite number above zero at `key`, or `default` if there is none."""
        value = self._value(key, default)
        # Comparing before converting: an int may be too large for a float.
        if type(value) not in {int, float} or not 0 < value < 1e30:
            self.fault(f"has {key} = {_shown(value)}, not a number above zero")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the truth value at `key`, or `default` if there is none."""
        value = self._value(key, default)
        if type(value) is not bool:
            self.fault(f"has {key} = {_shown(value)}, not true or false")
        return value

    def text(self, key: str, *, default: Any = _REQUIRED) -> str:
        """Return the text at `key`, or `default` if there is none."""
        value = self._value(key, default)
        if type(value) is not str:
            self.fault(f"has {key} = {_shown(value)}, not text")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return the text at `key`, or None."""
        return self.text(key) if self.has(key) else None

    def token_ids(self, key: str, num_tokens: int) -> tuple[int, ...]:
        """Return the token id, or list of ids, at `key`, each below `num_tokens`; () if none."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < num_tokens for i in ids):
            self.fault(f"has {key} = {_shown(value)}, not token ids below {num_tokens}")
        return tuple(ids)

    def expect(self, key: str, only: Any) -> None:
        """Refuse a model whose `key` is there and asks for something other than `only`."""
        value = self.values.get(key)
        if value is not None and (type(value) is not type(only) or value != only):
            self.fault(f"has {key} = {_shown(value)}, which is not supported yet")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.fault(f"does not say {key}")
        return default


def _shown(value: Any) -> str:
    """Show a value in an error: short, and in one line."""
    if isinstance(value, bool | int | float):
        # Too many digits would not even be converted to text.
        return str(value) if math.isnan(value) or abs(value) < 1 << 64 else "a huge number"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}…"
    return f"a {type(value).__name__}"
