"""`make test-forms`: answers of a real model under many constraints, at a high temperature.

Schemas are made at random, of every keyword that is kept to, and beside them regular expressions,
choices and a grammar. Each answer must be valid, by a validator that knows nothing of ours, or if
it was cut by its length, something that could have become valid. Guesses are on. In the end it says
what masks and guesses of constraints took of the time of steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import regex
from jsonschema import Draft202012Validator, FormatChecker

from twostroke import LLM, SamplingParams
from twostroke.core.config import CacheOptions, EngineOptions
from twostroke.core.constraint import Constraint
from twostroke.core.request import FinishReason
from twostroke.sample.grammar import GrammarMatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.engine.output import Completion

_TOGETHER = 16
_WORDS = ("name", "age", "kind", "tags", "city", "note", "size", "price", "is_open", "items")
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", r"^\+[0-9]{1,3} [0-9]{4,9}$")
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri")
_REGEXES = (r"[0-9]{1,3}(,[0-9]{3})*", "(yes|no|maybe)( [a-z]+){0,4}[.!?]", "#[0-9a-f]{6}")
_GRAMMAR = """\
start: sum
sum: product ("+" product | "-" product)*
product: value ("*" value | "/" value)*
value: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
_SUM = r"(?<s>(?<p>(?<v>[0-9]{1,3}|\((?&s)\))([*\/](?&v))*)([+-](?&p))*)"


def main() -> int:
    """Ask, check, and return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    constraints = [_constraint(rng) for _ in range(given.answers)]
    kept, wrong, spent = Counter[str](), list[str](), _clocks()
    with LLM(given.model, EngineOptions(cache=CacheOptions(context_length=1024))) as llm:
        client = llm.engine.client
        client.grammars.prepare()
        began = time.monotonic()
        for first in range(0, given.answers, _TOGETHER):
            some = constraints[first : first + _TOGETHER]
            params = [
                SamplingParams(
                    max_tokens=given.tokens,
                    temperature=given.temperature,
                    seed=given.seed + first + i,
                    constraint=constraint,
                )
                for i, constraint in enumerate(some)
            ]
            prompts = [_prompt(constraint) for constraint in some]
            for constraint, [answer] in zip(some, llm.generate(prompts, params), strict=True):
                verdict = _verdict(client.grammars.matcher(constraint), constraint, answer)
                kept[f"{constraint.notation}, {verdict}"] += 1
                if verdict == "wrong":
                    wrong.append(f"{constraint.text}\n    {answer.text!r}")
        elapsed_s = time.monotonic() - began
        snapshot = client.loop.snapshot()
    guesses, meter = snapshot.speculation, snapshot.strokes
    step_s = meter.prefill.time_s + meter.decode.time_s
    print(f"{given.model}: {given.answers} answers in {elapsed_s:.0f} s")
    for what, count in sorted(kept.items()):
        print(f"  {what}: {count}")
    print(f"  of what a grammar forces {guesses.accepted['grammar']} guesses were right,", end=" ")
    print(f"of {guesses.proposed['grammar']}")
    shares = ", ".join(f"{name} {100 * s / step_s:.1f}%" for name, s in spent.items())
    print(f"  of the {step_s:.0f} s of steps: {shares}")
    for one in wrong[:5]:
        print(f"  WRONG: {one}")
    return int(bool(wrong))


def _clocks() -> dict[str, float]:
    """Return seconds that matchers take, by what they are asked; they count from now on."""
    spent: dict[str, float] = {}
    for name in ("masks", "forced", "count_allowed"):
        spent[name] = 0.0
        setattr(GrammarMatcher, name, _timed(name, getattr(GrammarMatcher, name), spent))
    return spent


def _timed(name: str, function: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    def timed(*asked: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*asked)
        finally:
            spent[name] += time.perf_counter() - began_s

    return timed


def _prompt(constraint: Constraint) -> str:
    return f"An answer in the form {constraint.text[:300]} is:\n"


def _constraint(rng: random.Random) -> Constraint:
    kind = rng.random()
    if kind < 0.8:
        return Constraint("json_schema", json.dumps(_schema(rng, 0)))
    if kind < 0.9:
        return Constraint("regex", rng.choice(_REGEXES))
    if kind < 0.95:
        return Constraint("choice", json.dumps(rng.sample(_WORDS, rng.randint(1, 5))))
    return Constraint("grammar", _GRAMMAR)


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return a schema that some value fits."""
    makers = [_string, _number, _enum, _string]
    if depth < 3:
        makers += [_object, _object, _array, _any_of, _recursive]
    return rng.choice([_object, _array] if depth == 0 else makers)(rng, depth)


def _string(rng: random.Random, _depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randrange(4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 20)}


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    low = rng.randint(-50, 1000)
    bounds = {
        rng.choice(["minimum", "exclusiveMinimum"]): low,
        rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(20, 5000),
    }
    schema |= dict(rng.sample(list(bounds.items()), rng.randint(0, 2)))
    if schema["type"] == "integer" and rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 5])
    return schema


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    values = [*rng.sample(_WORDS, 2), None, True, rng.randint(0, 9), [1, "a"], {"x": 1.5}]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, 4)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "title": "Some object",
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth + 1)}
    if rng.random() < 0.8:
        schema |= {"minItems": low, "maxItems": low + rng.randrange(4)}
    if rng.random() < 0.2:
        schema["prefixItems"] = [_schema(rng, depth + 1) for _ in range(2)]
    return schema


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _recursive(rng: random.Random, depth: int) -> dict[str, Any]:
    name = f"d{rng.randrange(10**6)}"
    del depth
    node = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
        "$id": f"http://example.com/{name}",
        "$defs": {"leaf": {"type": "boolean"}},
    }
    node["properties"]["next"]["anyOf"].append({"$ref": "#/$defs/leaf"})
    return node


def _verdict(matcher: GrammarMatcher, constraint: Constraint, answer: Completion) -> str:
    """Return "valid", "cut", or "wrong"."""
    if answer.finish_reason is FinishReason.LENGTH:
        tokens = answer.token_ids
        return "cut" if matcher.count_allowed((), tokens) == len(tokens) else "wrong"
    return "valid" if _is_valid(constraint, answer.text) else "wrong"


def _is_valid(constraint: Constraint, text: str) -> bool:
    if constraint.notation == "regex":
        return regex.fullmatch(constraint.text, text) is not None
    if constraint.notation == "choice":
        return text in json.loads(constraint.text)
    if constraint.notation == "grammar":
        return regex.fullmatch(_SUM, text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    checker = FormatChecker(["date", "ipv4", "ipv6", "email", "uuid"])
    return Draft202012Validator(json.loads(constraint.text), format_checker=checker).is_valid(value)


if __name__ == "__main__":
    sys.exit(main())
