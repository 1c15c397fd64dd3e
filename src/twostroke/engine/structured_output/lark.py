"""Builds grammars in Lark's notation, as llguidance extends it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from twostroke.model.tokenizer.preface import MAX_BLANKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.core.constraint import ReasoningSection
    from twostroke.model.tokenizer import Tokenizer

# Keeps llguidance from following forced text, which has no choice of a next token.
NO_FORCING: Final = '%llguidance {"no_forcing": true}'
TEXT: Final = r"TEXT: /(.|\n)*/"  # a rule for any text without special tokens


def special_marks(marks: Iterable[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens that occur in marks, by the tokens' texts.

    Marks are texts such as `<tool_call>` that delimit parts of an answer. A mark may be a single
    token, or special tokens and other text, such as `<|channel>thought`. A grammar must name a
    special token by its id, because text rules do not match special tokens.
    """
    ids: dict[str, int] = {}
    for mark in filter(None, marks):
        ids |= _specials_in(mark, tokenizer)
    return ids


def _specials_in(mark: str, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens in a mark, by their texts; longer tokens win."""
    texts = ((tokenizer.token_text(id_), id_) for id_ in tokenizer.special_ids)
    ids = {text: id_ for text, id_ in texts if text and text in mark}
    if not ids:
        return {}
    longest_first = sorted(ids, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    return {text: ids[text] for text in pattern.findall(mark)}


def to_lark(text: str, specials: Mapping[str, int]) -> str:
    """Return a grammar expression, in Lark's notation, that matches a literal text.

    Marks in `specials` (token ids by text) become references to special tokens.
    """
    cuts = re.split("|".join(f"({re.escape(mark)})" for mark in specials), text)
    parts = [part for part in (cuts if specials else [text]) if part]
    return " ".join(
        f"<[{specials[part]}]>" if part in specials else json.dumps(part, ensure_ascii=False)
        for part in parts
    )


def text_until(name: str, mark: str, specials: Mapping[str, int]) -> str:
    """Return a grammar rule for any text that ends with the first occurrence of a mark.

    `name` is the rule's name. `specials` has the token ids of marks that are special tokens.
    """
    if _begins_with_special(mark, specials):
        return f"{name}: TEXT {to_lark(mark, specials)}"
    offsets = [mark.find(text) for text in specials if text in mark]
    if offsets:  # a terminal cannot have a special token: it ends before the first
        before, rest = json.dumps(mark[: min(offsets)]), to_lark(mark[min(offsets) :], specials)
        return f"{name.upper()}_TEXT: TEXT {before}\n{name}: {name.upper()}_TEXT {rest}"
    return f"{name}[lazy]: TEXT {to_lark(mark, specials)}"


def section_begin(preface: ReasoningSection, specials: Mapping[str, int]) -> str:
    """Return a grammar expression, in Lark's notation, for the opening of a reasoning section."""
    mark = to_lark(preface.begin, specials)
    if _begins_with_special(preface.begin, specials):
        return mark
    return rf"/\s{{0,{MAX_BLANKS}}}/ {mark}"


def _begins_with_special(mark: str, specials: Mapping[str, int]) -> bool:
    """Whether a mark begins with a special token, which no text before the mark can contain."""
    return any(mark.startswith(text) for text in specials)


def text_without_prefix(*terminals: str) -> str:
    """Return the grammar rule `TEXT`: any text that begins with none of the given terminals."""
    return f"{TEXT} & ~(({' | '.join(terminals)}) /(.|\\n)*/)" if terminals else TEXT


def union_grammar(first: str, second: str) -> str:
    """Return a grammar that allows all answers that at least one of two grammars allows.

    A grammar is in Lark's notation, or one of llguidance's JSON objects.
    """
    outer = {"name": "either", "lark_grammar": "start: @first | @second"}
    return json.dumps({"grammars": [outer, *_named("first", first), *_named("second", second)]})


def with_reasoning_section(preface: ReasoningSection, grammar: str, tokenizer: Tokenizer) -> str:
    """Return a grammar for an optional reasoning section, and then text that `grammar` allows.

    A grammar is in Lark's notation, or one of llguidance's JSON objects.
    """
    specials = special_marks((preface.begin, preface.end), tokenizer)
    start = (
        "start: (begin preface GAP?)? @answer" if preface.begin else "start: preface GAP? @answer"
    )
    rules = [start, text_until("preface", preface.end, specials), r"GAP: /\n{1,2}/", TEXT]
    if preface.begin:
        rules.append(f"begin: {section_begin(preface, specials)}")
    outer = {"name": "whole", "lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [outer, *_named("answer", grammar)]})


def with_begin(begin: str, grammar: str, tokenizer: Tokenizer) -> str:
    """Return a grammar for the text `begin`, and then text that `grammar` allows.

    A grammar is in Lark's notation, or one of llguidance's JSON objects.
    """
    start = f"start: {to_lark(begin, special_marks((begin,), tokenizer))} @rest"
    outer = {"name": "begun", "lark_grammar": start}
    return json.dumps({"grammars": [outer, *_named("rest", grammar)]})


def _named(name: str, grammar: str) -> list[dict[str, object]]:
    """Return a grammar as llguidance's JSON objects; rules can refer to the first by `name`."""
    parts = json.loads(grammar)["grammars"] if grammar[0] == "{" else [{"lark_grammar": grammar}]
    return [{**parts[0], "name": name}, *parts[1:]]
