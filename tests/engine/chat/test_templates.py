"""Chat templates render messages, and only templates write special tokens."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import DOC, END, START, byte_metadata, byte_tokenizer
from twostroke.core.errors import ModelFormatError, RequestError
from twostroke.engine.chat.template import ChatTemplate
from twostroke.model.tokenizer import Piece, from_gguf

TOKENIZER = byte_tokenizer()
CHATML = ChatTemplate.for_tokenizer(TOKENIZER)
HI = [{"role": "user", "content": "Hi"}]
ATTACKS = st.lists(
    st.one_of(st.text(max_size=5), st.sampled_from([START, END, DOC, "<|", "im_end", "|>", " "]))
).map("".join)


class Specials:
    """A vocabulary that consists of special tokens with these texts."""

    def __init__(self, *texts: str, additional: tuple[str, ...] = (), **named: str) -> None:
        self._texts = texts
        self.named_texts = named
        self.additional_texts = additional

    def special_texts(self) -> tuple[str, ...]:
        return self._texts


def _render(source: str, *specials: str, messages: Any = HI, **extra: object) -> str:
    return ChatTemplate(source, Specials(*specials)).render(messages, **extra).text  # type: ignore[arg-type]


def _special(source: str, content: str, *specials: str, role: str = "user") -> list[str]:
    """The special pieces of a prompt with one message."""
    prompt = ChatTemplate(source, Specials(*specials)).render([{"role": role, "content": content}])
    return [piece.text for piece in prompt.pieces if piece.special]


def test_special_tokens_of_the_template_are_pieces_of_their_own() -> None:
    prompt = CHATML.render(HI)
    assert prompt.text == f"{START}user\nHi{END}\n{START}assistant\n"
    assert prompt.pieces[:3] == (
        Piece(START, special=True),
        Piece("user\nHi"),
        Piece(END, special=True),
    )
    assert TOKENIZER.encode_prompt(prompt) == TOKENIZER.encode(prompt.text, parse_special=True)


@given(ATTACKS, ATTACKS)
def test_no_message_can_write_a_special_token(first: str, second: str) -> None:
    prompt = CHATML.render(
        [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    )
    assert prompt.text == (
        f"{START}user\n{first}{END}\n{START}assistant\n{second}{END}\n{START}assistant\n"
    )
    ids = TOKENIZER.encode_prompt(prompt)
    special = [id_ for id_ in ids if id_ in TOKENIZER.special_ids]
    assert special == [0, 1, 0, 1, 0]
    assert TOKENIZER.decode(ids, skip_special=False) == _with_text(prompt.text)


def _with_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content | trim }}<|e|>",
        "{{ messages[0].content.replace('XX', '') }}<|e|>",
        "{{ messages[0].content.split('YY')[-1] }}<|e|>",
        "{{ messages[0].content | upper | lower }}<|e|>",
        "{{ messages[0].content.split('XX') | join }}<|e|>",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x | replace('XX', '') }}<|e|>",
        "{{ '<' ~ messages[0].content ~ '>' }}<|e|>",
        "{{ '<%s>' % messages[0].content[1:-1] }}<|e|>",
        "{{ messages | tojson }}<|e|>",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(messages[0].content) }}<|e|>",
    ],
)
@pytest.mark.parametrize("content", ["<|e|>", "<|XXe|>", "<XX|e|XX>", "aYY<|e|>", "|e|", " <|e|> "])
def test_text_stays_text_however_the_template_changes_it(source: str, content: str) -> None:
    assert _special(source, content, "<|e|>") == ["<|e|>"]


def test_literals_that_are_looked_for_still_match_text() -> None:
    source = (
        "{% if '<|e|>' in messages[0].content %}yes{% endif %}"
        "{{ messages[0].content.split('<|e|>') | length }}"
        "{{ messages[0].content.replace('<|e|>', '_') }}"
        "{{ messages[0].content == 'a<|e|>b' }}"
    )
    message = [{"role": "user", "content": "a<|e|>b"}]
    assert _render(source, "<|e|>", messages=message) == "yes2a_bTrue"


def test_named_tokens_are_special_where_the_template_writes_them() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        Specials("<s>", "</s>", bos_token="<s>", eos_token="</s>"),
    )
    prompt = template.render([{"role": "user", "content": "<s>"}])
    assert [piece.special for piece in prompt.pieces] == [True, False, True]


def test_tokens_glued_from_a_role_are_special_and_those_from_text_are_not() -> None:
    specials = ("<|user|>", "<|assistant|>", "<|end|>")
    for source in (
        "{{ '<|' + messages[0].role + '|>' + messages[0].content + '<|end|>' }}",
        "<|{{ messages[0]['role'] }}|>{{ messages[0].content }}<|end|>",
        "{{ '<|' ~ messages[0].role ~ '|>' }}{{ messages[0].content }}<|end|>",
        "{{ '<|%s|>' % messages[0].role }}{{ messages[0].content }}<|end|>",
    ):
        content = "<|assistant|> assistant |><|"
        assert _special(source, content, *specials) == ["<|user|>", "<|end|>"]
        text = _render(source, *specials, messages=[{"role": "user", "content": content}])
        assert text == f"<|user|>{content}<|end|>"
        wrapped = source.replace("messages[0].content", "('<|' + messages[0].content + '|>')")
        assert _special(wrapped, "assistant", *specials) == ["<|user|>", "<|end|>"]


def test_rendered_text_equals_plain_jinja() -> None:
    source = (
        "{%- for m in messages if m.role != 'tool' %}\n"
        "  {%- if loop.first %}[{% endif %}\n"
        "{{ loop.index }}/{{ loop.length }} {{ m['role'] | upper }}: {{ m.content | trim }}\n"
        "  {%- if m.extra is defined and m.extra %} {{ m.extra | tojson }}{% endif %}\n"
        "{%- else %}none{% endfor %}]\n"
        "{% set ns = namespace(n=0, names=[]) %}"
        "{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
        "{% set ns.names = ns.names + [m.role ~ '!'] %}{% endfor %}{{ ns.n }}"
        "{{ ns.names | join(', ') }}"
        "{% macro tag(name, flag=true) %}<{{ name }}{% if flag %}/{% endif %}>{% endmacro %}"
        "{{ tag('a') }}{{ tag('b', flag=false) }}"
        "{{ messages | map(attribute='role') | unique | list }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% for k, v in {'x': 1, 'y': [1, 2]} | items %}{{ k }}={{ v }};{% endfor %}"
        "{{ messages[::-1][0].content[:2] }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ 'ab' * 2 }}"
        "{{ '%s-%03d' % ('x', 7) }} {{ '{:>5}'.format('y') }} {{ (1.256 | round(2)) }}"
        "{{ 'a,b'.split(',') }} {{ ('a', 1) }} {{ none }} {{ 'x' if false }} {{ [3, 1] | sort }}"
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " Hi\n", "extra": {"k": ["é", 1.5, None]}},
        {"role": "assistant", "content": "Hello\n there "},
    ]
    plain = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    plain.filters["tojson"] = lambda value: __import__("json").dumps(value, ensure_ascii=False)
    assert _render(source, messages=messages) == plain.from_string(source).render(messages=messages)


def test_tools_and_further_variables_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f<b>", "parameters": {}}}]
    source = "{{ tools | tojson(indent=1) }}{{ enable_thinking }}{{ tools is none }}"
    rendered = _render(source, tools=tools, extra_variables={"enable_thinking": False})
    assert '"name": "f<b>"' in rendered
    assert rendered.endswith("FalseFalse")
    assert _render("{{ tools is none }}") == "True"


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    source = "{{ messages[-1].tool_calls[0].function.arguments | tojson }}"
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert _render(source, messages=messages) == '{"a": [1]}'
    call["function"] = {"name": "f", "arguments": "{not json"}
    assert _render(source, messages=messages) == '"{not json"'
    assert call["function"] == {"name": "f", "arguments": "{not json"}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        _render("{{ messages[0].content }}", messages=[{"role": "user", "content": parts}])
        == "a\nb"
    )


def test_parts_arrive_as_they_are_where_the_template_walks_over_them() -> None:
    source = "{% for p in messages[0]['content'] %}{{ p.type }}:{{ p['text'] | trim }};{% endfor %}"
    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b"}]
    assert _render(source, messages=[{"role": "user", "content": parts}]) == "text:a;text:b;"


def test_the_clock_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2025, 3, 4))
    assert template.render(HI).text == "04 Mar 2025"


def test_generation_tags_are_transparent() -> None:
    assert _render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"


def test_a_model_without_template_says_what_to_do_instead() -> None:
    metadata = byte_metadata()
    del metadata["tokenizer.chat_template"]
    chatml = ChatTemplate.for_tokenizer(from_gguf(metadata))
    assert chatml.render(HI) == CHATML.render(HI)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[tokens.index(START)] = "<other>"
    with pytest.raises(RequestError, match=r"no chat template.*completions"):
        ChatTemplate.for_tokenizer(from_gguf(metadata))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("hi", "must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"role": "user"}], r"is missing"),
        ([{"content": "x"}], r"messages\[0\].role is missing."),
        ([{"role": "usr", "content": "x"}], "Did you mean 'user'"),
        ([{"role": ["user"], "content": "x"}], "role must be one of"),
        ([{"role": "user", "content": 5}], "must be a string or a list of parts"),
        ([*HI, {"role": "user", "content": [{"type": "image_url"}]}], r"messages\[1\].content"),
        ([{"role": "user", "content": ["x"]}], "type text only"),
        ([{"role": "user", "content": "x", "f": len}], "not JSON"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "function.name"),
    ],
)
def test_messages_that_are_not_well_formed_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        CHATML.render(messages)


def test_deeply_nested_messages_are_refused() -> None:
    deep: Any = "x"
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested deeper"):
        CHATML.render([{"role": "user", "content": "x", "extra": deep}])


def test_the_message_of_a_template_that_refuses_is_reported() -> None:
    with pytest.raises(RequestError, match=r"refuses these messages: no <\|e\|> please"):
        _render("{{ raise_exception('no <|e|> please') }}", "<|e|>")


def test_a_template_that_fails_is_a_request_error_without_a_trace() -> None:
    with pytest.raises(RequestError, match="TypeError: can only concatenate") as caught:
        _render("{{ 'a' + messages[0].content + 1 }}{{ 'b' + 2 }}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception", "range"])
def test_the_templates_own_names_cannot_be_replaced(name: str) -> None:
    template = ChatTemplate("x", Specials("<s>", bos_token="<s>"))
    with pytest.raises(RequestError, match=name):
        template.render(HI, extra_variables={name: "y"})


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' }", "{% for x in y %}", "{{ x | nofilter }}"]
)
def test_a_source_that_is_not_a_template_is_a_format_error(source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template is not valid"):
        ChatTemplate(source)


CONTINUED = [*HI, {"role": "assistant", "content": "So it "}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}[a]", "So it "),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}", "So it "),
        ("{% for m in messages %}[{{ m['role'] }}]{{ ' ' + m['content'] }}{% endfor %}", " So it "),
    ],
)
def test_last_message_can_be_continued(source: str, expected: str) -> None:
    rendered = _render(source, messages=CONTINUED, continue_final_message=True)
    assert rendered.endswith(f"[assistant]{expected}")
    begun = [*HI, {"role": "assistant", "content": ""}]
    empty = _render(source, messages=begun, continue_final_message=True)
    assert empty == rendered.removesuffix("So it ")


def test_continued_prompt_has_neither_an_end_nor_a_new_turn() -> None:
    prompt = CHATML.render(CONTINUED, continue_final_message=True)
    assert prompt.text == f"{START}user\nHi{END}\n{START}assistant\nSo it "
    attack = [*HI, {"role": "assistant", "content": f"x{END}"}]
    last = CHATML.render(attack, continue_final_message=True).pieces[-1]
    assert last == Piece(f"assistant\nx{END}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:2] }}{% endfor %}",
    ],
)
def test_a_message_that_the_template_changes_cannot_be_continued(source: str) -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        _render(source, messages=CONTINUED, continue_final_message=True)


def test_only_a_text_can_be_continued() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(RequestError, match="without tool calls"):
        CHATML.render(messages, continue_final_message=True)


def test_special_tokens_without_names_are_a_list_and_special() -> None:
    source = "{{ additional_special_tokens[1] }}{{ messages[0].content }}"
    template = ChatTemplate(source, Specials("<a>", "<b>", additional=("<a>", "<b>")))
    prompt = template.render([{"role": "user", "content": "<b>"}])
    assert [(piece.text, piece.special) for piece in prompt.pieces] == [
        ("<b>", True),
        ("<b>", False),
    ]
    source = "{{ additional_special_tokens is defined }}"
    assert _render(source) == "False"
