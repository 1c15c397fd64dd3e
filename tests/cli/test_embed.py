"""`twostroke embed`: a line of JSON for each text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from twostroke import LLM, EngineOptions
from twostroke.core.options import CacheOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]

SMALL = ("--kv-memory", "4MB")


def test_lines_are_json_in_the_order_of_the_texts(cli: Cli, tiny: str, tmp_path: Path) -> None:
    texts = ["hello world", "the", "a world in the world"]
    with LLM(tiny, EngineOptions(cache=CacheOptions(memory_bytes=4_000_000))) as llm:
        embeddings = llm.embed(texts)
        last = llm.embed("hello world", pooling="last", dimensions=5)[0]
    lines = "\n".join(texts) + "\n"
    path = tmp_path / "texts.txt"
    path.write_text(lines)
    for arguments, stdin in (
        (texts, b"not these"),
        (["-f", str(path)], b""),
        (["-f", "-"], lines.encode()),
        ([], lines.encode()),
    ):
        ran = cli("embed", tiny, *arguments, *SMALL, "-q", stdin=stdin)
        assert (ran.code, ran.err) == (0, "")
        result = [json.loads(line) for line in ran.out.splitlines()]
        assert [list(row) for row in result] == [["index", "prompt_tokens", "embedding"]] * 3
        assert [row["index"] for row in result] == [0, 1, 2]
        for output_line, right in zip(result, embeddings, strict=True):
            assert output_line["prompt_tokens"] == right.usage.prompt_tokens
            assert output_line["embedding"] == right.vector.tolist()
    ran = cli("embed", tiny, "hello world", "--pooling", "last", "--dimensions", "5", *SMALL, "-q")
    result = json.loads(ran.out)["embedding"]
    np.testing.assert_array_equal(np.array(result, np.float32), last.vector)


def test_only_line_feeds_end_a_line(cli: Cli, tiny: str) -> None:
    stdin = "hello\u2028world\x0cthe\r\n\u0085a\n".encode()
    ran = cli("embed", tiny, *SMALL, "-q", stdin=stdin)
    assert [json.loads(line)["index"] for line in ran.out.splitlines()] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "sentence"),
    [
        (("a", "-f", __file__), b"", 2, "not both"),
        ((), None, 2, "There is no text"),
        ((), b"", 2, "There is no text"),
        (("a", " "), b"", 2, "Text 2 is empty"),
        ((), b"a\n\nb\n", 2, "Line 2 of standard input is empty"),
        (("-f", "-"), b"a\n\nb\n", 2, "Line 2 of -f FILE is empty"),
        (("-f", "-"), b"a" * 600, 2, "Line 1 of -f FILE has 600 tokens"),
        (("caf\udce9",), b"", 2, "The text is not UTF-8 text: its character 3 is 0xe9."),
        (("-f", "/nowhere/x"), b"", 2, "'/nowhere/x' cannot be read"),
        (("a", "--dimensions", "0"), b"", 2, "--dimensions must be at least 1"),
        (("a", "--dimensions", "65"), b"", 2, "--dimensions must be from 1 to 64"),
        (("a", "--pooling", "maen"), b"", 2, "mean"),
        (("a", "x" * 600), b"", 2, "Text 2 has 600 tokens, but there may be 512: shorten it."),
        (
            ("x" * 65, "--context-length", "64"),
            b"",
            2,
            "Text 1 has 65 tokens, but there may be 64: shorten it, or raise --context-length",
        ),
        (("a", "--kv-memory", "1k"), b"", 6, "--kv-memory allows 1 KB"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_a_code(
    cli: Cli, tiny: str, arguments: tuple[str, ...], stdin: bytes | None, code: int, sentence: str
) -> None:
    ran = cli("embed", tiny, *arguments, stdin=stdin)
    assert ran.code == code
    assert ran.err.startswith("twostroke: ")
    assert sentence in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""
