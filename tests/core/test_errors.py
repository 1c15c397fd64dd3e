"""The nearest known word, as errors name it."""

from __future__ import annotations

import pytest

from twostroke.core.errors import Field, UsageError, nearest


@pytest.mark.parametrize(
    ("word", "known_words", "hint"),
    [
        ("of", ("auto", "off"), " Did you mean 'off'?"),
        ("OFF", ("auto", "off"), " Did you mean 'off'?"),
        ("q4_k_n", ("Q8_0", "Q4_K_M"), " Did you mean 'Q4_K_M'?"),
        ("zebra", ("auto", "off"), ""),
        ("", ("auto", "off"), ""),
        ("off", (), ""),
        ("tttf", ("ttft", "e2e"), " Did you mean 'ttft'?"),
        ("temp", ("stream", "temperature"), " Did you mean 'temperature'?"),
        ("stop_sequences", ("stop_token_ids", "stop"), " Did you mean 'stop'?"),
        ("max_new_tokens", ("min_tokens", "max_tokens"), " Did you mean 'max_tokens'?"),
        ("freq", ("stop", "frequency_penalty"), " Did you mean 'frequency_penalty'?"),
        ("top_k_options", ("options", "top_k"), " Did you mean 'top_k'?"),
        ("text", ("text", "prompt"), ""),  # which is known elsewhere
        ("ouput", ("input", "output"), " Did you mean 'output'?"),
        ("--modle", ("--models", "--version"), " Did you mean '--models'?"),
        ("on", ("n", "off"), ""),
        ("in", ("n", "min_p"), ""),
        ("to", ("stop", "top_p"), ""),
        ("gpu", ("auto", "cpu"), ""),
        ("cls", ("mean", "last"), ""),
        ("beam", ("stream", "n"), ""),
        ("lora", ("logprobs",), ""),
        ("image", ("messages",), ""),
        ("token_ids", ("stop_token_ids", "prompt"), ""),
        ("--top", ("--port", "--host"), ""),
    ],
)
def test_the_nearest_word_is_named_as_it_is_known(
    word: str, known_words: tuple[str, ...], hint: str
) -> None:
    assert nearest(word, known_words) == hint


@pytest.mark.parametrize(
    "quoted",
    [
        "{field!r:>9999999999}",
        "{0}",
        "{}",
        "{field.__class__}",
        "{field[0]}",
        "{other}",
        "{",
        "{{x}}",
    ],
)
@pytest.mark.parametrize("facts", [{}, {"most": 3}])
def test_braces_in_a_quoted_value_are_no_placeholders(quoted: str, facts: dict[str, int]) -> None:
    error = UsageError(f"The path {quoted} does not exist.", field="n", **facts)
    assert str(error) == f"The path {quoted} does not exist."


def test_facts_are_replaced_once() -> None:
    facts = {"own": "{other}", "other": Field("m")}
    error = UsageError("The {field} is {own!r} or {other}; not {most}.", field="n", **facts)
    assert error.sentence(str.upper) == "The N is '{other}' or M; not {most}."
