"""A router and its replica read the limit of an answer alike, however a request spells it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from twostroke.core.errors import TwostrokeError
from twostroke.http.answer_limits import ANSWER_FIELDS
from twostroke.router.paths import COMPUTED, FREE, READ
from twostroke.router.prompt import read_prompt
from twostroke.serve.body.decode import BodyDecoder
from twostroke.serve.protocols import DIALECTS
from twostroke.serve.store import Store, Tenant

CONTEXT = 1000
SAID = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/messages": {"messages": SAID},
    "/completion": {"prompt": "Hi"},
    "/infill": {"input_prefix": "Hi", "input_suffix": ""},
    "/api/chat": {"messages": SAID},
    "/api/generate": {"prompt": "Hi"},
}
# Each field that limits an answer somewhere, in every path: most paths ignore or refuse most.
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
COUNTS = ("n", "n_cmpl", "best_of")
VALUES: tuple[Any, ...] = (
    *(1, 7, 0, -1, -2, -3, 5000, 2**62, 7.0, 7e0, 7.5, 1e300, -1.0),
    *("7", "-1", "", None, True, False, [7], {"value": 7}),
)
PROMPTS: tuple[Any, ...] = (
    *("a", ["a", "b", "c"], [5, 6], [[5, 6], [7]], [5, "a"], ["a", [5], [6, "b"]], [], [[]]),
    *(['"', '["', "\\"], ["a"], [["a", 5], ["b"]], [5, [6]]),
)


def spellings(path: str) -> list[dict[str, Any]]:
    """Return bodies of a path with every value in each field, and with pairs of fields."""
    needed = {"max_tokens": 9} if path == "/v1/messages" else {}
    found: list[dict[str, Any]] = [{}, needed]
    for name, value in itertools.product(LIMITS, VALUES):
        found += [{name: value}, needed | {name: value}, {"options": {name: value}}]
    for (one, other), first, second in itertools.product(
        itertools.permutations(LIMITS, 2), (1, -1, 0, None, 7.0), (3, -1, None, "3")
    ):
        found.append({one: first, other: second})
        found.append({one: first, "options": {other: second}})
    for name, value in itertools.product(COUNTS, VALUES):
        found.append(needed | {name: value, LIMITS[0]: 5})
        found.append(needed | {name: value, "n": 2, "n_predict": 5, "best_of": value})
    if "prompt" in BODIES[path]:
        found += [needed | {"prompt": prompt, "max_tokens": 5, "n": 2} for prompt in PROMPTS]
    return found


def replicas_count(path: str, body: bytes) -> int | None:
    """Return how many tokens all answers may have at a replica; None if it refuses the body."""
    dialect = DIALECTS[path]
    try:
        asked, _ = BodyDecoder(dialect.request, 64).decode(body)
        job = dialect.read(asked, Tenant("", Store(10, 100_000)))
    except TwostrokeError:
        return None
    limit = job.params.max_tokens
    return len(job.prompts) * job.params.n * (CONTEXT if limit is None else min(limit, CONTEXT))


@pytest.mark.parametrize("path", BODIES)
def test_every_spelling_of_a_limit_counts_the_same(path: str) -> None:
    differing, num_taken = [], 0
    for fields in spellings(path):
        for text in (json.dumps(BODIES[path] | fields), escaped(BODIES[path] | fields)):
            expected = replicas_count(path, text.encode())
            if expected is None:
                continue
            num_taken += 1
            routed = read_prompt(text.encode(), b"").max_answer_tokens(path, CONTEXT)
            if routed != expected:
                differing.append((text, expected, routed))
    assert not differing, differing[:5]
    assert num_taken > 20


def escaped(body: dict[str, Any]) -> str:
    """Return a body whose names are written with escapes, twice, the first time with 1."""
    names = {name: "".join(f"\\u{ord(char):04x}" for char in name) for name in body}
    pairs = [f'"{name}": 1' for name in body if name in LIMITS]
    pairs += [f'"{names[name]}": {json.dumps(value)}' for name, value in body.items()]
    return "{" + ", ".join(pairs) + "}"


def test_every_path_that_answers_says_how_it_limits_answers() -> None:
    assert set(ANSWER_FIELDS) == set(COMPUTED) - set(READ) - set(FREE) == set(DIALECTS)
