"""Random functions with JSON schemas, random arguments that fit them, and walks in a grammar."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from twostroke.engine.structured_output.grammar import GrammarMatcher
    from twostroke.model.tokenizer import Tokenizer

Schema = dict[str, Any]

_TEXTS = (
    "",
    "a",
    " a ",
    "\n",
    "two\nlines\n",
    "\n\nx",
    'say "hi"',
    "it's",
    "back\\slash \\n",
    "a < b > c </x> <y",
    "</parameter",
    "5",
    "-1.5e3",
    "true",
    "null",
    "None",
    " null ",
    "[1]",
    '{"a": 1}',
    '"quoted"',
    "é 東京 😀",
    "k=v, n=1)",
    "tab\there",
    "<tool_call>",
    "}",
)
_WORDS = ("red", "two words", "5", "true", "null", "a\nb", 'q"q')


def random_schema(rng: random.Random, *, depth: int = 2) -> Schema:
    """Return the schema of an object with random members, some of them required."""
    names = rng.sample(["city", "n", "unit", "tags", "ok", "x-1", "päth", "a.b", "q"], k=4)
    members = {name: _value_schema(rng, depth) for name in names[: rng.randint(0, 4)]}
    required = [name for name in members if rng.random() < 0.6]
    schema: Schema = {"type": "object", "properties": members, "required": required}
    return schema | ({} if rng.random() < 0.5 else {"additionalProperties": False})


def _value_schema(rng: random.Random, depth: int) -> Schema:
    kind = rng.choice(("string",) * 3 + ("nullable", "enum", "number", "nested", "any", "union"))
    if kind == "string":
        return {"type": "string"}
    if kind == "nullable":
        return {"anyOf": [{"type": "string"}, {"type": "null"}]}
    if kind == "enum":
        return {"enum": rng.sample([*_WORDS, 1, 2.5, None, True], k=3)}
    if kind == "number":
        limits: Schema = {"minimum": 3, "maximum": 40} if rng.random() < 0.3 else {}
        return {"type": rng.choice(("integer", "number", "boolean", "null"))} | limits
    if kind == "union":
        return {"type": rng.sample(["string", "integer", "number", "boolean", "array"], k=2)}
    if kind == "any" or not depth:
        return {}
    if rng.random() < 0.5:
        return {"type": "array", "items": _value_schema(rng, depth - 1)}
    return random_schema(rng, depth=depth - 1)


def random_value(rng: random.Random, schema: Schema) -> Any:
    """Return a random value that fits a schema of `random_schema`."""
    if "anyOf" in schema:
        return random_value(rng, rng.choice(schema["anyOf"]))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", rng.choice(("string", "integer", "boolean", "null", "array")))
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", ())
        return {
            name: random_value(rng, inner)
            for name, inner in schema.get("properties", {}).items()
            if name in required or rng.random() < 0.5
        }
    if kind == "array":
        return [random_value(rng, schema.get("items", {})) for _ in range(rng.randint(0, 3))]
    values: Schema = {
        "string": rng.choice(_TEXTS),
        "boolean": rng.random() < 0.5,
        "null": None,
        "integer": rng.choice((3, 7, 40)),
        "number": rng.choice((3, 4.5, 39.25)),
    }
    return values[kind]


def random_answer(
    matcher: GrammarMatcher,
    tokenizer: Tokenizer,
    rng: random.Random,
    snippets: Sequence[str],
    begin: str = "",
    max_tokens: int = 1500,
) -> str | None:
    """Return a random text that a grammar allows as a whole; None if it got too long.

    The text begins with `begin`. The rest consists of random snippets, as far as the grammar
    allows them, and random tokens.
    """
    ends = sorted(matcher.ends)
    output = tokenizer.encode(begin, parse_special=True)
    mask = np.zeros((1, matcher.num_words), np.uint32)
    texts = [tokenizer.encode(snippet, parse_special=True) for snippet in snippets]
    while len(output) < max_tokens:
        if matcher.count_allowed(output, ends[:1]) and rng.random() < 0.8:
            return _text(output, tokenizer)
        if rng.random() < 0.8:
            snippet = rng.choice(texts)
            num_allowed = matcher.count_allowed(output, snippet)
            if num_allowed == len(snippet) or (num_allowed and rng.random() < 0.3):
                output += snippet[:num_allowed]
            continue
        matcher.masks(output, (), (), mask)
        (allowed,) = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()
        tokens = [int(token) for token in allowed if token not in matcher.ends]
        if not tokens:
            return _text(output, tokenizer)
        output.append(rng.choice(tokens))
    return None


def _text(output: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """Return the text of tokens, with special tokens; None if it is not UTF-8."""
    try:
        return b"".join(map(tokenizer.token_bytes, output)).decode()
    except UnicodeDecodeError:
        return None


def snippets_of(schema: Schema) -> list[str]:
    """Return texts that values of a schema may have: names, listed values and literals."""
    schema_text = json.dumps(schema, ensure_ascii=False)
    names = [*schema.get("properties", ())]
    words = [word for word in _WORDS if word in schema_text]
    return [*names, *words, '"', "}", "]", ", ", "1", "true", "null", "7", "x"]
