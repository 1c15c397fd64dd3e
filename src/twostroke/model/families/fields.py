"""Reads a model file's metadata, and checks the type and the limits of each value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from twostroke.core.errors import ModelFormatError, warn_of_wrong_token_id
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Mapping

    T = TypeVar("T")

# Far above every known model, but low enough that a damaged file cannot cause huge allocations.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1 << 10
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31
MAX_EXPERTS = 1 << 10
# Numbers stay within these limits, so that their products and powers stay finite.
_MIN_NUMBER, _MAX_NUMBER = 1e-30, 1e30

_MAX_TEXT_CHARS = 60  # characters of a file's text in an error
_REQUIRED: Any = object()


class Fields(Frozen):
    """Reads the metadata of a model file (GGUF or config.json), and checks each value.

    Each method returns the value at a key, and checks its type and range. `name` is the file, and
    `prefix` is prepended to every key. Every fault is a ModelFormatError that names the file, the
    key and the limit.
    """

    name: str
    values: Mapping[str, Any]
    prefix: str = ""

    def with_prefix(self, prefix: str) -> Fields:
        """Return a reader of the same metadata that puts `prefix` before every key."""
        return Fields(self.name, self.values, prefix)

    def changed(self, values: Mapping[str, Any]) -> Fields:
        """Return a reader of the same metadata in which some keys have other values."""
        changed_values = {self.prefix + key: value for key, value in values.items()}
        return Fields(self.name, {**self.values, **changed_values}, self.prefix)

    def value(self, key: str) -> Any:
        """Return the metadata value at `key`, unchecked; None if it is missing."""
        return self.values.get(self.prefix + key)

    def fault(self, text: str) -> NoReturn:
        """Raise a ModelFormatError with the text "'NAME' TEXT.", where NAME is the model file."""
        raise ModelFormatError(f"{self.name!r} {text}.")

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise a ModelFormatError about the value at a metadata key.

        `problem` is the end of the message, after the key and the value.
        """
        self.fault(f"has {self.prefix}{key} = {_format_value(self.value(key))}, {problem}")

    def has(self, key: str) -> bool:
        """Whether the metadata has the key, with a value other than null."""
        return self.value(key) is not None

    def integer(self, key: str, high: int, *, low: int = 1, default: Any = _REQUIRED) -> int:
        """Return the whole number at a metadata key, from `low` to `high`.

        A list of equal numbers, one for each layer, counts as one number, since some converters
        write such lists for every model. If the key is missing, return `default`, or raise
        ModelFormatError without one.
        """
        value = self._value(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"not a whole number from {low} to {high}")
        return value

    def number(
        self,
        key: str,
        *,
        low: float = _MIN_NUMBER,
        high: float = _MAX_NUMBER,
        default: Any = _REQUIRED,
    ) -> float:
        """Return the number at a metadata key, from `low` to `high`.

        If the key is missing, return `default`, or raise ModelFormatError without one.
        """
        value = self._value(key, default)
        # Comparing before converting: an int may be too large for a float.
        if type(value) not in {int, float} or not low <= value <= high:
            self.refuse(key, f"not a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(
        self, key: str, *, low: float = _MIN_NUMBER, default: float | None = None
    ) -> float | None:
        """Return the number at a metadata key; None if it is 0, `default` if the key is missing."""
        value = self.value(key)
        if type(value) in {int, float} and value == 0:
            return None
        return default if value is None else self.number(key, low=low)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return the list of `count` positive numbers at a metadata key."""
        values = self._value(key, _REQUIRED)
        if not isinstance(values, list) or len(values) != count:
            self.fault(
                f"has {self.prefix}{key} that is not a list of {counted_noun(count, 'number')}"
            )
        entries = Fields(self.name, {f"{self.prefix}{key}[{i}]": v for i, v in enumerate(values)})
        return tuple(entries.number(name) for name in entries.values)

    def part(self, key: str) -> Fields | None:
        """Return a reader of the JSON object at a metadata key; None if the key is missing."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fault(f"has {self.prefix}{key} that is not an object")
        return Fields(f"{self.name}: {key}", value)

    def choices(self, key: str, value_map: Mapping[Any, T], count: int) -> tuple[T, ...]:
        """Return the list of `count` values at a metadata key, each translated by `value_map`.

        A value that is not in the map is refused.
        """
        values = self._value(key, _REQUIRED)
        if not isinstance(values, list) or len(values) != count:
            self.fault(
                f"has {self.prefix}{key} that is not a list of {counted_noun(count, 'value')}"
            )
        for value in values:
            if not isinstance(value, str | int) or value not in value_map:
                supported = ", ".join(map(str, value_map))
                self.fault(
                    f"has {self.prefix}{key} with {_format_value(value)}; supported: {supported}"
                )
        return tuple(value_map[value] for value in values)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the truth value at a metadata key, or `default` if it is missing."""
        value = self._value(key, default)
        if type(value) is not bool:
            self.refuse(key, "not true or false")
        return value

    def text(self, key: str, *, default: Any = _REQUIRED) -> str:
        """Return the text at a metadata key, or `default` if it is missing."""
        value = self._value(key, default)
        if type(value) is not str:
            self.refuse(key, "not text")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return the text at a metadata key, or None if it is missing."""
        return self.text(key) if self.has(key) else None

    def token_ids(self, key: str, num_tokens: int) -> tuple[int, ...]:
        """Return the token id or ids at a metadata key; empty if the key is missing.

        Only ids below `num_tokens` are returned. Other values are left out with a warning: files
        often have -1 where there is no such token.
        """
        value = self.value(key)
        ids = value if isinstance(value, list) else [value]
        token_ids = []
        for token_id in ids:
            if type(token_id) is int and 0 <= token_id < num_tokens:
                token_ids.append(token_id)
            elif token_id is not None:
                warn_of_wrong_token_id(f"{self.prefix}{key}", token_id)
        return tuple(token_ids)

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse the model file unless a metadata value is missing or one of `allowed`.

        Readers call this for fields that Twostroke supports with these values only.
        """
        value = self.value(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            self.refuse(key, "which is not supported yet")

    def _value(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.fault(f"has no {self.prefix}{key}")
        return default


def _format_value(value: Any) -> str:
    """Return a metadata value as text for an error message: short, and in one line."""
    if isinstance(value, int):
        # Too many digits would not even be converted to text.
        return str(value) if abs(value) < 1 << 64 else "a huge number"
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_TEXT_CHARS else f"{value[:_MAX_TEXT_CHARS]!r}…"
    return f"a {type(value).__name__}"
