"""Finds out whether two schemas are disjoint; makes the alternatives of `oneOf` disjoint."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.engine.structured_output.schema.branch import SchemaItem, key, kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.engine.structured_output.schema.branch import SchemaBranch, State
    from twostroke.engine.structured_output.schema.document import Document

_MAX_DEPTH: Final = 3  # of schemas in schemas that are compared
_MAX_COMPARED_BRANCHES: Final = 12
_MAX_ALTERNATIVES: Final = 40  # that are compared pair by pair
# The opposite of a schema is simple if it has only these keywords.
_SIMPLE: Final = frozenset(
    (
        *("$comment", "const", "default", "description", "enum", "examples", "exclusiveMaximum"),
        *("exclusiveMinimum", "maxItems", "maxLength", "maxProperties", "maximum", "minItems"),
        *("minLength", "minProperties", "minimum", "not", "pattern", "required", "title", "type"),
    )
)


class SchemaStates(Protocol):
    """The interface of `Expander` that this module needs to compare schemas.

    A state is a set of schemas that a value must all fit; the functions below get the interface as
    `space`.
    """

    document: Document

    def state(self, states: Iterable[State | None]) -> State | None:
        """Combine states into the state of values that fit all of them; None if no value fits."""

    def branches(self, state: State) -> list[SchemaBranch]:
        """Return the branches of a state: a value fits the state if it fits one of them."""


def make_exclusive(items: Sequence[SchemaItem], space: SchemaStates) -> tuple[list[State], bool]:
    """Rewrite the alternatives of `oneOf` so that no value fits two of them.

    A grammar can only express a union (`anyOf`). So an alternative that overlaps with others gets
    further schemas, which exclude the values of the others. If this is not possible, the
    alternatives are returned unchanged. The result has a state (a set of schemas that a value must
    all fit) for each of `items`. The second value says whether the returned alternatives certainly
    exclude each other.
    """
    unchanged: list[State] = [(item,) for item in items]
    if _are_tagged(items, space):
        return unchanged, True
    if len(items) > _MAX_ALTERNATIVES:
        return unchanged, False
    overlaps = {
        pair
        for item, other in combinations(items, 2)
        if not are_disjoint((item,), (other,), space)
        for pair in ((item, other), (other, item))
    }
    alternatives: list[State] = []
    for item in items:
        state = [item]
        for other in items:
            if (item, other) not in overlaps:
                continue
            excluded = _excluding(other, item, space)
            if excluded is None:
                return unchanged, False
            state.append(excluded)
        alternatives.append(tuple(state))
    return alternatives, True


def _are_tagged(items: Sequence[SchemaItem], space: SchemaStates) -> bool:
    """Whether a tag distinguishes schemas: a required member with different values in each."""
    branches: list[SchemaBranch] = []
    for item in items:
        item_branches = space.branches(space.state([(item,)]) or ())
        if len(item_branches) != 1 or item_branches[0].kinds != {"object"}:
            return False
        branches += item_branches
    return any(
        _is_tag(name, branches, space) for name in (branches[0].required if branches else ())
    )


def _is_tag(name: str, branches: Sequence[SchemaBranch], space: SchemaStates) -> bool:
    """Whether a member is a tag: required, and with different listed values in each branch.

    Objects with different values of this member cannot fit two branches.
    """
    seen_keys: set[Any] = set()
    for branch in branches:
        state = space.state(branch.member(name)) if name in branch.required else ()
        allowed = [inner.allowed() for inner in space.branches(state)] if state else [None]
        keys = {key(value) for values in allowed for value in values or ()}
        if None in allowed or keys & seen_keys:
            return False
        seen_keys |= keys
    return True


def _excluding(other: SchemaItem, item: SchemaItem, space: SchemaStates) -> SchemaItem | None:
    """Return a schema that excludes the values of `other` from the values of `item`.

    The returned schema is either the negation of `other`, or demands that at least one member that
    `other` requires is missing. None if neither is possible.
    """
    if other.holds and _SIMPLE.issuperset(other.node.schema):
        return other.flipped
    # The required members of each branch of both schemas.
    other_required = [branch.required for branch in space.branches(space.state([(other,)]) or ())]
    own_required = [branch.required for branch in space.branches(space.state([(item,)]) or ())]
    names: list[str] = []
    if other_required:
        names = [
            name
            for name in other_required[0]
            if all(name in required for required in other_required)
        ]
    if not own_required or any(
        all(name in required for name in names) for required in own_required
    ):
        return None
    # A value without one of these members does not fit the other schema.
    node = space.document.derived({"required": names}, other.node, ("needs", *names))
    return SchemaItem(node, holds=False)


def are_disjoint(x: State, y: State, space: SchemaStates, depth: int = 0) -> bool:
    """Return whether no JSON value fits both of two states (sets of schemas).

    The result is False if this is not easy to prove. `depth` counts the objects and arrays around
    the values; members below a maximum depth are not compared.
    """
    states = [space.state([x]), space.state([y])]
    if None in states:
        return True
    if () in states or depth > _MAX_DEPTH:
        return False
    a, b = (space.branches(state) for state in states if state is not None)
    if len(a) * len(b) > _MAX_COMPARED_BRANCHES**2:
        return False
    return all(_are_branches_disjoint(x, y, space, depth) for x in a for y in b)


def _are_branches_disjoint(
    x: SchemaBranch, y: SchemaBranch, space: SchemaStates, depth: int
) -> bool:
    """Return whether no JSON value fits both of two branches (sets of limits on a value).

    The result is False if this is not easy to prove. `depth` is as in `are_disjoint`.
    """
    kinds = x.kinds & y.kinds
    for listing, other in ((x, y), (y, x)):
        values = listing.allowed()
        if values is not None:
            other_values = other.allowed()
            other_keys = None if other_values is None else set(map(key, other_values))
            return not any(
                other.is_allowed(value) if other_keys is None else key(value) in other_keys
                for value in values
                if kind(value) in kinds
            )
    if kinds & {"null", "boolean"}:
        return False
    if "string" in kinds and not x.lengths.narrowed(*y.lengths).is_empty:
        return False
    if kinds & {"integer", "fraction"} and not _are_numbers_disjoint(x, y):
        return False
    if "array" in kinds and not _are_arrays_disjoint(x, y, space, depth):
        return False
    return "object" not in kinds or _are_objects_disjoint(x, y, space, depth)


def _are_numbers_disjoint(x: SchemaBranch, y: SchemaBranch) -> bool:
    both = x.copy()
    if y.minimum is not None:
        both.limit_low(y.minimum[0], is_open=y.minimum[1])
    if y.maximum is not None:
        both.limit_high(y.maximum[0], is_open=y.maximum[1])
    return not both.has_range()


def _are_arrays_disjoint(x: SchemaBranch, y: SchemaBranch, space: SchemaStates, depth: int) -> bool:
    both = x.num_items.narrowed(*y.num_items)
    return both.is_empty or any(
        _are_states_disjoint(x.item(index), y.item(index), space, depth)
        for index in range(min(both.low, _MAX_DEPTH))
    )


def _are_objects_disjoint(
    x: SchemaBranch, y: SchemaBranch, space: SchemaStates, depth: int
) -> bool:
    return x.num_members.narrowed(*y.num_members).is_empty or any(
        _are_states_disjoint(x.member(name), y.member(name), space, depth)
        for name in {**x.required, **y.required}
    )


def _are_states_disjoint(
    x: Sequence[State | None], y: Sequence[State | None], space: SchemaStates, depth: int
) -> bool:
    a, b = space.state(x), space.state(y)
    return a is None or b is None or are_disjoint(a, b, space, depth + 1)
