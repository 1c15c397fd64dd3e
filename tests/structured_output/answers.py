"""Answers of a real model under many constraints, at a high temperature.

JSON schemas are made at random; others are regular expressions, choices and a grammar. Each answer
must be valid, by a validator that is not ours, or be reported by the check of finished answers; an
answer that was cut by its length must be something that could have become valid. Speculation is on.
In the end it prints how much time of steps the masks and drafts of constraints took.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import regex
from json_judge import REPEATED, fault
from schema_form import Form
from schemas import Schemas

from twostroke import LLM, SamplingParams
from twostroke.core.constraint import Constraint
from twostroke.core.options import CacheOptions, EngineOptions
from twostroke.core.request import FinishReason
from twostroke.engine.structured_output.grammar import GrammarMatcher

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from twostroke.engine.client import Client
    from twostroke.engine.output import Completion
    from twostroke.engine.structured_output.grammar import Grammars

_TOGETHER = 16
_WORDS = ("name", "age", "kind", "tags", "city", "note", "size", "price", "is_open", "items")
_REGEXES = (r"[0-9]{1,3}(,[0-9]{3})*", "(yes|no|maybe)( [a-z]+){0,4}[.!?]", "#[0-9a-f]{6}")
_GRAMMAR = """\
start: sum
sum: product ("+" product | "-" product)*
product: value ("*" value | "/" value)*
value: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""
_SUM = r"(?<s>(?<p>(?<v>[0-9]{1,3}|\((?&s)\))([*\/](?&v))*)([+-](?&p))*)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this part's options."""
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.5)


def run(args: argparse.Namespace) -> bool:
    """Ask, check, print a table, and return whether no answer is wrong."""
    rng = random.Random(args.seed)
    verdict_counts, wrong, spent = Counter[str](), list[str](), _clocks()
    with LLM(args.model, EngineOptions(cache=CacheOptions(context_length=1024))) as llm:
        client = llm.engine.client
        client.grammars.prepare()
        constraints = [_constraint(rng, client.grammars) for _ in range(args.answers)]
        start_s = time.monotonic()
        for first in range(0, args.answers, _TOGETHER):
            some = constraints[first : first + _TOGETHER]
            params = [
                SamplingParams(
                    max_tokens=args.tokens,
                    temperature=args.temperature,
                    seed=args.seed + first + i,
                    constraint=constraint,
                )
                for i, constraint in enumerate(some)
            ]
            prompts = [_prompt(constraint) for constraint in some]
            for constraint, [answer] in zip(some, llm.generate(prompts, params), strict=True):
                verdict = _verdict(client, constraint, answer)
                verdict_counts[f"{constraint.notation}, {verdict}"] += 1
                if verdict == "wrong":
                    wrong.append(f"{constraint.text}\n    {answer.text!r}")
        elapsed_s = time.monotonic() - start_s
        snapshot = client.loop.snapshot()
    speculation, meter = snapshot.speculation, snapshot.phases
    step_s = meter.prefill.time_s + meter.decode.time_s
    print(f"{args.model}: {args.answers} answers in {elapsed_s:.0f} s")
    for verdict_name, count in sorted(verdict_counts.items()):
        print(f"  {verdict_name}: {count}")
    print(
        f"  of what a grammar forces {speculation.accepted['grammar']} drafts were accepted,",
        end=" ",
    )
    print(f"of {speculation.proposed['grammar']}")
    shares = ", ".join(f"{name} {100 * s / step_s:.1f}%" for name, s in spent.items())
    print(f"  of the {step_s:.0f} s of steps: {shares}")
    for text in wrong[:5]:
        print(f"  WRONG: {text}")
    return not wrong


def _clocks() -> dict[str, float]:
    """Return seconds that matchers take, by what they are asked; they count from now on."""
    spent: dict[str, float] = {}
    for name in ("masks", "forced", "count_allowed"):
        spent[name] = 0.0
        setattr(GrammarMatcher, name, _timed(name, getattr(GrammarMatcher, name), spent))
    return spent


def _timed(name: str, function: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            spent[name] += time.perf_counter() - began_s

    return timed


def _prompt(constraint: Constraint) -> str:
    return f"An answer in the form {constraint.text[:300]} is:\n"


def _constraint(rng: random.Random, grammars: Grammars) -> Constraint:
    kind = rng.random()
    if kind < 0.8:
        return _form(Schemas(rng), grammars)
    if kind < 0.9:
        return Constraint("regex", rng.choice(_REGEXES))
    if kind < 0.95:
        return Constraint("choice", json.dumps(rng.sample(_WORDS, rng.randint(1, 5))))
    return Constraint("grammar", _GRAMMAR)


def _form(schemas: Schemas, grammars: Grammars) -> Constraint:
    """Return a constraint by a random schema that is not refused."""
    while True:
        constraint = Constraint("json_schema", json.dumps(schemas.make()))
        if grammars.refusal(constraint) is None:
            return constraint


def _verdict(client: Client, constraint: Constraint, answer: Completion) -> str:
    """Return "valid", "reported" (not valid, which the check after finds), "cut", or "wrong"."""
    if answer.finish_reason is FinishReason.LENGTH:
        tokens = answer.token_ids
        matcher = client.grammars.matcher(constraint)
        return "cut" if matcher.count_allowed((), tokens) == len(tokens) else "wrong"
    if _is_valid(constraint, answer.text):
        return "valid"
    if constraint.notation != "json_schema":
        return "wrong"
    form = Form(client.grammars, client.card.tokenizer, constraint.text)
    return "wrong" if form.passes(answer.text) else "reported"


def _is_valid(constraint: Constraint, text: str) -> bool:
    if constraint.notation == "regex":
        return regex.fullmatch(constraint.text, text) is not None
    if constraint.notation == "choice":
        return text in json.loads(constraint.text)
    if constraint.notation == "grammar":
        return regex.fullmatch(_SUM, text) is not None
    return fault(json.loads(constraint.text), text) in {None, REPEATED}
