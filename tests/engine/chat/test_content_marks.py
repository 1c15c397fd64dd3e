"""Marks that models write around the text of an answer are found, allowed, and removed."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from support import family_templates
from support.byte_tokenizer import CHATML, byte_metadata
from twostroke.core.constraint import ReasoningSection
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat.call_forms import FORMS
from twostroke.engine.chat.call_reader import (
    ArgumentsPiece,
    CallBegin,
    ReasoningPiece,
    TextPiece,
)
from twostroke.engine.chat.content_marks import ContentMarks, UnmarkedText
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.chat.reasoning import Thinking
from twostroke.engine.chat.tools import Function, Tools
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.model.tokenizer import from_gguf

if TYPE_CHECKING:
    from twostroke.engine.chat.conversation import PreparedChat

CONTROL = 3
USER = {"role": "user", "content": "How much?"}
TOOLS = Tools((), (Function.described("f", {"type": "object"}, "tools"),), False, True)
XTML_CALL = FORMS["xtml"].write([("f", "{}")])
XTML_END = "<|close|>message<|sep|>"
XTML_TEXT = "<|open|>response<|sep|>So < 5.<|close|>response<|sep|>"
XTML_UNCLOSED = "<|open|>response<|sep|>So < 5."
XTML_MARKS = ("<|open|>", "<|close|>", "<|sep|>")
SOLAR_CALL = FORMS["solar"].write([("f", "{}")])
SOLAR_MARKS = ("<|begin|>", "<|end|>", "<|content|>", "<|calls|>", *FORMS["solar"].all_marks)
SOLAR_NEXT = "<|end|><|begin|>assistant"
MUSE_CALL = FORMS["atem"].write([("f", "{}")])
MUSE_NEXT = "<|eom|><|start|>assistant"
MUSE_THOUGHT = f" to=self<|message|>Hm.{MUSE_NEXT}"
THINKS = Thinking(is_on=True)
IN_XML = "<response>42</response>"
GRANITE_CALL = FORMS["granite"].write([("f", "{}")])


def chat_of(template: str, marks: tuple[str, ...] = ()) -> Chat:
    metadata = byte_metadata(odd=tuple((mark, CONTROL) for mark in marks))
    return Chat(from_gguf(metadata | {"tokenizer.chat_template": template}))


def prepared(chat: Chat, thinking: Thinking | None = None) -> PreparedChat:
    return chat.prepare_answer(chat.render([USER], thinking=thinking or Thinking()), TOOLS)


def continuing(chat: Chat, text: str, thinking: Thinking) -> PreparedChat:
    messages = [USER, {"role": "assistant", "content": text}]
    prompt = chat.render(
        messages, thinking=thinking, add_generation_prompt=False, continue_final_message=True
    )
    return chat.prepare_answer(prompt, TOOLS, continued=text)


def read(answer: PreparedChat, text: str, cuts: list[int], **options: Any) -> tuple[str, str, int]:
    """Return the text and the reasoning of an answer, and its number of calls."""
    reader = answer.answer_format().reader(answer.tokenizer)
    edges = [0, *cuts, len(text)]
    pieces = [piece for start, end in pairwise(edges) for piece in reader.feed(text[start:end])]
    pieces += reader.finish(**options)
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)),
        "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)),
        sum(isinstance(piece, CallBegin) for piece in pieces),
    )


CASES = [
    ("XTML", XTML_TEXT + XTML_END, ("So < 5.", "", 0)),
    ("XTML", XTML_TEXT, ("So < 5.", "", 0)),
    ("XTML", f"{XTML_UNCLOSED}{XTML_END}Never.", ("So < 5.", "", 0)),
    ("XTML", f"{XTML_UNCLOSED[:-3]}<|close|>response<|sep|>", ("So <", "", 0)),
    ("XTML", f"{XTML_UNCLOSED}<|clo", ("So < 5.<|clo", "", 0)),
    ("XTML", "So < 5.", ("So < 5.", "", 0)),
    (
        "XTML",
        f"<|open|>think<|sep|>Hm.<|close|>think<|sep|>{XTML_TEXT}{XTML_CALL}{XTML_END}",
        ("So < 5.", "Hm.", 1),
    ),
    ("XTML", f"<|open|>response<|sep|><|close|>response<|sep|>{XTML_CALL}", ("", "", 1)),
    ("XTML", f"{XTML_CALL}{XTML_END}", ("", "", 1)),
    ("SOLAR", "<|content|>So < 5.", ("So < 5.", "", 0)),
    ("SOLAR", f"<|think|>Hm.{SOLAR_NEXT}<|content|>So < 5.", ("So < 5.", "Hm.", 0)),
    (
        "SOLAR",
        f"<|think|>Hm.{SOLAR_NEXT}<|content|>So < 5.{SOLAR_NEXT}{SOLAR_CALL}",
        ("So < 5.", "Hm.", 1),
    ),
    ("SOLAR", f"<|think|>Hm.{SOLAR_NEXT}{SOLAR_CALL}", ("", "Hm.", 1)),
    ("MUSE", " to=user<|message|>So < 5.", ("So < 5.", "", 0)),
    ("MUSE", f"{MUSE_THOUGHT} to=user<|message|>So < 5.", ("So < 5.", "Hm.", 0)),
    ("MUSE", f"{MUSE_THOUGHT} to=f<|message|>{MUSE_CALL}", ("", "Hm.", 1)),
    ("MUSE", f" to=f<|message|>\n{MUSE_CALL}", ("", "", 1)),
    (
        "MUSE",
        f" to=user<|message|>So < 5.{MUSE_NEXT} to=f<|message|>{MUSE_CALL}",
        ("So < 5.", "", 1),
    ),
    ("MUSE", "to=do: it", ("to=do: it", "", 0)),
    ("MUSE", "to=", ("to=", "", 0)),
    (
        "GRANITE_RESPONSES",
        "<think>Hm.</think>\n<response>\nSo < 5.\n</response>\n",
        ("So < 5.\n", "Hm.", 0),
    ),
    ("GRANITE_RESPONSES", "<response>A </respons>.</response>", ("A </respons>.", "", 0)),
    ("GRANITE_RESPONSES", "Use </response> there.", ("Use </response> there.", "", 0)),
    ("GRANITE_RESPONSES", f"<response>So.</response>\n{GRANITE_CALL}", ("So.", "", 1)),
]


@pytest.mark.parametrize(("template", "text", "expected"), CASES)
def test_marks_are_removed_however_the_stream_is_cut(
    template: str, text: str, expected: tuple[str, str, int]
) -> None:
    chat, rng = chat_of(getattr(family_templates, template)), random.Random(text)
    answer = prepared(chat, THINKS if template == "GRANITE_RESPONSES" else None)
    assert read(answer, text, []) == expected
    assert read(answer, text, [*range(1, len(text))]) == expected
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 9)))
        assert read(answer, text, cuts) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IN_XML, "42"),
        (f"<think>Hm.</think>\n{IN_XML}", "<think>Hm.</think>\n\n42"),
        ("<think>Hm.</think>So.", "<think>Hm.</think>\n\nSo."),
        ("<think>Hm", "<think>Hm"),
        ("Use </response> there.", "Use </response> there."),
    ],
)
def test_text_on_the_terminal_keeps_its_reasoning_and_loses_its_marks(
    text: str, expected: str
) -> None:
    for size in (1, 3, len(text)):
        unmarked = UnmarkedText(
            ContentMarks("<response>", "</response>"), ReasoningSection("<think>", "</think>")
        )
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        shown = "".join(map(unmarked.feed, parts)) + unmarked.finish(is_cut=False)
        assert shown == expected, size


@pytest.mark.parametrize(
    "text",
    [
        XTML_TEXT,
        XTML_TEXT + XTML_CALL,
        XTML_TEXT + XTML_END,
        f"{XTML_UNCLOSED}{XTML_END}",
    ],
)
def test_marks_that_the_limit_cut_are_no_text(text: str) -> None:
    answer = prepared(chat_of(family_templates.XTML))
    for cut in range(2, len(text)):
        shown, _, _ = read(answer, text[:cut], [cut // 2], is_cut=True)
        assert "So < 5.".startswith(shown.rstrip("<")), cut


def test_text_that_the_prompt_opened_ends_with_its_mark() -> None:
    chat = chat_of(family_templates.XTML)
    answer = prepared(chat, Thinking(is_on=False))
    assert answer.prompt.text.endswith("<|open|>response<|sep|>")
    text = XTML_TEXT.removeprefix("<|open|>response<|sep|>") + XTML_CALL
    assert read(answer, text, []) == ("So < 5.", "", 1)


def test_marks_that_only_the_template_names_stay_text() -> None:
    granite = chat_of(family_templates.GRANITE_RESPONSES)
    wraps_results = chat_of(
        "{% for m in messages %}{% if m.role == 'tool' %}<response>{{ m.content }}</response>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    apriel = chat_of(
        "{% if thinking %}Write [BEGIN FINAL RESPONSE] ... [END FINAL RESPONSE].{% endif %}"
        + family_templates.APRIEL
    )
    for chat in (granite, wraps_results):
        for thinking in (None, Thinking(is_on=False)):
            assert read(prepared(chat, thinking), IN_XML, []) == (IN_XML, "", 0)
    assert prepared(apriel, Thinking(is_on=False)).content_marks is None
    assert prepared(apriel, THINKS).content_marks is not None


@pytest.mark.parametrize(
    ("template", "continued", "text", "expected"),
    [
        ("GRANITE_RESPONSES", "<think>Hm", " ok</think>\n<response>So.</response>", "So."),
        ("GRANITE_RESPONSES", "<think>Hm</think>\n<response>So", " is it.</response>", " is it."),
        ("GRANITE_RESPONSES", "<think>Hm</think>\n", IN_XML, "42"),
        ("GRANITE_RESPONSES", "<response>So", " is it.</response>", " is it."),
        ("GRANITE_RESPONSES", "<response>So.</response>", "</response>", "</response>"),
        ("GRANITE_RESPONSES", "<answer>", "42</response></answer>", "42</response></answer>"),
        ("XTML", "So", " < 5.<|close|>response<|sep|>", " < 5."),
    ],
)
def test_continued_text_keeps_marks_that_it_did_not_open(
    template: str, continued: str, text: str, expected: str
) -> None:
    chat = chat_of(getattr(family_templates, template))
    answer = continuing(chat, continued, THINKS if "GRANITE" in template else Thinking())
    assert read(answer, text, [])[0] == expected


def test_arguments_of_calls_keep_marks_after_continued_text() -> None:
    answer = continuing(chat_of(family_templates.GRANITE_RESPONSES), "Sure: ", THINKS)
    call = FORMS["granite"].write([("f", json.dumps({"x": IN_XML}))])
    reader = answer.answer_format().reader(answer.tokenizer)
    pieces = reader.feed(call) + reader.finish()
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
    assert json.loads(arguments) == {"x": IN_XML}


def test_templates_without_such_marks_have_none() -> None:
    for template in (CHATML, family_templates.COHERE, family_templates.THINKS):
        assert prepared(chat_of(template)).content_marks is None


def test_reasoning_is_found_in_a_rendered_answer_and_in_the_prompt() -> None:
    for name, begin, is_opened in (
        ("XTML", "<|open|>think<|sep|>", False),
        ("SOLAR", "<|think|>", False),
        ("APRIEL", "Here are my reasoning steps:", True),
    ):
        chat = chat_of(getattr(family_templates, name))
        assert chat.reasons
        preface = chat.prepare_answer(chat.render([USER])).preface
        assert preface is not None
        assert preface.begin == ("" if is_opened else begin)


@pytest.mark.parametrize(
    ("template", "marks", "allowed", "refused"),
    [
        (
            "XTML",
            XTML_MARKS,
            [XTML_TEXT, XTML_TEXT + XTML_CALL, "So.", XTML_CALL],
            [XTML_TEXT + XTML_TEXT, "<|open|>other<|sep|>", XTML_CALL[:-1]],
        ),
        (
            "SOLAR",
            SOLAR_MARKS,
            ["<|content|>So.", f"<|content|>So.{SOLAR_NEXT}{SOLAR_CALL}", SOLAR_CALL],
            ["<|content|><|content|>So.", f"{SOLAR_CALL}<|begin|>"],
        ),
    ],
)
def test_marks_that_are_special_tokens_are_allowed_around_text(
    template: str, marks: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    answer = prepared(chat_of(getattr(family_templates, template), marks))
    params = answer.constrained(SamplingParams())
    tokenizer = answer.tokenizer
    assert params.constraint is not None
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(params.constraint)
    for text in allowed + refused:
        tokens = [*tokenizer.encode(text, parse_special=True), min(tokenizer.eos_ids)]
        assert (matcher.count_allowed((), tokens) == len(tokens)) is (text in allowed), text
    for mark in marks[:3]:
        assert tokenizer.find(mark) in params.shown_ids
