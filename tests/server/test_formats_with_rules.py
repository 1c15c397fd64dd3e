"""Answer formats combined with other rules about tokens give an answer, or a clear 400."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.family_templates import talker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

FORMS: list[dict[str, Any]] = [
    {"guided_choice": ["a"]},
    {"guided_regex": "[ab]{3}"},
    {"guided_json": {"const": "a"}},
    {"guided_grammar": 'start: "a" "b"?'},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server whose model samples among the allowed tokens."""
    with talker(tmp_path_factory.mktemp("rules"), family_templates.HERMES) as live:
        yield live


def rules(server: LiveServer) -> list[dict[str, Any]]:
    """Return rules that forbid the tokens which the formats need, or the end token."""
    tokenizer = server.client.card.tokenizer
    [letter], end = tokenizer.encode("a"), min(tokenizer.eos_ids)
    everything = {str(token): -100 for token in range(tokenizer.vocab_size)}
    return [
        {"logit_bias": {str(letter): -100, str(end): -100}},
        {"logit_bias": everything, "min_tokens": 5},
        {"min_tokens": 8},
        {"stop_token_ids": [letter], "min_tokens": 5},
        {"stop": ["a"], "min_tokens": 4},
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_a_form_wins_over_rules_that_bar_its_tokens(
    server: LiveServer, path: str, form: dict[str, Any]
) -> None:
    for rule, stream in product(rules(server), (False, True)):
        body = {"max_tokens": 8, "temperature": 0, "stream": stream, **form, **rule}
        body |= (
            {"prompt": "hello"}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "hello"}]}
        )
        response = server.http.post(path, json=body)
        assert response.status_code == 200, (rule, response.text)
        assert '"error"' not in response.text
