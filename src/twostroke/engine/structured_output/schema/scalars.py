"""Writes llguidance's schemas for the null, booleans, numbers and strings of a JSON schema."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.branch import kind
from twostroke.engine.structured_output.schema.patterns import pattern_without

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.engine.structured_output.schema.branch import SchemaBranch

    Schema = dict[str, Any]

# llguidance reads numbers as float64, which represents every integer up to this one.
_MAX_EXACT_INTEGER: Final = 2**53
# The largest integer that an answer can have. Without a limit, a weak model would write digits up
# to its token limit. 64-bit keys need 19 digits, and float64 represents this number exactly.
_MAX_INTEGER: Final = 9 * 10**18
# The largest number in `multipleOf`, without and with its trailing zeros. llguidance has a state
# for each remainder, and further states for the zeros.
_MAX_MULTIPLE: Final = 20_000
_MAX_MULTIPLE_WITH_ZEROS: Final = 50_000
_MAX_MULTIPLE_DIGITS: Final = 8


def scalars(branch: SchemaBranch) -> Iterator[Schema]:
    """Yield llguidance's schemas for the scalar values that a branch of a JSON schema allows.

    A branch is a set of keywords that a value must all fit. Keywords that the yielded schemas do
    not enforce are added to the branch's `unenforced_keywords`, so that finished answers are
    checked.
    """
    values = branch.allowed()
    if values is not None:
        yield from _listed_values(branch, values)
        return
    for type_name, all_values in (("null", [None]), ("boolean", [False, True])):
        if type_name in branch.kinds:
            allowed = [value for value in all_values if branch.is_allowed(value)]
            if allowed:
                is_complete = len(allowed) == len(all_values)
                yield {"type": type_name} if is_complete else {"enum": allowed}
    if branch.kinds & {"integer", "fraction"}:
        yield from _numbers(branch)
    if "string" in branch.kinds:
        yield from _strings(branch)


def _listed_values(branch: SchemaBranch, values: Sequence[Any]) -> Iterator[Schema]:
    texts = [value for value in values if isinstance(value, str) and can_be_written(value)]
    others = [value for value in values if not isinstance(value, str) and is_exact(value)]
    for value in others:
        if kind(value) in {"integer", "fraction"} and abs(value) > _MAX_EXACT_INTEGER:
            branch.add_gap("enum (of numbers beyond 2^53)")
    if others:
        yield {"enum": [to_json_value(value) for value in others]}
    if texts:
        yield {"enum": texts, **_patterns(branch, [])}


def _numbers(branch: SchemaBranch) -> Iterator[Schema]:
    both = branch.kinds & {"integer", "fraction"}
    schema: Schema = {"type": "integer" if both == {"integer"} else "number"}
    if both == {"fraction"}:
        branch.add_gap("not (of integers)")
    if branch.multiple is not None:
        multiple = branch.multiple
        if both == {"integer"}:
            multiple = multiple * multiple.denominator
        number = Decimal(multiple.numerator) / Decimal(multiple.denominator)
        if not _is_easy(number):
            branch.add_gap(f"multipleOf (of {number.normalize():f})")
        elif number != 1 or both != {"integer"}:
            schema["multipleOf"] = to_json_value(number)
    excluded = sorted(
        value
        for value in branch.excluded.values()
        if kind(value) in both and branch.has_number(value)
    )
    edges = [branch.minimum, *((value, True) for value in excluded), branch.maximum]
    for low, high in pairwise(edges):
        part = branch.copy()
        part.minimum, part.maximum = low, high
        if part.has_range():
            yield schema | _bounds(branch, *_separate_bounds(low, high))


def _is_easy(multiple: Decimal) -> bool:
    """Return whether llguidance can handle a `multipleOf` exactly and quickly."""
    _, digits, exponent = multiple.normalize().as_tuple()
    size, num_zeros = int("".join(map(str, digits))), int(exponent)
    if size > _MAX_MULTIPLE or abs(num_zeros) > _MAX_MULTIPLE_DIGITS:
        return False
    if num_zeros >= 0:
        return bool(size * 10**num_zeros <= _MAX_MULTIPLE_WITH_ZEROS)
    return bool(_digits_read(float(multiple)) == size)


def _digits_read(number: float) -> float:
    """Return the digits of a fractional `multipleOf` as llguidance reads them, to find errors.

    llguidance multiplies by 10 in float64 until the number is whole, which may round.
    """
    while number % 1:
        number *= 10
    return number


def _bounds(
    branch: SchemaBranch, low: tuple[Any, bool] | None, high: tuple[Any, bool] | None
) -> Schema:
    bounds: Schema = {}
    is_whole = "fraction" not in branch.kinds
    for bound, other, keyword, sign in ((low, high, "inimum", 1), (high, low, "aximum", -1)):
        if bound is None:
            if is_whole and (other is None or other[0] * sign >= -_MAX_EXACT_INTEGER):
                bounds[f"m{keyword}"] = -_MAX_INTEGER * sign
            continue
        number, is_open = bound
        if number * sign > _MAX_EXACT_INTEGER:
            branch.add_gap(f"m{keyword} (beyond 2^53)")
        elif number * sign < -_MAX_EXACT_INTEGER:  # only numbers that float64 represents
            is_larger = is_whole and number * sign < -_MAX_INTEGER
            limit = _MAX_INTEGER if is_larger else _MAX_EXACT_INTEGER
            bounds[f"m{keyword}"] = -limit * sign
        else:
            bounds[f"exclusiveM{keyword}" if is_open else f"m{keyword}"] = to_json_value(number)
            if not is_exact(number):
                branch.add_gap(f"m{keyword} (of {number})")
    return bounds


def _separate_bounds(low: tuple[Any, bool] | None, high: tuple[Any, bool] | None) -> Iterator[Any]:
    """Yield the lower and the upper bound of numbers, in a form that llguidance treats exactly.

    In a range narrower than 1, llguidance would allow a bound that is an integer and excluded. Such
    a bound is moved inwards by a small step.
    """
    if low is None or high is None or high[0] - low[0] >= 1:
        yield from (low, high)
        return
    width = Decimal(high[0]) - low[0]
    step = Decimal(1).scaleb(width.adjusted() - _MAX_MULTIPLE_DIGITS)
    for (number, is_open), sign in ((low, 1), (high, -1)):
        is_moved = is_open and kind(number) == "integer"
        yield (number + sign * step, False) if is_moved else (number, is_open)


def _strings(branch: SchemaBranch) -> Iterator[Schema]:
    schema: Schema = {"type": "string"}
    if branch.lengths.low:
        schema["minLength"] = branch.lengths.low
    if branch.lengths.high is not None:
        schema["maxLength"] = branch.lengths.high
    patterns = []
    excluded = [value for value in branch.excluded.values() if isinstance(value, str)]
    if excluded:
        pattern = pattern_without(excluded)
        if pattern is None:
            branch.add_gap("not (of many strings)")
        else:
            patterns.append(pattern)
    yield schema | _patterns(branch, patterns)


def _patterns(branch: SchemaBranch, more_patterns: Sequence[str]) -> Schema:
    """Return llguidance's keywords for all patterns that a branch's strings must match.

    `more_patterns` are patterns from other keywords, such as the length.
    """
    texts = [text for pattern in branch.patterns for text in (pattern.text, *pattern.other_texts)]
    texts += more_patterns
    if len(texts) < 2:
        return {"pattern": texts[0]} if texts else {}
    return {
        "pattern": texts[0],
        "allOf": [{"type": "string", "pattern": text} for text in texts[1:]],
    }


def to_json_value(value: Any) -> Any:
    """Return a `Decimal` as a number that JSON can write; return other values unchanged."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def is_exact(value: Any) -> bool:
    """Whether llguidance, which reads numbers as float64, represents a JSON value exactly."""
    if kind(value) not in {"integer", "fraction"}:
        return True
    if abs(value) > _MAX_INTEGER:
        return False
    as_float = float(value)
    if kind(value) == "integer":
        return bool(int(as_float) == value)
    return bool(Decimal(repr(as_float)) == value)


def can_be_written(text: str) -> bool:
    """Whether a text can be encoded as UTF-8: it has no lone surrogate."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
