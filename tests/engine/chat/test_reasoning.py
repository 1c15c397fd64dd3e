"""A model's reasoning: its marks, where it begins, and which request fields it supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support import family_templates
from support.byte_tokenizer import CHATML, CONTROL, byte_metadata
from twostroke.core.constraint import Constraint, ReasoningSection
from twostroke.core.errors import RequestError
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat.call_reader import CallBegin, ReasoningPiece, TextPiece
from twostroke.engine.chat.capabilities import PROBED_TOOL
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.chat.reader import AnswerFormat
from twostroke.engine.chat.reasoning import Thinking, with_budget
from twostroke.engine.chat_answer import read_tools
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.model.tokenizer import from_gguf

if TYPE_CHECKING:
    from twostroke.engine.chat.conversation import PreparedChat
    from twostroke.model.tokenizer import Tokenizer

USER = {"role": "user", "content": "Why?"}
SPOOF = {"role": "user", "content": "Say <think>"}
ANEW, INSIDE = ReasoningSection("<think>", "</think>"), ReasoningSection("", "</think>")


def tokenizer_of(template: str, *marks: str) -> Tokenizer:
    metadata = byte_metadata(odd=tuple((mark, 4) for mark in marks))
    return from_gguf(metadata | {"tokenizer.chat_template": template})


def section(answer: PreparedChat) -> ReasoningSection | None:
    """Return the reasoning section without its closing text, which depends on the template."""
    return answer.preface and replace(answer.preface, closing="")


def preface(
    template: str, messages: list[dict[str, str]], **options: Any
) -> ReasoningSection | None:
    chat = Chat(tokenizer_of(template))
    thinking = Thinking(**options) if options else Thinking()
    return section(chat.prepare_answer(chat.render(messages, thinking=thinking)))


@pytest.mark.parametrize(
    ("template", "messages", "options", "expected"),
    [
        (CHATML, [USER], {}, None),
        (CHATML, [SPOOF], {}, None),
        (family_templates.THINKS, [USER], {}, ANEW),
        (family_templates.THINKS, [SPOOF], {}, ANEW),
        (family_templates.THINKS, [USER], {"is_on": True}, ANEW),
        (family_templates.THINKS, [USER], {"is_on": False}, None),
        (family_templates.THINKS, [USER], {"effort": "none"}, None),
        (family_templates.THINKS, [USER], {"effort": "low"}, ANEW),
        (family_templates.THINKS, [USER], {"variables": {"enable_thinking": False}}, None),
        (
            family_templates.THINKS,
            [USER],
            {"effort": "none", "variables": {"enable_thinking": True}},
            ANEW,
        ),
        (family_templates.ALWAYS_THINKS, [USER], {}, INSIDE),
        (family_templates.ALWAYS_THINKS, [USER], {"effort": "high"}, INSIDE),
        (family_templates.GLM, [USER], {}, ANEW),
        (family_templates.GLM, [USER], {"is_on": False}, None),
        (family_templates.GRADES, [USER], {}, None),
        (family_templates.GRADES, [USER], {"is_on": True}, ReasoningSection("", "[/THINK]")),
    ],
)
def test_where_the_prompt_leaves_off_decides(
    template: str,
    messages: list[dict[str, str]],
    options: dict[str, Any],
    expected: ReasoningSection | None,
) -> None:
    assert preface(template, messages, **options) == expected


def test_tokens_of_the_vocabulary_are_marks_too() -> None:
    chat = Chat(tokenizer_of(CHATML, "<think>", "</think>"))
    assert section(chat.prepare_answer(chat.render([USER]))) == ANEW
    with pytest.raises(RequestError, match="does not support reasoning"):
        chat.render([USER], thinking=Thinking(True, param="thinking"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ANEW),
        ("The answer is", None),
        ("<think>\nWell", INSIDE),
        ("<think>Well</think> So", None),
        ("Hm </think>", None),
    ],
)
def test_a_text_that_is_gone_on_from_may_end_in_reasoning(
    text: str, expected: ReasoningSection | None
) -> None:
    chat = Chat(tokenizer_of(family_templates.THINKS))
    messages = [USER, {"role": "assistant", "content": text}]
    prompt = chat.render(messages, continue_final_message=True)
    assert section(chat.prepare_answer(prompt, continued=text)) == expected


def test_effort_reaches_a_template_that_knows_it() -> None:
    chat = Chat(tokenizer_of(family_templates.GRADES))
    text = chat.render([USER], thinking=Thinking(effort="high", param="reasoning_effort")).text
    assert text.endswith("high[THINK]")
    text = chat.render([USER], thinking=Thinking(effort="none", param="reasoning_effort")).text
    assert text.endswith("low[THINK][/THINK]")


@pytest.mark.parametrize(
    ("effort", "strength"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high")],
)
def test_effort_is_the_strength_of_muse_glimmer(effort: str, strength: str) -> None:
    chat = Chat(tokenizer_of(family_templates.MUSE))
    thinking = chat.thinking_with_budget(Thinking(effort=effort, param="reasoning_effort"), None)
    assert thinking.budget is None
    text = chat.render([USER], thinking=thinking).text
    assert f"Reasoning strength: {strength}." in text


def test_reasoning_of_earlier_answers_goes_where_the_template_looks_for_it() -> None:
    answer = {"role": "assistant", "content": "So.", "reasoning_content": "Because."}
    renamed = family_templates.THINKS.replace("reasoning_content", "thinking")
    for template, count in ((family_templates.THINKS, 1), (renamed, 1), (CHATML, 0)):
        text = Chat(tokenizer_of(template)).render([USER, answer, USER]).text
        assert text.count("<think>\nBecause.\n</think>") == count
        assert text.count("So.") == 1


# The template knows the marks, and leaves it to the model to open its reasoning.
OPENS_BY_ITSELF = family_templates.ALWAYS_THINKS.replace("<think>\n{% endif %}", "{% endif %}")


@pytest.mark.parametrize(
    ("template", "options", "word"),
    [
        (CHATML, {"is_on": True}, "does not support reasoning"),
        (CHATML, {"effort": "low"}, "does not support reasoning"),
        (CHATML, {"variables": {"enable_thinking": True}}, "is not a variable"),
        (OPENS_BY_ITSELF, {"is_on": False}, "always reasons"),
        (OPENS_BY_ITSELF, {"effort": "none"}, "always reasons"),
        (OPENS_BY_ITSELF, {"variables": {"enable_thinking": False}}, "is not a variable"),
        (family_templates.THINKS, {"variables": {"enable_thinkin": False}}, "Did you mean"),
        (family_templates.THINKS, {"variables": {"messages": []}}, "template itself uses"),
        (
            family_templates.THINKS,
            {"variables": {"enable_thinking": "x" * 20_000}},
            "16,384 characters",
        ),
        (family_templates.THINKS, {"variables": {f"a{i}": 1 for i in range(17)}}, "at most 16"),
        (family_templates.THINKS, {"effort": "much"}, "none, minimal, low"),
    ],
)
def test_what_a_template_cannot_do_is_refused(
    template: str, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(RequestError, match=word):
        preface(template, [USER], **options, param="the_field")


@pytest.mark.parametrize(
    "name", ["order", "capabilities", "continues", "thinking", "has_text_arguments"]
)
@pytest.mark.parametrize("tools", [(), (PROBED_TOOL,)])
def test_a_templates_variables_may_have_any_other_name(
    name: str, tools: tuple[dict[str, Any], ...]
) -> None:
    source = "{% for message in messages %}{{ message.content }}{% endfor %}{{ " + name + " }}"
    chat = Chat(tokenizer_of(source))
    prompt = chat.render([USER], tools, thinking=Thinking(variables={name: "red"}))
    assert prompt.text.endswith("red")


@pytest.mark.parametrize(
    "options",
    [
        {"is_on": False},
        {"effort": "none"},
        {"variables": {"enable_thinking": False}},
        {"variables": {"thinking": False}},
    ],
)
def test_reasoning_that_each_prompt_opens_is_closed_at_once(options: dict[str, Any]) -> None:
    chat = Chat(tokenizer_of(family_templates.ALWAYS_THINKS))
    assert chat.render([USER]).text.endswith("assistant\n<think>\n")
    prompt = chat.render([USER], thinking=Thinking(**options, param="the_field"))
    assert prompt.text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert chat.prepare_answer(prompt).preface is None
    begun = chat.render(
        [USER], thinking=Thinking(**options, param="the_field"), add_generation_prompt=False
    )
    assert "think" not in begun.text


# The template opens reasoning, and never mentions how it ends.
OPENS_ONLY = family_templates.ALWAYS_THINKS.replace(
    "(m.content or '').split('</think>')[-1]", "m.content"
)


def test_reasoning_that_only_the_prompt_marks_is_closed_too() -> None:
    assert "</think>" not in OPENS_ONLY
    assert preface(OPENS_ONLY, [USER]) == INSIDE
    assert preface(OPENS_ONLY, [USER], is_on=True) == INSIDE
    assert preface(OPENS_ONLY, [USER], effort="none") is None
    assert preface(OPENS_ONLY, [USER], variables={"enable_thinking": False}) is None


@pytest.mark.parametrize(
    ("template", "options", "expected", "ignored"),
    [
        (family_templates.ALWAYS_THINKS, {"variables": {"enable_thinking": True}}, INSIDE, []),
        (
            family_templates.ALWAYS_THINKS,
            {"effort": "high", "off": "enable_thinking"},
            None,
            ["field"],
        ),
        (family_templates.ALWAYS_THINKS, {"is_on": True, "off": "thinking"}, None, ["field"]),
        (family_templates.THINKS, {"effort": "high", "off": "enable_thinking"}, None, ["field"]),
        (family_templates.THINKS, {"effort": "none", "off": "enable_thinking"}, None, []),
        (
            family_templates.THINKS,
            {"effort": "none", "variables": {"enable_thinking": True}},
            ANEW,
            ["field"],
        ),
    ],
)
def test_a_field_that_contradicts_a_switch_is_an_error(
    template: str, options: dict[str, Any], expected: ReasoningSection | None, ignored: list[str]
) -> None:
    options = dict(options)
    if switch := options.pop("off", None):
        options["variables"] = {switch: False}
    chat = Chat(tokenizer_of(template))
    followed, errors = chat.supported_thinking(Thinking(**options, param="field"))
    assert [error.field for error in errors] == ignored
    assert section(chat.prepare_answer(chat.render([USER], thinking=followed))) == expected


@pytest.mark.parametrize("options", [{"is_on": False}, {"effort": "none"}])
def test_what_is_so_already_may_be_asked_for(options: dict[str, Any]) -> None:
    assert preface(CHATML, [USER], **options) is None
    assert preface(CHATML, [USER], variables={"enable_thinking": False}) is None


GEMMA = CHATML + (
    "{% if add_generation_prompt and not enable_thinking | default(false) %}"
    "{{ '<|channel>thought\n<channel|>' }}{% endif %}"
)
# Hy3 makes its marks, which are special tokens, from a suffix.
HY3 = (
    "{% set SUFFIX = ':opensource' %}{% set begin = '<think{}>'.format(SUFFIX) %}"
    "{% set end = '</think{}>'.format(SUFFIX) %}"
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
    + CHATML
    + "{% if add_generation_prompt %}{{ begin }}"
    "{% if reasoning_effort == 'no_think' %}{{ end }}{% endif %}{% endif %}"
)
SEED = CHATML + (
    "{% if add_generation_prompt and thinking_budget is defined %}Budget {{ thinking_budget }}."
    "{% if thinking_budget == 0 %}<seed:think>\n</seed:think>\n{% endif %}{% endif %}"
)
MINIMAX = CHATML + "{% if thinking_mode == 'disabled' %}<mm:think></mm:think>{% endif %}"


def with_tokens(template: str, *marks: str) -> Chat:
    metadata = byte_metadata(odd=tuple((mark, CONTROL) for mark in marks))
    return Chat(from_gguf(metadata | {"tokenizer.chat_template": template}))


def read(chat: Chat, prepared: PreparedChat, text: str) -> tuple[str, str]:
    """Return the reasoning and the text of an answer, with the tokens that its reader shows."""
    tokenizer = prepared.tokenizer
    shown_ids = prepared.constrained(SamplingParams()).shown_ids
    tokens = tokenizer.encode(text, parse_special=True)
    hidden = tokenizer.special_ids - shown_ids
    data = b"".join(tokenizer.token_bytes(token) for token in tokens if token not in hidden)
    reader = prepared.answer_format().reader(tokenizer)
    pieces = [*reader.feed(data.decode()), *reader.finish()]
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    return reasoning, "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def test_marks_may_be_a_special_token_and_text() -> None:
    chat = with_tokens(GEMMA, "<|channel>", "<channel|>")
    assert chat.prepare_answer(chat.render([USER])).preface is None
    on = chat.prepare_answer(chat.render([USER], thinking=Thinking(is_on=True, param="x")))
    assert section(on) == ReasoningSection("<|channel>thought", "<channel|>")
    assert read(chat, on, "<|channel>thought\nWell.<channel|>So.") == ("Well.", "So.")
    assert read(chat, on, "So.") == ("", "So.")
    params = on.constrained(SamplingParams(constraint=Constraint.choice(["yes", "no"])))
    assert params.constraint is not None
    tokenizer = on.tokenizer
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(params.constraint)
    for text, is_allowed in (
        ("<|channel>thought\nWell.<channel|>no", True),
        ("<|channel>thought\nWell.<channel|>so", False),
        ("<|channel>final", False),
        ("yes", True),
    ):
        tokens = tokenizer.encode(text, parse_special=True)
        assert (matcher.count_allowed([], tokens) == len(tokens)) == is_allowed, text


def test_marks_that_a_template_formats_are_special_tokens() -> None:
    chat = with_tokens(HY3, "<think:opensource>", "</think:opensource>")
    prompt = chat.render([USER])
    assert [piece.text for piece in prompt.pieces if piece.special][-2:] == [
        "<think:opensource>",
        "</think:opensource>",
    ]
    assert chat.prepare_answer(prompt).preface is None
    for effort, level in (("low", "low"), ("medium", "high"), ("high", "high")):
        thinking = Thinking(effort=effort, param="reasoning_effort")
        rendered = chat.render([USER], thinking=thinking)
        assert rendered.pieces[-1].text == "<think:opensource>"
        answer = chat.prepare_answer(rendered)
        assert section(answer) == ReasoningSection("", "</think:opensource>")
        assert read(chat, answer, "a</think:opensource>b") == ("a", "b")
        direct = chat.render([USER], thinking=Thinking(variables={"reasoning_effort": level}))
        assert direct == rendered
    off = chat.render([USER], thinking=Thinking(effort="none", param="reasoning_effort"))
    assert off == prompt


def test_other_marks_are_known() -> None:
    chat = Chat(tokenizer_of(MINIMAX))
    on = chat.prepare_answer(chat.render([USER]))
    assert section(on) == ReasoningSection("<mm:think>", "</mm:think>")
    off = chat.render([USER], thinking=Thinking(is_on=False, param="thinking"))
    assert off.text.endswith("<mm:think></mm:think>")


def test_a_template_gets_the_budget() -> None:
    chat = Chat(tokenizer_of(SEED))
    for budget, text in ((512, "Budget 512."), (None, ""), (-1, "")):
        prompt = chat.render([USER], thinking=Thinking(budget=budget))
        assert prompt.text.endswith(text)
        assert ("Budget" in prompt.text) == bool(text)
        assert section(chat.prepare_answer(prompt)) == ReasoningSection(
            "<seed:think>", "</seed:think>"
        )
    for thinking in (Thinking(budget=0), Thinking(effort="none", param="reasoning_effort")):
        prompt = chat.render([USER], thinking=thinking)
        assert prompt.text.endswith("Budget 0.<seed:think>\n</seed:think>\n")
        assert chat.prepare_answer(prompt).preface is None


@pytest.mark.parametrize(
    ("thinking", "names", "default", "budget"),
    [
        (Thinking(), (), None, None),
        (Thinking(), (), 100, 100),
        (Thinking(budget=7), (), 100, 7),
        (Thinking(budget=-1), (), 100, -1),
        (Thinking(effort="low"), (), None, 2048),
        (Thinking(effort="low"), ("reasoning_effort",), None, None),
        (Thinking(effort="low"), ("reasoning_effort",), 100, 100),
        (Thinking(effort="high"), (), 100, 100),
        (Thinking(effort="high"), (), 0, None),
        (Thinking(is_on=True), (), 0, None),
        (Thinking(variables={"enable_thinking": True}), (), 0, None),
        (Thinking(), (), 0, 0),
    ],
)
def test_the_budget_comes_from_the_request_its_effort_or_the_server(
    thinking: Thinking, names: tuple[str, ...], default: int | None, budget: int | None
) -> None:
    result = with_budget(thinking, names, default)
    assert result.budget == budget
    assert (thinking.budget is not None) == (result.sets_budget and budget is not None)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"<think>a</think>{CALL}<think>b\n</think>\n\ntext", "Ra C Rb Ttext"),
        (f"{CALL}\n<think>b</think>{CALL}\n<think>c", "C Rb C Rc"),
        (f"{CALL}\ntext <think>b</think>", "C Ttext <think>b</think>"),
        (f"<think>a</think>x{CALL}\nthe <thing", "Ra Tx C Tthe <thing"),
    ],
)
def test_reasoning_after_a_call_is_reasoning(answer: str, expected: str, size: int) -> None:
    tokenizer = tokenizer_of(CHATML)
    section = ReasoningSection("<think>", "</think>")
    reading = AnswerFormat(functions=("f",), preface=section, section_after_calls=section)
    reader = reading.reader(tokenizer)
    pieces = []
    for start in range(0, len(answer), size):
        pieces += reader.feed(answer[start : start + size])
    pieces += reader.finish()
    joined: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            joined.append("C")
        elif isinstance(piece, (TextPiece, ReasoningPiece)):
            kind = "T" if isinstance(piece, TextPiece) else "R"
            if joined and joined[-1][0] == kind:
                joined[-1] += piece.text
            else:
                joined.append(kind + piece.text)
    assert " ".join(joined) == expected


def test_calls_in_a_chat_allow_reasoning_between_them() -> None:
    chat = Chat(tokenizer_of(family_templates.ALWAYS_THINKS))
    tools = read_tools([{"type": "function", "function": {"name": "f"}}])
    answer = chat.prepare_answer(chat.render([USER]), tools)
    assert answer.section_after_calls == ANEW
    off = chat.render([USER], thinking=Thinking(is_on=False, param="x"))
    assert chat.prepare_answer(off, tools).section_after_calls is None
