"""Hosts and web origins: pages of strangers are refused, and listed origins get CORS headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.servers import LiveServer, live_server
from twostroke.core.errors import UsageError
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.origins import ForbiddenError, Origins
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = "https://app.example:3000"
CHAT = "/v1/chat/completions"
KEYS = ApiKeys({"sk": ""})
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os,x-own",
}


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    limits = RequestLimits(max_header_bytes=4000, max_body_bytes=1000)
    options = ServeOptions(drain_s=1, api_keys=KEYS, cors_origins=(PAGE,), limits=limits)
    with live_server(tmp_path_factory.mktemp("listed"), options) as server:
        yield server


def scope(**headers: str) -> Any:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http", "method": "GET", "path": "/", "headers": encoded}


def answers(options: ServeOptions, **headers: str) -> bool:
    try:
        Origins(options).check(scope(**headers))
    except ForbiddenError:
        return False
    return True


def test_keyless_server_is_not_reached_by_rebinding_or_foreign_pages(server: LiveServer) -> None:
    """A page whose domain was rebound to this machine sends its own domain as the host."""
    foreign: list[dict[str, str]] = [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:8000", "origin": "http://127.0.0.1.evil.example:8000"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "chrome-extension://abcdefgh"},
    ]
    for headers in foreign:
        for path in ("/", "/health", "/api/state", "/page/page.css", "/v1/models", "/metrics"):
            refused = server.http.get(path, headers=headers | {"accept": "text/html"})
            assert refused.status_code == 403, (headers, path)
            assert refused.headers["connection"] == "close"
            option = "--cors-origin" if "host" not in headers else "--allowed-host"
            assert option in refused.json()["error"]["message"]
            assert "access-control-allow-origin" not in refused.headers
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        response = server.http.post("/v1/messages", json=body, headers=headers)
        assert (response.status_code, response.json()["error"]["type"]) == (403, "permission_error")


def test_refusals_name_the_option_that_allows_the_request(server: LiveServer) -> None:
    for header, value, code, option in (
        ("host", "rebind.example:8000", "forbidden_host", "--allowed-host rebind.example if"),
        ("origin", "https://x.example", "forbidden_origin", "--cors-origin https://x.example to"),
        ("origin", "null", "forbidden_origin", "--cors-origin '*' and with keys to"),
    ):
        error = server.http.get("/v1/models", headers={header: value}).json()["error"]
        assert error["code"] == code
        assert f"start it with {option}" in error["message"]


def test_own_page_and_development_servers_pass(server: LiveServer) -> None:
    for headers in (
        {"origin": server.url},
        {"origin": "https://localhost", "host": "localhost"},  # a proxy with TLS
        {"origin": "http://localhost:5173"},
    ):
        response = server.http.post(CHAT, json={}, headers=headers)
        assert response.status_code == 400
        assert "access-control-allow-origin" not in response.headers


def test_preflight_of_a_page_that_is_not_listed_names_the_option(server: LiveServer) -> None:
    for origin in ("http://localhost:5173", "https://evil.example"):
        refused = server.http.options(CHAT, headers=PREFLIGHT | {"origin": origin})
        assert refused.status_code == 403
        assert "--cors-origin" in refused.json()["error"]["message"]
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("names", "private", "open_"),
    [
        (["localhost", "LOCALHOST.:1", "127.0.0.1:80", "127.9.9.9", "[::1]:8000"], True, True),
        (["a.localhost", "gpu1.example.com:8000", "proxy.example"], True, True),
        (["192.168.1.5:8000", "8.8.8.8", "[fe80::1]:8000", "twostroke:8000"], False, True),
        (["nas.local", "host.docker.internal", "pi.home.arpa"], False, True),
        (["evil.example", "localhost.evil.example", "127.0.0.1.evil.example"], False, False),
        (["xproxy.example", "a.proxy.example", "a b", "[::1", "http://localhost"], False, False),
        (["localhost:x", "localhost:123456", "localhost@evil.example", "\xe4.local"], False, False),
    ],
)
def test_names_of_a_keyless_server(names: list[str], *, private: bool, open_: bool) -> None:
    allowed = ("Proxy.Example", "gpu1.example.com")
    for name in names:
        assert answers(ServeOptions(allowed_hosts=allowed), host=name) is private, name
        options = ServeOptions(host="0.0.0.0", allowed_hosts=allowed)
        assert answers(options, host=name) is open_, name
    assert answers(ServeOptions(host="gpu1.example.com"), host="gpu1.example.com:8000")
    assert answers(ServeOptions())  # HTTP 1.0, which no browser speaks


def test_keys_replace_the_host_check_unless_hosts_are_configured() -> None:
    keyed = ServeOptions(api_keys=KEYS)
    assert answers(keyed, host="any.example", origin="https://evil.example")
    named = ServeOptions(api_keys=KEYS, allowed_hosts=("any.example",))
    assert answers(named, host="any.example")
    assert not answers(named, host="other.example")


def test_preflight_needs_no_key_and_allows_the_requested_headers(listed: LiveServer) -> None:
    response = listed.http.options(CHAT, headers=PREFLIGHT)
    assert (response.status_code, response.content) == (204, b"")
    result = response.headers
    assert result["access-control-allow-origin"] == PAGE
    assert result["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
    assert result["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert result["access-control-max-age"] == "7200"
    assert result["vary"] == "Origin"
    assert "access-control-allow-private-network" not in result
    old = PREFLIGHT | {"access-control-request-private-network": "true"}
    response = listed.http.options(CHAT, headers=old)
    assert response.headers["access-control-allow-private-network"] == "true"
    for strange in ("x\xe4", "a;b", "x" * 3000 + "," * 2000):
        body = {**PREFLIGHT, "access-control-request-headers": strange.encode("latin-1")}
        response = httpx.options(listed.url + CHAT, headers=body, trust_env=False)
        assert "access-control-allow-headers" not in response.headers


def test_errors_carry_the_headers_that_let_a_page_read_them(listed: LiveServer) -> None:
    headers = {"origin": PAGE, "authorization": "Bearer sk"}
    responses = [
        listed.http.get("/v1/models", headers={"origin": PAGE}),
        listed.http.get("/nowhere", headers=headers),
        listed.http.delete("/v1/models", headers=headers),
        listed.http.post(CHAT, json={"user": "x" * 2000}, headers=headers),
        listed.http.post(CHAT, json={}, headers=headers),
        listed.http.get("/health", headers=headers | {"x-long": "x" * 4000}),
        listed.http.get("/v1/models", headers=headers),
    ]
    assert [response.status_code for response in responses] == [401, 404, 405, 413, 400, 431, 200]
    for response in responses:
        assert response.headers["access-control-allow-origin"] == PAGE
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"twostroke-ignored", "retry-after", "x-ratelimit-reset-tokens"} <= {*exposed}
        assert "anthropic-ratelimit-requests-remaining" in exposed
        assert "Origin" in response.headers["vary"]


def test_other_origins_get_no_headers_but_caches_hear_of_it(listed: LiveServer) -> None:
    headers = {"authorization": "Bearer sk"}
    for origin in ({"origin": "https://evil.example"}, {"origin": f"{PAGE}0"}, {}):
        response = listed.http.get("/v1/models", headers={**headers, **origin})
        assert response.status_code == 200
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "Origin"
    assert listed.http.options(CHAT, headers=headers).status_code == 405  # without an origin


def test_a_keyed_server_may_allow_every_page(tmp_path: Path) -> None:
    options = ServeOptions(drain_s=1, api_keys=KEYS, cors_origins=("*",))
    with live_server(tmp_path, options) as server:
        for origin in (PAGE, "null", "moz-extension://1-2"):
            response = server.http.options(CHAT, headers=PREFLIGHT | {"origin": origin})
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (
                204,
                "*",
            )
        refused = server.http.get("/v1/models", headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
        assert "vary" not in refused.headers


@pytest.mark.parametrize(
    ("origin", "sent"),
    [
        ("HTTP://Localhost:80", "http://localhost"),
        ("https://app.example:443", "https://app.example"),
        ("https://app.example:80", "https://app.example:80"),
        ("https://app.example/", "https://app.example"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
        ("http://[::1]:3000", "http://[::1]:3000"),
    ],
)
def test_origins_are_compared_as_browsers_send_them(origin: str, sent: str) -> None:
    options = ServeOptions(cors_origins=(origin,))
    assert answers(options, origin=sent)
    headers = dict(Origins(options).headers(scope(origin=sent)))
    assert headers[b"access-control-allow-origin"] == sent.encode()


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "", "app.example", "https://", "https://a/b", "https://a//", "https://a:99999"],
)
def test_malformed_origins_are_refused_at_the_start(origin: str) -> None:
    with pytest.raises(UsageError, match="cors_origins"):
        ServeOptions(cors_origins=(origin,))


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "a/b", "[::1", "[]", "a b", "*", "::x"])
def test_malformed_hosts_are_refused_at_the_start(host: str) -> None:
    with pytest.raises(UsageError, match="allowed_hosts must be a host's name"):
        ServeOptions(allowed_hosts=(host,))
    assert ServeOptions(allowed_hosts=("::1", "[fe80::1]", "a.example.")).allowed_hosts


def request_line(server: LiveServer, target: str, host: str = "localhost") -> tuple[int, bytes]:
    """Send a GET request with this target; return the status and the body."""
    with server.connect() as connection:
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), body


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP"])
def test_request_lines_may_name_the_host(server: LiveServer, scheme: str) -> None:
    """Clients of proxies send this form, which every server must accept."""
    server_url = f"{scheme}://127.0.0.1:{server.port}"
    for path in ("/health/live", "/v1/models/tiny?x=1", "/v1/models/no%20body", "/nowhere"):
        assert request_line(server, server_url + path) == request_line(server, path)
    assert request_line(server, server_url)[0] == 200
    assert request_line(server, f"{scheme}://user:pw@localhost/v1/models")[0] == 200


def test_host_in_the_request_line_replaces_the_header(server: LiveServer) -> None:
    assert request_line(server, "http://evil.example/v1/models")[0] == 403
    assert request_line(server, "http://localhost@evil.example/v1/models")[0] == 403
    assert request_line(server, "http://localhost/v1/models", host="evil.example")[0] == 200
