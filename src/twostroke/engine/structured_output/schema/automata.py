r"""Rewrites patterns with look-around, `\b` or inner anchors as patterns without them.

A pattern becomes an alternating automaton: each state is a formula (and, or, not) over positions of
the pattern, from which the remaining text must match. Assertions about earlier text (`^`, `\b`,
look-behind) are decided by tracker automata, which read the same text in parallel. The formulas
that can arise are the states of a deterministic automaton, which is small for the patterns that
people write. It is minimized, and turned back into a regular expression by state elimination.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LAST_CODE: Final = 0x10FFFF
_MAX_STATES: Final = 400
_MAX_CLASSES: Final = 64
_MAX_TEXT: Final = 6000  # characters of the resulting expression
_MAX_POSITIONS: Final = 3000
_MAX_STEPS: Final = 100_000  # visited parts of formulas
_MAX_COUNT: Final = 100
MAX_CACHED: Final = 512
_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Final = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_SETS: Final = {"d": ((0x30, 0x39),), "w": _WORD, "s": _SPACE}
_NOT_IN_DOT: Final = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
# Control characters that an answer has only if a pattern names them.
_UNMENTIONED_CONTROLS: Final = ((0, 7), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))
_ANY: Final = ((0, LAST_CODE),)
_NOT_ASCII: Final = ((0x80, LAST_CODE),)
_LINE_ENDS: Final = ((0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS: Final = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B, "0": 0}
_COUNT: Final = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
_HEX: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")

_LOW_HALF: Final = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")

Ranges = tuple[tuple[int, int], ...]


class UnsupportedError(ValueError):
    """A JSON schema's pattern cannot become an automaton: it is not regular, or too large."""


class PatternNode(NamedTuple):
    """A node of a parsed regular expression's tree: its kind, and its operands or child nodes."""

    kind: str
    parts: tuple[Any, ...] = ()


_ANYTHING: Final = PatternNode("repeat", (PatternNode("set", (_ANY,)), 0, None))


class _Parser:
    """Parses a JSON schema's pattern (a regular expression of ECMA-262) into a tree."""

    def __init__(self, source: str) -> None:
        self._source, self._offset = source, 0

    def pattern(self) -> PatternNode:
        """Return the tree of the whole regular expression."""
        node = self._alternatives()
        if self._offset < len(self._source):
            raise UnsupportedError("a bracket is closed without being opened")
        return node

    def _alternatives(self) -> PatternNode:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else PatternNode("either", tuple(parts))

    def _sequence(self) -> PatternNode:
        parts: list[PatternNode] = []
        while self._offset < len(self._source) and self._source[self._offset] not in "|)":
            parts.append(self._with_count(self._atom()))
        return parts[0] if len(parts) == 1 else PatternNode("sequence", tuple(parts))

    def _with_count(self, atom: PatternNode) -> PatternNode:
        source = self._source
        while self._offset < len(source):
            sign, match = source[self._offset], _COUNT.match(source, self._offset)
            if sign in "*+?":
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
                self._offset += 1
            elif match:
                low = int(match[1])
                high = low if match[2] is None else int(match[3]) if match[3] else None
                self._offset = match.end()
            else:
                return atom
            if max(low, high or 0) > _MAX_COUNT:
                raise UnsupportedError("a count is too large")
            self._take("?")
            atom = PatternNode("repeat", (atom, low, high))
        return atom

    def _atom(self) -> PatternNode:
        character = self._source[self._offset]
        self._offset += 1
        match character:
            case "(":
                return self._group()
            case "[":
                return PatternNode("set", (self._set(),))
            case ".":
                return PatternNode(
                    "set", (subtract_ranges(_ANY, (*_NOT_IN_DOT, *_UNMENTIONED_CONTROLS)),)
                )
            case "^":
                return PatternNode("begin")
            case "$":
                return PatternNode("end")
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise UnsupportedError("nothing is repeated")
        return PatternNode("set", (((ord(character), ord(character)),),))

    def _group(self) -> PatternNode:
        kind = "group"
        for mark, name in (("?:", "group"), ("?=", "ahead"), ("?!", "not ahead")):
            if self._take(mark):
                kind = name
                break
        else:
            if self._take("?<="):
                kind = "behind"
            elif self._take("?<!"):
                kind = "not behind"
            elif match := re.compile(r"\?<[A-Za-z_$][\w$]*>").match(self._source, self._offset):
                self._offset = match.end()
            elif self._source.startswith("?", self._offset):
                raise UnsupportedError("a group of an unknown kind")
        inner = self._alternatives()
        if not self._take(")"):
            raise UnsupportedError("a group is not closed")
        return inner if kind == "group" else PatternNode(kind, (inner,))

    def _escape(self) -> PatternNode:
        if self._offset >= len(self._source):
            raise UnsupportedError("nothing is escaped")
        letter = self._source[self._offset]
        if letter in "bB":
            self._offset += 1
            return PatternNode("edge" if letter == "b" else "not edge")
        return PatternNode("set", (self._escaped(),))

    def _escaped(self) -> Ranges:
        """Return the characters for which an escape sequence stands, as ranges.

        The backslash has been read already.
        """
        source, letter = self._source, self._source[self._offset]
        if letter.lower() in _SETS:
            self._offset += 1
            ranges = _SETS[letter.lower()]
            return (
                subtract_ranges(_ANY, (*ranges, *_UNMENTIONED_CONTROLS))
                if letter.isupper()
                else ranges
            )
        if letter == "0" and source[self._offset + 1 : self._offset + 2].isdecimal():
            raise UnsupportedError("an octal escape")
        if letter in _CONTROLS:
            self._offset += 1
            return ((_CONTROLS[letter],) * 2,)
        if letter == "c" and (name := source[self._offset + 1 : self._offset + 2]).isalpha():
            self._offset += 2
            return ((ord(name.upper()) - 64,) * 2,)
        if match := _HEX.match(source, self._offset):
            self._offset = match.end()
            code = int(match[1] or match[2] or match[3], 16)
            low = _LOW_HALF.match(source, self._offset)
            if 0xD800 <= code < 0xDC00 and low:
                self._offset = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            return ((code, code),)
        if letter.isalnum():
            raise UnsupportedError("a back-reference, a property or an unknown escape")
        self._offset += 1
        return ((ord(letter), ord(letter)),)

    def _set(self) -> Ranges:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        source = self._source
        while True:
            if self._offset >= len(source):
                raise UnsupportedError("a set is not closed")
            if self._take("]"):
                break
            first = self._member()
            if source.startswith("-", self._offset) and not source.startswith("-]", self._offset):
                self._offset += 1
                last = self._member()
                if len(first) > 1 or len(last) > 1 or first[0][0] > last[0][1]:
                    raise UnsupportedError("a range of sets")
                first = ((first[0][0], last[0][1]),)
            ranges += first
        return (
            subtract_ranges(_ANY, (*ranges, *_UNMENTIONED_CONTROLS))
            if is_negated
            else merge_ranges(ranges)
        )

    def _member(self) -> Ranges:
        if self._take("\\b"):
            return ((8, 8),)
        if self._take("\\"):
            if self._offset >= len(self._source):
                raise UnsupportedError("nothing is escaped")
            return self._escaped()
        code = ord(self._source[self._offset])
        self._offset += 1
        return ((code, code),)

    def _take(self, text: str) -> bool:
        is_there = self._source.startswith(text, self._offset)
        self._offset += len(text) if is_there else 0
        return is_there


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return sorted ranges of characters, with overlapping and adjacent ranges merged."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def subtract_ranges(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the ranges of characters in `ranges` that are not in `others`."""
    result, start = [], 0
    for low, high in merge_ranges(others):
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    if start <= LAST_CODE:
        result.append((start, LAST_CODE))
    return merge_ranges(
        (max(low, first), min(high, last))
        for low, high in ranges
        for first, last in result
        if first <= high and low <= last
    )


# Formulas: TRUE and FALSE, ("end",) for the end of the text, ("at", position), ("not", formula),
# ("and", formulas) and ("or", formulas). ("behind", tracker, if_match, if_no_match) stands for one
# of two formulas, until the text before is known.
Formula = Any
TRUE: Final = ("true",)
FALSE: Final = ("false",)
END: Final = ("end",)


def negate_formula(formula: Formula) -> Formula:
    """Return the negation of an automaton's formula, a condition on the text that follows."""
    if formula == TRUE:
        return FALSE
    if formula == FALSE:
        return TRUE
    return formula[1] if formula[0] == "not" else ("not", formula)


def join_formulas(kind: str, formulas: Iterable[Formula]) -> Formula:
    """Return the simplified conjunction ("and") or disjunction ("or") of an automaton's formulas.

    `kind` is "and" or "or".
    """
    neutral, absorbing = (TRUE, FALSE) if kind == "and" else (FALSE, TRUE)
    parts: set[Formula] = set()
    for formula in formulas:
        parts |= set(formula[1]) if formula[0] == kind else {formula}
    parts.discard(neutral)
    if absorbing in parts or any(negate_formula(part) in parts for part in parts):
        return absorbing
    if not parts:
        return neutral
    return parts.pop() if len(parts) == 1 else (kind, frozenset(parts))


class _Automaton:
    """An alternating automaton: a regular expression as formulas about the text that follows.

    A formula combines conditions by "and", "or" and "not". For each look-behind, a separate
    automaton (a tracker) follows the text from its start.
    """

    def __init__(self, node: PatternNode, *, is_negated: bool = False) -> None:
        # For each position: its characters, and the formula of the text after one of them.
        self._next: list[tuple[Ranges, Formula]] = []
        self._loops: list[Callable[[], Formula]] = []
        self._trackers: dict[PatternNode, int] = {}
        self._is_tracking = False
        # Regular expression engines disagree about `.` and line ends, and about words that are not
        # ASCII. Where a part must not match, the characters in question are avoided.
        self.avoided: Ranges = (
            (*_UNMENTIONED_CONTROLS, *_LINE_ENDS) if is_negated else _UNMENTIONED_CONTROLS
        )
        self._is_denied = is_negated
        self.tracked: list[Formula] = []  # each tracker's formula at the start of a text
        self.num_steps = 0
        # Any text may stand before the match and after it.
        self.start = self.formula(PatternNode("sequence", (_ANYTHING, node)), TRUE)

    def formula(self, node: PatternNode, after: Formula) -> Formula:
        """Return the formula of a text that begins with a match of `node`, followed by `after`.

        `node` is a part of the regular expression; `after` is the formula of the text after the
        match.
        """
        kind, parts = node
        self.num_steps += 1
        if self.num_steps > _MAX_POSITIONS:
            raise UnsupportedError("it has too many parts")
        match kind:
            case "set":
                self._next.append((parts[0], after))
                return ("at", len(self._next) - 1) if parts[0] else FALSE
            case "sequence":
                for part in reversed(parts):
                    after = self.formula(part, after)
                return after
            case "either":
                return join_formulas("or", [self.formula(part, after) for part in parts])
            case "repeat":
                part, low, high = parts
                return self._repeated(part, low, high, after)
        return self._assertion(kind, parts, after)

    def _assertion(self, kind: str, parts: tuple[Any, ...], after: Formula) -> Formula:
        """Return the formula of an assertion, such as `^` or a look-ahead, followed by `after`.

        An assertion consumes no character. `kind` and `parts` come from its node in the tree.
        """
        if kind in {"edge", "not edge"}:
            return self._word_boundary(after, is_edge=kind == "edge")
        if kind in {"ahead", "not ahead"}:
            was_denied = self._is_denied
            if kind == "not ahead":
                self._enter_negation()
            rule = self.formula(parts[0], TRUE)
            self._is_denied = was_denied
            return join_formulas(
                "and", (negate_formula(rule) if kind == "not ahead" else rule, after)
            )
        if kind == "end":
            return join_formulas("and", (END, after))
        if kind == "not behind":
            self._enter_negation()
        if kind == "begin":
            return self._look_behind(PatternNode("set", (_ANY,)), FALSE, after)
        choice = (after, FALSE) if kind == "behind" else (FALSE, after)
        return self._look_behind(parts[0], if_so=choice[0], if_not=choice[1])

    def _enter_negation(self) -> None:
        """Record that the next part of the expression must not match, as in a negative look-ahead.

        The resulting expression then has no line endings in its sets of characters.
        """
        self._is_denied = True
        self.avoided = merge_ranges((*self.avoided, *_LINE_ENDS))

    def _word_boundary(self, after: Formula, *, is_edge: bool) -> Formula:
        """Return the formula of a word boundary, or of its absence, followed by `after`.

        A boundary next to a character outside ASCII never matches.
        """
        word, other = PatternNode("set", (_WORD,)), PatternNode("set", (_NOT_ASCII,))
        if self._is_denied:
            self.avoided = merge_ranges((*self.avoided, *_NOT_ASCII))
        is_word, is_other = self.formula(word, TRUE), self.formula(other, TRUE)
        inside = join_formulas("and", (is_word, after))
        outside = join_formulas("and", (negate_formula(is_word), negate_formula(is_other), after))
        after_word, after_rest = (outside, inside) if is_edge else (inside, outside)
        after_rest = self._look_behind(other, if_so=FALSE, if_not=after_rest)
        return self._look_behind(word, if_so=after_word, if_not=after_rest)

    def _repeated(self, part: PatternNode, low: int, high: int | None, after: Formula) -> Formula:
        if high is None:
            number = len(self._loops)
            self._loops.append(lambda: FALSE)
            loop: Formula = ("loop", number)
            inner = self.formula(part, loop)
            repeated = join_formulas("or", (inner, after))
            self._loops[number] = lambda: repeated
            after = loop
        else:
            for _ in range(high - low):
                after = join_formulas("or", (self.formula(part, after), after))
        for _ in range(low):
            after = self.formula(part, after)
        return after

    def _look_behind(self, node: PatternNode, if_so: Formula, if_not: Formula) -> Formula:
        """Return a condition on the text before: whether it ends with a match of `node`.

        If it does, the formula `if_so` applies, and otherwise `if_not`.
        """
        if self._is_tracking:
            raise UnsupportedError("it has a look-behind inside a look-behind")
        if node not in self._trackers:
            self._trackers[node] = len(self.tracked)
            self.tracked.append(FALSE)
            self._is_tracking = True
            number = self._trackers[node]
            self.tracked[number] = self.formula(PatternNode("sequence", (_ANYTHING, node)), END)
            self._is_tracking = False
        return ("behind", self._trackers[node], if_so, if_not)

    def resolved(
        self, formula: Formula, flags: tuple[bool, ...], open_loops: frozenset[int] = frozenset()
    ) -> Formula:
        """Return a formula in which each condition on the text before is decided.

        Loops are replaced by their formulas. `flags` say for each look-behind, by its number,
        whether the text before ends with a match. `open_loops` are the loops that were entered
        without consuming a character.
        """
        self.num_steps += 1
        if self.num_steps > _MAX_STEPS:
            raise UnsupportedError("it has too many combinations")
        match formula[0]:
            case "behind":
                branch = formula[2] if flags[formula[1]] else formula[3]
                return self.resolved(branch, flags, open_loops)
            case "loop":
                if formula[1] in open_loops:  # the loop was entered again without a character
                    return FALSE
                return self.resolved(self._loops[formula[1]](), flags, open_loops | {formula[1]})
            case "not":
                return negate_formula(self.resolved(formula[1], flags, open_loops))
            case "and" | "or":
                parts = [self.resolved(part, flags, open_loops) for part in formula[1]]
                return join_formulas(formula[0], parts)
        return formula

    def after(self, formula: Formula, code: int) -> Formula:
        """Return the formula for the rest of the text once a character has been consumed.

        `formula` is the condition on the text from this character on, without look-behind.
        """
        self.num_steps += 1
        match formula[0]:
            case "at":
                ranges, after = self._next[formula[1]]
                return after if any(low <= code <= high for low, high in ranges) else FALSE
            case "end":
                return FALSE
            case "not":
                return negate_formula(self.after(formula[1], code))
            case "and" | "or":
                return join_formulas(formula[0], [self.after(part, code) for part in formula[1]])
        return formula

    def classes(self) -> list[Ranges]:
        """Divide all characters into classes (ranges) that the automaton treats equally.

        The deterministic automaton has one transition for each class.
        """
        edges = {0, LAST_CODE + 1}
        for ranges, _ in self._next:
            edges |= {edge for low, high in ranges for edge in (low, high + 1)}
        groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
        marks = sorted(edges)
        for low, end in pairwise(marks):
            key = tuple(
                any(first <= low <= last for first, last in ranges) for ranges, _ in self._next
            )
            groups.setdefault(key, []).append((low, end - 1))
        if len(groups) > _MAX_CLASSES:
            raise UnsupportedError("it distinguishes too many classes of characters")
        return [merge_ranges(ranges) for ranges in groups.values()]


def accepts_end(formula: Formula) -> bool:
    """Return whether the empty text satisfies an automaton's formula: a match may end here."""
    match formula[0]:
        case "true" | "end":
            return True
        case "not":
            return not accepts_end(formula[1])
        case "and":
            return all(map(accepts_end, formula[1]))
        case "or":
            return any(map(accepts_end, formula[1]))
    return False


class DfaTable(NamedTuple):
    """A deterministic finite automaton (DFA) of a regular expression, as a table of transitions.

    Attributes:
        classes: the classes of characters.
        transitions: the next state, by state and class.
        final: whether a state accepts the text so far.
        avoided: characters that the resulting expression leaves out.
    """

    classes: list[Ranges]
    transitions: list[list[int]]
    final: list[bool]
    avoided: Ranges


def build_dfa(node: PatternNode, *, is_negated: bool = False) -> DfaTable:
    """Build the deterministic automaton of all texts in which a regular expression matches.

    With `is_negated`, of all texts in which the expression does not match.
    """
    automaton = _Automaton(node, is_negated=is_negated)
    classes = automaton.classes()
    trackers = automaton.tracked

    def state_of(formula: Formula, tracked: tuple[Formula, ...]) -> tuple[Formula, ...]:
        """Return the state of the deterministic automaton for a set of formulas.

        The state is a tuple: the formula of the rest of the text, then each look-behind's formula,
        with all conditions on earlier text decided.
        """
        nothing = (False,) * len(trackers)
        resolved_trackers = tuple(automaton.resolved(formula, nothing) for formula in tracked)
        flags = tuple(map(accepts_end, resolved_trackers))
        return (automaton.resolved(formula, flags), *resolved_trackers)

    states = {state_of(automaton.start, tuple(trackers)): 0}
    transitions: list[list[int]] = []
    final: list[bool] = []
    waiting = list(states)
    while len(transitions) < len(states):
        state = waiting[len(transitions)]
        final.append(accepts_end(state[0]) is not is_negated)
        row = []
        for ranges in classes:
            formulas = [automaton.after(formula, ranges[0][0]) for formula in state]
            other = state_of(formulas[0], tuple(formulas[1:]))
            if other not in states:
                states[other] = len(states)
                waiting.append(other)
                if len(states) > _MAX_STATES:
                    raise UnsupportedError("its automaton is too large")
            row.append(states[other])
        transitions.append(row)
    return _minimize(DfaTable(classes, transitions, final, automaton.avoided))


def _minimize(table: DfaTable) -> DfaTable:
    """Return the deterministic automaton with the fewest states that accepts the same texts."""
    block = [int(is_final is not table.final[0]) for is_final in table.final]
    while True:
        keys: dict[tuple[int, ...], int] = {}
        refined = [
            keys.setdefault((block[state], *(block[to] for to in row)), len(keys))
            for state, row in enumerate(table.transitions)
        ]
        if len(keys) == len(set(block)):
            break
        block = refined
    first = [block.index(number) for number in range(max(block) + 1)]
    order = {block[0]: 0}
    for number in range(len(first)):
        order.setdefault(number, len(order))
    by_order = sorted(order, key=order.__getitem__)
    transitions = [
        [order[block[to]] for to in table.transitions[first[number]]] for number in by_order
    ]
    final = [table.final[first[number]] for number in by_order]
    return DfaTable(table.classes, transitions, final, table.avoided)


def to_expression(table: DfaTable) -> str:
    """Return a regular expression that matches exactly the texts that an automaton accepts.

    Raises:
        UnsupportedError: the expression would be too long, or no text is accepted.
    """
    num_states = len(table.transitions)
    start, end = num_states, num_states + 1
    edges: dict[int, dict[int, str]] = {state: {} for state in range(num_states + 2)}
    for state, row in enumerate(table.transitions):
        groups: dict[int, list[tuple[int, int]]] = {}
        for ranges, to in zip(table.classes, row, strict=True):
            groups.setdefault(to, []).extend(ranges)
        for to, characters in groups.items():
            written = subtract_ranges(merge_ranges(characters), table.avoided)
            if written:
                edges[state][to] = _set_text(written)
        if table.final[state]:
            edges[state][end] = ""
    edges[start][0] = ""
    left = set(range(num_states))
    while left:
        into = {
            state: [other for other in edges if state in edges[other] and other != state]
            for state in left
        }
        state = min(left, key=lambda state: (_cost(edges, state, into[state]), state))
        left.discard(state)
        loop = edges[state].pop(state, None)
        star = "" if not loop else f"{_grouped(loop)}*"
        outward = edges.pop(state)
        for source in into[state]:
            before = edges[source].pop(state)
            for to, after in outward.items():
                path = _as_sequence_part(before) + star + _as_sequence_part(after)
                old = edges[source].get(to)
                edges[source][to] = path if old is None else _either(old, path)
        if sum(len(text) for row in edges.values() for text in row.values()) > 4 * _MAX_TEXT:
            raise UnsupportedError("it would be too long")
    text = edges[start].get(end)
    if text is None:
        raise UnsupportedError("nothing matches it")
    if len(text) > _MAX_TEXT:
        raise UnsupportedError("it would be too long")
    return text


def _cost(edges: dict[int, dict[int, str]], state: int, sources: list[int]) -> int:
    outward = [text for to, text in edges[state].items() if to != state]
    loop = len(edges[state].get(state, ""))
    num_in, num_out = len(sources), len(outward)
    before = sum(len(edges[source][state]) for source in sources)
    return before * num_out + (sum(map(len, outward)) + loop * num_out) * num_in


def _either(first: str, second: str) -> str:
    """Return a regular expression that matches all texts that at least one of two matches."""
    if first == "":
        return f"{_grouped(second)}?"
    if second == "":
        return f"{_grouped(first)}?"
    return f"{first}|{second}"


def _as_sequence_part(text: str) -> str:
    """Return a regular expression in a form that can be concatenated: a group if it has `|`."""
    depth, is_escaped, in_set = 0, False, False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_set:
            in_set = character != "]"
        elif character == "[":
            in_set = True
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "|" and not depth:
            return f"(?:{text})"
    return text


def _grouped(text: str) -> str:
    return text if re.fullmatch(r"\[[^\]\[]*\]", text) else f"(?:{text})"


def _set_text(ranges: Ranges) -> str:
    """Return a set of characters in the notation of regular expressions, such as `[a-z]`."""
    if ranges == subtract_ranges(_ANY, _UNMENTIONED_CONTROLS):
        return r"[^\x{0}-\x{7}\x{b}\x{e}-\x{1f}\x{7f}]"
    parts = []
    for low, high in ranges:
        parts.append(f"\\x{{{low:x}}}")
        if low < high:
            parts.append(f"-\\x{{{high:x}}}")
    return f"[{''.join(parts)}]"


def without_look_around(source: str) -> tuple[str, ...] | None:
    """Rewrite a JSON schema's pattern as regular expressions without look-around or inner anchors.

    llguidance supports neither. The pattern matches in a text if all returned expressions match the
    whole text. None if the pattern is not regular, or too large.
    """
    try:
        conjuncts = _conjuncts(_Parser(source).pattern())
        return tuple(f"^(?:{to_expression(build_dfa(node))})$" for node in conjuncts)
    except (UnsupportedError, RecursionError):
        return None


@lru_cache(MAX_CACHED)
def opposite_pattern(source: str) -> str | None:
    """Return a regular expression for all texts in which a JSON schema's pattern does not match.

    It replaces a `pattern` under `not`. None if the pattern is not regular, or too large.
    """
    try:
        table = build_dfa(_Parser(source).pattern(), is_negated=True)
        return f"^(?:{to_expression(table)})$"
    except (UnsupportedError, RecursionError):
        return None


def _conjuncts(node: PatternNode) -> list[PatternNode]:
    """Split a pattern with look-around at its ends into patterns that a text must all match.

    Separate patterns have smaller automata than the whole pattern.
    """
    parts = list(node.parts) if node.kind == "sequence" else [node]
    conjuncts: list[PatternNode] = []
    while len(parts) > 2 and parts[0].kind == "begin" and parts[1].kind in {"ahead", "not ahead"}:
        conjuncts.append(PatternNode("sequence", (parts[0], parts.pop(1))))
    while len(parts) > 2 and parts[-1].kind == "end" and parts[-2].kind in {"behind", "not behind"}:
        conjuncts.append(PatternNode("sequence", (parts.pop(-2), parts[-1])))
    return [*conjuncts, PatternNode("sequence", tuple(parts))]
