"""Whether two schemas exclude each other, as far as that is easy to see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.schema.branch import key, kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.schema.branch import Branch, State

    Expand = Callable[[State], Sequence[Branch]]
    Merge = Callable[[Sequence[State | None]], State | None]

_DEEPEST: Final = 3
_MOST_BRANCHES: Final = 12


def are_apart(one: State, other: State, expand: Expand, merge: Merge, depth: int = 0) -> bool:
    """Return whether no value fits both states; false if that is hard to see."""
    a, b = expand(one), expand(other)
    if len(a) * len(b) > _MOST_BRANCHES**2:
        return False
    return all(_apart(x, y, expand, merge, depth) for x in a for y in b)


def _apart(x: Branch, y: Branch, expand: Expand, merge: Merge, depth: int) -> bool:
    """Return whether no value fits both branches."""
    kinds = x.kinds & y.kinds
    values = [branch.allowed() for branch in (x, y)]
    known = [
        (branch, list_) for branch, list_ in zip((y, x), values, strict=True) if list_ is not None
    ]
    if known:
        other, list_ = known[0]
        keys = None if len(known) < 2 else {key(value) for value in known[1][1]}
        return not any(
            other.is_allowed(value) if keys is None else key(value) in keys
            for value in list_
            if kind(value) in kinds
        )
    if kinds & {"null", "boolean"}:
        return False
    if "string" in kinds and not x.lengths.narrowed(y.lengths.low, y.lengths.high).is_empty:
        return False
    if kinds & {"integer", "fraction"} and not _numbers_apart(x, y):
        return False
    if "array" in kinds and not _arrays_apart(x, y, expand, merge, depth):
        return False
    return "object" not in kinds or _objects_apart(x, y, expand, merge, depth)


def _numbers_apart(x: Branch, y: Branch) -> bool:
    both = x.copy()
    if y.least is not None:
        both.limit_low(y.least[0], is_open=y.least[1])
    if y.most is not None:
        both.limit_high(y.most[0], is_open=y.most[1])
    low, high = both.least, both.most
    return bool(low and high) and not both.has_range()


def _arrays_apart(x: Branch, y: Branch, expand: Expand, merge: Merge, depth: int) -> bool:
    both = x.items.narrowed(y.items.low, y.items.high)
    if both.is_empty:
        return True
    return any(
        _states_apart(x.item(place), y.item(place), expand, merge, depth)
        for place in range(min(both.low, _DEEPEST))
    )


def _objects_apart(x: Branch, y: Branch, expand: Expand, merge: Merge, depth: int) -> bool:
    if x.members.narrowed(y.members.low, y.members.high).is_empty:
        return True
    return any(
        _states_apart(x.member(name), y.member(name), expand, merge, depth)
        for name in [*x.required, *(name for name in y.required if name not in x.required)]
    )


def _states_apart(
    x: Sequence[State | None],
    y: Sequence[State | None],
    expand: Expand,
    merge: Merge,
    depth: int,
) -> bool:
    a, b = merge(x), merge(y)
    if a is None or b is None:
        return True
    if not a or not b or depth == _DEEPEST:
        return False
    return are_apart(a, b, expand, merge, depth + 1)
