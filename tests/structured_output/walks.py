"""Random walks through the grammars of random schemas.

At each place a walk takes a random token of those that are allowed, until the answer may end.
Sometimes it tries a text that a weak grammar would let through: a member name spelled with escapes,
the same name again, a date that does not exist. A finished text must be a valid value, by a
validator that is not ours; else the check of the finished answer must report it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from json_judge import REPEATED, fault
from schema_form import Forms, reason
from schemas import Schemas

from twostroke.backends.sampling.reference import as_flags
from twostroke.core.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from form import Form
    from numpy.typing import NDArray

    TaskResult = tuple[Counter[str], Counter[str], list[str]]

_WALKS = 10  # through the grammar of a schema
_SCHEMAS = 25  # a task
_MOST_TOKENS = 240
_HURRY = 60  # tokens, after which a walk goes for its end
_MOST_SHOWN = 12  # wrong texts
_NUMBERS = ("1.0", "-0", "0.5", "1e2", "1E-2", "10", "100000000000000000000", "-1.0e+0", "2.50")
_TEXTS = ("2021-02-29", "2024-02-29", "2021-04-31T00:00:60Z", "23:59:60Z", "22:59:60Z")
_TEXTS += ("23:59:60+01:00", "2020-01-01T23:59:60z", "P1Y2D", "P1M", "PT", "256.1.1.1", "1::2::3")
_TEXTS += ("\\n", "\\u0000", "\\ud83d\\ude42", "\\ud83d", "\\/", "ab\\n", "1", "é", "\ufeff", "x-")
_ESCAPES = ("\\u0061", "\\u000a", "\\u00E9", "\\\\", '\\"', "\\ud800", "\\udc00", "\\t")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this part's options."""
    parser.add_argument("--walks", type=int, default=100_000, help="that finish")
    parser.add_argument("--processes", type=int, default=os.cpu_count())


def run(args: argparse.Namespace) -> bool:
    """Walk until enough walks have finished, print a table, and return whether none is wrong."""
    began_s = time.monotonic()
    count, refused, wrong = Counter[str](), Counter[str](), list[str]()
    start = multiprocessing.get_context("spawn")
    with start.Pool(args.processes, _begin, (args.model,)) as pool:
        for result in pool.imap_unordered(_task, _seeds(args.seed)):
            count += result[0]
            refused += result[1]
            wrong += result[2]
            if count["walks that finished"] >= args.walks:
                pool.terminate()
                break
    print(f"random walks, seed {args.seed}, {time.monotonic() - began_s:.0f} s")
    print(*(f"  {verdict}: {number}" for verdict, number in sorted(count.items())), sep="\n")
    print(*(f"  refused, {number}: {why}" for why, number in refused.most_common(25)), sep="\n")
    print(*(f"  WRONG: {fault}\n" for fault in wrong[:_MOST_SHOWN]), sep="", end="")
    return not wrong


def _seeds(seed: int) -> Iterator[str]:
    return (f"{seed}:{task}" for task in itertools.count())


_walkers: list[Walker] = []  # of this process


def _begin(model: str) -> None:
    _walkers.append(Walker(Forms(model)))


def _task(seed: str) -> TaskResult:
    return _walkers[0].task(random.Random(seed))


class Walker:
    """Walks through grammars over one model's tokens."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        size = forms.tokenizer.vocab_size
        self._bytes = [forms.tokenizer.token_bytes(i) for i in range(size)]
        self._single = {some[0]: i for i, some in enumerate(self._bytes) if len(some) == 1}

    def task(self, rng: random.Random) -> TaskResult:
        """Walk through the grammars of some schemas."""
        schemas = Schemas(rng)
        count, refused, wrong = Counter[str](), Counter[str](), list[str]()
        for _ in range(_SCHEMAS):
            schema = schemas.make()
            count["schemas"] += 1
            try:
                form = self._forms.form(schema)
            except RequestError as error:
                count["schemas refused"] += 1
                refused[reason(error)] += 1
                continue
            count["schemas that are checked after"] += bool(form.unenforced_keywords)
            shown_verdicts = set[str]()
            for _ in range(_WALKS):
                verdict, why = self._verdict(form, schema, rng)
                count[verdict] += 1
                count["walks that finished"] += verdict.startswith("finished")
                if why and verdict not in shown_verdicts:
                    shown_verdicts.add(verdict)
                    unenforced_keywords = f"unenforced_keywords: {form.unenforced_keywords}"
                    wrong.append(
                        f"{verdict}: {why}\n    {json.dumps(schema)}\n    {unenforced_keywords}"
                    )
        return count, refused, wrong

    def _verdict(self, form: Form, schema: Any, rng: random.Random) -> tuple[str, str]:
        """Return what became of a walk, and what is wrong about it, if anything."""
        try:
            spelled = self.walk(form, _hints(schema), rng)
        except RequestError as error:
            return f"failed: {reason(error)}", ""
        if spelled is None:
            return "cut", ""
        text = spelled.decode(errors="backslashreplace")
        why, is_passed = fault(schema, text), form.passes(text)
        if why == REPEATED:  # JSON allows that; the schema holds for either of them
            return "finished, valid, though members repeat", ""
        if why is None:
            return (
                ("finished, valid", "") if is_passed else ("finished, reported though valid", text)
            )
        if is_passed:
            return f"finished, wrong: {why.split(':')[0]}", f"{text}\n    {why}"
        return "finished, invalid and reported", ""

    def walk(self, form: Form, hints: list[str], rng: random.Random) -> bytes | None:
        """Return a whole answer of a grammar, or None if it became too long."""
        matcher, output, text = form.matcher(), list[int](), b""
        walk_state = _WalkState(hints, rng)
        mask = np.zeros((1, form.num_words), np.uint32)
        while len(output) < _MOST_TOKENS:
            matcher.masks(output, (), (), mask)
            hurried = len(output) > _HURRY
            allowed = np.flatnonzero(as_flags(mask[0], len(self._bytes)))
            going_on = allowed[~np.isin(allowed, list(matcher.ends))]
            may_end = len(going_on) < len(allowed)
            if may_end and (hurried or not going_on.size or rng.random() < 0.5):
                return text
            if not going_on.size:
                raise RequestError("Nothing may follow.")
            token = self._token(mask[0], walk_state, hurried=hurried)
            output.append(int(rng.choice(going_on)) if token is None else token)
            text += self._bytes[output[-1]]
            walk_state.follow(self._bytes[output[-1]])
        return None

    def _token(
        self, row: NDArray[np.uint32], walk_state: _WalkState, *, hurried: bool
    ) -> int | None:
        """Return an allowed token that is to be tried, or that comes nearer to the end."""
        for byte in walk_state.wish():
            token = self._single.get(byte)
            if token is not None and row[token // 32] >> (token % 32) & 1:
                return token
            walk_state.give_up()
        if walk_state.rng.random() < (0.95 if hurried else 0.25):
            for byte in b'"' if walk_state.in_string else b"}],":
                token = self._single[byte]
                if row[token // 32] >> (token % 32) & 1:
                    return token
        return None


class _WalkState:
    """Where in a JSON text a walk is, and what it tries there."""

    def __init__(self, hints: list[str], rng: random.Random) -> None:
        self.in_string = False
        self.rng = rng
        self._opens = False  # a string has just begun
        self._escaped = False
        self._hints = hints
        self._wish = b""

    def wish(self) -> bytes:
        """Return the next byte to try, or nothing."""
        daring = 0.5 if self._opens else 0.05 if self.in_string else 0.15
        if not self._wish and self.rng.random() < daring:
            self._wish = self._new_wish().encode()
        return self._wish[:1]

    def give_up(self) -> None:
        """Forget a wish that is not allowed."""
        self._wish = b""

    def follow(self, some: bytes) -> None:
        """Go on with the bytes of a token."""
        self._wish = self._wish[1:] if self._wish.startswith(some) else b""
        for byte in some:
            self._opens = False
            if self._escaped:
                self._escaped = False
            elif byte == ord('"'):
                self.in_string = self._opens = not self.in_string
            elif byte == ord("\\"):
                self._escaped = self.in_string

    def _new_wish(self) -> str:
        rng = self.rng
        if not self.in_string:
            return rng.choice(_NUMBERS)
        if not self._opens:
            return rng.choice(_ESCAPES)
        if not self._hints or rng.random() < 0.2:
            return rng.choice(_TEXTS)
        share = rng.choice((0, 0, 0.3, 1))
        spelled = (_spelled(character, share, rng) for character in rng.choice(self._hints))
        return "".join(spelled) + '"'


def _spelled(character: str, share: float, rng: random.Random) -> str:
    """Return a character in a JSON string, escaped as `share` says."""
    if rng.random() >= share:
        return json.dumps(character, ensure_ascii=False)[1:-1]
    units = character.encode("utf-16-be")
    escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
    return escaped if rng.random() < 0.5 else escaped.upper().replace("U", "u")


def _hints(schema: Any) -> list[str]:
    """Return the texts in a schema: names and values."""
    if isinstance(schema, str):
        return [schema]
    if isinstance(schema, list):
        return [hint for item in schema for hint in _hints(item)]
    if not isinstance(schema, dict):
        return []
    names = [*schema.get("properties", ())] if isinstance(schema.get("properties"), dict) else []
    return names * 3 + [hint for item in schema.values() for hint in _hints(item)]
