"""Fields that ask to keep a prompt in the cache: for how long, and whether they have an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from support.servers import live_server
from twostroke.engine.counters import TierTotals
from twostroke.engine.pool_access import PoolAccess
from twostroke.server.generation.response_store import ResponseStore, Tenant
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.anthropic.messages import MessagesRequest, read
from twostroke.server.protocols.common.fields import retention_s

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

HELLO = [{"role": "user", "content": "hello"}]


def kept_s(**fields: Any) -> float:
    body = {"max_tokens": 1, "messages": HELLO, **fields}
    return read(msgspec.convert(body, MessagesRequest), Tenant("", ResponseStore(1, 1))).keep_s


def text(mark: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": "Be brief.", "cache_control": mark}]


def test_marks_of_anthropics_clients_say_how_long() -> None:
    assert kept_s() == kept_s(cache_control=None) == 0
    assert kept_s(cache_control={"type": "ephemeral"}) == 300
    assert kept_s(system=text({"type": "ephemeral", "ttl": "1h"})) == 3600
    both = [{"role": "user", "content": text({"type": "ephemeral", "ttl": "5m"})}]
    assert kept_s(messages=both, cache_control={"type": "ephemeral", "ttl": "1h"}) == 3600
    assert kept_s(messages=both) == 300
    result = {"type": "tool_result", "tool_use_id": "a", "content": both[0]["content"]}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    called = [*HELLO, {"role": "assistant", "content": [call]}]
    called = [*called, {"role": "user", "content": [result]}]
    assert kept_s(messages=called) == 300
    tool = {"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
    assert kept_s(tools=[tool]) == 300


def test_openais_retention_says_how_long() -> None:
    assert [retention_s(value) for value in ("24h", "in_memory", None)] == [86_400, 0, 0]


def test_a_wrong_way_to_keep_a_prompt_is_refused_with_the_nearest_word(tmp_path: Path) -> None:
    anthropic, openai = "/v1/messages", "/v1/chat/completions"
    marks = {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemral"}
    system = [{"type": "text", "text": "Be brief.", "cache_control": marks[0]}]
    cases = [
        (anthropic, {"cache_control": marks[0]}, "cache_control.ttl must be one of 1h, 5m"),
        (anthropic, {"cache_control": marks[1]}, "Did you mean 'ephemeral'?"),
        (anthropic, {"cache_control": "5m"}, "cache_control must be an object"),
        (anthropic, {"system": system}, "system[0].cache_control.ttl must be one of 1h, 5m"),
        (openai, {"prompt_cache_retention": "24hs"}, "Did you mean '24h'?"),
        (openai, {"prompt_cache_retention": []}, "prompt_cache_retention must be a string"),
        ("/v1/responses", {"prompt_cache_retention": "forever"}, "must be one of 24h, in-memory"),
    ]
    with live_server(tmp_path, ServeOptions(drain_s=1)) as server:
        for path, fields, reason in cases:
            body = {"max_tokens": 1, "messages": HELLO}
            body = {"input": "hello"} if path == "/v1/responses" else body
            answer = server.http.post(path, json=body | fields)
            assert (answer.status_code, reason in answer.text) == (400, True), answer.text
        body = {"messages": HELLO, "max_tokens": 1, "prompt_cache_retention": "in_memory"}
        answer = server.http.post(openai, json=body)
        assert (answer.status_code, answer.headers.get("twostroke-ignored")) == (200, None)


def test_fields_reach_the_engine_and_are_ignored_only_without_a_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    for has_cache in (False, True):
        if has_cache:
            monkeypatch.setattr(PoolAccess, "totals", lambda _: (TierTotals("disk"),))
        with live_server(tmp_path, ServeOptions(drain_s=1)) as server:
            pages = server.client.loop.pages
            pages.on_submit.append(lambda state: seen.append(state.request.hints.keep_s))
            body = {"messages": HELLO, "max_tokens": 2, "prompt_cache_retention": "24h"}
            answer = server.http.post("/v1/chat/completions", json=body)
            assert ("twostroke-ignored" not in answer.headers) == has_cache
            marked = {"messages": HELLO, "max_tokens": 2, "cache_control": {"type": "ephemeral"}}
            answer = server.http.post("/v1/messages", json=marked)
            assert ("twostroke-ignored" not in answer.headers) == has_cache
    assert seen == [86_400.0, 300.0] * 2
