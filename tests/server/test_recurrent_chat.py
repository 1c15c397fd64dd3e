"""Chats with a model that has recurrent layers find the earlier turns in the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.engines import PAGE_SIZE, tiny_client
from support.family_templates import ALWAYS_THINKS
from support.servers import live_server
from support.tiny import CHAT_TEMPLATE, tiny_of
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.prompts import encode_turn

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import LiveServer

TEMPLATES = {"chatml": CHAT_TEMPLATE, "earlier reasoning left out": ALWAYS_THINKS}


def post(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.http.post(path, json={"model": "tiny"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("protocol", ["openai", "anthropic", "ollama"])
def test_the_next_turn_computes_only_what_the_template_changes(
    tmp_path: Path, template: str, protocol: str
) -> None:
    messages = [{"role": "user", "content": "Twenty words about the sea, and ten about rain."}]
    with live_server(
        tmp_path,
        tiny=tiny_of("qwen3.5", context_length=2048),
        metadata={"tokenizer.chat_template": TEMPLATES[template]},
        num_states=24,
        max_running=3,
    ) as server:
        stats = server.client.loop.snapshot
        for turn in range(8):
            before = stats().scheduler
            match protocol:
                case "openai":
                    post(server, "/v1/chat/completions", messages=messages, max_tokens=3)
                case "anthropic":
                    post(server, "/v1/messages", messages=messages, max_tokens=3)
                case "ollama":
                    options = {"num_predict": 3}
                    post(server, "/api/chat", messages=messages, stream=False, options=options)
            after = stats().scheduler
            num_computed = (after.num_prompt_tokens - before.num_prompt_tokens) - (
                after.num_hit_tokens - before.num_hit_tokens
            )
            added = (
                200 if turn == 0 else len(messages[-1]["content"]) + len(messages[-2]["content"])
            )
            assert num_computed < added + 2 * PAGE_SIZE, "the marks of two turns are a page"
            messages += [
                {"role": "assistant", "content": f"So it is{' so' * turn}."},
                {"role": "user", "content": f"And then{' what' * turn}?"},
            ]


def test_only_models_with_recurrent_layers_render_other_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rendered = 0
    render = Chat.render

    def counting_render(self: Chat, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_rendered
        num_rendered += 1
        return render(self, *args, **kwargs)

    monkeypatch.setattr(Chat, "render", counting_render)
    messages = [{"role": "user", "content": "Hello"}]
    for family, num_states, expected in (("qwen3", 0, 1), ("qwen3.5", 8, 3)):
        with tiny_client(tmp_path, tiny_of(family), num_states=num_states) as (client, _):
            num_rendered = 0
            tokens, _, hints, _ = encode_turn(client.card, messages, SamplingParams())
            assert num_rendered == expected
            assert bool(hints.shared_lengths) == (expected > 1)
            assert all(0 < length <= len(tokens) for length in hints.shared_lengths)
