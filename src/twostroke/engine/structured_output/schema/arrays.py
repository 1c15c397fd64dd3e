"""Writes llguidance's schemas for the arrays that a JSON schema allows."""

from __future__ import annotations

import json
from itertools import chain, product
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.branch import key
from twostroke.engine.structured_output.schema.overlap import are_disjoint
from twostroke.engine.structured_output.schema.scalars import can_be_written, to_json_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.engine.structured_output.schema.branch import Contains, SchemaBranch, State
    from twostroke.engine.structured_output.schema.expand import Expander

    Schema = dict[str, Any]
    Child = Callable[[Sequence[State | None]], Schema | bool]

_MAX_LISTED_ARRAYS: Final = 400  # arrays of distinct items that are written one by one
_MAX_LISTED_CHARS: Final = 20_000  # of these arrays
_MAX_COMPARED_ITEMS: Final = 8  # that are compared pair by pair
# The items that `contains` requires are written as a run: where it may begin, and by how many items
# it may exceed the minimum.
_MAX_RUN_STARTS: Final = 8
_MAX_EXTRA_IN_RUN: Final = 4
# Several `contains` are enforced together: how many, and at how many positions each.
_MAX_CONTAINS_KEYWORDS: Final = 3
_MAX_POSITIONS: Final = 4
_NO_ITEMS: Final[Mapping[int, Sequence[Contains]]] = {}
_MAX_MIN_CONTAINS: Final = 64


def arrays(branch: SchemaBranch, expander: Expander, child: Child) -> Iterator[Schema]:
    """Yield llguidance's schemas for the arrays that a branch of a JSON schema allows.

    A branch is a set of keywords that a value must all fit. Keywords that the yielded schemas do
    not enforce are added to the branch's `unenforced_keywords`, so that finished answers are
    checked. `child` returns the schema of an item that must fit some states (sets of schemas).
    """
    listed = _distinct_arrays(branch, expander)
    if listed is not None:
        if listed:
            yield {"enum": listed}
        return
    limiting = [
        contains
        for contains in branch.contains
        if contains.min_count or contains.max_count is not None
    ]
    if not limiting:
        yield from _array_schema(branch, child)
        return
    are_simple = all(contains[1:3] == (1, None) for contains in limiting)
    if 1 < len(limiting) <= _MAX_CONTAINS_KEYWORDS and are_simple:
        yield from _containing_each(branch, limiting, child)
        return
    for contains in limiting[1:]:
        branch.add_gap(contains.location)
    yield from _containing(branch, limiting[0], child)


def _containing_each(
    branch: SchemaBranch, keywords: Sequence[Contains], child: Child
) -> Iterator[Schema]:
    """Yield array schemas for several `contains` keywords: fitting items are at fixed indices.

    Each yielded schema demands, for each keyword, that the item at one of the first
    `_MAX_POSITIONS` indices fits. The same item may fit several keywords.
    """
    high = branch.num_items.high
    for indices in product(range(_MAX_POSITIONS), repeat=len(keywords)):
        if high is None or max(indices) < high:
            fixed: dict[int, list[Contains]] = {}
            for index, contains in zip(indices, keywords, strict=True):
                fixed.setdefault(index, []).append(contains)
            yield from _array_schema(branch, child, fixed)


def _containing(branch: SchemaBranch, contains: Contains, child: Child) -> Iterator[Schema]:
    """Yield array schemas for one `contains` keyword, each with consecutive fitting items.

    If `maxContains` limits the number of fitting items, all other items must not fit.
    """
    low = contains.min_count
    high = branch.num_items.high
    max_run = low
    if contains.max_count is not None:
        max_run = min(contains.max_count, low + _MAX_EXTRA_IN_RUN)
        if contains.max_count < low:
            return
    if low > _MAX_MIN_CONTAINS:
        branch.add_gap(contains.location)
        yield from _array_schema(branch, child)
        return
    for count in range(low, max_run + 1):
        for first in range(_MAX_RUN_STARTS if count else 1):
            if high is not None and first + count > high:
                break
            fixed = {index: [contains] for index in range(first, first + count)}
            yield from _array_schema(branch, child, fixed, limited=contains)


def _array_schema(
    branch: SchemaBranch,
    child: Child,
    fixed: Mapping[int, Sequence[Contains]] = _NO_ITEMS,
    limited: Contains | None = None,
) -> Iterator[Schema]:
    """Yield llguidance's schema of a branch's arrays; nothing if no array fits.

    Args:
        branch: keywords of a JSON schema that a value must all fit.
        child: returns the schema for an item that must fit some states.
        fixed: maps an index to the `contains` keywords that the item at this index must fit.
        limited: a `contains` keyword. If it has a maximum, the items that are not in `fixed` must
            not fit it.
    """
    parts = [*branch.arrays, *branch.unevaluated_items()]
    end = max(fixed, default=-1) + 1
    length = max([end, *(len(part.first) for part in parts)])
    low, high = max(branch.num_items.low, end), branch.num_items.high
    others: list[State | None] = []
    if limited is not None and limited.max_count is not None:
        others.append((limited.item.flipped,))
    if high is not None:
        length = min(length, high)
    first = []
    for index in range(length):
        if index in fixed:
            scope = tuple(chain.from_iterable(contains.scope for contains in fixed[index]))
            evaluated = [*branch.arrays, *branch.unevaluated_items(excluded_scope=scope)]
            items: list[State] = [(contains.item,) for contains in fixed[index]]
            first.append(child([*(part.of(index) for part in evaluated), *items]))
        else:
            first.append(child([*branch.item(index), *others]))
    rest = child([*(part.others for part in parts), *others])
    if any(item is False for item in first[:low]) or (low > length and rest is False):
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


def _distinct_arrays(branch: SchemaBranch, expander: Expander) -> list[list[Any]] | None:
    """List all arrays that a branch's `uniqueItems` allows, if they are few.

    The list then replaces the keyword in the grammar. Returns None without `uniqueItems`, if items
    are distinct anyway, or if the arrays are too many to list. In the last case the grammar does
    not enforce `uniqueItems`, and the finished answer is checked.
    """
    high = branch.num_items.high
    if branch.unique is None or (high is not None and high < 2):
        return None
    length = max((len(part.first) for part in branch.arrays), default=0)
    state = expander.state(branch.item(length))
    is_closed = state is None or (high is not None and high <= length)
    if (
        is_closed
        and length <= _MAX_COMPARED_ITEMS
        and _are_items_disjoint(branch, expander, length)
    ):
        return None
    listed = None if branch.contains else _list_arrays(branch, expander, length)
    if listed is None:
        branch.add_gap(branch.unique)
    return listed


def _list_arrays(branch: SchemaBranch, expander: Expander, length: int) -> list[list[Any]] | None:
    """List all arrays with distinct items that a branch of a JSON schema allows.

    None if they are too many, or a schema of items does not list its values. All items from the
    index `length` on have the same schema.
    """
    low, high = branch.num_items.low, branch.num_items.high
    values_at: dict[int, dict[Any, Any] | None] = {}
    listed: list[list[Any]] = []
    beginnings: list[dict[Any, Any]] = [{}]  # distinct items by their keys
    count = num_characters = 0
    while beginnings:
        if count >= low:
            listed += [list(items.values()) for items in beginnings]
            num_characters += len(json.dumps(listed[-len(beginnings) :], default=str))
        if len(beginnings) > _MAX_LISTED_ARRAYS or len(listed) > _MAX_LISTED_ARRAYS:
            return None
        if num_characters > _MAX_LISTED_CHARS:
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
    return listed


def _are_items_disjoint(branch: SchemaBranch, expander: Expander, length: int) -> bool:
    """Return whether no two of an array's first `length` items can be equal, by their schemas."""
    states = [expander.state(branch.item(index)) for index in range(length)]
    return all(
        state is None or other is None or are_disjoint(state, other, expander)
        for index, state in enumerate(states)
        for other in states[:index]
    )


def _values(expander: Expander, state: State) -> dict[Any, Any] | None:
    """Return the JSON values that fit a state, by key; None if its schemas do not list values.

    A state is a set of schemas that a value must all fit. Used to list all arrays of such values.
    """
    values_by_key: dict[Any, Any] = {}
    for branch in expander.branches(state):
        values = branch.allowed()
        if values is None or branch.patterns or branch.unenforced_keywords:
            return None
        values_by_key |= {key(value): to_json_value(value) for value in values}
    return {
        name: value
        for name, value in values_by_key.items()
        if not isinstance(value, str) or can_be_written(value)
    }
