"""Whether schemas exclude one another, as far as that is easy to see; and how they are kept to."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.engine.structured_output.schema.branch import SchemaItem, key, kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.engine.structured_output.schema.branch import SchemaBranch, State
    from twostroke.engine.structured_output.schema.document import Document

_DEEPEST: Final = 3
_MOST_BRANCHES: Final = 12
_MOST_ALTERNATIVES: Final = 40  # each of which is compared with each other
# The opposite of a schema is simple if these are all it says.
_PLAIN: Final = frozenset(
    (
        *("$comment", "const", "default", "description", "enum", "examples", "exclusiveMaximum"),
        *("exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum", "minItems"),
        *("minLength", "minProperties", "minimum", "not", "pattern", "required", "title", "type"),
    )
)


class Space(Protocol):
    """The schemas of a document, by states."""

    document: Document

    def state(self, states: Iterable[State | None]) -> State | None:
        """Return the state of values that fit all of these."""

    def branches(self, state: State) -> list[SchemaBranch]:
        """Return branches: a value fits the state if it fits one of them."""


def exclusive(items: Sequence[SchemaItem], space: Space) -> tuple[list[State], bool]:
    """Return alternatives of which one holds and no other, and whether that is certain.

    An alternative that could hold together with another one excludes it.
    """
    if _are_tagged(items, space):
        return [(one,) for one in items], True
    if len(items) > _MOST_ALTERNATIVES:
        return [(one,) for one in items], False
    overlaps = {
        pair
        for one, other in combinations(items, 2)
        if not are_apart((one,), (other,), space)
        for pair in ((one, other), (other, one))
    }
    found: list[State] = []
    is_exact = True
    for one in items:
        near = [_excluding(other, one, space) for other in items if (one, other) in overlaps]
        also = [item for item in near if item is not None]
        if len(also) < len(near):
            is_exact = False
        found.append((one, *also))
    return (found, True) if is_exact else ([(one,) for one in items], False)


def _are_tagged(items: Sequence[SchemaItem], space: Space) -> bool:
    """Return whether a required member has values that tell the schemas apart."""
    branches = [space.branches(space.state([(item,)]) or ()) for item in items]
    if not all(len(one) == 1 and one[0].kinds == {"object"} for one in branches):
        return False
    return any(
        _is_tag(name, [one for (one,) in branches], space)
        for name in (branches[0][0].required if branches else ())
    )


def _is_tag(name: str, branches: Sequence[SchemaBranch], space: Space) -> bool:
    seen: set[Any] = set()
    for branch in branches:
        state = space.state(branch.member(name)) if name in branch.required else ()
        listed = [one.allowed() for one in space.branches(state)] if state else [None]
        found = {key(value) for values in listed for value in values or ()}
        if None in listed or found & seen:
            return False
        seen |= found
    return True


def _excluding(other: SchemaItem, one: SchemaItem, space: Space) -> SchemaItem | None:
    """Return a schema of values that do not fit `other`, but may fit `one`; None if unknown."""
    if other.holds and _PLAIN.issuperset(other.node.schema):
        return other.flipped
    needed, given = (
        [branch.required for branch in space.branches(space.state([(item,)]) or ())]
        for item in (other, one)
    )
    names = [name for name in needed[0] if all(name in rest for rest in needed)] if needed else []
    if not given or any(all(name in rest for name in names) for rest in given):
        return None
    # Those that lack a member which the other one needs.
    made = space.document.made({"required": names}, other.node, ("needs", *names))
    return SchemaItem(made, holds=False)


def are_apart(one: State, other: State, space: Space, depth: int = 0) -> bool:
    """Return whether no value fits both states; false if that is hard to see."""
    states = [space.state([one]), space.state([other])]
    if None in states:
        return True
    if () in states or depth > _DEEPEST:
        return False
    a, b = (space.branches(state) for state in states if state is not None)
    if len(a) * len(b) > _MOST_BRANCHES**2:
        return False
    return all(_apart(x, y, space, depth) for x in a for y in b)


def _apart(x: SchemaBranch, y: SchemaBranch, space: Space, depth: int) -> bool:
    """Return whether no value fits both branches."""
    kinds = x.kinds & y.kinds
    for one, other in ((x, y), (y, x)):
        values = one.allowed()
        if values is not None:
            others = other.allowed()
            keys = None if others is None else {key(value) for value in others}
            return not any(
                other.is_allowed(value) if keys is None else key(value) in keys
                for value in values
                if kind(value) in kinds
            )
    if kinds & {"null", "boolean"}:
        return False
    if "string" in kinds and not x.lengths.narrowed(*y.lengths).is_empty:
        return False
    if kinds & {"integer", "fraction"} and not _numbers_apart(x, y):
        return False
    if "array" in kinds and not _arrays_apart(x, y, space, depth):
        return False
    return "object" not in kinds or _objects_apart(x, y, space, depth)


def _numbers_apart(x: SchemaBranch, y: SchemaBranch) -> bool:
    both = x.copy()
    if y.least is not None:
        both.limit_low(y.least[0], is_open=y.least[1])
    if y.most is not None:
        both.limit_high(y.most[0], is_open=y.most[1])
    return not both.has_range()


def _arrays_apart(x: SchemaBranch, y: SchemaBranch, space: Space, depth: int) -> bool:
    both = x.items.narrowed(*y.items)
    return both.is_empty or any(
        _states_apart(x.item(place), y.item(place), space, depth)
        for place in range(min(both.low, _DEEPEST))
    )


def _objects_apart(x: SchemaBranch, y: SchemaBranch, space: Space, depth: int) -> bool:
    return x.members.narrowed(*y.members).is_empty or any(
        _states_apart(x.member(name), y.member(name), space, depth)
        for name in {**x.required, **y.required}
    )


def _states_apart(
    x: Sequence[State | None], y: Sequence[State | None], space: Space, depth: int
) -> bool:
    a, b = space.state(x), space.state(y)
    return a is None or b is None or are_apart(a, b, space, depth + 1)
