"""One conversation gives one prompt, whichever protocol and template it comes by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support import strict_templates
from support.family_templates import talker
from twostroke.core.sampling import SamplingParams
from twostroke.engine.prompts import encode_chat, encode_turn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

    Messages = list[dict[str, Any]]

TEMPLATES = ("LENIENT", "FIRST_ALONE", "ALTERNATES", "NO_SYSTEM", "DROPS_ROLES", "LAST_SYSTEM")
CONVERSATIONS = (
    "system:a system:b user:c",
    "user:a system:b user:c",
    "system:a user:b assistant:c user:d system:e",
    "system:a user:b user:c assistant:d assistant:e user:f",
    "assistant:a user:b",
    "system:a",
    "user:a system:b assistant:c system:d user:e",
)


@pytest.fixture(scope="module", params=TEMPLATES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Start a server whose model has this chat template."""
    template = strict_templates.TEMPLATES[request.param]
    with talker(tmp_path_factory.mktemp("alike"), template) as started:
        yield started


@pytest.mark.parametrize("words", CONVERSATIONS)
def test_every_protocol_makes_the_same_prompt(server: LiveServer, words: str) -> None:
    pairs = (word.partition(":") for word in words.split())
    messages = [{"role": role, "content": f"The words of {text}."} for role, _, text in pairs]
    card = server.client.card
    tokens = encode_chat(card, messages)
    assert encode_turn(card, messages, SamplingParams())[0] == tokens  # LLM.chat, twostroke chat
    kwargs: dict[str, Any] = {"messages": messages}
    assert _post(server, "/tokenize", **kwargs)["tokens"] == tokens
    text = _post(server, "/apply-template", **kwargs)["prompt"]
    assert card.tokenizer.encode(text, parse_special=True) == tokens
    counts = [
        _post(server, "/v1/chat/completions", **kwargs, max_tokens=1)["usage"]["prompt_tokens"],
        _post(server, "/v1/chat/completions/input_tokens", **kwargs)["input_tokens"],
        _post(server, "/v1/responses/input_tokens", input=messages)["input_tokens"],
        _post(server, "/v1/messages/count_tokens", **kwargs)["input_tokens"],
        _post(server, "/api/chat", **kwargs, stream=False, options={"num_predict": 1})[
            "prompt_eval_count"
        ],
    ]
    assert counts == [len(tokens)] * len(counts)


def test_developer_texts_and_instructions_are_system_messages(server: LiveServer) -> None:
    user = {"role": "user", "content": "Hello."}
    messages = [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, user]
    developer = {"role": "developer", "content": "Two."}
    counts = [
        _post(server, path, **fields)["input_tokens"]
        for path, fields in (
            ("/v1/responses/input_tokens", {"input": messages}),
            ("/v1/responses/input_tokens", {"instructions": "One.", "input": [developer, user]}),
            ("/v1/chat/completions/input_tokens", {"messages": [messages[0], developer, user]}),
            ("/v1/messages/count_tokens", {"system": "One.", "messages": messages[1:]}),
        )
    ]
    assert counts == [counts[0]] * len(counts)


def _post(server: LiveServer, path: str, **fields: Any) -> Any:
    response = server.http.post(path, json={"model": "tiny"} | fields)
    assert response.status_code == 200, response.text
    return response.json()
