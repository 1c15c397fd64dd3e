"""Measure how long hostile schemas delay other streams of our server.

Run it with `make bench WHAT=hostile-schemas`.

One client streams a long answer. Meanwhile another client sends costly schemas, patterns and
grammars, one after the other, each with at most 40 tokens of an answer. The result is the
longest gap in the stream, beside the longest gap during plain requests of the same length: any
other client costs something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.common.servers import MODEL_NAME, Server, our_command

if TYPE_CHECKING:
    from collections.abc import Iterator

_GOAL_S = 0.1
_TOKENS = 40  # of each neighbour's answer
_ANSWER_WITHIN_S = 60.0


def _schema(**schema: object) -> dict[str, object]:
    return {"guided_json": schema}


_PARTS = [
    {"type": "object", "properties": {f"p{i}{j}": {"type": "integer"}}, "required": [f"p{i}{j}"]}
    for i in range(8)
    for j in range(6)
]
_PATTERNS = {f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}b*$"} for i in range(60)}
FORMS: dict[str, dict[str, object]] = {
    "exponential pattern": {"guided_regex": "(a|b)*a(a|b){300}"},
    "nested repetitions": {"guided_regex": "((((a{0,100}){0,100}){0,100}){0,100})"},
    "long classes": {"guided_regex": r"(\p{L}|\p{N}){1,2000}"},
    "20,000 alternatives": {"guided_regex": "|".join(f"word{i}xyz" for i in range(20_000))},
    "15,000 choices": {"guided_choice": [f"choice {i}" for i in range(15_000)]},
    "an enum of 20,000": _schema(enum=[f"v{i}" for i in range(20_000)]),
    "minItems of 100,000": _schema(type="array", minItems=100_000, items={"type": "integer"}),
    "maxLength of 1,000,000": _schema(type="string", maxLength=1_000_000),
    "allOf of anyOf": _schema(allOf=[{"anyOf": _PARTS[6 * i : 6 * i + 6]} for i in range(8)]),
    "anyOf of 60 objects": _schema(anyOf=[{"type": "object", "properties": _PATTERNS}] * 60),
    "heavy pattern": _schema(type="string", pattern="^(.{0,1000}[abc]){0,50}$"),
    "a million forced": {"guided_regex": "(a{1000}){1000}"},
    "a million forced later": {"guided_regex": "[bc](a{1000}){1000}"},
    "minItems of a constant": _schema(type="array", minItems=1_000_000, items={"const": 1}),
    "rules that double": {
        "guided_grammar": "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60))
        + '\nr60: "a"'
    },
    "ambiguous grammar": {"guided_grammar": 'start: s\ns: s s | "a" | ""'},
    "deep grammar": {
        "guided_grammar": "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(3000))
        + '\nr3000: "a"'
    },
}


def main() -> None:
    """Measure, then print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file or a catalogue name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM")
    args = parser.parse_args()
    names = ["plain requests", *args.only]
    runs: dict[str, list[tuple[float, str]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
        command = our_command(args.model, args.threads)
        port = Server("Twostroke", command, Path(folder_name), stack).port
        _send_request(port, {})
        for number in range(args.rounds):
            note(f"Round {number + 1} of {args.rounds}")
            for name in names:
                runs[name].append(_longest_gap(port, _varied(FORMS.get(name, {}), number)))
    facts = machine_facts()
    result = {**facts, "model": args.model, "runs": runs}
    save("hostile", result, _text(args, runs, facts))


def _varied(form: dict[str, object], number: int) -> dict[str, object]:
    """Return a form that is new to the server, which keeps what it has compiled."""
    match form:
        case {"guided_json": dict(schema)}:
            return {"guided_json": {**schema, "title": f"round {number}"}}
        case {"guided_regex": str(pattern)}:
            return {"guided_regex": f"({pattern})(round {number})?"}
        case {"guided_choice": list(choices)}:
            return {"guided_choice": [*choices, f"round {number}"]}
        case {"guided_grammar": str(grammar)}:
            return {"guided_grammar": f'{grammar}\nr: "round {number}"'}
    return form


def _longest_gap(port: int, form: dict[str, object]) -> tuple[float, str]:
    """Return the longest gap of a stream while a neighbour asks, and how that one was answered."""
    answer: list[str] = []
    gaps: list[float] = []
    neighbour = threading.Thread(target=lambda: answer.append(_send_request(port, form)))
    last_s, num_after = None, 0
    for count, now_s in enumerate(_stream(port)):
        if last_s is not None and count > 16:
            gaps.append(now_s - last_s)
        last_s = now_s
        if count == 16:
            neighbour.start()
        if answer:
            num_after += 1
        if num_after > 4:
            break
    neighbour.join()
    return max(gaps), answer[0]


def _stream(port: int) -> Iterator[float]:
    """Yield when each piece of a long answer came."""
    body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with _post(port, body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


def _send_request(port: int, form: dict[str, object]) -> str:
    """Ask for an answer of a form, and return how it went."""
    began_s = time.perf_counter()
    try:
        with _post(port, {"prompt": "Say something.", "max_tokens": _TOKENS, **form}) as response:
            reason = json.load(response)["choices"][0]["finish_reason"]
    except urllib.error.HTTPError as error:
        reason = f"{error.code}: {json.load(error)['error']['message']}"
    return f"{time.perf_counter() - began_s:.1f} s, {reason}"


def _post(port: int, body: dict[str, object]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": MODEL_NAME, "temperature": 1.0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=_ANSWER_WITHIN_S)


def _text(
    args: argparse.Namespace, runs: dict[str, list[tuple[float, str]]], facts: dict[str, Any]
) -> str:
    plain, *_ = (median(gap for gap, _ in mine) for mine in runs.values())
    header = ("a neighbour that asks for", "longest gap", "more than plain", "its own answer")
    lines, worst = [], 0.0
    for name, mine in runs.items():
        gaps_ms = [1e3 * gap for gap, _ in mine]
        added_s = median(gaps_ms) / 1e3 - plain
        worst = max(worst, added_s)
        lines.append(
            (name, spread(gaps_ms, 0, " ms"), f"{1e3 * added_s:+.0f} ms", mine[-1][1][:90])
        )
    about = f"At most {1e3 * worst:.0f} ms more than a plain neighbour; the goal is under 100."
    rounds = caption(facts, args.model, f"{args.rounds} rounds")
    return "\n".join(["## Hostile forms", "", table(header, lines), "", about, "", rounds])


if __name__ == "__main__":
    main()
