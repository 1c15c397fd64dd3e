"""Files without content: each command says that there is nothing in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]


@pytest.mark.parametrize("content", ["", "\n\n", "  \n   \n"], ids=["none", "lines", "blanks"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("batch", "FILE", "-o", "OUT", "--model", "MODEL"), "FILE has no request"),
        (("embed", "MODEL", "-f", "FILE"), "--file: The file 'FILE' has no text"),
        (("generate", "MODEL", "-f", "FILE"), "The prompt is empty"),
        (("generate", "MODEL", "a", "--json-schema", "FILE"), "--json-schema: The file 'FILE' has"),
        (("generate", "MODEL", "a", "--grammar", "FILE"), "--grammar: The file 'FILE' has no text"),
        (("generate", "MODEL", "a", "--chat-template-file", "FILE"), "The file 'FILE' has no text"),
        (("compare", "MODEL", "--text", "FILE"), "--text: The file 'FILE' has no text"),
        (("quantize", "MODEL", "-o", "OUT", "--to", "q4_0", "--text", "FILE"), "has no text"),
        (("cache", "warm", "MODEL", "DIR", "--system", "FILE"), "--system: The file 'FILE' has no"),
        (("cache", "warm", "MODEL", "DIR", "--prompt", "FILE"), "--prompt: The file 'FILE' has no"),
        (("serve", "MODEL", "--port", "0", "--api-keys", "FILE"), "FILE has no keys"),
        (("fleet", "up", "FILE"), "FILE, line 1: must be fields (name: value), got nothing"),
        (("plan", "fleet", "FILE"), "FILE, line 1: must be fields (name: value), got nothing"),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_an_empty_file_is_named(
    cli: Cli, tiny: str, tmp_path: Path, arguments: tuple[str, ...], sentence: str, content: str
) -> None:
    file = tmp_path / "empty"
    file.write_text(content)
    words = {"MODEL": tiny, "FILE": str(file), "OUT": str(tmp_path / "out.gguf")}
    ran = cli(*(words.get(word, word) for word in arguments), stdin=b"")
    assert ran.code == 2
    assert sentence.replace("FILE", str(file)).split("/")[-1] in ran.err
    assert ran.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
