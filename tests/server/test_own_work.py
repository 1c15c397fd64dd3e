"""Work in the server itself is bounded, ends when its client leaves, and lets others run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.servers import live_server, post_bytes
from support.waiting import wait_for
from twostroke.core.cancellation import WorkCancelledError
from twostroke.model.tokenizer import Tokenizer
from twostroke.model.tokenizer.merges import Merges
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions
from twostroke.server.protocols.openai.tokens import MAX_SHORT_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import LiveServer

WORD = "z" * 7_800_000
MESSAGES = [{"role": "user", "content": WORD[:3_500_000]}]  # templates render up to 4,000,000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = ApiKeys({"k": "anna", "other": "ben"})
    folder = tmp_path_factory.mktemp("own_work")
    with live_server(folder, ServeOptions(drain_s=1, api_keys=keys)) as live:
        live.http.headers["authorization"] = "Bearer k"
        yield live


FLOODS: dict[str, dict[str, Any]] = {
    "/tokenize prompt": {"prompt": WORD},
    "/tokenize content": {"content": WORD},
    "/tokenize parts": {"content": [WORD, 5, "z"]},
    "/tokenize many parts": {"content": [WORD[:60_000]] * 100},
    "/tokenize messages": {"messages": MESSAGES},
    "/detokenize": {"tokens": [70] * 1_000_000},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": WORD[:3_500_000]},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": WORD},
    "/v1/completions": {"prompt": WORD},
    "/v1/chat/completions": {"messages": MESSAGES},
}


@pytest.mark.parametrize("name", FLOODS)
def test_prompts_beyond_any_context_are_refused_with_the_limit(
    server: LiveServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = list[int]()
    merge = Merges._merge_long

    def noted(self: Merges, symbols: list[int]) -> list[int]:
        merged.append(len(symbols))
        return merge(self, symbols)

    monkeypatch.setattr(Merges, "_merge_long", noted)
    answer = server.http.post(name.split(maxsplit=1)[0], json=FLOODS[name])
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert any(f"{limit}" in message for limit in (511, 512, MAX_SHORT_LENGTH)), message
    assert sum(merged) <= 3 * MAX_SHORT_LENGTH  # and not the millions that were sent


def test_a_higher_limit_may_be_requested(server: LiveServer) -> None:
    text = "z" * 100_000
    refused = server.http.post("/tokenize", json={"prompt": text})
    assert refused.status_code == 400
    assert (
        "the context holds 512: set max_tokens to have more" in refused.json()["error"]["message"]
    )
    body = {"prompt": text, "max_tokens": 100_000}
    ids = server.http.post("/tokenize", json=body).json()["tokens"]
    assert len(ids) == 100_000
    request_body = {"tokens": ids}
    assert "set max_tokens" in server.http.post("/detokenize", json=request_body).text
    response = server.http.post("/detokenize", json=request_body | {"max_tokens": 100_000})
    assert response.json()["prompt"] == text
    few = server.http.post("/tokenize", json={"prompt": "zzz", "max_tokens": 2})
    assert "max_tokens allows 2" in few.json()["error"]["message"]
    wrong = server.http.post("/tokenize", json={"prompt": "zzz", "max_tokens": 0})
    assert wrong.status_code == 400


def test_a_short_text_is_counted_although_no_context_holds_it(server: LiveServer) -> None:
    body = server.http.post("/tokenize", json={"prompt": "z" * 20_000}).json()
    assert body["count"] == 20_000


def test_work_ends_with_its_client_and_another_tenant_does_not_wait(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients send a body of one long word each, and disconnect."""
    word = WORD[:2_000_000]
    encode, ends, begun = Tokenizer.encode, list[str](), threading.Semaphore(0)

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if len(text) < len(word):
            return encode(self, text, **options)
        begun.release()
        try:
            return encode(self, text, **options)
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    monkeypatch.setattr(Tokenizer, "encode", noted)
    line = server.api._readers._queue
    # Without `max_tokens` the word would be refused before it is merged.
    body = {"prompt": word, "max_tokens": 10_000_000}
    connections = [server.connect() for _ in range(3)]
    for connection in connections:
        header = "Authorization: Bearer k\r\n"
        connection.sendall(post_bytes("/tokenize", body, headers=header))
    assert begun.acquire(timeout=30)
    wait_for(lambda: line.num_waiting("anna") == 2)
    headers = {"authorization": "Bearer other"}
    url = f"{server.http.base_url}/tokenize"
    text = "hello " * 3400  # 20 KB
    other = httpx.post(url, json={"prompt": text}, headers=headers, timeout=30, trust_env=False)
    assert other.status_code == 200
    assert not ends  # it did not wait for the first word, which is still merged
    for connection in connections:
        connection.close()
    wait_for(lambda: line.num_waiting("anna") == 0 and line._free == line._max_slots)
    # Another one may begin before the server notices that its client has left, too.
    assert set(ends) == {WorkCancelledError.__name__}
