"""A branch: one of the conjunctions that a schema is a union of, sorted by keywords."""

from __future__ import annotations

import math
from copy import copy
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twostroke.engine.structured_output.schema.patterns import RegexPattern, matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.engine.structured_output.schema.document import Node

# A number is an integer or has a fraction: so that types exclude one another.
KINDS: Final = ("null", "boolean", "integer", "fraction", "string", "array", "object")
_NUMBERS: Final = frozenset(("integer", "fraction"))


class SchemaItem(NamedTuple):
    """A schema that a value must fit, or must not."""

    node: Node
    holds: bool = True

    @property
    def flipped(self) -> SchemaItem:
        """The opposite."""
        return SchemaItem(self.node, not self.holds)


# Items that a value must fit all. Without any, each value fits; None if no value fits.
State = tuple[SchemaItem, ...]
# For unevaluated*: the applications of schemas that something belongs to.
Scope = tuple[int, ...]


class ObjectPart(NamedTuple):
    """What the `properties` of one schema, and its neighbours, say of members."""

    names: dict[str, State | None]
    patterns: dict[RegexPattern, State | None]
    others: State | None  # of members that neither of these name
    is_open: bool  # it does not speak of others
    scope: Scope = ()

    def of(self, name: str) -> tuple[State | None, ...]:
        """Return the states that the member with a name must fit."""
        found = [self.names[name]] if name in self.names else []
        found += [state for one, state in self.patterns.items() if matches(one, name)]
        return tuple(found) or (self.others,)


class ArrayPart(NamedTuple):
    """What one schema says of items."""

    first: tuple[State | None, ...]
    others: State | None
    is_open: bool
    scope: Scope = ()

    def of(self, place: int) -> State | None:
        """Return the state that an item must fit."""
        return self.first[place] if place < len(self.first) else self.others


class Contains(NamedTuple):
    """How many items fit a schema: at least, and at most."""

    item: SchemaItem
    least: int
    most: int | None
    place: str
    scope: Scope = ()


class Unevaluated(NamedTuple):
    """A schema of the members, or items, that nothing in an application of a schema evaluates."""

    application: int
    state: State | None
    is_of_objects: bool
    scope: Scope


class Alternatives(NamedTuple):
    """Alternatives, of which one must hold.

    An inexact choice allows values that the keyword does not.
    """

    alternatives: tuple[tuple[State, Scope], ...]
    place: str
    is_exact: bool = True


class Range(NamedTuple):
    """How long something may be: from `low` to `high`, if there is one."""

    low: int = 0
    high: int | None = None

    def narrowed(self, low: int = 0, high: int | None = None) -> Range:
        """Return what both allow."""
        highs = [one for one in (self.high, high) if one is not None]
        return Range(max(self.low, low), min(highs, default=None))

    def has(self, count: int) -> bool:
        """Return whether a count is allowed."""
        return self.low <= count and (self.high is None or count <= self.high)

    @property
    def is_empty(self) -> bool:
        """Whether no count is allowed."""
        return self.high is not None and self.low > self.high


class SchemaBranch:
    """A conjunction: for each type, what it says of the values of that type."""

    def __init__(self) -> None:
        """Begin with any value."""
        self.kinds = frozenset(KINDS)
        self.values: dict[Any, Any] | None = None  # the only ones that are allowed
        self.excluded: dict[Any, Any] = {}
        self.least: tuple[Any, bool] | None = None  # and whether the number itself is excluded
        self.most: tuple[Any, bool] | None = None
        self.multiple: Fraction | None = None
        self.lengths = Range()
        self.patterns: dict[RegexPattern, None] = {}
        self.known: dict[str, None] = {}  # the names of members, as they were met
        self.plain: dict[str, tuple[State | None, ...]] = {}  # of parts that say no more
        self.objects: list[ObjectPart] = []
        self.required: dict[str, None] = {}
        self.members = Range()
        self.names: list[SchemaItem] = []
        self.arrays: list[ArrayPart] = []
        self.items = Range()
        self.contains: list[Contains] = []
        self.unique: str | None = None  # the place of uniqueItems
        self.unevaluated: list[Unevaluated] = []
        self.choices: list[Alternatives] = []
        self.gaps: dict[str, str] = {}  # place to the kind of values it is about; "" for all
        self.seen: set[tuple[SchemaItem, Scope]] = set()
        self.is_touched = False  # by anything but choices

    def copy(self) -> SchemaBranch:
        """Return a branch that changes on its own."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | set):
                setattr(other, name, copy(value))
        return other

    def gap(self, place: str, of: str = "") -> None:
        """Note a keyword that is not held."""
        self.gaps.setdefault(place, of)

    def exclude(self, values: Sequence[Any]) -> None:
        """Allow none of these values."""
        self.excluded |= {key(value): value for value in values}

    def limit_values(self, values: Sequence[Any]) -> None:
        """Allow only these values."""
        allowed = {key(value): value for value in values}
        if self.values is not None:
            allowed = {name: value for name, value in self.values.items() if name in allowed}
        self.values = allowed

    def limit_low(self, number: object, *, is_open: bool) -> None:
        """Allow only numbers from one on, or above it."""
        new = (number, is_open)
        self.least = new if self.least is None else max(self.least, new)

    def limit_high(self, number: Any, *, is_open: bool) -> None:
        """Allow only numbers up to one, or below it."""
        new = (number, is_open)
        if self.most is None or (number, not is_open) < (self.most[0], not self.most[1]):
            self.most = new

    def limit_multiple(self, number: int | Decimal) -> None:
        """Allow only multiples of a number, besides those of others."""
        new, old = Fraction(number), self.multiple
        if old is not None:
            numerator = math.lcm(new.numerator, old.numerator)
            new = Fraction(numerator, math.gcd(new.denominator, old.denominator))
        self.multiple = new

    def add_part(self, part: ObjectPart) -> None:
        """Add what a schema says of members."""
        self.known |= dict.fromkeys(part.names)
        if part.patterns or not part.is_open or part.scope:
            self.objects.append(part)
            return
        for name, state in part.names.items():
            self.plain[name] = (*self.plain.get(name, ()), state)

    def object_parts(self) -> list[ObjectPart]:
        """Return what is said of members beside `plain`, what nothing evaluates included."""
        return [*self.objects, *map(self._unevaluated_members, self._of(is_of_objects=True))]

    def unevaluated_items(self, but: Scope = ()) -> list[ArrayPart]:
        """Return what applications of schemas say of items that nothing evaluates."""
        parts = []
        for one in self._of(is_of_objects=False):
            if one.application in but:
                continue
            inside = [part for part in self.arrays if one.application in part.scope]
            if any(not part.is_open for part in inside) or self._is_inner(one):
                continue
            first = max((len(part.first) for part in inside), default=0)
            parts.append(ArrayPart(((),) * first, one.state, is_open=False))
        return parts

    def _unevaluated_members(self, one: Unevaluated) -> ObjectPart:
        inside = [part for part in self.objects if one.application in part.scope]
        names: dict[str, State | None] = {name: () for part in inside for name in part.names}
        patterns: dict[RegexPattern, State | None] = {
            pattern: () for part in inside for pattern in part.patterns
        }
        if any(not part.is_open for part in inside) or self._is_inner(one):
            return ObjectPart(names, patterns, (), is_open=True)
        return ObjectPart(names, patterns, one.state, is_open=False)

    def _is_inner(self, one: Unevaluated) -> bool:
        """Return whether another in its application has evaluated all."""
        return any(
            one.application in other.scope and one.is_of_objects == other.is_of_objects
            for other in self.unevaluated
        )

    def _of(self, *, is_of_objects: bool) -> list[Unevaluated]:
        return [one for one in self.unevaluated if one.is_of_objects == is_of_objects]

    def member(self, name: str, parts: Sequence[ObjectPart] | None = None) -> list[State | None]:
        """Return the states that the member with a name must fit; `parts` are `object_parts`."""
        parts = self.object_parts() if parts is None else parts
        more = [state for part in parts for state in part.of(name)]
        return [*self.plain.get(name, ()), *more]

    def item(self, place: int) -> list[State | None]:
        """Return the states that an item must fit."""
        return [part.of(place) for part in [*self.arrays, *self.unevaluated_items()]]

    def allowed(self) -> list[Any] | None:
        """Return the values that are allowed, if only some are; of objects and arrays, none."""
        if self.values is None:
            if self.kinds - {"null", "boolean"}:
                return None
            known = [None, False, True]
            return [v for v in known if kind(v) in self.kinds and key(v) not in self.excluded]
        return [value for value in self.values.values() if self.is_allowed(value)]

    def is_possible(self) -> bool:
        """Return whether any value may fit, as far as this shows without looking at members."""
        kinds = set(self.kinds)
        if not self.has_range():
            kinds -= _NUMBERS
        if self.lengths.is_empty:
            kinds -= {"string"}
        if self.items.is_empty:
            kinds -= {"array"}
        if self.members.is_empty:
            kinds -= {"object"}
        self.kinds = frozenset(kinds)
        if self.values is not None:
            self.kinds &= {kind(value) for value in self.allowed() or ()}
        return bool(self.kinds)

    def has_range(self) -> bool:
        """Return whether there is a number between the bounds."""
        if self.least is None or self.most is None:
            return True
        (low, is_low_open), (high, is_high_open) = self.least, self.most
        if "fraction" not in self.kinds:
            first, last = math.ceil(low), math.floor(high)
            first += is_low_open and first == low
            last -= is_high_open and last == high
            return bool(first <= last)
        return bool(low < high or (low == high and not is_low_open and not is_high_open))

    def is_allowed(self, value: Any) -> bool:
        """Return whether what is said of scalar values allows one."""
        if kind(value) not in self.kinds or key(value) in self.excluded:
            return False
        if isinstance(value, str):
            fits = self.lengths.has(len(value))
            return fits and all(matches(pattern, value) for pattern in self.patterns)
        if kind(value) in _NUMBERS:
            return self.has_number(value)
        return True

    def has_number(self, value: Any) -> bool:
        """Return whether a number is within the bounds."""
        low, high = self.least, self.most
        if low is not None and (value < low[0] or (low[1] and value == low[0])):
            return False
        if high is not None and (value > high[0] or (high[1] and value == high[0])):
            return False
        return self.multiple is None or (Fraction(value) / self.multiple).denominator == 1


def kind(value: object) -> str:
    """Return the kind of a value as `Document` reads them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", Decimal: "fraction", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def key(value: Any) -> Any:
    """Return something that is equal for equal values only."""
    if isinstance(value, list):
        return ("array", *map(key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, key(inner)) for name, inner in value.items()))
    return (kind(value), value)


def kinds_of(types: str | Iterable[str]) -> frozenset[str]:
    """Return the kinds of one or several types of JSON Schema."""
    names = {types} if isinstance(types, str) else set(types)
    return frozenset(names - {"number"} | (_NUMBERS if "number" in names else set()))
