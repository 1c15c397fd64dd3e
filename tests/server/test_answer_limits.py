"""A router and its replica read a request's limits of the answer alike, however spelled."""

from __future__ import annotations

import itertools
import json
import random
import re
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from msgspec import inspect

from support.replicas import live_router
from support.servers import live_server
from support.tiny import Tiny, infill_metadata
from support.waiting import wait_for
from twostroke.core.errors import TwostrokeError
from twostroke.core.mismatch import union_members
from twostroke.fleet.router.paths import COMPUTED_PATHS, ENGINELESS_PATHS, PROMPT_ONLY_PATHS
from twostroke.fleet.routing.prompt import RoutedPrompt, read_prompt
from twostroke.server.body.decode import BodyDecoder
from twostroke.server.generation.response_store import ResponseStore, Tenant
from twostroke.server.http.answer_limits import ANSWER_FIELDS
from twostroke.server.http.boundary import ALIASES
from twostroke.server.routes import GENERATION_PROTOCOLS
from twostroke.server.storage import Records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.replicas import LiveRouter

CONTEXT = 1000
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES},
    "/completion": {"prompt": "Hi"},
    "/infill": {"input_prefix": "Hi", "input_suffix": ""},
    "/api/chat": {"messages": MESSAGES},
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
    """Return bodies for a path with every value in each field, and with pairs of fields."""
    needed = {"max_tokens": 9} if path == "/v1/messages" else {}
    result: list[dict[str, Any]] = [{}, needed]
    for name, value in itertools.product(LIMITS, VALUES):
        result += [{name: value}, needed | {name: value}, {"options": {name: value}}]
    for (first_name, other), first, second in itertools.product(
        itertools.permutations(LIMITS, 2), (1, -1, 0, None, 7.0), (3, -1, None, "3")
    ):
        result.append({first_name: first, other: second})
        result.append({first_name: first, "options": {other: second}})
    for name, value in itertools.product(COUNTS, VALUES):
        result.append(needed | {name: value, LIMITS[0]: 5})
        result.append(needed | {name: value, "n": 2, "n_predict": 5, "best_of": value})
    if "prompt" in BODIES[path]:
        result += [needed | {"prompt": prompt, "max_tokens": 5, "n": 2} for prompt in PROMPTS]
    return result


def replicas_count(path: str, body: bytes, *, is_llama_path: bool = False) -> int | None:
    """Return how many tokens a replica allows all answers; None if it refuses the body.

    With `is_llama_path` the request came by a path without /v1.
    """
    dialect = GENERATION_PROTOCOLS[path]
    reader = (dialect.read_as_llama_server if is_llama_path else None) or dialect.read
    try:
        decoded, _ = BodyDecoder(dialect.request, 64).decode(body)
        job = reader(decoded, Tenant("", ResponseStore(10, 100_000)))
    except TwostrokeError:
        return None
    limit = job.params.max_tokens
    return len(job.prompts) * job.params.n * (CONTEXT if limit is None else min(limit, CONTEXT))


@pytest.mark.parametrize("path", BODIES)
def test_every_spelling_of_a_limit_counts_the_same(path: str) -> None:
    differing, num_taken = [], 0
    readings = (False, True) if GENERATION_PROTOCOLS[path].read_as_llama_server else (False,)
    for fields in spellings(path):
        for text in (json.dumps(BODIES[path] | fields), escaped(BODIES[path] | fields)):
            routed = read_prompt(text.encode(), b"").max_answer_tokens(path, CONTEXT)
            for is_llama_path in readings:
                expected = replicas_count(path, text.encode(), is_llama_path=is_llama_path)
                num_taken += expected is not None
                if expected not in {None, routed}:
                    differing.append((text, expected, routed, is_llama_path))
    assert not differing, differing[:5]
    assert num_taken > 20


def escaped(body: dict[str, Any]) -> str:
    """Return a body whose names have JSON escapes, and occur twice, first with the value 1."""
    names = {name: "".join(f"\\u{ord(char):04x}" for char in name) for name in body}
    pairs = [f'"{name}": 1' for name in body if name in LIMITS]
    pairs += [f'"{names[name]}": {json.dumps(value)}' for name, value in body.items()]
    return "{" + ", ".join(pairs) + "}"


def test_every_path_that_answers_says_how_it_limits_answers() -> None:
    assert (
        set(ANSWER_FIELDS)
        == set(COMPUTED_PATHS) - set(PROMPT_ONLY_PATHS) - set(ENGINELESS_PATHS)
        == set(GENERATION_PROTOCOLS)
    )


# Fields with whole numbers that change neither how long answers are nor how many there are.
OTHER_NUMBERS = frozenset(
    (
        *("seed", "top_k", "min_keep", "top_logprobs", "logprobs", "prompt_logprobs", "n_probs"),
        *("min_tokens", "priority", "stop_token_ids", "prompt", "id_slot", "mirostat"),
        "max_tool_calls",
        *("reasoning_budget", "thinking_budget", "thinking_budget_tokens"),
        "thinking_token_budget",
    )
)


def test_every_field_with_a_whole_number_is_a_limit_or_none() -> None:
    """A new field of any protocol fails here until the test knows whether it limits answers."""
    unknown = {
        f"{path} {name}"
        for path, dialect in GENERATION_PROTOCOLS.items()
        for name in _whole_numbers(dialect.request)
        if name not in {*LIMITS, *COUNTS, *OTHER_NUMBERS}
    }
    assert not unknown
    named = {name for fields in ANSWER_FIELDS.values() for name in (*fields.limits, *fields.counts)}
    assert named <= {*LIMITS, *COUNTS}
    assert set(BODIES) == set(GENERATION_PROTOCOLS)


def _whole_numbers(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the names of integer fields in a request and in the objects that it contains."""
    known_types, waiting = set[type](), [kind]
    while waiting:
        struct = inspect.type_info(waiting.pop())
        assert isinstance(struct, inspect.StructType)
        for field in struct.fields:
            for part in union_members([field.type]):
                item = part.item_type if isinstance(part, inspect.ListType) else part
                is_inner = isinstance(item, inspect.StructType) and field.name == "options"
                if isinstance(part, inspect.IntType):
                    yield field.encode_name
                elif is_inner and item.cls not in known_types:
                    known_types.add(item.cls)
                    waiting.append(item.cls)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    """Start a router that keeps usage, in front of a server with a context of 48 tokens."""
    folder: Path = tmp_path_factory.mktemp("limits")
    with (
        closing(Records(folder / "records")) as records,
        live_server(folder, tiny=Tiny(context_length=48), metadata=infill_metadata()) as server,
        live_router(server.url, records=records) as live,
    ):
        wait_for(lambda: bool(live.router.fleet.ready))
        yield live


# No field limits summaries (/v1/responses/compact), whose instructions fill this context.
PATHS = [
    *(path for path in BODIES if ANSWER_FIELDS[path].limits),
    *(alias for alias, path in ALIASES.items() if path in BODIES),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_server_writes_no_more_than_its_router_counts(
    router: LiveRouter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router counts the most tokens that a request may get; random requests never get more."""
    limits: list[int] = []
    count = RoutedPrompt.max_answer_tokens

    def noted(self: RoutedPrompt, *args: Any, **options: Any) -> int:
        limits.append(count(self, *args, **options))
        return limits[-1]

    monkeypatch.setattr(RoutedPrompt, "max_answer_tokens", noted)
    draw, written = random.Random(path), list[int]()
    with httpx.Client(base_url=router.url, timeout=60, trust_env=False) as http:
        for _ in range(24):
            text = random_body(ALIASES.get(path, path), draw)
            headers = {"content-type": "application/json"}
            answer = http.post(path, content=text, headers=headers)
            assert answer.status_code in {200, 400}, answer.text
            if answer.status_code == 200:
                written.append(num_written(answer.json()))
                assert written[-1] <= limits[-1], (text, limits[-1], answer.text[:300])
    assert any(written)


def random_body(path: str, draw: random.Random) -> str:
    """Return a body with up to three fields that may limit answers, some of them twice."""
    fields: list[tuple[str, Any]] = list(BODIES[path].items())
    fields += [("stream", False), ("ignore_eos", True), ("temperature", 0)]
    if path == "/v1/messages":
        fields.append(("max_tokens", 9))
    if "prompt" in BODIES[path] and draw.random() < 0.3:
        fields.append(("prompt", draw.choice((["a", "b"], [[5, 6], [7]], [5, 6], ["a", [5]]))))
    for _ in range(draw.randint(0, 3)):
        name = draw.choice((*LIMITS, *COUNTS))
        value = draw.choice(VALUES) if draw.random() < 0.5 else draw.randint(0, 9)
        fields.append(("options", {name: value}) if draw.random() < 0.2 else (name, value))
    return (
        "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields) + "}"
    )


def num_written(answer: Any) -> int:
    """Return how many tokens a response says that its answers have."""
    matches = re.findall(
        r'"(?:completion_tokens|output_tokens|eval_count|tokens_predicted)": ?(\d+)',
        json.dumps(answer),
    )
    return sum(map(int, matches)) if isinstance(answer, list) else int(matches[0] if matches else 0)
