"""Names of models on the hub: the accepted forms, and the errors for other forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twostroke.core.errors import ModelNotFoundError, UsageError
from twostroke.model.hub.names import HubName, look_up, parse_hub_name

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hf:owner/repo", HubName("owner/repo")),
        ("HF:owner/repo", HubName("owner/repo")),
        ("hf://owner/repo", HubName("owner/repo")),
        ("hf:Qwen/Qwen2.5-0.5B:Q4_K_M", HubName("Qwen/Qwen2.5-0.5B", "Q4_K_M")),
        ("hf:o/r:a b/model.gguf@v1.0", HubName("o/r", "a b/model.gguf", "v1.0")),
        ("hf:o/r@refs/pr/1", HubName("o/r", None, "refs/pr/1")),
        ("https://huggingface.co/o/r", HubName("o/r")),
        ("https://huggingface.co/o/r/", HubName("o/r")),
        ("https://www.huggingface.co/o/r?library=gguf#top", HubName("o/r")),
        ("huggingface.co/o/r", HubName("o/r")),
        ("hf.co/o/r", HubName("o/r")),
        ("https://huggingface.co/o/r/tree/dev", HubName("o/r", None, "dev")),
        ("https://hf.co/o/r/blob/main/a/b%20c.gguf", HubName("o/r", "a/b c.gguf")),
        ("https://hf.co/o/r/resolve/v2/a.gguf?download=true", HubName("o/r", "a.gguf", "v2")),
    ],
)
def test_each_form_is_understood(typed: str, expected: HubName) -> None:
    name = parse_hub_name(typed)
    assert name == expected
    assert parse_hub_name(str(name)) == expected


@pytest.mark.parametrize(
    "typed", ["smollm2", "owner/repo", "./hf:x", "pypi:a==1:b.gguf", "a:b", ""]
)
def test_names_of_other_kinds_are_not_parsed_as_hub_names(typed: str) -> None:
    assert parse_hub_name(typed) is None


@pytest.mark.parametrize(
    "typed",
    [
        "hf:",
        "hf:repo",
        "hf:a/b/c",
        "hf:o/r:",
        "hf:o/r@",
        "hf:o/r@dev:file.gguf",
        "hf:o/r:a:b",
        "hf:o/r:../../secret",
        "hf:o/r:/etc/passwd",
        "hf:o/r:a\\b",
        "hf:o/r@../main",
        "hf:../r",
        "hf:o/..",
        "hf:o/a--b",
        "hf:o/r\n",
        "hf:o/r:a\0b",
        "https://huggingface.co/datasets/o/r",
        "https://huggingface.co/models",
        "https://huggingface.co/o/r/discussions/4",
    ],
)
def test_malformed_hub_names_are_refused_with_the_right_form(typed: str) -> None:
    with pytest.raises(UsageError, match=r"hf:owner/repo\[:file"):
        parse_hub_name(typed)


def test_a_repository_without_its_prefix_gets_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # "../x" may exist beside the repository
    for name in ("Qwen/Qwen3-0.6B-GGUF", "o/r:Q4_0"):
        with pytest.raises(ModelNotFoundError, match=f"Did you mean 'hf:{name}'"):
            look_up(name)
    for path in ("./a/b", "/a/b", "a/b/c", "../x"):
        with pytest.raises(ModelNotFoundError, match=r"There is no file or folder '[^']*'\.$"):
            look_up(path)
