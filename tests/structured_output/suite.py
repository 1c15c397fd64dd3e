"""The JSON Schema Test Suite: which of its instances our forms allow.

A form must not let an invalid instance through: either its grammar rejects it, or the check of the
finished answer reports it. What valid instances a grammar rejects, and which schemas are refused,
is counted. Instances are spelled as our grammars write JSON, with their members in any order.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schema_form import Forms, reason

from twostroke.core.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from form import Form

_DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_MOST_SPELLINGS = 240


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add this part's options."""
    parser.add_argument("--suite", type=Path, default=Path("build/json-schema-suite"))
    parser.add_argument("--list", action="store_true", help="list rejected instances and refusals")


def run(args: argparse.Namespace) -> bool:
    """Try all instances, print a table, and return whether none is wrong."""
    forms = Forms(args.model)
    outcomes = [_run_draft(forms, args, draft) for draft in _DRAFTS]
    return all(outcomes)


def _run_draft(forms: Forms, args: argparse.Namespace, draft: str) -> bool:
    folder = args.suite / "tests" / draft
    files = [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/format/*.json"))]
    assert files, f"the suite is not in {folder}"
    result = _DraftResult()
    for file in files:
        kind = "format" if file.name == "format.json" or file.parent != folder else "required"
        for group in json.loads(file.read_text()):
            result.where = f"{file.relative_to(folder)}: {group['description']}"
            result.count[f"{kind} schemas"] += 1
            try:
                form = forms.form(_with_draft(group["schema"], draft))
            except RequestError as error:
                result.count[f"{kind} schemas, refused"] += 1
                result.refused[reason(error)] += 1
                result.listed.append(f"refused: {result.where}: {reason(error)}")
                continue
            result.count["schemas whose answers are checked after"] += bool(
                form.unenforced_keywords
            )
            for test in group["tests"]:
                _try(form, group["schema"], test, result)
    print(f"JSON Schema Test Suite, {draft}, required and optional/format")
    print(*(f"  {verdict}: {number}" for verdict, number in sorted(result.count.items())), sep="\n")
    print(
        *(f"  refused, {number}: {why}" for why, number in result.refused.most_common()), sep="\n"
    )
    print(*(f"  {line}\n" for line in (result.listed if args.list else [])), sep="", end="")
    print(*(f"  WRONG: {fault}\n" for fault in result.wrong), sep="", end="")
    return not result.wrong


@dataclass(slots=True)
class _DraftResult:
    """The findings of a draft, and the group of tests that is under way."""

    where: str = ""
    count: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)


def _try(form: Form, schema: Any, test: Any, result: _DraftResult) -> None:
    """Try an instance, and note what became of it."""
    kind, verdict = "valid" if test["valid"] else "invalid", _verdict(form, schema, test["data"])
    annotation = test["description"].endswith("is only an annotation by default")
    if verdict in {"rejected", "reported"} and kind == "valid" and annotation:
        verdict = "not accepted: formats are kept to"
    result.count[f"{kind} instances, {verdict}"] += 1
    label = f"{result.where} | {test['description']} | {json.dumps(test['data'])[:80]}"
    if (kind, verdict) in {("invalid", "accepted"), ("valid", "reported")}:
        result.wrong.append(f"{kind}, {verdict}: {label}")
    elif (kind, verdict) == ("valid", "rejected"):
        result.listed.append(f"{kind}, {verdict}: {label}")


def _with_draft(schema: Any, draft: str) -> Any:
    """Return a schema that names its draft: those of draft 7 leave it to their folder."""
    return schema if isinstance(schema, bool) else {"$schema": _DRAFTS[draft]} | schema


def _verdict(form: Form, schema: Any, instance: Any) -> str:
    """Return "accepted", "rejected" (perhaps with a reason) or "reported", by the check after."""
    accepted_texts = [text for text in _spellings(instance, schema) if form.takes(text)]
    if accepted_texts:
        return "accepted" if any(form.passes(text) for text in accepted_texts) else "reported"
    integral = _with_integers(instance)
    if json.dumps(integral) != json.dumps(instance) and form.takes(_spelled(integral)):
        return "rejected: 1.0 is written as 1"
    return "rejected"


def _spellings(instance: Any, schema: Any) -> list[str]:
    """Return the texts of a value: members in each order, characters escaped or not."""
    names = list(_names(schema))
    orders = [instance, _sorted(instance, names)]
    orders += itertools.islice(_orders(instance), _MOST_SPELLINGS)
    texts = [_spelled(value, ascii_only=some) for value in orders for some in (False, True)]
    return list(dict.fromkeys(texts))


def _spelled(value: Any, *, ascii_only: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ascii_only)


def _orders(value: Any) -> Iterator[Any]:
    """Yield a value with the members of its objects in each order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(_orders, value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for inner in itertools.product(*(_orders(value[name]) for name in names)):
                yield dict(zip(names, inner, strict=True))
    else:
        yield value


def _sorted(value: Any, names: list[str]) -> Any:
    """Return a value with members in the order in which a schema names them."""
    if isinstance(value, list):
        return [_sorted(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    known_names = [name for name in names if name in value]
    return {name: _sorted(value[name], names) for name in dict.fromkeys([*known_names, *value])}


def _names(schema: Any) -> Iterator[str]:
    """Yield all names in a schema, in its order."""
    if isinstance(schema, dict):
        for name, inner in schema.items():
            yield name
            yield from _names(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _names(inner)


def _with_integers(value: Any) -> Any:
    """Return a value whose integral numbers are integers."""
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(inner_value) for name, inner_value in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
