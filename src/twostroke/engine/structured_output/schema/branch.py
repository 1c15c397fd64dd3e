"""`SchemaBranch`: a conjunction of keywords, sorted by type. A schema is a union of branches."""

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

# The types of values, so that no value has two: numbers are integers or have a fraction.
KINDS: Final = ("null", "boolean", "integer", "fraction", "string", "array", "object")
_NUMBERS: Final = frozenset(("integer", "fraction"))


class SchemaItem(NamedTuple):
    """A schema (`node`) that a JSON value must fit or, if `holds` is false, must not fit."""

    node: Node
    holds: bool = True

    @property
    def flipped(self) -> SchemaItem:
        """The opposite: values must not fit the schema if they had to, and vice versa."""
        return SchemaItem(self.node, not self.holds)


# A conjunction of items. Each value fits the empty state. In place of a state, None means that no
# value fits.
State = tuple[SchemaItem, ...]
# The applications of schemas with an `unevaluated*` keyword that a keyword lies in.
Scope = tuple[int, ...]


class ObjectPart(NamedTuple):
    """One JSON schema's `properties`, `patternProperties` and `additionalProperties`, as states.

    A state is a set of schemas that a value must all fit.

    Attributes:
        names: the state of each named member.
        patterns: the state of members whose names match a pattern.
        others: the state of all other members.
        is_open: whether the schema has no `additionalProperties`.
        scope: numbers of the `unevaluated*` keywords of outer schemas for which these members count
            as evaluated.
    """

    names: dict[str, State | None]
    patterns: dict[RegexPattern, State | None]
    others: State | None
    is_open: bool
    scope: Scope = ()

    def of(self, name: str) -> tuple[State | None, ...]:
        """Return the states (sets of schemas) that an object's member with this name must fit."""
        states = [self.names[name]] if name in self.names else []
        states += [state for pattern, state in self.patterns.items() if matches(pattern, name)]
        return tuple(states) or (self.others,)


class ArrayPart(NamedTuple):
    """One JSON schema's `prefixItems` and `items`, as states.

    A state is a set of schemas that a value must all fit.

    Attributes:
        first: the states of the first items.
        others: the state of all other items.
        is_open: whether the schema has no `items` for the other items.
        scope: numbers of the `unevaluated*` keywords of outer schemas for which these items count
            as evaluated.
    """

    first: tuple[State | None, ...]
    others: State | None
    is_open: bool
    scope: Scope = ()

    def of(self, index: int) -> State | None:
        """Return the state (a set of schemas) that the array's item at an index must fit."""
        return self.first[index] if index < len(self.first) else self.others


class Contains(NamedTuple):
    """A JSON schema's `contains`: `min_count` to `max_count` array items must fit a schema."""

    item: SchemaItem
    min_count: int
    max_count: int | None
    location: str
    scope: Scope = ()


class Unevaluated(NamedTuple):
    """A JSON schema's `unevaluatedProperties` or `unevaluatedItems`.

    `state` has the schemas for all members or items that no other keyword evaluates. `application`
    is the number of this keyword: members or items count as evaluated if the `scope` of their
    keyword contains this number.
    """

    application: int
    state: State | None
    is_of_objects: bool
    scope: Scope


class Alternatives(NamedTuple):
    """The alternatives of a JSON schema's keyword such as `anyOf`: a value must fit one of them.

    If `is_exact` is false, the alternatives also allow some values that the keyword forbids.
    """

    alternatives: tuple[tuple[State, Scope], ...]
    location: str
    is_exact: bool = True


class Range(NamedTuple):
    """A range of string lengths or item counts, from `low` to `high` (None: without limit)."""

    low: int = 0
    high: int | None = None

    def narrowed(self, low: int = 0, high: int | None = None) -> Range:
        """Return the intersection of the range with one from `low` to `high`."""
        highs = [limit for limit in (self.high, high) if limit is not None]
        return Range(max(self.low, low), min(highs, default=None))

    def has(self, count: int) -> bool:
        """Whether a length or count is in the range."""
        return self.low <= count and (self.high is None or count <= self.high)

    @property
    def is_empty(self) -> bool:
        """Whether no length or count is in the range."""
        return self.high is not None and self.low > self.high


class SchemaBranch:
    """A branch of JSON schemas: limits that a value must all fit, for each type of values.

    The schemas that a value must fit become a union of branches, in which `anyOf` and other
    alternatives are resolved. Each branch is then written as a simple schema for llguidance.

    Attributes:
        kinds: the types of values that are allowed.
        values: the only allowed values, by key; None without such a list.
        excluded: values that are not allowed, by key.
        minimum, maximum: a bound of numbers, and whether the bound itself is excluded; None without
            a bound.
        multiple: numbers must be multiples of this number.
        lengths: the lengths of strings.
        patterns: the patterns that strings must match.
        member_names: the names of members, in the order of the schema.
        simple_members: states of members from schemas that only list members.
        objects: parts from all other schemas with keywords about members.
        required: names of required members.
        num_members: how many members objects have.
        name_items: the schemas that the names of members must fit (`propertyNames`).
        arrays: parts from the schemas with keywords about items.
        num_items: how many items arrays have.
        contains: the `contains` keywords.
        unique: the location of `uniqueItems`, if items must be distinct.
        unevaluated: the `unevaluated*` keywords.
        choices: the alternatives of keywords such as `anyOf` that are not resolved yet.
        unenforced_keywords: locations of keywords that the grammar does not enforce, each with the
            type of values that it is about ("" for all types).
        seen: the schemas that were added already.
        is_touched: whether anything but choices was added.
    """

    def __init__(self) -> None:
        """Begin without limits: all JSON values are allowed."""
        self.kinds = frozenset(KINDS)
        self.values: dict[Any, Any] | None = None
        self.excluded: dict[Any, Any] = {}
        self.minimum: tuple[Any, bool] | None = None
        self.maximum: tuple[Any, bool] | None = None
        self.multiple: Fraction | None = None
        self.lengths = Range()
        self.patterns: dict[RegexPattern, None] = {}
        self.member_names: dict[str, None] = {}
        self.simple_members: dict[str, tuple[State | None, ...]] = {}
        self.objects: list[ObjectPart] = []
        self.required: dict[str, None] = {}
        self.num_members = Range()
        self.name_items: list[SchemaItem] = []
        self.arrays: list[ArrayPart] = []
        self.num_items = Range()
        self.contains: list[Contains] = []
        self.unique: str | None = None
        self.unevaluated: list[Unevaluated] = []
        self.choices: list[Alternatives] = []
        self.unenforced_keywords: dict[str, str] = {}
        self.seen: set[tuple[SchemaItem, Scope]] = set()
        self.is_touched = False

    def copy(self) -> SchemaBranch:
        """Return an independent copy of the branch."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | set):
                setattr(other, name, copy(value))
        return other

    def add_gap(self, location: str, kind_: str = "") -> None:
        """Record a schema's keyword that the grammar will not enforce.

        Finished answers are then checked against the schema. `kind_` is the type of values that the
        keyword is about; empty for all types.
        """
        self.unenforced_keywords.setdefault(location, kind_)

    def exclude(self, values: Sequence[Any]) -> None:
        """Disallow these JSON values in the branch."""
        self.excluded |= {key(value): value for value in values}

    def limit_values(self, values: Sequence[Any]) -> None:
        """Allow only these JSON values, without values that earlier keywords excluded."""
        allowed = {key(value): value for value in values}
        if self.values is not None:
            allowed = {name: value for name, value in self.values.items() if name in allowed}
        self.values = allowed

    def limit_low(self, number: object, *, is_open: bool) -> None:
        """Set a lower bound of numbers; with `is_open` the bound itself is excluded."""
        new = (number, is_open)
        self.minimum = new if self.minimum is None else max(self.minimum, new)

    def limit_high(self, number: Any, *, is_open: bool) -> None:
        """Set an upper bound of numbers; with `is_open` the bound itself is excluded."""
        new = (number, is_open)
        if self.maximum is None or (number, not is_open) < (self.maximum[0], not self.maximum[1]):
            self.maximum = new

    def limit_multiple(self, number: int | Decimal) -> None:
        """Allow only numbers that are multiples of a number; earlier limits stay."""
        new, old = Fraction(number), self.multiple
        if old is not None:
            numerator = math.lcm(new.numerator, old.numerator)
            new = Fraction(numerator, math.gcd(new.denominator, old.denominator))
        self.multiple = new

    def add_part(self, part: ObjectPart) -> None:
        """Add one JSON schema's keywords about members of objects to the branch.

        Schemas that only list members are kept in `simple_members`, which is faster.
        """
        self.member_names |= dict.fromkeys(part.names)
        if part.patterns or not part.is_open or part.scope:
            self.objects.append(part)
            return
        for name, state in part.names.items():
            self.simple_members[name] = (*self.simple_members.get(name, ()), state)

    def object_parts(self) -> list[ObjectPart]:
        """Return the parts about members of objects, `unevaluatedProperties` included.

        Members from schemas that only list members (`simple_members`) are left out.
        """
        return [
            *self.objects,
            *map(self._unevaluated_members, self._unevaluated_of(is_of_objects=True)),
        ]

    def unevaluated_items(self, excluded_scope: Scope = ()) -> list[ArrayPart]:
        """Return the array parts that stand for the branch's `unevaluatedItems` keywords.

        Keywords whose number is in `excluded_scope` are left out, because the item counts as
        evaluated for them.
        """
        parts = []
        for keyword in self._unevaluated_of(is_of_objects=False):
            if keyword.application in excluded_scope:
                continue
            inside = [part for part in self.arrays if keyword.application in part.scope]
            if any(not part.is_open for part in inside) or self._is_evaluated(keyword):
                continue
            first = max((len(part.first) for part in inside), default=0)
            parts.append(ArrayPart(((),) * first, keyword.state, is_open=False))
        return parts

    def _unevaluated_members(self, keyword: Unevaluated) -> ObjectPart:
        inside = [part for part in self.objects if keyword.application in part.scope]
        names: dict[str, State | None] = {name: () for part in inside for name in part.names}
        patterns: dict[RegexPattern, State | None] = {
            pattern: () for part in inside for pattern in part.patterns
        }
        if any(not part.is_open for part in inside) or self._is_evaluated(keyword):
            return ObjectPart(names, patterns, (), is_open=True)
        return ObjectPart(names, patterns, keyword.state, is_open=False)

    def _is_evaluated(self, keyword: Unevaluated) -> bool:
        """Whether an inner `unevaluated*` keyword leaves nothing unevaluated for this keyword."""
        return any(
            keyword.application in other.scope and keyword.is_of_objects == other.is_of_objects
            for other in self.unevaluated
        )

    def _unevaluated_of(self, *, is_of_objects: bool) -> list[Unevaluated]:
        return [keyword for keyword in self.unevaluated if keyword.is_of_objects == is_of_objects]

    def member(self, name: str, parts: Sequence[ObjectPart] | None = None) -> list[State | None]:
        """Return the states (sets of schemas) that an object's member with this name must fit.

        `parts` are the branch's `object_parts`, if the caller has computed them already.
        """
        parts = self.object_parts() if parts is None else parts
        states = [state for part in parts for state in part.of(name)]
        return [*self.simple_members.get(name, ()), *states]

    def item(self, index: int) -> list[State | None]:
        """Return the states (sets of schemas) that an array's item at an index must fit."""
        return [part.of(index) for part in [*self.arrays, *self.unevaluated_items()]]

    def allowed(self) -> list[Any] | None:
        """Return the scalar values that the branch allows, if it lists them; otherwise None.

        `const` and `enum` list values; the types null and boolean have few values, which count as
        listed.
        """
        if self.values is None:
            if self.kinds - {"null", "boolean"}:
                return None
            return [
                value
                for value in (None, False, True)
                if kind(value) in self.kinds and key(value) not in self.excluded
            ]
        return [value for value in self.values.values() if self.is_allowed(value)]

    def is_possible(self) -> bool:
        """Return whether the branch may allow any value; types without allowed values are removed.

        Members of objects and items of arrays are not examined.
        """
        kinds = set(self.kinds)
        if not self.has_range():
            kinds -= _NUMBERS
        if self.lengths.is_empty:
            kinds -= {"string"}
        if self.num_items.is_empty:
            kinds -= {"array"}
        if self.num_members.is_empty:
            kinds -= {"object"}
        self.kinds = frozenset(kinds)
        if self.values is not None:
            self.kinds &= {kind(value) for value in self.allowed() or ()}
        return bool(self.kinds)

    def has_range(self) -> bool:
        """Whether any number is between the branch's lower and upper bound."""
        if self.minimum is None or self.maximum is None:
            return True
        (low, is_low_open), (high, is_high_open) = self.minimum, self.maximum
        if "fraction" not in self.kinds:
            first, last = math.ceil(low), math.floor(high)
            first += is_low_open and first == low
            last -= is_high_open and last == high
            return bool(first <= last)
        return bool(low < high or (low == high and not is_low_open and not is_high_open))

    def is_allowed(self, value: Any) -> bool:
        """Whether a scalar JSON value is within all limits of the branch."""
        if kind(value) not in self.kinds or key(value) in self.excluded:
            return False
        if isinstance(value, str):
            fits = self.lengths.has(len(value))
            return fits and all(matches(pattern, value) for pattern in self.patterns)
        if kind(value) in _NUMBERS:
            return self.has_number(value)
        return True

    def has_number(self, value: Any) -> bool:
        """Whether a number is within the branch's bounds, and a multiple of its `multipleOf`."""
        low, high = self.minimum, self.maximum
        if low is not None and (value < low[0] or (low[1] and value == low[0])):
            return False
        if high is not None and (value > high[0] or (high[1] and value == high[0])):
            return False
        return self.multiple is None or (Fraction(value) / self.multiple).denominator == 1


def kind(value: object) -> str:
    """Return the type of a JSON value, one of `KINDS`; numbers must be `int` or `Decimal`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", Decimal: "fraction", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def key(value: Any) -> Any:
    """Return a hashable key of a JSON value; only equal values have equal keys."""
    if isinstance(value, list):
        return ("array", *map(key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, key(inner)) for name, inner in value.items()))
    return (kind(value), value)


def kinds_of(types: str | Iterable[str]) -> frozenset[str]:
    """Return the names in `KINDS` for one or several types of JSON Schema."""
    names = {types} if isinstance(types, str) else set(types)
    return frozenset(names - {"number"} | (_NUMBERS if "number" in names else set()))
