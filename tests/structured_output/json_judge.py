"""Whether a text is a JSON value that fits a schema, by a validator that is not ours.

`jsonschema` with exact numbers, patterns that read `$` as ECMA-262 does, and strict formats.
"""

from __future__ import annotations

import decimal
import ipaddress
import json
import re
import uuid
from datetime import date
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from jsonschema import FormatChecker
from jsonschema.validators import validator_for

if TYPE_CHECKING:
    from collections.abc import Callable

    Pairs = list[tuple[str, Any]]

_MAX_EXPONENT = 400  # of a number's exponent: what is beyond is as large, or as small, as anything
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:z|Z|([+-])(\d\d):(\d\d))", re.ASCII)
_DURATION = re.compile(
    r"P(?:\d+W|(?=[\dT])(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?=\d)(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)",
    re.ASCII,
)
_EMAIL = re.compile(
    r"[\w!#$%&'*+/=?^`{|}~-]+(?:\.[\w!#$%&'*+/=?^`{|}~-]+)*@\S+|\".*\"@\S+", re.ASCII
)


REPEATED = "members repeat"


def fault(schema: Any, text: str) -> str | None:
    """Return why a text is not a valid value of a schema, or None.

    A text in which members repeat must be valid whether the first or the last of them is read; then
    the fault is no more than `REPEATED`.
    """
    with decimal.localcontext(decimal.Context(prec=2000)):
        exact_schema = json.loads(json.dumps(_rewritten(schema)), parse_float=_number)
        validator = validator_for(exact_schema)(exact_schema, format_checker=_checker())
        try:
            last, first = _read(text, dict), _read(text, lambda pairs: dict(reversed(pairs)))
        except ValueError as error:
            return str(error)
        for value in (last, first):
            for error in validator.iter_errors(value):
                return f"{error.validator}: {error.message[:200]}"
        try:
            _read(text, _unique)
        except ValueError:
            return REPEATED
        return None


def _read(text: str, make_object: Callable[[Pairs], Any]) -> Any:
    return json.loads(
        text,
        object_pairs_hook=make_object,
        parse_float=_number,
        parse_int=_number,
        parse_constant=_constant,
    )


def _unique(pairs: Pairs) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError(REPEATED)
    return dict(pairs)


def _number(text: str) -> Any:
    digits, _, exponent = text.lower().partition("e")
    number = Decimal(digits).scaleb(max(-_MAX_EXPONENT, min(_MAX_EXPONENT, int(exponent or 0))))
    return int(number) if number == number.to_integral_value() else number


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _rewritten(schema: Any) -> Any:
    """Return a schema with patterns as Python's `re` needs them: its `$` allows a line break."""
    if isinstance(schema, list):
        return [_rewritten(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    results = {name: _rewritten(inner) for name, inner in schema.items()}
    if isinstance(results.get("pattern"), str):
        results["pattern"] = results["pattern"].replace("$", r"\Z")
    if isinstance(results.get("patternProperties"), dict):
        patterns = results["patternProperties"]
        results["patternProperties"] = {
            pattern.replace("$", r"\Z"): patterns[pattern] for pattern in patterns
        }
    return results


def _checker() -> FormatChecker:
    checker = FormatChecker([])
    checker.checkers = {
        name: (_only_strings(check), ValueError) for name, check in _FORMATS.items()
    }
    return checker


def _only_strings(check: Callable[[str], bool]) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, str) or check(value)


def _is_date(text: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None and bool(
        date.fromisoformat(text)
    )


def _is_time(text: str) -> bool:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return False
    hour, minute, second = (int(match[i]) for i in (1, 2, 3))
    offset = (int(match[5]), int(match[6])) if match[4] else (0, 0)
    if hour > 23 or minute > 59 or second > 60 or offset[0] > 23 or offset[1] > 59:
        return False
    offset_minutes = (60 * offset[0] + offset[1]) * (-1 if match[4] == "-" else 1)
    return second < 60 or (60 * hour + minute - offset_minutes) % (24 * 60) == 24 * 60 - 1


def _is_date_time(text: str) -> bool:
    return len(text) > 10 and text[10] in "Tt" and _is_date(text[:10]) and _is_time(text[11:])


_FORMATS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": _is_date_time,
    "duration": lambda text: _DURATION.fullmatch(text) is not None and len(text) > 1,
    "email": lambda text: _EMAIL.fullmatch(text) is not None,
    "ipv4": lambda text: text.isascii() and bool(ipaddress.IPv4Address(text)),
    "ipv6": lambda text: text.isascii() and "%" not in text and bool(ipaddress.IPv6Address(text)),
    "uuid": lambda text: str(uuid.UUID(text)) == text.lower(),
}
