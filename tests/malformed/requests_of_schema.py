"""Malformed HTTP requests, mutated from valid ones of the server's own OpenAPI document."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

from malformed.odd_values import Samples, damaged, garbled, odd, text_of
from twostroke.core.frozen import Frozen

MOST_TOKENS = 4  # of an answer, where its limit is a limit
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
_LIMIT_OF = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/completion": "n_predict",
    "/infill": "n_predict",
}
_TYPES: tuple[bytes, ...] = (
    b"text/plain",
    b"",
    b"application/xml",
    b"application/json; charset=utf-16",
)
_TYPES += (b"application/x-www-form-urlencoded", b"multipart/form-data", b"application/json\xff")
_HEADERS = (
    *(b"Authorization", b"X-Request-Id", b"X-Api-Key", b"Origin", b"Accept", b"Traceparent"),
    *(b"Anthropic-Version", b"Content-Encoding", b"Accept-Encoding", b"Range", b"If-None-Match"),
    *(b"Cookie", b"X-Forwarded-For", b"Host", b"Sec-Fetch-Site", b"X-Request-Timeout", b"Upgrade"),
)
_VALUES = (
    *(b"\xff\xfe", b"a" * 3000, b"Bearer \xe9", b"Bearer ", b"Basic Og==", b"../..", b"gzip"),
    *(b"\x80" * 40, b"-1", b"1e999", b"NaN", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"),
    *(
        b"a\tb",
        b"null",
        b"http://evil.example",
        b"*/*;q=9",
        b"bytes=0-0,-1",
        b"{{7*7}}",
        b"websocket",
    ),
)
_METHODS = ("PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "DELETE", "X" * 60)
_IDS = (
    *(
        "..",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "%00",
        "a%00b",
        "%",
        "%zz",
        "%ff",
        "a" * 2000,
        "file-0",
    ),
    *(
        "resp_" + "0" * 32,
        "batch_1",
        "%F0%9F%98%80",
        "a;b",
        "a%0d%0aX:1",
        "..%5c..",
        "-1",
        "//",
        "*",
    ),
)
_PARTS = (
    *(
        b'Content-Disposition: form-data; name="purpose"',
        b'Content-Disposition: form-data; name="file"',
    ),
    *(
        b'Content-Disposition: form-data; name="file"; filename="../../x"',
        b"Content-Disposition: \xff",
    ),
    *(b'Content-Disposition: form-data; name="file"; filename="a\0b"', b"X: " + b"y" * 9000, b""),
)


class Case(Frozen):
    """One request: what it was made from, and its bytes."""

    name: str
    method: str
    data: bytes


class Requests:
    """Draws requests: always the same for the same document and seed."""

    def __init__(self, document: Any, seed: int) -> None:
        self._document = document
        self.rng = random.Random(seed)
        self._samples = Samples(document, self.rng)
        self._bodies, self._others = [], []
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {})
                if "application/json" in content:
                    self._bodies.append((path, content["application/json"]))
                elif not content:
                    parameters = [
                        parameter["name"] for parameter in operation.get("parameters", ())
                    ]
                    self._others.append((method.upper(), path, parameters))

    def draw(self) -> Case:
        """Return a malformed request."""
        pick = self.rng.random()
        if pick < 0.08:
            return self._form()
        if pick < 0.22:
            return self._without_body()
        path, content = self.rng.choice(self._bodies)
        body = self.body(path, content)
        headers = {b"Content-Type": b"application/json"}
        if pick < 0.75:
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                body = damaged(body, self.rng)
            data = text_of(body)
        elif pick < 0.9:
            data = garbled(text_of(body), self.rng)
        elif pick < 0.91:
            data = text_of(odd(self.rng))
        else:
            data = text_of(body)
            headers |= self._headers()
        return self._case("POST", path, headers, data)

    def body(self, path: str, content: Any) -> Any:
        """Return a valid body, out of an example or the schema, with some more fields."""
        rng = self.rng
        if rng.random() < 0.5:
            body = copy.deepcopy(rng.choice(list(content["examples"].values()))["value"])
            fields = self._samples.fields(content["schema"])
            for name in rng.sample(sorted(fields), min(len(fields), rng.randrange(3))):
                body[name] = self._samples.draw(fields[name])
        else:
            body = self._samples.draw(content["schema"])
        shorten(body, path)
        return body

    def batch_line(self) -> bytes:
        """Return a line of a batch, mostly a malformed one."""
        rng = self.rng
        path = rng.choice(("/v1/chat/completions", "/v1/completions", "/v1/embeddings"))
        body = self.body(path, dict(self._bodies)[path])
        line: Any = {"custom_id": str(rng.random()), "method": "POST", "url": path, "body": body}
        if rng.random() < 0.8:
            line = damaged(line, rng)
        return garbled(text_of(line), rng) if rng.random() < 0.1 else text_of(line)

    def upload(self, num_lines: int) -> bytes:
        """Return an upload of a batch whose first line is right."""
        body = {"prompt": "hello", "max_tokens": 2}
        good: Any = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        lines = [text_of(good)]
        for number in range(1, num_lines):
            changed = damaged(copy.deepcopy(body), self.rng)
            shorten(changed, "/v1/completions")
            lines.append(text_of(good | {"custom_id": str(number), "body": changed}))
        parts = [(_PARTS[0], b"batch"), (_PARTS[2], b"\n".join(lines))]
        data = b"".join(b"--b\r\n%b\r\n\r\n%b\r\n" % part for part in parts) + b"--b--\r\n"
        headers = {b"Content-Type": b"multipart/form-data; boundary=b"}
        return self._case("POST", "/v1/files", headers, data).data

    def _without_body(self) -> Case:
        rng = self.rng
        method, path, parameters = rng.choice(self._others)
        path = re.sub(r"\{\w+\}", lambda _: rng.choice(_IDS), path)
        names = rng.sample(parameters, min(len(parameters), rng.randrange(3)))
        query = "&".join(
            f"{name}={rng.choice(_quoted())}" for name in names * rng.choice((1, 1, 3))
        )
        if rng.random() < 0.3:
            method = rng.choice(_METHODS)
        if rng.random() < 0.1:
            path = rng.choice(
                (path + "/", "/" + path, path + "/..", path.upper(), "/" + rng.choice(_IDS))
            )
        headers = self._headers() if rng.random() < 0.3 else {}
        return self._case(method, f"{path}?{query}" if query else path, headers, b"")

    def _form(self) -> Case:
        rng = self.rng
        boundary = rng.choice((b"b", b"x" * 70, b"'\"", b"\xff", b"----"))
        parts = [
            (_PARTS[0], b"batch"),
            (_PARTS[2], b"\n".join(self.batch_line() for _ in range(2))),
        ]
        for _ in range(rng.randrange(3)):
            head = rng.choice(_PARTS)
            parts.insert(
                rng.randrange(3), (head, rng.choice((b"", b"a" * 2000, b"\0\r\n--", b"b")))
            )
        if rng.random() < 0.05:
            parts *= 10
        data = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, *part) for part in parts)
        data += b"--" + boundary + b"--\r\n"
        if rng.random() < 0.5:
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice((b"", data[at + 1 :], b"\r\n--b", b"\0" + data[at:]))
        kind = b"multipart/form-data; boundary=" + (boundary if rng.random() < 0.9 else b'"')
        return self._case("POST", "/v1/files", {b"Content-Type": kind}, data)

    def _headers(self) -> dict[bytes, bytes]:
        rng = self.rng
        results = {
            rng.choice(_HEADERS): rng.choice(_VALUES) for _ in range(rng.choice((1, 1, 2, 5)))
        }
        if rng.random() < 0.4:
            results[b"Content-Type"] = rng.choice(_TYPES)
        return results

    @staticmethod
    def _case(method: str, target: str, headers: dict[bytes, bytes], body: bytes) -> Case:
        headers = {b"Host": b"localhost", **headers}
        if body or method == "POST":
            headers[b"Content-Length"] = str(len(body)).encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers.items())
        head = f"{method} {target} HTTP/1.1\r\n".encode("latin-1", "replace")
        return Case(f"{method} {target[:80]}", method, head + lines + b"\r\n" + body)


def shorten(body: Any, path: str) -> None:
    """Bound what a valid request costs; a change may take the bound away again."""
    if not isinstance(body, dict):
        return
    for part in (body, body.get("options")):
        if not isinstance(part, dict):
            continue
        for name in _LIMITS:
            if isinstance(part.get(name), int):
                part[name] = min(part[name], MOST_TOKENS)
    if path in _LIMIT_OF and not any(body.get(name) for name in _LIMITS):
        body[_LIMIT_OF[path]] = MOST_TOKENS
    if path in {"/api/chat", "/api/generate"} and not isinstance(body.get("options"), dict):
        body["options"] = {"num_predict": MOST_TOKENS}


def _quoted() -> list[str]:
    return [*_IDS, "2", "0", "-1", "9" * 30, "NaN", "true", "", "desc"]
