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
    ],
)
def test_the_nearest_word_is_named_as_it_is_known(
    word: str, known: tuple[str, ...], hint: str
) -> None:
    assert nearest(word, known) == hint
