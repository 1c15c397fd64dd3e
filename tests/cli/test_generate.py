"""`twostroke generate`: the answer, its speed, and the JSON on which scripts rely."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.tiny import infill_metadata, write_base_gguf, write_tiny_gguf
from twostroke import LLM, EngineOptions, SamplingParams
from twostroke.cli.generate import _prompt
from twostroke.core.errors import UsageError
from twostroke.core.options import CacheOptions
from twostroke.engine.redraw import EncodedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Ran
    from twostroke.engine.client import Client
    from twostroke.engine.output import Output

    Cli = Callable[..., Ran]

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def expected(tiny: str) -> dict[str, list[int]]:
    """Return the tokens of greedy answers, by prompt."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(tiny, EngineOptions(cache=CacheOptions(memory_bytes=4_000_000))) as llm:
        message = {"role": "user", "content": "hello world"}
        system = {"role": "system", "content": "be kind"}
        return {
            "chat": list(llm.chat([message], params)[0].token_ids),
            "system": list(llm.chat([system, message], params)[0].token_ids),
            "raw": list(llm.generate("hello world", params)[0][0].token_ids),
        }


def test_json_is_one_object_as_promised(
    cli: Cli, tiny: str, expected: dict[str, list[int]]
) -> None:
    ran = cli("generate", tiny, "-p", "hello world", *GREEDY, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    body = json.loads(ran.out)
    assert list(body) == ["text", "token_ids", "finish_reason", "usage", "timings"]
    assert body["token_ids"] == expected["chat"]
    assert body["finish_reason"] == "length"
    assert list(body["usage"]) == [
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "accepted_tokens",
        "rejected_tokens",
    ]
    assert body["usage"]["completion_tokens"] == 12
    assert list(body["timings"]) == [
        "ttft_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "mfu",
        "mbu",
    ]
    assert all(value > 0 for value in body["timings"].values())


def test_marks_around_the_answer_are_not_shown(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models with `<response>` in their chat template, such as Granite 3.3, write them."""
    template = (
        "{% for m in messages %}{{ m.role }}: "
        "{% if m.role == 'assistant' %}<response>{{ m.content }}</response>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    model = write_tiny_gguf(tmp_path / "marks.gguf", metadata={"tokenizer.chat_template": template})
    stream = EncodedPrompt.stream

    def answer_in_marks(prompt: EncodedPrompt, client: Client) -> Iterator[Output]:
        first, *middle, last = stream(prompt, client)
        yield replace(first, text="<resp")
        yield from (replace(output, text="") for output in middle)
        yield replace(last, text="onse>So.</response>")

    monkeypatch.setattr(EncodedPrompt, "stream", answer_in_marks)
    arguments = ("generate", str(model), "-p", "hello", *GREEDY)
    assert json.loads(cli(*arguments, "--json").out)["text"] == "So."
    assert cli(*arguments, "--quiet").out == "So.\n"
    assert cli(*arguments, "--raw", "--quiet").out == "<response>So.</response>\n"


def test_what_was_not_measured_is_null(cli: Cli, tiny: str) -> None:
    ran = cli("generate", tiny, "-p", "a", "--max-tokens", "1", "--ignore-eos", "--json")
    timings = json.loads(ran.out)["timings"]
    assert timings["decode_tokens_per_s"] is timings["mbu"] is None


def test_text_goes_out_and_figures_go_aside(cli: Cli, tiny: str) -> None:
    ran = cli("generate", tiny, "-p", "hello world", *GREEDY)
    text = json.loads(cli("generate", tiny, "-p", "hello world", *GREEDY, "--json").out)["text"]
    assert ran.out == f"{text}\n"
    assert ran.err.startswith("TTFT ")
    assert "% of peak · decode " in ran.err
    assert ran.err.endswith("% of bandwidth\n")
    quiet = cli("generate", tiny, "-p", "hello world", *GREEDY, "--quiet")
    assert (quiet.out, quiet.err) == (ran.out, "")


def test_the_prompt_comes_from_everywhere(
    cli: Cli, tiny: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("hello world\n")
    for arguments, stdin in (
        (("hello world",), b""),
        (("-p", "hello world"), b"not this"),
        (("-p", "-"), b"hello world\n"),
        (("-",), b"hello world"),
        ((), b"hello world\n"),
        (("-f", str(path)), b"not this"),
    ):
        ran = cli("generate", tiny, *arguments, *GREEDY, "--json", stdin=stdin)
        assert json.loads(ran.out)["token_ids"] == expected["chat"], arguments


def test_raw_continues_the_text_as_it_is(
    cli: Cli, tiny: str, expected: dict[str, list[int]]
) -> None:
    ran = cli("generate", tiny, "-p", "hello world", "--raw", *GREEDY, "--json")
    assert json.loads(ran.out)["token_ids"] == expected["raw"] != expected["chat"]


def test_a_system_message_goes_before(cli: Cli, tiny: str, expected: dict[str, list[int]]) -> None:
    ran = cli("generate", tiny, "hello world", "--system", "be kind", *GREEDY, "--json")
    assert json.loads(ran.out)["token_ids"] == expected["system"] != expected["chat"]
    assert cli("generate", tiny, "hello", "--system", "x", "--raw").code == 2


@pytest.mark.parametrize("without_template", [("--raw",), ("--suffix", "x")])
@pytest.mark.parametrize(
    "options",
    [("--chat-template", "chatml"), ("--reasoning-budget", "8")],
    ids=lambda options: options[0],
)
def test_options_of_chats_are_refused_without_a_chat_template(
    cli: Cli, options: tuple[str, str], without_template: tuple[str, ...]
) -> None:
    ran = cli("generate", "x", "hello", *options, *without_template)
    assert ran.code == 2
    message = f"{options[0]} cannot be combined with {without_template[0]}: leave one of them out."
    assert message in ran.err


@pytest.mark.parametrize("way", ["name", "file", "text", "option"])
def test_another_chat_template_may_be_given(
    cli: Cli, tiny: str, expected: dict[str, list[int]], tmp_path: Path, way: str
) -> None:
    template = "{{ messages[0].content }}"  # as --raw
    path = tmp_path / "a.jinja"
    path.write_text(template)
    option = "--chat-template-file" if way == "option" else "--chat-template"
    value = {"name": "chatml", "text": template}.get(way, str(path))
    ran = cli("generate", tiny, "-p", "hello world", option, value, *GREEDY, "--json")
    assert json.loads(ran.out)["token_ids"] == expected["chat" if way == "name" else "raw"]


def test_a_model_without_a_template_continues(cli: Cli, tmp_path: Path) -> None:
    path = str(write_base_gguf(tmp_path / "base.gguf"))
    plain, raw = (
        json.loads(cli("generate", path, "hello", *flags, *GREEDY, "--json").out)["token_ids"]
        for flags in ((), ("--raw",))
    )
    assert plain == raw


def test_the_reference_needs_no_native_library(
    cli: Cli, tiny: str, no_libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(no_libraries))  # where no limits are remembered
    ran = cli("generate", tiny, "hello", *GREEDY, "--backend", "reference", "--json")
    timings = json.loads(ran.out)["timings"]
    assert timings["decode_tokens_per_s"] > 0
    assert (timings["mfu"], timings["mbu"]) == (None, None)
    output = cli("generate", tiny, "hello", *GREEDY, "--backend", "reference").err
    assert "decode" in output
    assert "%" not in output


def test_the_same_seed_gives_the_same_answer(cli: Cli, tiny: str) -> None:
    line = ("generate", tiny, "hi", "--max-tokens", "20", "--ignore-eos", "--json", "--seed")
    texts = [json.loads(cli(*line, seed).out)["token_ids"] for seed in ("5", "5", "6")]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_answer(cli: Cli, tiny: str) -> None:
    whole_text = cli("generate", tiny, "hello", *GREEDY, "-q").out.removesuffix("\n")
    stop = whole_text[3:5]
    ran = cli("generate", tiny, "hello", *GREEDY, "--stop", stop, "--json")
    body = json.loads(ran.out)
    assert body["finish_reason"] == "stop"
    assert body["text"] == whole_text[: whole_text.index(stop)]


def test_the_reference_backend_agrees(cli: Cli, tiny: str, expected: dict[str, list[int]]) -> None:
    ran = cli("generate", tiny, "hello world", *GREEDY, "--json", "--backend", "reference")
    assert json.loads(ran.out)["token_ids"][:4] == expected["chat"][:4]


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "sentence"),
    [
        (("-p", "a", "b"), b"", 2, "Give the prompt once"),
        (("-p", "a", "-f", "/dev/null"), b"", 2, "Give the prompt once"),
        ((), None, 2, "There is no prompt"),
        ((), b"", 2, "prompt is empty"),
        (("-p", "  "), b"", 2, "prompt is empty"),
        (("-p", "", "--raw"), b"", 2, "prompt is empty"),
        ((), b"caf\xe9", 2, "Standard input is not UTF-8 text: byte 3 is 0xe9."),
        (("-p", "caf\udce9"), b"", 2, "--prompt is not UTF-8 text: its character 3 is 0xe9."),
        (("-p", "a", "--stop", "\udcff"), b"", 2, "--stop is not UTF-8 text"),
        (("-f", "/nowhere/x"), b"", 2, "'/nowhere/x' cannot be read: No such file"),
        (("-p", "a", "--json-schema", '{"type": 1}'), b"", 2, "--json-schema: The name of a file"),
        (("-p", "a", "--json-schema", "[1]"), b"", 2, "--json-schema: The name of a file"),
        (
            ("-p", "a", "--json-schema", "/nowhere"),
            b"",
            2,
            "--json-schema: The file '/now",
        ),
        (("-p", "a", "--json-schema", "/"), b"", 2, "--json-schema: The file '/' cannot be read"),
        (("-p", "a", "--grammar", 'root ::= "a"'), b"", 2, "--grammar: The name of a file"),
        (("-p", "a", "--grammar", 'start: "a"'), b"", 2, "--grammar: The name of a file"),
        (("-p", "a", "--grammar", "x" * 300), b"", 2, "--grammar: The name of a file"),
        (("-p", "a", "--json-schema", "-"), b"{", 2, "--json-schema"),
        (("-p", "a", "--json-schema", "-"), b"\xff", 2, "--json-schema: Standard input is not"),
        (("-p", "a", "--grammar", "-"), b"start: nowhere", 2, "--grammar"),
        (("-p", "a", "--regex", "("), b"", 2, "--regex"),
        (("-p", "a", "--choice", ""), b"", 2, "--choice"),
        (("-f", "/"), b"", 2, "cannot be read: it is a folder"),
        (("-p", "a", "--context-length", "513"), b"", 2, "at most 512 tokens of context, not 513"),
        (("-p", "a", "--kv-memory", "1k"), b"", 6, "--kv-memory allows 1 KB"),
        (("-p", "a", "--level", "portabel"), b"", 2, "Did you mean 'portable'?"),
        (("-p", "a" * 2000), b"", 2, "prompt and answer together may have 512: shorten it."),
        (
            ("-p", "a" * 100, "--context-length", "64"),
            b"",
            2,
            "shorten it, or raise --context-length (up to 512).",
        ),
        (("-p", "a", "--max-tokens", "510"), b"", 2, "lower --max-tokens to 4"),
        (("-p", "a", "--chat-template", "chatlm"), b"", 2, "got 'chatlm'. Did you mean 'chatml'?"),
        (("-p", "a", "--chat-template-file", "/nowhere"), b"", 2, "'/nowhere' cannot be read"),
        (
            ("-p", "a", "--chat-template", "chatml", "--chat-template-file", "/proc/version"),
            b"",
            2,
            "--chat-template cannot be combined with --chat-template-file",
        ),
        (("-p", "a", "--backend", "gpu"), b"", 8, "[gpu]'"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_a_code(
    cli: Cli, tiny: str, arguments: tuple[str, ...], stdin: bytes | None, code: int, sentence: str
) -> None:
    ran = cli("generate", tiny, *arguments, stdin=stdin)
    assert ran.code == code
    assert ran.err.startswith("twostroke: ")
    assert sentence in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""


@pytest.mark.parametrize(
    ("content", "code", "sentence"),
    [
        (b"", 4, "is empty"),
        (b"not a model", 4, "is not a GGUF file"),
        (b"GGUF", 4, "is truncated"),
    ],
)
def test_a_bad_model_file_is_one_sentence(
    cli: Cli, tmp_path: Path, content: bytes, code: int, sentence: str
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    ran = cli("generate", str(path), "-p", "a")
    assert ran.code == code
    assert sentence in ran.err
    assert ran.err.count("\n") == 1


def test_a_truncated_model_is_one_sentence(cli: Cli, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    ran = cli("generate", str(path), "-p", "a", "--json")
    assert (ran.code, ran.out) == (4, "")
    assert "is truncated" in ran.err


@pytest.mark.parametrize("name", ["smolm2", "./nowhere.gguf", "ftp://x/y"])
def test_an_unknown_model_is_one_sentence(cli: Cli, name: str) -> None:
    ran = cli("generate", name, "-p", "a")
    assert ran.code == 3
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "code", "sentence"),
    [
        ("TWOSTROKE_NUM_THREADS", "abc", 2, "from 1 to 1024, not 'abc'"),
        ("TWOSTROKE_CPU_LEVEL", "portabel", 2, "(TWOSTROKE_CPU_LEVEL)"),
    ],
)
def test_a_wrong_setting_names_its_variable(
    cli: Cli,
    tiny: str,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    code: int,
    sentence: str,
) -> None:
    monkeypatch.setenv(variable, value)
    ran = cli("generate", tiny, "-p", "a")
    assert ran.code == code
    assert sentence in ran.err
    assert variable in ran.err


def test_without_standard_input_the_prompt_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="There is no prompt"):
        _prompt(None, None, None)


def test_a_suffix_is_a_text_or_a_file(cli: Cli, tiny: str, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "code.gguf", metadata=infill_metadata())
    (tmp_path / "behind.txt").write_text(" world\n")
    with LLM(path, EngineOptions(cache=CacheOptions(memory_bytes=4_000_000))) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        token_lists = [
            [*llm.generate("hello", params, suffix=suffix)[0][0].token_ids]
            for suffix in (" world", " world\n")
        ]
    for suffix, tokens in zip((" world", f"@{tmp_path / 'behind.txt'}"), token_lists, strict=True):
        ran = cli("generate", str(path), "-p", "hello", "--suffix", suffix, *GREEDY, "--json")
        assert json.loads(ran.out)["token_ids"] == tokens
    for model, more_options, message in (
        (tiny, (), "no tokens for filling in the middle"),
        (str(path), ("--system", "be kind"), "--system needs a chat template"),
        (str(path), ("--suffix", "@/nowhere"), "'/nowhere' cannot be read"),
    ):
        ran = cli("generate", model, "hello", "--suffix", "x", *more_options)
        assert ran.code == 2
        assert message in ran.err


@pytest.mark.model
def test_the_real_model_knows_a_capital(
    cli: Cli, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = cli(
        "generate",
        str(smollm2_path),
        *("-p", "What is the capital of France?", "--temperature", "0", "--max-tokens", "20"),
        *("--activation-bits", "15", "--json"),
    )
    assert "Paris" in json.loads(ran.out)["text"]


def test_finished_answer_that_breaks_its_schema_is_printed_and_an_error(
    cli: Cli, tiny: str, tmp_path: Path
) -> None:
    arguments = ("generate", tiny, "-p", "hello", "--max-tokens", "60", "--quiet", "--json-schema")
    for pattern, code in ((r"^(long text)\\1$", 10), (r"^.*(?!x)$", 0)):  # no grammar holds either
        path = tmp_path / "schema.json"
        path.write_text(f'{{"type": "string", "maxLength": 2, "pattern": "{pattern}"}}')
        ran = cli(*arguments, str(path))
        assert ran.code == code
        assert ("breaks the rule pattern (#) of the schema" in ran.err) is (code == 10)
        assert isinstance(json.loads(ran.out), str)
        ran = cli(*arguments, str(path), "--json")
        assert ran.code == code
        assert json.loads(ran.out).get("schema_miss", "") == ("pattern (#)" if code else "")
