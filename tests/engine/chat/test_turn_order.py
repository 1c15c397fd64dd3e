"""Every template gets each conversation complete, in an order that it accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support import strict_templates
from support.byte_tokenizer import byte_metadata
from support.chats import TOOLS
from twostroke.core.errors import RequestError
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.chat.template import ChatTemplate
from twostroke.engine.chat.turn_order import ANY_ORDER, arrange_turns
from twostroke.model.tokenizer import from_gguf

CALL: dict[str, Any] = {
    "id": "call_123456789",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
KINDS = (
    *("system", "developer", "user", "assistant", "call", "text and call", "unanswered call"),
    *("empty", "null"),
)


def chat_of(template: str, **named_templates: str) -> Chat:
    named = {f"tokenizer.chat_template.{name}": source for name, source in named_templates.items()}
    return Chat(from_gguf(byte_metadata() | {"tokenizer.chat_template": template} | named))


CHATS = {name: chat_of(source) for name, source in strict_templates.TEMPLATES.items()}


def conversation(*kinds: str) -> list[dict[str, Any]]:
    """Return messages of these kinds; each message's text has a different word."""
    messages: list[dict[str, Any]] = []
    for index, kind in enumerate(kinds):
        text = f"words{index}said"
        if "call" in kind:
            content = text if kind == "text and call" else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": [CALL]})
            if kind == "unanswered call":
                continue
            result = {"role": "tool", "tool_call_id": CALL["id"], "content": f"result{index}given"}
            messages.append(result)
        elif kind in {"empty", "null"}:
            messages.append({"role": "assistant", "content": "" if kind == "empty" else None})
        else:
            messages.append({"role": kind, "content": text})
    return messages


def turn_messages(*turns: str) -> list[dict[str, Any]]:
    """Return messages from words such as `user:Hello`."""
    pairs = (turn.partition(":") for turn in turns)
    return [{"role": role, "content": content} for role, _, content in pairs]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("LENIENT", "developer"),
        ("FIRST_ALONE", "developer lone_system several_systems late_system"),
        (
            "ALTERNATES",
            "developer lone_system several_systems late_system assistant_first same_role",
        ),
        ("NO_SYSTEM", "developer system late_system assistant_first same_role"),
        ("DROPS_ROLES", "developer system late_system"),
        ("LAST_SYSTEM", "developer several_systems late_system"),
        ("DEVELOPER_FIRST", "developer several_systems late_system"),
        ("NO_EMPTY_ANSWER", "developer empty_answer"),
        (
            "WITH_LAST_QUESTION",
            (
                "developer lone_system answered_system several_systems late_system lone_result"
                " unanswered_call"
                " user_after_result text_with_calls assistant_first same_role"
            ),
        ),
        ("NEEDS_TOOLS", "developer"),
        ("ONLY_PARTS", "developer"),
    ],
)
def test_refused_orders_are_found_by_trying_the_template(name: str, refused: str) -> None:
    order = CHATS[name]._plain.turn_order
    results = [kind for kind in order.__struct_fields__ if not getattr(order, kind)]
    assert sorted(results) == sorted(refused.split())


@given(st.sampled_from(sorted(CHATS)), st.lists(st.sampled_from(KINDS), min_size=1, max_size=9))
@settings(max_examples=300, deadline=None)
def test_every_template_shows_all_texts_of_every_conversation(name: str, kinds: list[str]) -> None:
    messages = conversation(*kinds)
    text = CHATS[name].render(messages).text
    missing = [
        message["content"]
        for message in messages
        if message["content"] and message["content"] not in text
    ]
    assert not missing, text


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=9), st.booleans(), st.booleans())
@example(kinds=["system", "unanswered call", "user"], with_calls=False, with_empty=True)
@example(kinds=["system", "call", "empty", "user"], with_calls=True, with_empty=False)
def test_a_system_message_stays_only_before_a_last_user_message(
    kinds: list[str], with_calls: bool, with_empty: bool
) -> None:
    """The text would be lost: the template adds the system message to the last user message."""
    order = replace(
        ANY_ORDER,
        lone_system=False,
        answered_system=False,
        late_system=False,
        user_after_result=False,
        unanswered_call=with_calls,
        empty_answer=with_empty,
    )
    turns = arrange_turns(conversation(*kinds), order)
    assert turns[0]["role"] != "system" or turns[-1]["role"] == "user"


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=9))
def test_texts_stay_in_their_order(kinds: list[str]) -> None:
    messages = conversation(*(kind for kind in kinds if kind not in {"system", "developer"}))
    for name in ("ALTERNATES", "WITH_LAST_QUESTION", "NO_SYSTEM"):
        if messages:
            text = CHATS[name].render(messages).text
            text_offsets = [
                text.index(message["content"]) for message in messages if message["content"]
            ]
            assert text_offsets == sorted(text_offsets), name


@given(st.lists(st.sampled_from(KINDS[2:-1]), min_size=1, max_size=9))
def test_a_template_that_accepts_a_conversation_gets_it_unchanged(kinds: list[str]) -> None:
    messages = conversation(*kinds)
    template = ChatTemplate(strict_templates.LENIENT)
    assert CHATS["LENIENT"].render(messages).text == template.render(messages).text
    assert arrange_turns(messages, ANY_ORDER) == messages


@pytest.mark.parametrize(
    ("name", "turns", "same"),
    [
        ("FIRST_ALONE", ["system:a", "developer:b", "user:c"], ["system:a\n\nb", "user:c"]),
        ("FIRST_ALONE", ["user:a", "system:b", "user:c"], ["user:a", "user:b\n\nc"]),
        (
            "FIRST_ALONE",
            ["user:a", "assistant:b", "user:c", "system:d"],
            ["user:a", "assistant:b", "user:c\n\nd"],
        ),
        (
            "FIRST_ALONE",
            ["system:a", "user:b", "assistant:c", "system:d"],
            ["system:a", "user:b", "assistant:c", "user:d"],
        ),
        ("FIRST_ALONE", ["system:a"], ["user:a"]),
        ("ALTERNATES", ["user:a", "user:b", "assistant:c"], ["user:a\n\nb", "assistant:c"]),
        (
            "ALTERNATES",
            ["user:a", "assistant:b", "assistant:c", "user:d"],
            ["user:a", "assistant:b\n\nc", "user:d"],
        ),
        ("ALTERNATES", ["assistant:a", "user:b"], ["user:", "assistant:a", "user:b"]),
        ("NO_SYSTEM", ["system:a", "system:b", "user:c"], ["user:a\n\nb\n\nc"]),
        ("NO_SYSTEM", ["system:a", "assistant:b"], ["user:a", "assistant:b"]),
        ("DROPS_ROLES", ["developer:a", "user:b"], ["user:a\n\nb"]),
        ("LAST_SYSTEM", ["system:a", "system:b", "user:c"], ["system:a\n\nb", "user:c"]),
        ("LENIENT", ["developer:a", "user:b"], ["system:a", "user:b"]),
    ],
)
def test_refused_turns_become_part_of_their_neighbours(
    name: str, turns: list[str], same: list[str]
) -> None:
    chat = CHATS[name]
    plain = ChatTemplate(strict_templates.TEMPLATES[name])
    assert chat.render(turn_messages(*turns)).text == plain.render(turn_messages(*same)).text


def test_a_question_after_a_result_becomes_part_of_it() -> None:
    text = CHATS["WITH_LAST_QUESTION"].render(
        [*conversation("user", "call"), *turn_messages("user:So?")]
    )
    assert "[TOOL_RESULTS]result1given\n\nSo?[/TOOL_RESULTS]" in text.text


def test_many_turns_become_one_text() -> None:
    texts = [f"text {number}" for number in range(9_000)]
    messages = turn_messages(*(f"system:{text}" for text in texts), "user:Hi")
    assert "\n\n".join(texts) in CHATS["FIRST_ALONE"].render(messages).text


def test_parts_of_joined_messages_stay_parts() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system must be first') }}{% endif %}{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    parts = [{"type": "text", "text": "b"}]
    messages = [
        *turn_messages("system:a"),
        {"role": "system", "content": parts},
        *turn_messages("user:c"),
    ]
    assert chat_of(source).render(messages).text == "<a><b>c"


def test_the_last_answer_is_continued_on_every_template() -> None:
    for name, chat in CHATS.items():
        if name == "ALTERNATES":
            continue  # it trims the text, so it could not go on from it
        messages = turn_messages(
            "system:a", "developer:b", "user:c", "user:d", "assistant:e", "assistant:f g"
        )
        prompt = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt.text.endswith("f g"), name


def test_a_template_that_refuses_even_stricter_orders_says_why() -> None:
    chat = chat_of("{{ raise_exception('never') }}")
    with pytest.raises(RequestError, match="never"):
        chat.render(turn_messages("user:a"))


def test_an_order_that_was_not_tried_is_rearranged_when_it_is_refused() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 > 4 and m.role == loop.previtem.role %}"
        "{{ raise_exception('twice') }}{% endif %}{{ m.content }}|{% endfor %}"
    )
    turns = ["user:a", "assistant:b"] * 3 + ["user:c", "user:d"]
    assert chat_of(source).render(turn_messages(*turns)).text.endswith("|c\n\nd|")


def test_the_template_for_tools_is_used_where_there_are_tools() -> None:
    chat = chat_of(
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        tool_use="T:" + strict_templates.LENIENT,
    )
    assert chat.render(turn_messages("user:a")).text == "a"
    assert chat.render(turn_messages("user:a"), TOOLS).text.startswith("T:")
    assert chat.capabilities.shows_tools


def test_a_template_for_tools_that_cannot_be_compiled_is_not_used() -> None:
    chat = chat_of(strict_templates.LENIENT, tool_use="{{ .Tools }}")
    assert "get_weather" in chat.render(turn_messages("user:a"), TOOLS).text
    assert chat.refusal is None
    assert "line 1" in str(chat.tool_refusal)


@pytest.mark.parametrize(
    "source", ["{{ .Prompt }}", "{% for m in messages %}", "{{ 1 | nothing }}"]
)
def test_a_template_that_cannot_be_compiled_refuses_each_chat(source: str) -> None:
    chat = chat_of(source)
    chat.prepare()
    assert "line 1" in str(chat.refusal)
    with pytest.raises(RequestError, match="line 1") as caught:
        chat.render(turn_messages("user:a"))
    assert caught.value.http_status == 400


def test_a_model_chats_with_a_template_of_any_name() -> None:
    metadata = byte_metadata()
    del metadata["tokenizer.chat_template"]
    chat = Chat.of(from_gguf(metadata | {"tokenizer.chat_template.rag": "R"}))
    assert chat is not None
    assert chat.render(turn_messages("user:a")).text == "R"
    empty = Chat.of(from_gguf(metadata | {"tokenizer.chat_template": " "}))
    assert empty is not None  # the vocabulary has the marks of ChatML
    assert empty.render(turn_messages("user:a")).text.startswith("<|im_start|>user\na")


def called(arguments: str, *, content: str = "") -> dict[str, Any]:
    """Return an answer that calls `add` with these arguments."""
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [CALL | {"function": function}]}


@pytest.mark.parametrize("arguments", ["no JSON", '{"a": tr', "[1]", "5", '"no JSON"'])
def test_arguments_that_are_no_object_reach_templates_that_need_an_object(arguments: str) -> None:
    messages = [*turn_messages("user:a"), called(arguments), *turn_messages("tool:b", "user:c")]
    for tools in ((), TOOLS):
        text = CHATS["NAMED_ARGUMENTS"].render(messages, tools).text
        assert f"<function=add>\n<parameter=arguments>\n{arguments.strip(chr(34))}\n" in text
        assert "b" in text


@pytest.mark.parametrize("arguments", ["", "null", "{}"])
def test_null_and_empty_text_are_no_arguments(arguments: str) -> None:
    messages = [*turn_messages("user:a"), called(arguments), *turn_messages("tool:b", "user:c")]
    assert "<function=add>\n</function>" in CHATS["NAMED_ARGUMENTS"].render(messages).text
    assert '"arguments": {}}' in CHATS["LENIENT"].render(messages).text


def test_templates_that_accept_any_arguments_get_them_unchanged() -> None:
    messages = [*turn_messages("user:a"), called("no JSON"), *turn_messages("tool:b")]
    assert '"arguments": "no JSON"}' in CHATS["LENIENT"].render(messages).text


def test_calls_beside_a_text_are_shown_if_the_template_drops_them() -> None:
    messages = [
        *turn_messages("user:a"),
        called('{"a": "argument"}', content="words"),
        *turn_messages("tool:b", "user:c"),
    ]
    text = CHATS["TEXT_OR_CALLS"].render(messages).text
    assert 0 < text.index("words") < text.index("argument")


def test_a_call_before_all_questions_stays_beside_tools() -> None:
    messages = [called('{"a": "argument"}'), *turn_messages("tool:b", "user:c")]
    for tools in ((), TOOLS):
        text = CHATS["TOOLS_IN_FIRST"].render(messages, tools).text
        assert "argument" in text
        assert ("get_weather" in text) == bool(tools)


@pytest.mark.parametrize(
    "failing",
    [
        "{% if p.type is not string %}{{ raise_exception('an unknown type') }}{% endif %}",
        "{{ '' + p.type }}",
        "{% macro m(t) %}{{ '' if t is string else m(t) }}{% endmacro %}{{ m(p.type) }}",
    ],
)
def test_tools_on_which_the_template_fails_are_described_as_text(failing: str) -> None:
    source = (
        "{% for t in tools or [] %}{% for key, p in t.function.parameters.properties | items %}"
        + failing
        + "{% endfor %}{% endfor %}"
        + strict_templates.LENIENT
    )
    chat = chat_of(source)
    optional = {"type": ["string", "null"]}
    function = {"name": "add", "parameters": {"type": "object", "properties": {"x": optional}}}
    text = chat.render(turn_messages("user:a"), [{"type": "function", "function": function}]).text
    assert json.dumps(function) in text
    assert "You can call these functions" in text
    assert "You can call these functions" not in chat.render(turn_messages("user:a"), TOOLS).text
    with pytest.raises(RequestError, match="never"):
        chat_of(source + "{{ raise_exception('never') }}").render(turn_messages("user:a"), TOOLS)


def test_parts_that_the_template_drops_are_joined() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{{ m.content[0].text }}{% endif %}|{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert chat_of(source).render(messages).text == "a\nb|a\nb|"
    assert chat_of(source).render([{"role": "user", "content": []}]).text == "|"
