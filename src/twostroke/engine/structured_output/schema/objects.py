"""Branches of objects, as llguidance reads them."""

from __future__ import annotations

import json
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.schema.branch import Range
from twostroke.engine.structured_output.schema.patterns import are_apart, matches, spelled, without
from twostroke.engine.structured_output.schema.scalars import can_be_written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.engine.structured_output.schema.branch import ObjectPart, SchemaBranch, State
    from twostroke.engine.structured_output.schema.expand import Expander
    from twostroke.engine.structured_output.schema.patterns import RegexPattern

    Schema = dict[str, Any]
    AnySchema = Schema | bool
    # The schema of a state, which may be a reference; False if no value fits.
    Child = Callable[[Sequence[State | None]], Schema | bool]

_MOST_SELECTIONS: Final = 64  # of members, which are spelled one by one
_MOST_SELECTED_TEXT: Final = 100_000  # characters of these
_MOST_MATCHES: Final = 20_000  # comparisons of a name with a pattern
MAX_NAME_SHOWN: Final = 80  # characters of a name


def objects(branch: SchemaBranch, expander: Expander, child: Child) -> Iterator[Schema]:
    """Yield schemas of a branch's objects, and note in it what they do not hold."""
    parts = branch.object_parts()
    allowed = _Names(branch, expander)
    spoken = dict(branch.known)
    for pattern in _patterns(parts):
        spoken |= dict.fromkeys(spelled(pattern))
    known = spoken | branch.required
    num_patterns = sum(len(part.patterns) for part in parts)
    if len(known) * max(1, num_patterns) > _MOST_MATCHES:
        first_name = next(iter(known))[:MAX_NAME_SHOWN]
        raise ValueError(
            f"an object has {len(known):,} names and {num_patterns:,} of patternProperties, whose "
            f"product must be at most {_MOST_MATCHES:,}; its first name is '{first_name}'"
        )
    names = dict.fromkeys([*known, *allowed.listed])
    members: dict[str, AnySchema] = {}
    for name in names:
        is_usable = can_be_written(name) and allowed.has(name)
        members[name] = child(branch.member(name, parts)) if is_usable else False
    if any(members[name] is False for name in branch.required):
        return
    possible = [name for name, inner in members.items() if inner is not False]
    more = _others(parts, allowed, possible, child)
    if not _is_asked(branch, parts):
        is_enough = branch.members.low <= len(possible)
        more = _less(more, is_named=is_enough and any(name in spoken for name in possible))
    if more and allowed.is_weak:
        branch.gap("propertyNames (of several limits)", "object")
    yield from _counted(branch, members, more)


def _counted(branch: SchemaBranch, members: dict[str, AnySchema], more: Schema) -> Iterator[Schema]:
    """Yield schemas with the right number of members: `more` are those without a name."""
    low, high = branch.members
    required = [name for name in members if name in branch.required]
    optional = [n for n, one in members.items() if one is not False and n not in branch.required]
    most = len(required) + len(optional)
    if (high is not None and len(required) > high) or (not more and low > most):
        return
    used = {name: inner for name, inner in members.items() if more or inner is not False}
    shape: Schema = {"type": "object", "properties": used, "required": required}
    shape |= more or {"additionalProperties": False}
    if low <= len(required) and (high is None or (not more and high >= most)):
        yield shape
        return
    if not optional or (not more and high is None and low == len(required) + 1):
        yield shape | _counts(low, high)
        return
    selections = _selections(required, optional, branch.members, has_others=bool(more))
    choices = [*islice(selections, _MOST_SELECTIONS + 1)]
    size = len(json.dumps(used)) * len(choices)
    if len(choices) > _MOST_SELECTIONS or size > _MOST_SELECTED_TEXT:
        branch.gap("minProperties or maxProperties (of many)")
        yield shape
        return
    for present, free in choices:
        needed_names = {*required, *present}
        is_kept = needed_names.union(free).__contains__
        inside = {n: inner if is_kept(n) else False for n, inner in used.items()}
        if not more:
            inside = {n: inner for n, inner in inside.items() if is_kept(n)}
        counts = _counts(low, high) if more and not free else {}
        yield (
            shape
            | counts
            | {"properties": inside, "required": [n for n in used if n in needed_names]}
        )


def _selections(
    required: Sequence[str], optional: Sequence[str], members: Range, *, has_others: bool
) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Yield which optional members there are, and which there may be besides.

    Members beside the named ones, if there can be some, count towards the least number, too.
    """
    low, high = members
    num_named = len(required) + len(optional)
    num_asked = max(0, low - len(required))
    if high is not None and (has_others or high < num_named):
        for count in range(0 if has_others else num_asked, len(optional) + 1):
            if len(required) + count <= high:
                yield from ((names, ()) for names in combinations(optional, count))
        return
    for count in range(num_asked if has_others else 0):  # others make up the number
        yield from ((names, ()) for names in combinations(optional, count))
    for indices in combinations(range(len(optional)), num_asked):  # the first that there are
        after = indices[-1] + 1 if indices else 0
        yield [optional[index] for index in indices], optional[after:]


def _counts(low: int, high: int | None) -> Schema:
    found = {"minProperties": low} if low else {}
    return found if high is None else {**found, "maxProperties": high}


def _is_asked(branch: SchemaBranch, parts: Sequence[ObjectPart]) -> bool:
    """Return whether the schema speaks of all members that it does not name.

    By default they are allowed beside named ones, but then nobody waits for them.
    """
    return bool(branch.names) or any(not part.is_open for part in parts)


def _less(more: Schema, *, is_named: bool) -> Schema:
    """Return what of other members is left if nobody asks for them: those that fit a pattern.

    Patterns that only forbid names ask for others, and so does a schema without any name.
    """
    patterns = more.get("patternProperties", {})
    if any(inner is not False for inner in patterns.values()):
        return {**more, "additionalProperties": False}
    return {} if is_named and not patterns else more


def _patterns(parts: Sequence[ObjectPart]) -> dict[RegexPattern, None]:
    return {pattern: None for part in parts for pattern in part.patterns}


def _others(
    parts: Sequence[ObjectPart], allowed: _Names, named: Sequence[str], child: Child
) -> Schema:
    """Return what members that have no schema of their own are; an empty one if there are none."""
    groups = _grouped([pattern for pattern in _patterns(parts) if not spelled(pattern)])
    # llguidance would apply the schema of a whole group to a named member, too.
    if allowed.is_closed or any(
        len({matches(pattern, name) for pattern in group}) > 1 for group in groups for name in named
    ):
        return {}
    found: dict[str, AnySchema] = {}
    for group in groups:
        states = [state for part in parts for p, state in part.patterns.items() if p in group]
        states += [part.others for part in parts if not all(p in part.patterns for p in group)]
        text = (
            "|".join(f"(?:{pattern.text})" for pattern in group)
            if len(group) > 1
            else group[0].text
        )
        if allowed.pattern is not None and text != allowed.pattern:
            continue
        found[text] = child(states)
    rest = child([part.others for part in parts])
    if allowed.pattern is not None:
        if rest is not False and not groups:
            found[allowed.pattern] = rest
        rest = False
    if rest is False and all(inner is False for inner in found.values()):
        return {}
    return (
        {"patternProperties": found, "additionalProperties": rest}
        if found
        else {"additionalProperties": rest}
    )


def _grouped(patterns: Sequence[RegexPattern]) -> list[list[RegexPattern]]:
    """Return patterns in groups: no name matches patterns of two groups."""
    groups: list[list[RegexPattern]] = []
    for pattern in patterns:
        near = [group for group in groups if not all(are_apart(pattern, one) for one in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(one for group in near for one in group), pattern])
    return groups


class _Names:
    """Which names `propertyNames` allows.

    `listed` are all, if it `is_closed`; else others match `pattern`, if there is one. It `is_weak`
    if not all of those are allowed.
    """

    def __init__(self, branch: SchemaBranch, expander: Expander) -> None:
        self.listed: tuple[str, ...] = ()
        self.pattern: str | None = None
        self.is_closed = False
        self.is_weak = False
        self._branches: list[SchemaBranch] | None = None
        if not branch.names:
            return
        state = expander.state([(item,) for item in branch.names])
        found = [] if state is None else expander.branches(state)
        self._branches = [one for one in found if "string" in one.kinds]
        for one in self._branches:
            for place, of in one.gaps.items():
                if of in {"", "string"}:
                    branch.gap(place, "object")
        self.listed = tuple(self._listed())
        free = [one for one in self._branches if one.allowed() is None]
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
            for one in self._branches or ()
            for value in one.allowed() or ()
            if isinstance(value, str)
        ]

    def has(self, name: str) -> bool:
        """Return whether a name is allowed."""
        if self._branches is None:
            return True
        return any(
            one.is_allowed(name) and (one.allowed() is None or name in (one.allowed() or ()))
            for one in self._branches
        )


def _num_limits(names: SchemaBranch) -> int:
    num_patterns = sum(1 + len(pattern.other_texts) for pattern in names.patterns)
    return num_patterns + (names.lengths != Range()) + bool(names.excluded)


def _pattern(names: SchemaBranch) -> str | None:
    """Return a pattern of a branch of names, which may hold one of several limits only."""
    low, high = names.lengths
    if names.patterns:
        return next(iter(names.patterns)).text
    if low or high is not None:
        return f"^[\\x00-\\x{{10ffff}}]{{{low},{'' if high is None else high}}}$"
    return without([value for value in names.excluded.values() if isinstance(value, str)])
