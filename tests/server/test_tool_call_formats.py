"""Tool calls in the forms of several model families, as clients see them."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support import family_templates
from support.byte_tokenizer import byte_tokenizer
from support.family_templates import say, talker
from support.servers import events
from twostroke.core.constraint import Constraint, ReasoningSection
from twostroke.engine.chat.call_forms import FORMS
from twostroke.engine.chat.tools import ToolForm
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.server.protocols.common.tools import FunctionBody, to_tools

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import LiveServer

Fields = dict[str, Any]

CONTROL, USER_DEFINED = 3, 4
SCHEMA: Fields = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ANYTHING = {"type": "object", "additionalProperties": True}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": ANYTHING}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = ("weather", '{"city": "Oslo"}')
OTHER = ("time", '{"zone": [1]}')


def form_of(
    name: str,
    choice: Any,
    *,
    parallel: bool,
    kind: int,
    preface: ReasoningSection | None = None,
    answer: Constraint | None = None,
) -> ToolForm:
    form = FORMS[name]
    tokenizer = byte_tokenizer(odd=tuple((mark, kind) for mark in form.all_marks))
    bodies = [FunctionBody(**tool["function"]) for tool in TOOLS]  # type: ignore[arg-type]
    tools = to_tools(bodies, choice, parallel=parallel)
    assert tools is not None
    return ToolForm(tools, form, tokenizer, preface, answer)


def written(name: str, *calls: tuple[str, str]) -> str:
    """Return the text of tool calls in a form, with ids if the form has ids."""
    text = FORMS[name].write(calls)
    for function, _ in calls:
        if FORMS[name].id_mark:
            text = text.replace(f"{function}[ARGS]", f"{function}[CALL_ID]abcdefgh1[ARGS]")
    return text


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
@pytest.mark.parametrize("name", FORMS)
def test_grammars_allow_calls_that_fit_and_no_others(name: str, kind: int) -> None:
    one_call, two = written(name, CALL), written(name, CALL, OTHER)
    wrong = [written(name, ("weather", '{"city": "Bonn"}')), written(name, ("tim", "{}"))]
    cut = one_call[:-1]
    text = ["hello", "", "a {b} [c]"]
    mixed = [] if FORMS[name].is_bare else [f"Well. {one_call}"]
    cases = {
        ("auto", True): ([one_call, two, *text, *mixed], []),
        ("auto", False): ([one_call, *text, *mixed], [two]),
        ("required", True): ([one_call, two], [*text, *mixed]),
        ("required", False): ([one_call], [*text, two]),
    }
    for (choice, parallel), (good, bad) in cases.items():
        form = form_of(name, choice, parallel=parallel, kind=kind)
        is_whole = checker(form)
        for one_of in good:
            assert is_whole(one_of), (choice, parallel, one_of)
        unknown = [] if choice == "auto" and FORMS[name].is_bare else wrong[1:]
        for one_of in (*bad, *wrong[:1], *unknown, cut):
            assert not is_whole(one_of), (choice, parallel, one_of)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", FORMS)
def test_names_of_tools_may_have_every_allowed_character(name: str, choice: str) -> None:
    form, odd_name = FORMS[name], "mcp:files/read.all-1_a"
    tokenizer = byte_tokenizer(odd=tuple((mark, CONTROL) for mark in form.all_marks))
    tools = to_tools([FunctionBody(odd_name, parameters=SCHEMA)], choice, parallel=True)
    assert tools is not None
    is_whole = checker(ToolForm(tools, form, tokenizer, None, None))
    text = form.write([(odd_name, CALL[1])])
    if form.id_mark:
        text = text.replace(f"{odd_name}[ARGS]", f"{odd_name}[CALL_ID]abcdefgh1[ARGS]")
    assert is_whole(text)


def test_a_call_without_its_mark_is_held_to_its_schema() -> None:
    form = form_of("llama", "auto", parallel=False, kind=CONTROL)
    tokenizer = form.tokenizer
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(form.constraint())

    def num_allowed(text: str) -> int:
        return matcher.count_allowed((), tokenizer.encode(text))

    for text in ('{"name": "weathe', '{"name": "other", "parameters": [', ' {"name": "weather"'):
        assert num_allowed(text) == len(tokenizer.encode(text))
    begun = '{"name": "weather", "parameters": {"city": "'
    assert num_allowed(begun + "Oslo") == len(tokenizer.encode(begun + "Oslo"))
    assert num_allowed(begun + "Bonn") == len(tokenizer.encode(begun))


FORM: Fields = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANSWERS = {
    "json_schema": (json.dumps(FORM), '{"name": "weather", "age": 1}', '{"name": "weather"}'),
    "regex": ("[0-9]{4}", "1789", "178"),
    "choice": ('["yes", "no"]', "yes", "perhaps"),
    "grammar": ('start: "a" b\nb: /[0-9]/', "a1", "b1"),
}


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_calls_or_has_its_form(name: str, kind: int) -> None:
    one_call, two = written(name, CALL), written(name, CALL, OTHER)
    if FORMS[name].is_bare:
        one_call, two = FORMS[name].mark + one_call, FORMS[name].mark + two
    wrong = written(name, ("weather", '{"city": "Bonn"}'))
    for preface in (None, ReasoningSection("<think>", "</think>")):
        for notation, (text, good, bad) in ANSWERS.items():
            answer = Constraint(notation, text)
            form = form_of(name, "auto", parallel=True, kind=kind, answer=answer, preface=preface)
            begin = "" if preface is None else "<think>Hm.</think>"
            is_whole = checker(form)
            for allowed in (one_call, two, good):
                assert is_whole(begin + allowed), (notation, allowed)
            for refused in (
                wrong,
                bad,
                "hello",
                one_call[:-1],
                one_call + good,
                good + one_call,
                "",
            ):
                assert not is_whole(begin + refused), (notation, refused)


def checker(form: ToolForm) -> Callable[[str], bool]:
    """Return a function that tells whether a text is a complete answer."""
    matcher = Grammars(form.tokenizer, form.tokenizer.vocab_size).matcher(form.constraint())
    end = min(form.tokenizer.eos_ids)

    def is_whole(text: str) -> bool:
        tokens = [*form.tokenizer.encode(text, parse_special=True), end]
        return matcher.count_allowed((), tokens) == len(tokens)

    return is_whole


@pytest.mark.parametrize("schema", [FORM, {"type": "object"}, {"enum": [{"name": "weather"}]}])
def test_beside_json_a_call_may_lack_its_marks(schema: Fields) -> None:
    answer = Constraint("json_schema", json.dumps(schema))
    is_any = schema == {"type": "object"}
    for name, has_result in product(("hermes", "llama", "mistral list"), (False, True)):
        form = form_of(name, "auto", parallel=True, kind=CONTROL, answer=answer)
        is_whole = checker(replace(form, has_result=has_result))
        needs_sign = has_result and not FORMS[name].is_bare
        for key in ("arguments", "parameters"):
            good = f'{{"name": "weather", "{key}": {{"city": "Oslo"}}}}'
            bad = good.replace("Oslo", "Bonn")
            for before, after in (("```json\n", "\n```"), ("```", "```\n"), ("```{", "}```")):
                assert is_whole(before + good + after)
                assert not is_whole(before + bad + after)
            assert is_whole(good) is (is_any or not needs_sign)
            assert is_whole(bad) is (is_any and needs_sign)
            assert not is_whole(f"{good}\n{good}")
        for text in ('{"name": "weather", "x": 1}', '{"name": "a", "arguments": 1}', '{"na": 1}'):
            assert is_whole(text) is is_any


def test_a_call_without_marks_is_held_in_every_form_of_json() -> None:
    for name in (name for name, form in FORMS.items() if form.has_json):
        is_whole = checker(form_of(name, "auto", parallel=True, kind=CONTROL))
        good = '{"name": "weather", "arguments": {"city": "Oslo"}}'
        for text in (good, f"{{{good}}}", f"{good}\n{good}", f"```json\n{good}\n```\n", good + " "):
            assert is_whole(text), (name, text)
            assert not is_whole(text.replace("Oslo", "Bonn")), (name, text)
        assert not is_whole(good + " Done.")
        assert is_whole('{"name": "nobody", "arguments": {}}')


CASES = [
    ("HERMES", "hermes", ()),
    ("LLAMA", "llama", ("<|python_tag|>",)),
    ("MISTRAL_LIST", "mistral list", ("[TOOL_CALLS]",)),
    ("MISTRAL", "mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("MISTRAL_IDS", "mistral with ids", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    ("PHI", "phi", ("<|tool_call|>", "<|/tool_call|>")),
    ("TAGGED", "tags", ("<tool_call>", "</tool_call>")),
    ("TAGGED", "tags", ()),
    ("GLM", "pairs", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>")),
    ("INVOKES", "invoke", ("<minimax:tool_call>", "</minimax:tool_call>")),
    ("DSML", "dsml", ("｜DSML｜",)),
    ("KEYWORDS", "keywords", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("GEMMA4", "gemma", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    ("KIMI", "kimi", FORMS["kimi"].all_marks),
    ("COHERE", "cohere", ("<|START_ACTION|>", "<|END_ACTION|>")),
    ("XTML", "xtml", ("<|open|>", "<|sep|>", "<|close|>")),
    ("XTML", "xtml", ()),
    ("PARAMS", "params", ()),
    ("PARAMS", "params", ("<function", "</function>", "<param", "</param>")),
    ("SOLAR", "solar", FORMS["solar"].all_marks),
    ("LIST", "list", ("<tool_calls>", "</tool_calls>")),
    ("LINES", "lines", ()),
    ("APERTUS", "apertus", ("<|tools_prefix|>", "<|tools_suffix|>")),
    ("FUNCTIONS", "functions", ()),
    ("FUNCTOOLS", "functools", ()),
    ("GIGACHAT", "gigachat", ("<|function_call|>",)),
    ("GIGACHAT_MESSAGE", "gigachat message", ("<|message_sep|>", "<|role_sep|>")),
]


@pytest.mark.parametrize(("template", "name", "controls"), CASES)
def test_calls_are_sent_in_openais_form(
    tmp_path: Path, template: str, name: str, controls: tuple[str, ...]
) -> None:
    with talker(tmp_path, getattr(family_templates, template), controls) as server:
        for calls in ((CALL,), (CALL, OTHER)):
            text = written(name, *calls)
            if len(calls) == 1 and FORMS[name].is_bare:
                text = f"{FORMS[name].mark}{text}"
            say(server, text)
            for choice in ("auto", "required"):
                if choice == "required" and text.startswith("<|python"):
                    say(server, written(name, *calls))
                if len(calls) == 2 and template == "LLAMA":
                    continue  # its template takes one call at once, and so does the grammar
                body = server.chat(tools=TOOLS, tool_choice=choice, temperature=0).json()
                [answer] = body["choices"]
                assert answer["finish_reason"] == "tool_calls"
                assert answer["message"]["content"] is None
                functions = [call["function"] for call in answer["message"]["tool_calls"]]
                assert [
                    (function["name"], function["arguments"]) for function in functions
                ] == list(calls)
                assert _streamed(server, tools=TOOLS, tool_choice=choice) == list(calls)
        say(server, written(name, CALL))
        body = server.chat(tools=TOOLS, tool_choice=NAMED, temperature=0).json()
        assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        say(server, "No need.")
        body = server.chat(tools=TOOLS, temperature=0).json()
        assert body["choices"][0]["message"]["content"] == "No need."


@pytest.mark.parametrize(
    ("template", "name"), [("HERMES", "hermes"), ("TAGGED", "tags"), ("GLM", "pairs")]
)
def test_a_cut_call_is_not_shown_as_text_in_any_protocol(
    tmp_path: Path, template: str, name: str
) -> None:
    talk = [{"role": "user", "content": "hello"}]
    functions = [tool["function"] for tool in TOOLS]
    named = [
        {"name": function["name"], "input_schema": function["parameters"]} for function in functions
    ]
    protocols: dict[str, Callable[[int], Fields]] = {
        "/v1/chat/completions": lambda n: {"messages": talk, "tools": TOOLS, "max_tokens": n},
        "/v1/responses": lambda n: {
            "input": talk,
            "tools": [{"type": "function", **function} for function in functions],
            "max_output_tokens": n,
        },
        "/v1/messages": lambda n: {"messages": talk, "tools": named, "max_tokens": n},
        "/api/chat": lambda n: {"messages": talk, "tools": TOOLS, "options": {"num_predict": n}},
    }
    bare = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    answers = [(written(name, CALL), written(name, CALL, OTHER))]
    answers += [(bare, f"{bare}\n{bare}")] * FORMS[name].has_json
    with talker(tmp_path, getattr(family_templates, template)) as server:
        for first_call, both in answers:
            tokens = say(server, both)
            first = len(server.client.card.tokenizer.encode(first_call))
            cuts = range(first, len(tokens) - 20, 5)
            for (path, body), is_stream in product(protocols.items(), (False, True)):
                for cut in cuts:
                    fields = body(cut) | {"stream": is_stream, "temperature": 0}
                    fields.setdefault("options", {})["temperature"] = 0
                    if "api" not in path:
                        del fields["options"]
                    text = server.http.post(path, json=fields).text
                    assert "weather" in text
                    assert not _shown_text(text).strip(), (path, is_stream, cut, text)


def _shown_text(response: str) -> str:
    """Return all text in a response of any protocol, whole or streamed."""
    results: list[str] = []

    def look(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, str) and key in {"content", "text"}:
                results.append(inner)
            elif isinstance(inner, dict | list):
                look(inner)

    for line in response.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            look(json.loads(data))
    return "".join(results)


@pytest.mark.parametrize(("template", "controls"), [CASES[1][::2], CASES[4][::2]])
def test_forced_calls_are_drawn_in_the_models_form(
    tmp_path: Path, template: str, controls: tuple[str, ...]
) -> None:
    with talker(tmp_path, getattr(family_templates, template), controls) as server:
        fields = {"tools": TOOLS[:1], "tool_choice": NAMED, "max_tokens": 120, "seed": 1}
        [answer] = server.chat(**fields).json()["choices"]
        assert answer["finish_reason"] == "tool_calls"
        [call] = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in {"Oslo", "Rome"}
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "weather"},
            "max_tokens": 120,
        }
        [use] = server.http.post("/v1/messages", json=body).json()["content"]
        assert use["type"] == "tool_use"
        assert use["input"]["city"] in {"Oslo", "Rome"}


def _streamed(server: LiveServer, **fields: Any) -> list[tuple[str, str]]:
    results: list[tuple[str, str]] = []
    chunks = events(server.chat(stream=True, temperature=0, **fields).text)[:-1]
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        assert not delta.get("content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(results):
                results.append((call["function"]["name"], ""))
            results[-1] = (results[-1][0], results[-1][1] + call["function"]["arguments"])
    return results
