"""Branches of null, booleans, numbers and strings, as llguidance reads them."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.branch import kind
from twostroke.engine.structured_output.schema.patterns import without

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.engine.structured_output.schema.branch import SchemaBranch

    Schema = dict[str, Any]

_EXACT: Final = 2**53  # the largest number up to which llguidance knows each integer
# The largest that is written: without an end, a weak model would write digits up to its limit.
# Keys of 64 bits need 19 digits, and this is a number that llguidance knows.
_LARGEST: Final = 9 * 10**18
# The largest number in `multipleOf`, without its zeros at the end and with them. llguidance has a
# state for each remainder, and further states for the zeros.
_LARGEST_MULTIPLE: Final = 20_000
_LARGEST_WITH_ZEROS: Final = 50_000
_MOST_DIGITS: Final = 8


def scalars(branch: SchemaBranch) -> Iterator[Schema]:
    """Yield schemas of a branch's scalar values, and note in it what they do not hold."""
    values = branch.allowed()
    if values is not None:
        yield from _listed(branch, values)
        return
    for one in ("null", "boolean"):
        if one in branch.kinds:
            known = [None] if one == "null" else [False, True]
            left = [value for value in known if branch.is_allowed(value)]
            if left:
                yield {"type": one} if len(left) == len(known) else {"enum": left}
    if branch.kinds & {"integer", "fraction"}:
        yield from _numbers(branch)
    if "string" in branch.kinds:
        yield from _strings(branch)


def _listed(branch: SchemaBranch, values: Sequence[Any]) -> Iterator[Schema]:
    texts = [value for value in values if isinstance(value, str) and can_be_written(value)]
    others = [value for value in values if not isinstance(value, str) and is_exact(value)]
    for value in others:
        if kind(value) in {"integer", "fraction"} and abs(value) > _EXACT:
            branch.gap("enum (of numbers beyond 2^53)")
    if others:
        yield {"enum": [written(value) for value in others]}
    if texts:
        yield {"enum": texts, **_patterns(branch, [])}


def _numbers(branch: SchemaBranch) -> Iterator[Schema]:
    both = branch.kinds & {"integer", "fraction"}
    schema: Schema = {"type": "integer" if both == {"integer"} else "number"}
    if both == {"fraction"}:
        branch.gap("not (of integers)")
    if branch.multiple is not None:
        multiple = branch.multiple
        if both == {"integer"}:
            multiple = multiple * multiple.denominator
        number = Decimal(multiple.numerator) / Decimal(multiple.denominator)
        if not _is_easy(number):
            branch.gap(f"multipleOf (of {number.normalize():f})")
        elif number != 1 or both != {"integer"}:
            schema["multipleOf"] = written(number)
    excluded = sorted(
        value
        for value in branch.excluded.values()
        if kind(value) in both and branch.has_number(value)
    )
    edges = [branch.least, *((value, True) for value in excluded), branch.most]
    for low, high in pairwise(edges):
        part = branch.copy()
        part.least, part.most = low, high
        if part.has_range():
            yield schema | _bounds(branch, *_apart(low, high))


def _is_easy(multiple: Decimal) -> bool:
    """Return whether llguidance reads a `multipleOf` exactly and handles it quickly."""
    _, digits, exponent = multiple.normalize().as_tuple()
    size, num_zeros = int("".join(map(str, digits))), int(exponent)
    if size > _LARGEST_MULTIPLE or abs(num_zeros) > _MOST_DIGITS:
        return False
    if num_zeros >= 0:
        return bool(size * 10**num_zeros <= _LARGEST_WITH_ZEROS)
    return bool(_digits_read(float(multiple)) == size)


def _digits_read(number: float) -> float:
    """Return a fraction's digits as llguidance reads them, by multiplying with 10 in float64."""
    while number % 1:
        number *= 10
    return number


def _bounds(
    branch: SchemaBranch, low: tuple[Any, bool] | None, high: tuple[Any, bool] | None
) -> Schema:
    found: Schema = {}
    is_whole = "fraction" not in branch.kinds
    for bound, other, keyword, sign in ((low, high, "inimum", 1), (high, low, "aximum", -1)):
        if bound is None:
            if is_whole and (other is None or other[0] * sign >= -_EXACT):
                found[f"m{keyword}"] = -_LARGEST * sign
            continue
        number, is_open = bound
        if number * sign > _EXACT:
            branch.gap(f"m{keyword} (beyond 2^53)")
        elif number * sign < -_EXACT:  # only numbers that llguidance knows
            is_larger = is_whole and number * sign < -_LARGEST
            found[f"m{keyword}"] = -(_LARGEST if is_larger else _EXACT) * sign
        else:
            found[f"exclusiveM{keyword}" if is_open else f"m{keyword}"] = written(number)
            if not is_exact(number):
                branch.gap(f"m{keyword} (of {number})")
    return found


def _apart(low: tuple[Any, bool] | None, high: tuple[Any, bool] | None) -> Iterator[Any]:
    """Yield two bounds, with a whole number that is excluded moved into a range less than 1 wide.

    There, llguidance would allow the number itself.
    """
    if low is None or high is None or high[0] - low[0] >= 1:
        yield from (low, high)
        return
    width = Decimal(high[0]) - low[0]
    step = Decimal(1).scaleb(width.adjusted() - _MOST_DIGITS)
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
        pattern = without(excluded)
        if pattern is None:
            branch.gap("not (of many strings)")
        else:
            patterns.append(pattern)
    yield schema | _patterns(branch, patterns)


def _patterns(branch: SchemaBranch, more: Sequence[str]) -> Schema:
    texts = [text for pattern in branch.patterns for text in (pattern.text, *pattern.other_texts)]
    texts += more
    if len(texts) < 2:
        return {"pattern": texts[0]} if texts else {}
    return {
        "pattern": texts[0],
        "allOf": [{"type": "string", "pattern": text} for text in texts[1:]],
    }


def written(value: Any) -> Any:
    """Return a number as JSON writes it; other values as they are."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def is_exact(value: Any) -> bool:
    """Return whether llguidance represents a value exactly; it reads numbers as float64."""
    if kind(value) not in {"integer", "fraction"}:
        return True
    if abs(value) > _LARGEST:
        return False
    read = float(value)
    return bool(int(read) == value if kind(value) == "integer" else Decimal(repr(read)) == value)


def can_be_written(text: str) -> bool:
    """Return whether the grammar can spell a text: it can unless a surrogate stands alone."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
