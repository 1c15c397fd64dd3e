"""API keys: who may send requests, in which header, and that tenants see nothing of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.servers import LiveServer, live_server
from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.http.api_key import MAX_WORD_LENGTH
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY, OTHER = "sk-first", "sk-second"
BEARER = {"authorization": f"Bearer {KEY}"}
HELLO = [{"role": "user", "content": "hello"}]
MESSAGE = {"messages": HELLO, "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = ApiKeys({KEY: "anna", OTHER: "ben", "bare": ""})
    options = ServeOptions(drain_s=1, api_keys=keys)
    with live_server(tmp_path_factory.mktemp("keys"), options) as server:
        yield server


def test_every_route_and_method_asks_for_a_key(guarded: LiveServer) -> None:
    paths = [route.path for route in guarded.api.routes() if not route.path.startswith("/page/")]
    paths += ["/nowhere", "//v1//models", "/PAGE/page.css"]
    with httpx.Client(trust_env=False) as bare:
        for path in paths:
            url = path.replace("{model:path}", "tiny").replace("{response_id}", "resp_1")
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"):
                if path.startswith("/health") and method in {"GET", "HEAD"}:
                    continue
                response = bare.request(method, guarded.url + url)
                assert (response.status_code, method + path) == (401, method + path)
                assert response.headers["www-authenticate"] == "Bearer"


def test_health_and_page_files_need_no_key(guarded: LiveServer) -> None:
    for part in ("", "/live", "/ready", "/progress"):
        assert guarded.http.get(f"/health{part}").status_code == 200
    browser = {"accept": "text/html,*/*"}
    page = guarded.http.get("/", headers=browser)
    assert page.headers["content-type"].startswith("text/html")
    assert guarded.http.get("/page/nothing.js").status_code == 404
    assert guarded.http.get("/api/state", headers=browser).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        BEARER,
        {"authorization": f"bearer   {KEY}"},
        {"x-api-key": KEY},
        {"x-api-key": "wrong", **BEARER},
        {"authorization": "Basic xyz", "x-api-key": OTHER},
    ],
)
def test_a_key_comes_in_either_header(guarded: LiveServer, headers: dict[str, str]) -> None:
    response = guarded.http.post("/v1/chat/completions", json=MESSAGE, headers=headers)
    assert response.status_code == 200


WRONG: list[dict[str, Any]] = [
    {"authorization": "Bearer wrong"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"authorization": "Bearer"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": "Bearer wrong", "x-api-key": KEY},
    {"authorization": b"Bearer \xff\xfe"},
    {"x-api-key": b"\xe4" * 1000},
    {"x-api-key": ""},
    {"host": KEY},
]


@pytest.mark.parametrize("headers", WRONG)
def test_wrong_keys_are_refused(guarded: LiveServer, headers: dict[str, Any]) -> None:
    response = guarded.http.post("/v1/chat/completions", json=MESSAGE, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    assert KEY not in response.text


def test_anthropics_clients_hear_of_it_in_their_form(guarded: LiveServer) -> None:
    refused = guarded.http.post("/v1/messages", json=MESSAGE, headers={"x-api-key": "wrong"})
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    assert guarded.http.post("/v1/messages", json=MESSAGE, headers=headers).status_code == 200


def test_tenants_share_neither_prefixes_nor_responses(guarded: LiveServer) -> None:
    def send_request(key: str) -> int:
        body = {"messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        response = guarded.http.post("/v1/chat/completions", json=body, headers=headers)
        cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert send_request(KEY) == 0
    assert send_request(KEY) > 0
    assert send_request(OTHER) == 0
    stored_response = guarded.http.post(
        "/v1/responses", json={"input": "hello"}, headers=BEARER
    ).json()
    path = f"/v1/responses/{stored_response['id']}"
    assert guarded.http.get(path, headers=BEARER).status_code == 200
    assert guarded.http.get(path, headers={"x-api-key": OTHER}).status_code == 404


def test_the_description_says_that_keys_are_needed(guarded: LiveServer) -> None:
    body = guarded.http.get("/openapi.json", headers=BEARER).json()
    assert body["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "401" in body["paths"]["/v1/models"]["get"]["responses"]
    assert body["paths"]["/health"]["get"]["security"] == []
    assert "401" not in body["paths"]["/health"]["get"]["responses"]


def test_without_keys_anybody_may_ask_with_any(server: LiveServer) -> None:
    assert server.http.get("/v1/models", headers={"x-api-key": "any"}).status_code == 200
    body = server.http.get("/openapi.json").json()
    assert body["security"] == []
    assert "securitySchemes" not in body["components"]


def tenant_of(keys: ApiKeys, text: bytes) -> str | None:
    key = keys.find(text)
    return None if key is None else key.tenant


def test_a_file_of_keys_names_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsk-1\n  anna   sk-2\nanna sk-3\r\n")
    keys = ApiKeys.read(file, "sk-4")
    assert keys is not None
    key_texts = [b"sk-1", b"sk-2", b"sk-3", b"sk-4", b"anna", b"", b"#", b"sk-5"]
    results = [tenant_of(keys, key) for key in key_texts]
    assert results == ["", "anna", "anna", "", None, None, None, None]
    assert ApiKeys.read(None, None) is None
    only = ApiKeys.read(None, "sk-4")
    assert only is not None
    assert tenant_of(only, b"sk-4") == ""


@pytest.mark.parametrize("value", ["", " ", "\n"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("TWOSTROKE_API_KEY", env.api_key),
        ("TWOSTROKE_REPLICA_KEY", env.replica_key),
        ("TWOSTROKE_RANK_SECRET", env.rank_secret),
        ("TWOSTROKE_PEER_SECRET", env.peer_secret),
    ],
)
def test_a_secret_is_never_passed_over_for_being_empty(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], object], value: str
) -> None:
    """An environment variable that was left empty must not open the server."""
    monkeypatch.delenv(name, raising=False)
    assert not read()
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} is empty: set it to a .*, or unset it"):
        read()


def test_a_client_with_an_empty_key_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, key in (("", None), (" ", None), ("sk-1", "sk-1")):
        monkeypatch.setenv("TWOSTROKE_API_KEY", value)
        assert env.client_api_key() == key
    monkeypatch.delenv("TWOSTROKE_API_KEY")
    assert env.client_api_key() is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"", "has no keys"),
        (b"# nothing\n", "has no keys"),
        (b"a b secret\n", "Line 1 of"),
        (b"k\nanna k\n", "Line 2 of"),
        (b"x" * (MAX_WORD_LENGTH + 1), "Line 1 of"),
        (b"se\x07cret", "Line 1 of"),
        ("sécret".encode(), "ASCII"),
    ],
)
def test_malformed_key_file_is_refused_without_showing_a_key(
    tmp_path: Path, text: bytes, sentence: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        ApiKeys.read(file, None)
    assert "secret" not in str(caught.value)


def test_unreadable_files_and_malformed_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        ApiKeys.read(tmp_path / "none", None)
    with pytest.raises(UsageError, match="cannot be read: it is a folder, not a file"):
        ApiKeys.read(tmp_path, None)
    for key in ("two words", "", "é", "x" * (MAX_WORD_LENGTH + 1)):
        with pytest.raises(UsageError, match=r"TWOSTROKE_API_KEY must be .* printable ASCII"):
            ApiKeys.read(None, key)
        with pytest.raises(UsageError, match="printable ASCII"):
            ApiKeys({key: ""})
