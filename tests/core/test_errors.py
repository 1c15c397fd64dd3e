"""The nearest known word, as errors name it."""

from __future__ import annotations

import pytest

from twostroke.core.errors import nearest


@pytest.mark.parametrize(
    ("word", "known", "hint"),
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
    word: str, known: tuple[str, ...], hint: str
) -> None:
    assert nearest(word, known) == hint
