"""Branches of arrays, as llguidance reads them."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

from twostroke.schema.branch import key
from twostroke.schema.overlap import are_apart
from twostroke.schema.scalars import can_be_written, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.schema.branch import Branch, Contains, State
    from twostroke.schema.expand import Expander

    Schema = dict[str, Any]
    Child = Callable[[Sequence[State | None]], Schema | bool]

_MOST_UNIQUE: Final = 4  # values whose orders are spelled
_MOST_APART: Final = 8  # items that are compared with one another
_MOST_PLACES: Final = 8  # where the first item of those that `contains` asks for may be
_MOST_IN_ROW: Final = 4  # of those items
_LONGEST: Final = 64  # array whose places are looked at one by one


def arrays(branch: Branch, expander: Expander, child: Child) -> Iterator[Schema]:
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
    for one in asked[1:]:
        branch.gap(one.place)
    yield from _containing(branch, asked[0], child)


def _containing(branch: Branch, asked: Contains, child: Child) -> Iterator[Schema]:
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
            yield from _made(branch, child, range(first, first + count), asked)


def _made(
    branch: Branch, child: Child, fixed: range = range(0), asked: Contains | None = None
) -> Iterator[Schema]:
    """Yield the schema of arrays of which the items at `fixed` places are those `asked` for."""
    parts = [*branch.arrays, *branch.unevaluated_items()]
    length = max([fixed.stop, *(len(part.first) for part in parts)])
    low, high = max(branch.items.low, fixed.stop), branch.items.high
    others: list[State | None] = []
    if asked is not None and asked.most is not None:
        others.append((asked.item.flipped,))
    if high is not None:
        length = min(length, high)
    first = []
    for place in range(length):
        if asked is not None and place in fixed:
            around = [*branch.arrays, *branch.unevaluated_items(but=asked.scope)]
            first.append(child([*(part.of(place) for part in around), (asked.item,)]))
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


def _distinct(branch: Branch, expander: Expander) -> list[list[Any]] | None:
    """Return all arrays of distinct items if they are few; else note that they may repeat."""
    high = branch.items.high
    if branch.unique is None or (high is not None and high < 2):
        return None
    state = expander.state(branch.item(max((len(p.first) for p in branch.arrays), default=0)))
    length = max((len(part.first) for part in branch.arrays), default=0)
    if state is None or (high is not None and high <= length):
        if length <= _MOST_APART and _are_apart(branch, expander, length):
            return None
    elif not length and not branch.contains and state:
        values = _values(expander, state)
        if values is not None and len(values) <= _MOST_UNIQUE:
            most = len(values) if high is None else min(high, len(values))
            return [
                list(chosen)
                for count in range(branch.items.low, most + 1)
                for chosen in permutations(values, count)
            ]
    branch.gap(branch.unique)
    return None


def _are_apart(branch: Branch, expander: Expander, length: int) -> bool:
    """Return whether no two of the first items can be equal."""
    states = [expander.state(branch.item(place)) for place in range(length)]
    return all(
        one is None or other is None or are_apart(one, other, expander)
        for place, one in enumerate(states)
        for other in states[:place]
    )


def _values(expander: Expander, state: State) -> list[Any] | None:
    """Return the values that fit a state, if they are listed."""
    found: dict[Any, Any] = {}
    for branch in expander.branches(state):
        values = branch.allowed()
        if values is None or branch.patterns or branch.gaps:
            return None
        found |= {key(one): written(one) for one in values}
    return [one for one in found.values() if not isinstance(one, str) or can_be_written(one)]
