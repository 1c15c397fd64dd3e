"""Typed, bounded reading of the metadata of model files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.core.errors import ModelFormatError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# Far above every known model, and low enough that a damaged file cannot ask for huge memory.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1 << 10
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 31
MAX_EXPERTS = 1 << 10
# Numbers stay within these, so that their products and powers stay finite.
_SMALLEST, _LARGEST = 1e-30, 1e30

_MOST_SHOWN = 60  # characters of a word in an error
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """The values of file `name` by key; each reading checks type and range.

    `prefix` is prepended to every key. Every fault is a ModelFormatError that names the file, the
    key and the limit.
    """

    name: str
    values: Mapping[str, Any]
    prefix: str = ""

    def within(self, prefix: str) -> Fields:
        """Return the same values, with `prefix` before every key."""
        return Fields(self.name, self.values, prefix)

    def value(self, key: str) -> Any:
        """Return the value at `key`, unchecked; None if it is missing."""
        return self.values.get(self.prefix + key)

    def fault(self, text: str, hint: str = "") -> NoReturn:
        """Raise a ModelFormatError about this file; `hint` is a further sentence."""
        raise ModelFormatError(f"{self.name!r} {text}.{hint}")

    def refuse(self, key: str, problem: str, hint: str = "") -> NoReturn:
        """Raise a ModelFormatError about the value at `key`."""
        self.fault(f"has {self.prefix}{key} = {_shown(self.value(key))}, {problem}", hint)

    def only(self, known: Collection[str]) -> None:
        """Refuse a key that is none of `known`, with the nearest of them."""
        for key in self.values:
            if key not in known:
                self.fault(f"has {_shown(key)}, which is not one of its keys", _nearest(key, known))

    def word(self, key: str, known: Collection[str]) -> str:
        """Return the text at `key`, one of `known`."""
        value = self.text(key)
        if value not in known:
            self.refuse(key, f"not one of {', '.join(known)}", _nearest(value, known))
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.value(key) is not None

    def integer(self, key: str, high: int, *, low: int = 1, default: Any = _REQUIRED) -> int:
        """Return the whole number at `key`, from `low` to `high`, or `default` if there is none."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"not a whole number from {low} to {high}")
        return value

    def number(
        self, key: str, *, above: float = 0.0, low: float = 0.0, default: Any = _REQUIRED
    ) -> float:
        """Return the finite number at `key`, or `default` if there is none.

        It must be above `above`, and at least `low` if that is given.
        """
        value = self._value(key, default)
        is_number = type(value) in {int, float}
        # Comparing before converting: an int may be too large for a float.
        if not is_number or not max(above, _SMALLEST) < value < _LARGEST or value < low:
            self.refuse(key, f"not a number {_bound(value if is_number else 0, above, low)}")
        return float(value)

    def optional_number(
        self, key: str, *, low: float = 0.0, default: float | None = None
    ) -> float | None:
        """Return the number at `key` as `number` does, None for zero, `default` if not there."""
        value = self.value(key)
        if type(value) in {int, float} and value == 0:
            return None
        return default if value is None else self.number(key, low=low)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return the `count` numbers above zero of the list at `key`."""
        values = self._value(key, _REQUIRED)
        if not isinstance(values, list) or len(values) != count:
            self.fault(f"has {self.prefix}{key} that is not a list of {count} numbers")
        entries = Fields(self.name, {f"{self.prefix}{key}[{i}]": v for i, v in enumerate(values)})
        return tuple(entries.number(name) for name in entries.values)

    def part(self, key: str) -> Fields | None:
        """Return the object at `key` as `Fields`, or None if there is none."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fault(f"has {self.prefix}{key} that is not an object")
        return Fields(f"{self.name}: {key}", value)

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Return the `count` truth values of the list at `key`."""
        values = self._value(key, _REQUIRED)
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(type(value) is bool for value in values):
            self.fault(f"has {self.prefix}{key} that is not a list of {count} truth values")
        return tuple(values)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return the truth value at `key`, or `default` if there is none."""
        value = self._value(key, default)
        if type(value) is not bool:
            self.refuse(key, "not true or false")
        return value

    def text(self, key: str, *, default: Any = _REQUIRED) -> str:
        """Return the text at `key`, or `default` if there is none."""
        value = self._value(key, default)
        if type(value) is not str:
            self.refuse(key, "not text")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return the text at `key`, or None."""
        return self.text(key) if self.has(key) else None

    def token_ids(self, key: str, num_tokens: int) -> tuple[int, ...]:
        """Return the token id, or list of ids, at `key`, each below `num_tokens`; () if none."""
        value = self.value(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for place, one in enumerate(ids):
            if type(one) is not int or not 0 <= one < num_tokens:
                where = f"{key}[{place}]" if isinstance(value, list) else key
                wrong = f"{self.prefix}{where} = {_shown(one)}"
                self.fault(f"has {wrong}, not a token id from 0 to {num_tokens - 1}")
        return tuple(ids)

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse a model in which `key` has a value that is not one of `allowed`."""
        value = self.value(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            self.refuse(key, "which is not supported yet")

    def _value(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.fault(f"does not say {self.prefix}{key}")
        return default


def _bound(value: float, above: float, low: float) -> str:
    """Return in words which limit a number does not keep."""
    if value >= _LARGEST:
        return f"below {_LARGEST:g}"
    if low:
        return f"of at least {low:g}"
    limit = _SMALLEST if value > above else above
    return f"above {limit:g}" if limit else "above zero"


def _nearest(word: str, known: Collection[str]) -> str:
    return nearest(word[:_MOST_SHOWN], known)


def _shown(value: Any) -> str:
    """Show a value in an error: short, and in one line."""
    if isinstance(value, int):
        # Too many digits would not even be converted to text.
        return str(value) if abs(value) < 1 << 64 else "a huge number"
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]!r}…"
    return f"a {type(value).__name__}"
