"""The form of every error of OpenAI's protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx


def refused(
    response: httpx.Response, status: int, param: str | None, code: str | None = None
) -> str:
    """Check an error's form and return its message; any `code` will do if none is given."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert code is None or error["code"] == code
    message: str = error["message"]
    assert message.endswith((".", "?"))
    assert message.isprintable()
    assert "Traceback" not in message
    assert ".py" not in message
    return message
