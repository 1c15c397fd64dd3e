"""Branches of arrays, as llguidance reads them."""

from __future__ import annotations

import json
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.branch import key
from twostroke.engine.structured_output.schema.overlap import are_apart
from twostroke.engine.structured_output.schema.scalars import can_be_written, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.engine.structured_output.schema.branch import Contains, SchemaBranch, State
    from twostroke.engine.structured_output.schema.expand import Expander

    Schema = dict[str, Any]
    Child = Callable[[Sequence[State | None]], Schema | bool]

_MOST_DISTINCT: Final = 400  # arrays of distinct items that are spelled
_MOST_DISTINCT_TEXT: Final = 20_000  # characters of these arrays
_MOST_APART: Final = 8  # items that are compared with one another
_MOST_PLACES: Final = 8  # where the first item of those that `contains` asks for may be
_MOST_IN_ROW: Final = 4  # of those items
_MOST_CONTAINED: Final = 3  # keywords `contains` that are held together
_MOST_PLACES_OF_EACH: Final = 4  # where the items may be that several `contains` ask for
_NO_PLACES: Final[Mapping[int, Sequence[Contains]]] = {}
_LONGEST: Final = 64  # array whose places are looked at one by one


def arrays(branch: SchemaBranch, expander: Expander, child: Child) -> Iterator[Schema]:
    """Yield schemas of a branch's arrays, and note in it what they do not hold."""
    listed = _distinct(branch, expander)
    if listed is not None:
        if listed:
            yield {"enum": listed}
        return
    asked = [one for one in branch.contains if one.least or one.most is not None]
    if not asked:
        yield from _made(branch, child)
        return
    if 1 < len(asked) <= _MOST_CONTAINED and all(contains[1:3] == (1, None) for contains in asked):
        yield from _containing_each(branch, asked, child)
        return
    for one in asked[1:]:
        branch.gap(one.place)
    yield from _containing(branch, asked[0], child)


def _containing_each(
    branch: SchemaBranch, keywords: Sequence[Contains], child: Child
) -> Iterator[Schema]:
    """Yield arrays with an item for each of several `contains`; an item may fit several of them."""
    high = branch.items.high
    for indices in product(range(_MOST_PLACES_OF_EACH), repeat=len(keywords)):
        if high is None or max(indices) < high:
            fixed: dict[int, list[Contains]] = {}
            for index, contains in zip(indices, keywords, strict=True):
                fixed.setdefault(index, []).append(contains)
            yield from _made(branch, child, fixed)


def _containing(branch: SchemaBranch, asked: Contains, child: Child) -> Iterator[Schema]:
    """Yield arrays with a row of items that fit; if their number is limited, no others do."""
    low, high = asked.least, branch.items.high
    most = low if asked.most is None else min(asked.most, low + _MOST_IN_ROW)
    if asked.most is not None and asked.most < low:
        return
    if low > _LONGEST:
        branch.gap(asked.place)
        yield from _made(branch, child)
        return
    for count in range(low, most + 1):
        for first in range(_MOST_PLACES if count else 1):
            if high is not None and first + count > high:
                break
            fixed = {index: [asked] for index in range(first, first + count)}
            yield from _made(branch, child, fixed, asked)


def _made(
    branch: SchemaBranch,
    child: Child,
    fixed: Mapping[int, Sequence[Contains]] = _NO_PLACES,
    limited: Contains | None = None,
) -> Iterator[Schema]:
    """Yield the schema of arrays whose items at `fixed` places fit some `contains`.

    If `limited` has a most number of items, no others fit it.
    """
    parts = [*branch.arrays, *branch.unevaluated_items()]
    end = max(fixed, default=-1) + 1
    length = max([end, *(len(part.first) for part in parts)])
    low, high = max(branch.items.low, end), branch.items.high
    others: list[State | None] = []
    if limited is not None and limited.most is not None:
        others.append((limited.item.flipped,))
    if high is not None:
        length = min(length, high)
    first = []
    for place in range(length):
        if place in fixed:
            scope = tuple(chain.from_iterable(contains.scope for contains in fixed[place]))
            around = [*branch.arrays, *branch.unevaluated_items(but=scope)]
            items: list[State] = [(contains.item,) for contains in fixed[place]]
            first.append(child([*(part.of(place) for part in around), *items]))
        else:
            first.append(child([*branch.item(place), *others]))
    rest = child([*(part.others for part in parts), *others])
    if any(one is False for one in first[:low]) or (low > length and rest is False):
        return
    is_full = high is not None and high <= length
    schema: Schema = {"type": "array", "items": False if is_full else rest}
    if first:
        schema["prefixItems"] = first
    if low:
        schema["minItems"] = low
    if high is not None:
        schema["maxItems"] = high
    yield schema


def _distinct(branch: SchemaBranch, expander: Expander) -> list[list[Any]] | None:
    """Return all arrays of distinct items if they are few; else note that they may repeat."""
    high = branch.items.high
    if branch.unique is None or (high is not None and high < 2):
        return None
    state = expander.state(branch.item(max((len(p.first) for p in branch.arrays), default=0)))
    length = max((len(part.first) for part in branch.arrays), default=0)
    is_closed = state is None or (high is not None and high <= length)
    if is_closed and length <= _MOST_APART and _are_apart(branch, expander, length):
        return None
    spelled = None if branch.contains else _spelled(branch, expander, length)
    if spelled is None:
        branch.gap(branch.unique)
    return spelled


def _spelled(branch: SchemaBranch, expander: Expander, length: int) -> list[list[Any]] | None:
    """Return all arrays of distinct items; None if they are many, or items are not listed.

    From the place `length` on, all items have the same schema.
    """
    low, high = branch.items.low, branch.items.high
    values_at: dict[int, dict[Any, Any] | None] = {}
    spelled: list[list[Any]] = []
    beginnings: list[dict[Any, Any]] = [{}]  # distinct items by their keys
    count = num_characters = 0
    while beginnings:
        if count >= low:
            spelled += [list(items.values()) for items in beginnings]
            num_characters += len(json.dumps(spelled[-len(beginnings) :], default=str))
        if len(beginnings) > _MOST_DISTINCT or len(spelled) > _MOST_DISTINCT:
            return None
        if num_characters > _MOST_DISTINCT_TEXT:
            return None
        if count == high:
            break
        index = min(count, length)
        if index not in values_at:
            state = expander.state(branch.item(index))
            values_at[index] = {} if state is None else _values(expander, state)
        values = values_at[index]
        if values is None:
            return None
        beginnings = [
            {**items, name: value}
            for items in beginnings
            for name, value in values.items()
            if name not in items
        ]
        count += 1
    return spelled


def _are_apart(branch: SchemaBranch, expander: Expander, length: int) -> bool:
    """Return whether no two of the first items can be equal."""
    states = [expander.state(branch.item(place)) for place in range(length)]
    return all(
        one is None or other is None or are_apart(one, other, expander)
        for place, one in enumerate(states)
        for other in states[:place]
    )


def _values(expander: Expander, state: State) -> dict[Any, Any] | None:
    """Return the values that fit a state by their keys, if they are listed."""
    values_by_key: dict[Any, Any] = {}
    for branch in expander.branches(state):
        values = branch.allowed()
        if values is None or branch.patterns or branch.gaps:
            return None
        values_by_key |= {key(value): written(value) for value in values}
    return {
        name: value
        for name, value in values_by_key.items()
        if not isinstance(value, str) or can_be_written(value)
    }
