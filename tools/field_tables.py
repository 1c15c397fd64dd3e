"""Write the tables of request fields in docs/reference/api.md; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from twostroke.server.body.field import Fact
from twostroke.server.body.well_known import HINTS
from twostroke.server.openapi.document import ServerFacts, components
from twostroke.server.protocols.common.fields import CommonFields
from twostroke.server.routes import EMBEDDING_PROTOCOLS, GENERATION_PROTOCOLS, UTILITY_ENDPOINTS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
BEGIN, END = "<!-- tables of fields: make tables -->\n", "<!-- end of tables -->\n"
SHARED = "/v1/chat/completions, /v1/completions, /v1/responses"

Schema = dict[str, Any]


def main() -> int:
    """Write the page, or return 1 if it has to be written."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    current = before + BEGIN + tables() + END + after
    if "--check" in sys.argv:
        return int(current != page)
    PAGE.write_text(current)
    return 0


def tables() -> str:
    """Return the tables of all bodies; fields of several bodies are listed once."""
    bodies: dict[str, Any] = {
        path: one.request
        for path, one in (GENERATION_PROTOCOLS | EMBEDDING_PROTOCOLS | UTILITY_ENDPOINTS).items()
    }
    facts = ServerFacts("", has_keys=False, is_strict=False, values=dict.fromkeys(Fact))
    found = components({SHARED: CommonFields, **bodies}, facts)
    shared = found["CommonFields"]["properties"]
    parts = [_hints(), _table(SHARED, shared)]
    for path, kind in bodies.items():
        properties = found[kind.__name__]["properties"]
        if issubclass(kind, CommonFields):
            properties = {k: v for k, v in properties.items() if shared.get(k) != v}
        parts.append(_table(path, properties))
    return "\n" + "\n".join(parts) + "\n"


def _hints() -> str:
    """Return the table of hints that other servers' clients send."""
    head = [
        "### Hints for other servers",
        "",
        "| sent by | fields that are ignored on paths that do not list them below |",
        "|---|---|",
    ]
    rows = [f"| {who} | `{'`, `'.join(names)}` |" for who, names in HINTS.items()]
    return "\n".join([*head, *rows, ""])


def _table(title: str, fields: dict[str, Schema]) -> str:
    rows, ignored, hints, unsupported = [], [], [], []
    for name, schema in fields.items():
        text = schema["description"]
        if text == "Ignored.":
            ignored.append(f"`{name}`")
        elif text.startswith("Ignored"):
            hints.append(f"`{name}`")
        elif text.startswith("Not supported"):
            neutral = ", ".join(f"`{_json(value)}`" for value in schema["enum"][1:])
            unsupported.append(f"`{name}`" + (f" ({neutral})" if neutral else ""))
        else:
            rows.append(f"| `{name}` | {_values(schema)} | {text} |")
    head = [f"### {title}", "", "| field | values | meaning |", "|---|---|---|"]
    lists = []
    if ignored:
        lists += ["", f"Ignored: {', '.join(ignored)}."]
    if hints:
        lists += ["", f"Ignored, and refused with `--strict`: {', '.join(hints)}."]
    if unsupported:
        lists += ["", f"Refused, except null and neutral values: {', '.join(unsupported)}."]
    return "\n".join([*head, *rows, *lists, ""])


def _values(schema: Schema) -> str:
    """Return the types and the bounds of a field in words."""
    if words := schema.get("enum"):
        return ", ".join(f"`{word}`" for word in words if word is not None)
    ways = schema.get("anyOf") or schema.get("oneOf") or [schema]
    if any("enum" in way for way in ways):
        return ", ".join(filter(None, map(_values, ways)))
    outer = {key: value for key, value in schema.items() if key not in {"anyOf", "oneOf"}}
    words = [_type(way) for way in ways if way.get("type") != "null"]
    bounds = [_bounds(way | outer) for way in ways if way.get("type") != "null"]
    return ", ".join([" or ".join(dict.fromkeys(words)), *dict.fromkeys(filter(None, bounds))])


def _type(schema: Schema) -> str:
    kind = schema.get("type", "object")
    if kind == "array":
        return f"list of {_type(schema['items'])}s" if "type" in schema.get("items", {}) else "list"
    return "string" if isinstance(kind, list) else str(kind)


def _bounds(schema: Schema) -> str:
    if most := schema.get("maxLength"):
        return f"at most {most} characters"
    if most := schema.get("maxItems", schema.get("maxProperties")):
        return f"at most {most} entries"
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    if "not" in schema:  # 0, in limits of tokens
        return f"{low} or at least 1"
    high = schema.get("maximum")
    if high is None or high > 2**30:
        return f"at least {low}" if low not in (None, -(2**63)) else ""
    if above is not None:
        return f"over {above:g}, up to {high:g}"
    return f"{low:g} to {high:g}" if low is not None else f"at most {high:g}"


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


if __name__ == "__main__":
    sys.exit(main())
