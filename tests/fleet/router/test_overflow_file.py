"""Overflow files: errors name the line and the known words, and keys stay secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.fleet.router.key_file import KeyFile
from twostroke.fleet.router.overflow_file import read_overflow
from twostroke.server.auth.usage_header import ReportedUsage

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
objective: 2.5
never_for: [clinic]
replicas: {price_per_hour: 2.49}
upstreams:
  - name: openai
    url: https://api.openai.com/v1
    protocol: openai
    key_file: openai.key
    when: [no_replica, objective]
    max_cost_per_day: 20
    models:
      smollm2: {model: gpt-5-mini, input: 0.25, cached: 0.025, output: 2}
"""


def read(folder: Path, text: str) -> Any:
    path = folder / "overflow.yaml"
    path.write_text(text)
    return read_overflow(path)


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    spec = read(tmp_path, GOOD)
    [upstream] = spec.upstreams
    assert (spec.objective, spec.never_for, spec.currency) == (2.5, ("clinic",), "USD")
    assert (upstream.max_parallel, upstream.connect_timeout) == (64, 5)
    assert upstream.key_file == str(tmp_path / "openai.key")
    assert upstream.find_model("owner/SmolLM2").model == "gpt-5-mini"
    assert upstream.find_model("") is None


@pytest.mark.parametrize(
    ("url", "protocol", "path"),
    [
        ("https://api.openai.com", "openai", "/v1/chat/completions"),
        ("https://api.openai.com/v1/", "openai", "/v1/chat/completions"),
        ("https://a.example/api/paas/v4", "openai", "/api/paas/v4/chat/completions"),
        ("https://api.anthropic.com", "anthropic", "/v1/messages"),
        ("https://api.anthropic.com/v1", "anthropic", "/v1/messages"),
        ("https://a.example/anthropic", "anthropic", "/anthropic/v1/messages"),
        ("http://localhost:1234", "openai", "/v1/chat/completions"),
        ("http://[::1]:1234", "openai", "/v1/chat/completions"),
    ],
)
def test_urls_are_those_of_the_vendors_libraries(
    url: str, protocol: str, path: str, tmp_path: Path
) -> None:
    text = GOOD.replace("https://api.openai.com/v1", f'"{url}"')
    spec = read(tmp_path, text.replace("protocol: openai", f"protocol: {protocol}"))
    [upstream] = spec.upstreams
    assert upstream.address().path + upstream.target.decode() == path


FAULTS = [
    ("objective: 2.5", "objektive: 2.5", "line 1: there is no field 'objektive'. Did you mean"),
    ("objective: 2.5\n", "", "needs the field objective"),
    ("2.5", "0", "greater than 0"),
    ("name: openai", "name: here", "and not be 'here'"),
    ("name: openai", "name: Open AI", "line 5: name must have small letters"),
    ("https://", "http://", "line 6: url must begin with https://"),
    ("https://", "ftp://", "line 6: url must be a URL"),
    ("https://api", "https://user:secret@api", "line 6: url must be a URL"),
    ("protocol: openai", "protocol: opnai", "must be one of anthropic, openai, got 'opnai'."),
    ("[no_replica, objective]", "[no_replicas]", "got 'no_replicas'. Did you mean"),
    ("[no_replica, objective]", "[]", "when must have rules of"),
    ("    max_cost_per_day: 20\n", "", "max_cost_per_day is missing"),
    ("max_cost_per_day: 20", "max_cost_per_day: -1", "line 10: max_cost_per_day must be"),
    ("input: 0.25, ", "", "line 12: upstreams[0].models.smollm2.input is missing"),
    ("input: 0.25", "input: -1", "input must be from 0"),
    ("output: 2}", "output: cheap}", "must be a number"),
    ("output: 2}", "outputs: 2, output: 2}", "there is no field 'outputs'"),
    ("      smollm2: {", "      {", "got a text (upstreams[0].models.model)"),
    ("output: 2}", "output: 2", "this is not YAML"),
    ("price_per_hour: 2.49", "price_per_hour: 2, models: {a: {input: 1, output: 1}}", "no effect"),
    ("max_cost_per_day: 20", "max_cost_per_day: 20\n    drop: [messages]", "must not name"),
]


@pytest.mark.parametrize(("old", "new", "reason"), FAULTS)
def test_errors_name_the_line_and_the_known_words(
    old: str, new: str, reason: str, tmp_path: Path
) -> None:
    assert old in GOOD
    with pytest.raises(TwostrokeError) as error:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert reason in str(error.value)
    assert str(error.value).startswith("overflow.yaml, line ")
    assert "secret" not in str(error.value)


def test_two_upstreams_need_two_names(tmp_path: Path) -> None:
    _, upstream = GOOD.split("upstreams:\n")
    with pytest.raises(UsageError, match="for two upstreams"):
        read(tmp_path, GOOD + upstream)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"sk-secret two\n", "does not have one key"),
        ("sk-secret-ü".encode(), "ASCII"),
    ],
)
def test_a_file_without_a_key_is_an_error_that_shows_no_key(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "the.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        KeyFile(path)
    assert reason in str(error.value)
    assert "the.key" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_key_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "the.key"
    path.write_text("sk-secret")
    path.chmod(0o600)
    assert KeyFile(path).key() == "sk-secret"
    assert caplog.text == ""
    path.chmod(0o644)
    assert "sk-secret" not in repr(KeyFile(path))
    assert "chmod 600" in caplog.text
    assert "sk-secret" not in caplog.text


def test_costs_have_a_price_for_each_kind_of_token(tmp_path: Path) -> None:
    [upstream] = read(tmp_path, GOOD).upstreams
    used = ReportedUsage(1000, 400, 100)
    assert upstream.models["smollm2"].cost(used) == pytest.approx(
        (600 * 0.25 + 400 * 0.025 + 100 * 2) / 1e6
    )
    without_cache = read(tmp_path, GOOD.replace("cached: 0.025, ", "")).upstreams[0]
    assert without_cache.models["smollm2"].cost(used) == pytest.approx(
        (1000 * 0.25 + 100 * 2) / 1e6
    )
