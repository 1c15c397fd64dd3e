"""URLs in errors and logs: no password is shown."""

from __future__ import annotations

import pytest

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.message_text import masked_url, without_passwords
from twostroke.core.urls import server_url


@pytest.mark.parametrize(
    ("url", "shown_url"),
    [
        ("redis://:hunter2@host:6379/0", "redis://***@host:6379/0"),
        ("redis://user:hunter2@host", "redis://***@host"),
        ("https://hunter2@host/v1", "https://***@host/v1"),
        ("redis://user:hun/ter2@host:6379", "redis://***@host:6379"),
        ("redis://user:hun@ter2@host:6379", "redis://***@host:6379"),
        ("redis://user:hun@t/er2@host:6379", "redis://***@host:6379"),
        ("http://user:hun?ter2@host", "http://***@host"),
        ("user:hunter2@host:9000", "***@host:9000"),
        ("ftp://user:hunter2@[::1]:80/x", "ftp://***@[::1]:80/x"),
        ("redis://host/0?password=hunter2&db=1", "redis://host/0?password=***&db=1"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("not a url", "not a url"),
        ("", ""),
    ],
)
def test_urls_are_shown_without_passwords(url: str, shown_url: str) -> None:
    assert masked_url(url) == shown_url


def test_urls_in_messages_have_no_passwords() -> None:
    text = "From http://a:hunter2@proxy:3128 to https://b:x@y@host/c@d and back."
    shown_text = "From http://***@proxy:3128 to https://***@host/c@d and back."
    assert without_passwords(text) == shown_text
    assert str(TwostrokeError("cannot use {url}.", field="url", url="redis://:hunter2@h")) == (
        "url cannot use redis://***@h."
    )


@pytest.mark.parametrize("url", ["ftp://x", "x", "http://", "http://h:0", "http://h:x", "http://["])
def test_what_is_not_the_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"^url must be like http://127.0.0.1:8000"):
        server_url(url, field="url")


@pytest.mark.parametrize("url", ["http://u:hunter2@h", "http://hunter2@h", "http://u:hunter2@h:x"])
def test_a_server_is_not_asked_with_a_password_in_its_url(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        server_url(url, field="url")
    assert "hunter2" not in str(caught.value)
    assert server_url("https://h:1/v1", field="url").port == 1
