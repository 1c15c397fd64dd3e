"""Words of Lark's notation, as llguidance extends it, for grammars that are put together here."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from twostroke.engine.structured_output.schema.prepare import prepare, with_escapes
from twostroke.engine.structured_output.schema.size import forces_little
from twostroke.model.tokenizer.preface import MAX_BLANKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.structured_output.schema.document import Deadline
    from twostroke.model.tokenizer import Tokenizer

# Where text can go on in one way only, llguidance does not look how far.
_SCHEMA: Final = re.compile(r"^\w+ *: *%json +(?=\{)", re.MULTILINE)
NO_FORCING: Final = '%llguidance {"no_forcing": true}'
TEXT: Final = r"TEXT: /(.|\n)*/"  # the rule of any text without special tokens


def special_marks(marks: Iterable[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of those marks that are special tokens, which no text can spell."""
    found = {mark: tokenizer.find(mark) for mark in marks if mark}
    return {mark: id_ for mark, id_ in found.items() if id_ in tokenizer.special_ids}


def spelled(text: str, specials: Mapping[str, int]) -> str:
    """Return a text as a grammar writes it; marks among `specials` are tokens."""
    cuts = re.split("|".join(f"({re.escape(mark)})" for mark in specials), text)
    parts = [part for part in (cuts if specials else [text]) if part]
    return " ".join(
        f"<[{specials[part]}]>" if part in specials else json.dumps(part, ensure_ascii=False)
        for part in parts
    )


def up_to(name: str, mark: str, specials: Mapping[str, int]) -> str:
    """Return the rule of any text up to a mark and with it, the first that comes."""
    if mark in specials:
        return f"{name}: TEXT {spelled(mark, specials)}"
    return f"{name}[lazy]: TEXT {spelled(mark, specials)}"


def beginning(preface: ReasoningSection, specials: Mapping[str, int]) -> str:
    """Return what a preface begins with."""
    mark = spelled(preface.begin, specials)
    return mark if preface.begin in specials else rf"/\s{{0,{MAX_BLANKS}}}/ {mark}"


def text_but(*others: str) -> str:
    """Return the rule of any text that begins with none of these, which are terminals."""
    return f"{TEXT} & ~(({' | '.join(others)}) /(.|\\n)*/)" if others else TEXT


def either(first: str, second: str) -> str:
    """Return the grammar of answers that one of two grammars allows.

    Each is in Lark's notation, or llguidance's own object, and so is the result.
    """
    whole = {"name": "either", "lark_grammar": "start: @first | @second"}
    return json.dumps({"grammars": [whole, *_named("first", first), *_named("second", second)]})


def with_prepared_schemas(rules: str, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Return rules in which each JSON schema is prepared, and what those do not hold.

    A schema is a rule of its own; with `x-guidance` it says how JSON is written.

    Raises:
        ValueError: a schema cannot be followed.
        TimeoutError: the deadline is over.
    """
    parts: list[str] = []
    gaps: list[str] = []
    end = 0
    has_forcing = False
    for found in _SCHEMA.finditer(rules):
        schema, after = json.JSONDecoder().raw_decode(rules, found.end())
        prepared = prepare(json.dumps(schema), deadline)
        text = json.loads(prepared.text)
        has_forcing = has_forcing or not forces_little(text)
        form = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
        if prepared.escapes:
            form = {"x-guidance": dict(with_escapes(form.get("x-guidance", {})))}
        parts += [rules[end : found.end()], json.dumps({**text, **form})]
        gaps += prepared.gaps
        end = after
    forcing = [f"\n{NO_FORCING}\n"] if has_forcing else []
    return "".join([*parts, rules[end:], *forcing]), tuple(gaps)


def after_preface(preface: ReasoningSection, grammar: str, tokenizer: Tokenizer) -> str:
    """Return the grammar of answers that begin with a preface.

    `grammar` is in Lark's notation, or llguidance's own object.
    """
    specials = special_marks((preface.begin, preface.end), tokenizer)
    start = (
        "start: (begin preface GAP?)? @answer" if preface.begin else "start: preface GAP? @answer"
    )
    rules = [start, up_to("preface", preface.end, specials), r"GAP: /\n{1,2}/", TEXT]
    if preface.begin:
        rules.append(f"begin: {beginning(preface, specials)}")
    whole = {"name": "whole", "lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [whole, *_named("answer", grammar)]})


def _named(name: str, grammar: str) -> list[dict[str, object]]:
    """Return a grammar as a list of llguidance's objects, the first of which has this name."""
    parts = json.loads(grammar)["grammars"] if grammar[0] == "{" else [{"lark_grammar": grammar}]
    return [{**parts[0], "name": name}, *parts[1:]]
