"""The built-in chat templates, which are chosen by name."""

from __future__ import annotations

import pytest

from support.byte_tokenizer import byte_tokenizer
from twostroke.core.errors import UsageError
from twostroke.engine.chat.template import ChatTemplate
from twostroke.model.built_in_templates import BUILT_IN, check_template, template_source

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
]


def render(name: str, *, opens: bool = True) -> str:
    return ChatTemplate(BUILT_IN[name]).render(MESSAGES, add_generation_prompt=opens).text


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_template_shows_all_texts_in_their_order(name: str) -> None:
    text = render(name)
    text_offsets = [text.index(message["content"]) for message in MESSAGES]
    assert text_offsets == sorted(text_offsets)
    assert text.startswith(render(name, opens=False))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            (
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
        ),
        (
            "llama3",
            (
                "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        (
            "gemma",
            (
                "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello."
                "<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
            ),
        ),
        (
            "llama2",
            "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. [INST] Why? [/INST]",
        ),
        ("mistral-v3", "[INST] Be brief.\n\nHi[/INST] Hello.[INST] Why?[/INST]"),
        (
            "phi4",
            (
                "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi"
                "<|im_end|><|im_start|>assistant<|im_sep|>Hello.<|im_end|><|im_start|>user<|im_sep|>Why?"
                "<|im_end|><|im_start|>assistant<|im_sep|>"
            ),
        ),
    ],
)
def test_templates_are_those_of_the_families(name: str, expected: str) -> None:
    assert render(name) == expected


@pytest.mark.parametrize("text", ["{{ messages }}", "This is not a chat template, it is", "chatml"])
def test_texts_and_names_are_templates(text: str) -> None:
    check_template(text)


def test_other_words_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"got 'chatlm'. Did you mean 'chatml'?"):
        check_template("chatlm")


def test_built_in_templates_begin_as_the_models_texts_do() -> None:
    plain = byte_tokenizer()
    assert template_source("chatml", plain) == BUILT_IN["chatml"]
    tokenizer = byte_tokenizer(add_bos_token=True)
    begin = tokenizer.token_text(tokenizer.prefix_ids[0])
    template = ChatTemplate(template_source("chatml", tokenizer), tokenizer)
    prompt = template.render(MESSAGES)
    assert prompt.text.startswith(f"{begin}<|im_start|>system")
    assert tokenizer.encode_prompt(prompt)[:1] == tokenizer.prefix_ids
    assert template_source("{{ messages }}", tokenizer) == "{{ messages }}"
