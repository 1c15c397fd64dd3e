"""Writes llguidance's schemas for the objects that a JSON schema allows."""

from __future__ import annotations

import json
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.message_text import counted_noun
from twostroke.engine.structured_output.schema.branch import Range
from twostroke.engine.structured_output.schema.patterns import (
    are_disjoint,
    listed_texts,
    matches,
    pattern_without,
)
from twostroke.engine.structured_output.schema.scalars import can_be_written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.engine.structured_output.schema.branch import ObjectPart, SchemaBranch, State
    from twostroke.engine.structured_output.schema.expand import Expander
    from twostroke.engine.structured_output.schema.patterns import RegexPattern

    Schema = dict[str, Any]
    AnySchema = Schema | bool
    # Returns the schema of the values that fit all states; False if no value fits.
    Child = Callable[[Sequence[State | None]], Schema | bool]

_MAX_SELECTIONS: Final = 64  # of optional members, written as a schema each
_MAX_SELECTIONS_CHARS: Final = 100_000
_MAX_MATCHES: Final = 20_000  # comparisons of a name with a pattern
MAX_QUOTED_NAME_CHARS: Final = 80


def objects(branch: SchemaBranch, expander: Expander, child: Child) -> Iterator[Schema]:
    """Yield llguidance's schemas for the objects that a branch of a JSON schema allows.

    A branch is a set of keywords that a value must all fit. Keywords that the yielded schemas do
    not enforce are added to the branch's `unenforced_keywords`, so that finished answers are
    checked. `child` returns the schema of a member that must fit some states (sets of schemas).
    """
    parts = branch.object_parts()
    allowed = _Names(branch, expander)
    described = dict(branch.member_names)  # names that have a schema
    for pattern in _patterns(parts):
        described |= dict.fromkeys(listed_texts(pattern))
    schema_names = described | branch.required
    num_patterns = sum(len(part.patterns) for part in parts)
    if len(schema_names) * max(1, num_patterns) > _MAX_MATCHES:
        first_name = next(iter(schema_names))[:MAX_QUOTED_NAME_CHARS]
        raise ValueError(
            f"an object has {counted_noun(len(schema_names), 'name', form=',')} and "
            f"{num_patterns:,} of patternProperties, whose product must be at most "
            f"{_MAX_MATCHES:,}; its first name is '{first_name}'"
        )
    names = dict.fromkeys([*schema_names, *allowed.listed])
    members: dict[str, AnySchema] = {}
    for name in names:
        is_usable = can_be_written(name) and allowed.has(name)
        members[name] = child(branch.member(name, parts)) if is_usable else False
    if any(members[name] is False for name in branch.required):
        return
    possible = [name for name, inner in members.items() if inner is not False]
    others = _other_members(parts, allowed, possible, child)
    if not _mentions_others(branch, parts):
        is_enough = branch.num_members.low <= len(possible)
        has_described = any(name in described for name in possible)
        others = _without_unmentioned(others, has_names=is_enough and has_described)
    if others and allowed.is_weak:
        branch.add_gap("propertyNames (of several limits)", "object")
    yield from _with_counts(branch, members, others)


def _with_counts(
    branch: SchemaBranch, members: dict[str, AnySchema], others: Schema
) -> Iterator[Schema]:
    """Yield object schemas that keep `minProperties` and `maxProperties`.

    If the counts cannot be written directly, each yielded schema chooses which optional members an
    object has. `members` are the schemas of named members, `others` the keywords about all other
    members.
    """
    low, high = branch.num_members
    required = [name for name in members if name in branch.required]
    optional = [
        name
        for name, inner in members.items()
        if inner is not False and name not in branch.required
    ]
    num_named = len(required) + len(optional)
    if (high is not None and len(required) > high) or (not others and low > num_named):
        return
    used = {name: inner for name, inner in members.items() if others or inner is not False}
    shape: Schema = {"type": "object", "properties": used, "required": required}
    shape |= others or {"additionalProperties": False}
    if low <= len(required) and (high is None or (not others and high >= num_named)):
        yield shape
        return
    if not optional or (not others and high is None and low == len(required) + 1):
        yield shape | _counts(low, high)
        return
    selections = _selections(required, optional, branch.num_members, has_others=bool(others))
    choices = [*islice(selections, _MAX_SELECTIONS + 1)]
    size = len(json.dumps(used)) * len(choices)
    if len(choices) > _MAX_SELECTIONS or size > _MAX_SELECTIONS_CHARS:
        branch.add_gap("minProperties or maxProperties (of many)")
        yield shape
        return
    for present, free in choices:
        required_names = {*required, *present}
        allowed_names = required_names.union(free)
        properties = {
            name: inner if name in allowed_names else False
            for name, inner in used.items()
            if others or name in allowed_names
        }
        counts = _counts(low, high) if others and not free else {}
        selected = [name for name in used if name in required_names]
        yield shape | counts | {"properties": properties, "required": selected}


def _selections(
    required: Sequence[str], optional: Sequence[str], num_members: Range, *, has_others: bool
) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Yield choices of optional members; they cover all objects whose number of members is allowed.

    Each choice is a pair: optional members that the object must have, and optional members that it
    may have. With `has_others`, objects may also have unnamed members, which count as well.
    """
    low, high = num_members
    num_named = len(required) + len(optional)
    num_missing = max(0, low - len(required))
    if high is not None and (has_others or high < num_named):
        for count in range(0 if has_others else num_missing, len(optional) + 1):
            if len(required) + count <= high:
                yield from ((names, ()) for names in combinations(optional, count))
        return
    for count in range(num_missing if has_others else 0):  # other members make up the number
        yield from ((names, ()) for names in combinations(optional, count))
    for indices in combinations(
        range(len(optional)), num_missing
    ):  # the first optional members of an object
        after = indices[-1] + 1 if indices else 0
        yield [optional[index] for index in indices], optional[after:]


def _counts(low: int, high: int | None) -> Schema:
    counts = {"minProperties": low} if low else {}
    return counts if high is None else {**counts, "maxProperties": high}


def _mentions_others(branch: SchemaBranch, parts: Sequence[ObjectPart]) -> bool:
    """Whether a JSON schema says anything about members that it does not name.

    By default JSON Schema allows such members. But if the schema does not mention them, no answer
    needs them.
    """
    return bool(branch.name_items) or any(not part.is_open for part in parts)


def _without_unmentioned(others: Schema, *, has_names: bool) -> Schema:
    """Return keywords that forbid the members that a JSON schema does not mention.

    `others` are llguidance's keywords for members whose names are not in the schema's `properties`.
    Members that match a pattern of `patternProperties` stay allowed. All members stay allowed if
    every pattern only forbids names, or if the schema names no usable member (not `has_names`).
    """
    patterns = others.get("patternProperties", {})
    if any(inner is not False for inner in patterns.values()):
        return {**others, "additionalProperties": False}
    return {} if has_names and not patterns else others


def _patterns(parts: Sequence[ObjectPart]) -> dict[RegexPattern, None]:
    return {pattern: None for part in parts for pattern in part.patterns}


def _other_members(
    parts: Sequence[ObjectPart], allowed: _Names, named: Sequence[str], child: Child
) -> Schema:
    """Return llguidance's keywords for the members of an object that are not in `properties`.

    `parts` are the keywords about members, `allowed` the names that `propertyNames` allows, and
    `named` the names in `properties`. Empty if an object cannot have such members.
    """
    groups = _grouped([pattern for pattern in _patterns(parts) if not listed_texts(pattern)])
    # If a named member matched only some patterns of a group, llguidance would apply the schema of
    # the whole group to it.
    if allowed.is_closed or any(
        len({matches(pattern, name) for pattern in group}) > 1 for group in groups for name in named
    ):
        return {}
    by_pattern: dict[str, AnySchema] = {}
    for group in groups:
        states = [
            state for part in parts for pattern, state in part.patterns.items() if pattern in group
        ]
        states += [
            part.others for part in parts if not all(pattern in part.patterns for pattern in group)
        ]
        text = (
            "|".join(f"(?:{pattern.text})" for pattern in group)
            if len(group) > 1
            else group[0].text
        )
        if allowed.pattern is not None and text != allowed.pattern:
            continue
        by_pattern[text] = child(states)
    rest = child([part.others for part in parts])
    if allowed.pattern is not None:
        if rest is not False and not groups:
            by_pattern[allowed.pattern] = rest
        rest = False
    if rest is False and all(inner is False for inner in by_pattern.values()):
        return {}
    keywords: Schema = {"patternProperties": by_pattern} if by_pattern else {}
    return {**keywords, "additionalProperties": rest}


def _grouped(patterns: Sequence[RegexPattern]) -> list[list[RegexPattern]]:
    """Group patterns of member names, so that no name matches patterns of two groups.

    Each group becomes one pattern of llguidance's `patternProperties`.
    """
    groups: list[list[RegexPattern]] = []
    for pattern in patterns:
        overlapping = [
            group for group in groups if not all(are_disjoint(pattern, other) for other in group)
        ]
        groups = [group for group in groups if group not in overlapping]
        groups.append([*(other for group in overlapping for other in group), pattern])
    return groups


class _Names:
    """The names that a branch's `propertyNames` allows for an object's members.

    Attributes:
        listed: names that the schema lists.
        is_closed: whether no other names are allowed.
        pattern: a pattern that the other names must match; None without one.
        is_weak: whether the pattern also matches some names that are not allowed.
    """

    def __init__(self, branch: SchemaBranch, expander: Expander) -> None:
        self.listed: tuple[str, ...] = ()
        self.pattern: str | None = None
        self.is_closed = False
        self.is_weak = False
        self._branches: list[SchemaBranch] | None = None
        if not branch.name_items:
            return
        state = expander.state([(item,) for item in branch.name_items])
        name_branches = [] if state is None else expander.branches(state)
        self._branches = [inner for inner in name_branches if "string" in inner.kinds]
        for inner in self._branches:
            for location, kind in inner.unenforced_keywords.items():
                if kind in {"", "string"}:
                    branch.add_gap(location, "object")
        self.listed = tuple(self._listed())
        free = [inner for inner in self._branches if inner.allowed() is None]
        self.is_closed = not free
        if not free:
            return
        num_limits = _num_limits(free[0])
        if len(free) == 1 and not self.listed:
            self.pattern = _pattern(free[0]) if num_limits else None
            if num_limits == bool(self.pattern):
                return
        self.is_weak = True

    def _listed(self) -> list[str]:
        return [
            value
            for branch in self._branches or ()
            for value in branch.allowed() or ()
            if isinstance(value, str)
        ]

    def has(self, name: str) -> bool:
        """Whether `propertyNames` allows a member's name."""
        if self._branches is None:
            return True
        return any(
            branch.is_allowed(name)
            and (branch.allowed() is None or name in (branch.allowed() or ()))
            for branch in self._branches
        )


def _num_limits(names: SchemaBranch) -> int:
    num_patterns = sum(1 + len(pattern.other_texts) for pattern in names.patterns)
    return num_patterns + (names.lengths != Range()) + bool(names.excluded)


def _pattern(names: SchemaBranch) -> str | None:
    """Return a regular expression for the member names that `propertyNames` allows.

    If the names have several limits, the expression keeps only one of them. None if it would be too
    large.
    """
    low, high = names.lengths
    if names.patterns:
        return next(iter(names.patterns)).text
    if low or high is not None:
        return f"^[\\x00-\\x{{10ffff}}]{{{low},{'' if high is None else high}}}$"
    return pattern_without([value for value in names.excluded.values() if isinstance(value, str)])
