"""Answers in channels (harmony, gpt-oss): prompts, reading in any cut, garbled headers, grammar."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from support.byte_tokenizer import CONTROL, byte_metadata
from support.harmony_template import TEMPLATE
from twostroke.core.constraint import Constraint
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat.call_reader import (
    ArgumentsPiece,
    CallBegin,
    ReasoningPiece,
    TextPiece,
)
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.chat.harmony import MARKS
from twostroke.engine.chat.reasoning import Thinking
from twostroke.engine.chat_answer import read_tools
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.engine.structured_output.reasoning_budget import ReasoningBudget
from twostroke.model.tokenizer import from_gguf

if TYPE_CHECKING:
    from twostroke.engine.chat.conversation import PreparedChat
    from twostroke.model.tokenizer import Tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "Weather in Rome?"}
ANALYSIS = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
CALL_OF_RECIPIENT = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}'


@cache
def tokenizer() -> Tokenizer:
    metadata = byte_metadata(odd=tuple((mark, CONTROL) for mark in MARKS))
    return from_gguf(metadata | {"tokenizer.chat_template": TEMPLATE})


def prepared(choice: str = "auto", *, has_tools: bool = True, **options: Any) -> PreparedChat:
    chat = Chat(tokenizer())
    tools = read_tools([WEATHER], choice) if has_tools else None
    prompt = chat.render([USER], [WEATHER] if has_tools else ())
    return chat.prepare_answer(prompt, tools, **options)


def read(text: str, *, seed: int | None = None, is_cut: bool = False, **options: Any) -> Any:
    """Return the reasoning, the text and the calls of an answer that comes in random pieces."""
    splits = options.pop("splits_reasoning", True)
    reader = prepared(**options).answer_format(splits_reasoning=splits).reader(tokenizer())
    rng, pieces, start = random.Random(seed), [], 0
    while start < len(text):
        end = len(text) if seed is None else start + rng.randint(1, 12)
        pieces += reader.feed(text[start:end])
        start = end
    pieces += reader.finish(is_cut=is_cut)
    reasoning = "".join(p.text for p in pieces if isinstance(p, ReasoningPiece))
    content = "".join(p.text for p in pieces if isinstance(p, TextPiece))
    calls = [
        (
            call.name,
            "".join(
                p.text for p in pieces if isinstance(p, ArgumentsPiece) and p.index == call.index
            ),
        )
        for call in pieces
        if isinstance(call, CallBegin)
    ]
    return reasoning, content, calls, reader.has_whole_calls


ROME = [("get_weather", '{"city": "Rome"}')]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>Sunny.", ("Let me think.", "Sunny.", [], False)),
        (f"{ANALYSIS}{CALL}", ("Let me think.", "", ROME, True)),
        (f"{ANALYSIS}{CALL}<|call|>", ("Let me think.", "", ROME, True)),
        ("<|channel|>final<|message|>Hi <|b> there", ("", "Hi <|b> there", [], False)),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL,
            ("", "I look.", ROME, True),
        ),
        # The recipient stands before the channel, or `json` has no mark.
        (
            ANALYSIS + CALL_OF_RECIPIENT,
            ("Let me think.", "", ROME, True),
        ),
        (
            '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Rome"}<|call|>',
            ("", "", ROME, True),
        ),
        (
            '<|channel|>commentary to=get_weather code<|message|>{"city": "Rome"}<|call|>',
            ("", "", ROME, True),
        ),
        # A message has no end, or an answer no header.
        (
            "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes",
            ("Hm", "Yes", [], False),
        ),
        ("Just text.", ("", "Just text.", [], False)),
        ("finally", ("", "finally", [], False)),
        ("final", ("", "final", [], False)),
        ("a", ("", "a", [], False)),
        (f"{ANALYSIS}assistant", ("Let me think.", "", [], False)),
        ("<|channel|>final<|message|><|end|>assistant", ("", "", [], False)),
        ("<|start|>" + "x" * 600, ("", "x" * 600, [], False)),  # no header ends
        # Two sections of reasoning, and a recipient that is no tool.
        (f"{ANALYSIS}{ANALYSIS}", ("Let me think.\n\nLet me think.", "", [], False)),
        (
            "<|channel|>analysis to=browser.search<|message|>q<|call|>",
            ("q", "", [], False),
        ),
    ],
)
def test_answers_are_read_however_they_are_cut(
    text: str, expected: tuple[str, str, list[Any], bool], seed: int | None
) -> None:
    assert read(text, seed=seed) == expected


def test_any_text_is_read_in_the_same_way_however_it_is_cut() -> None:
    rng = random.Random(0)
    parts = (*MARKS, "assistant", "analysis", "final", "commentary", " to=functions.get_weather")
    parts += ("to=", " json", " ", "x" * 250, "\n", "Hi", "<|", "a", "<")
    for _ in range(200):
        text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        assert read(text, seed=1) == read(text), text


def test_a_cut_call_is_not_whole() -> None:
    assert read(CALL[:-3], is_cut=True)[3] is False
    assert read(CALL[:-3])[3] is True


def test_reasoning_stays_in_the_text_if_it_is_not_separated() -> None:
    text = f"{ANALYSIS}<|channel|>final<|message|>Sunny."
    assert read(text, splits_reasoning=False, has_tools=False)[:2] == (
        "",
        "Let me think.\n\nSunny.",
    )


def test_prompts_show_tools_calls_and_results() -> None:
    chat = Chat(tokenizer())
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Rome it is.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = chat.render(messages, [WEATHER], thinking=Thinking(effort="high")).text
    assert "Reasoning: high" in text
    assert "# Instructions\n\nBe brief." in text
    assert "type get_weather = (_: {\ncity: string,\n}) => any;" in text
    begin = "<|start|>assistant<|channel|>analysis<|message|>Rome it is.\n\nI look.<|end|>"
    middle = "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
    result = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
    assert f'{begin}{middle}{{"city": "Rome"}}<|call|>{result}"sunny"<|end|>' in text
    assert text.endswith("<|end|><|start|>assistant")
    later = [*messages, {"role": "assistant", "content": "Sunny.", "reasoning_content": "Easy."}]
    text = chat.render([*later, USER], [WEATHER]).text
    assert "Rome it is." not in text
    assert "Easy." not in text
    assert "<|channel|>final<|message|>Sunny.<|end|>" in text


def allows(constraint: Constraint, text: str) -> bool:
    """Return whether a constraint allows a whole answer."""
    grammars = Grammars(tokenizer(), tokenizer().vocab_size)
    matcher = grammars.matcher(constraint)
    tokens = tokenizer().encode(text, add_special=False, parse_special=True)
    tokens = [*tokens, min(tokenizer().eos_ids)]
    return matcher.count_allowed((), tokens) == len(tokens)


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("choice", "text", "is_allowed"),
    [
        ("auto", f"{ANALYSIS}{FINAL}Sunny.", True),
        ("auto", f"{FINAL}Sunny.", True),
        ("auto", f"{ANALYSIS}{CALL}", True),
        ("auto", f"{ANALYSIS}{CALL[:-1]}", False),
        ("auto", CALL.replace("city", "town"), False),
        ("auto", CALL.replace("get_weather", "other"), False),
        ("auto", f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", True),
        ("auto", "Sunny.", False),
        ("required", f"{ANALYSIS}{CALL}", True),
        ("required", CALL.replace(" <|constrain|>json", ""), True),
        (
            "required",
            CALL_OF_RECIPIENT,
            True,
        ),
        ("required", f"{ANALYSIS}{FINAL}Sunny.", False),
        (
            "required",
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
            False,
        ),
    ],
)
def test_the_grammar_holds_headers_names_and_arguments(
    choice: str, text: str, is_allowed: bool
) -> None:
    constraint = prepared(choice).constrained(SamplingParams()).constraint
    assert constraint is not None
    assert allows(constraint, text) == is_allowed


SCHEMA = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}},
    "required": ["a"], "additionalProperties": False})  # fmt: skip


@pytest.mark.parametrize("has_tools", [False, True])
def test_structured_output_is_the_final_message(has_tools: bool) -> None:
    params = SamplingParams(constraint=SCHEMA)
    options = {"answer": SCHEMA} if has_tools else {}
    constraint = prepared(has_tools=has_tools, **options).constrained(params).constraint
    assert constraint is not None
    whole_answer = '{"a": 1}'
    assert allows(constraint, f"{ANALYSIS}{FINAL}{whole_answer}")
    assert allows(constraint, f"{FINAL}{whole_answer}")
    assert not allows(constraint, whole_answer)
    assert not allows(constraint, f"{ANALYSIS}{FINAL}Sunny.")
    assert allows(constraint, f"{ANALYSIS}{CALL}") == has_tools


def test_a_budget_ends_the_analysis_with_the_tokens_of_its_marks() -> None:
    section = prepared(has_tools=False).preface
    assert section is not None
    budget = ReasoningBudget(
        section, 8, max_output=99, tokenizer=tokenizer(), vocab_size=tokenizer().vocab_size
    )
    texts = [tokenizer().token_text(token) for token in budget.closing]
    assert texts == ["<|end|>", "<|start|>", *"assistant"]


def test_marks_are_shown_and_a_call_or_a_return_ends_the_answer() -> None:
    params = prepared(has_tools=False).constrained(SamplingParams())
    assert {tokenizer().find(mark) for mark in MARKS} == params.shown_ids
    ends = {tokenizer().token_text(token) for token in tokenizer().eos_ids}
    assert {"<|call|>", "<|return|>"} <= ends
    assert "<|end|>" not in ends


@pytest.mark.parametrize(
    ("effort", "level"), [("minimal", "low"), ("medium", "medium"), ("xhigh", "high")]
)
def test_an_effort_that_the_model_does_not_know_is_the_nearest(effort: str, level: str) -> None:
    chat = Chat(tokenizer())
    text = chat.render([USER], thinking=Thinking(effort=effort)).text
    assert f"Reasoning: {level}\n" in text
