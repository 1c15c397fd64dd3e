"""Texts in one piece of memory, beside lists of bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from twostroke.tokenize.texts import Keys, Texts
from twostroke.tokenize.vocabulary import Vocabulary


def _random_texts(seed: int) -> list[bytes]:
    draw = random.Random(seed)
    lengths = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 66, 130, 500]
    return [
        bytes(draw.choice(b"ab \xc3\xa9\xff\x00") for _ in range(draw.choice(lengths)))
        for _ in range(draw.randrange(1, 200))
    ]


def _bytes_of(texts: Texts) -> list[bytes]:
    return [texts.blob[a:b].tobytes() for a, b in zip(texts.starts, texts.ends, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_keys_of_all_are_those_of_each(seed: int) -> None:
    texts, keys = _random_texts(seed), Keys()
    every = keys.of_all(Texts.joined(texts)).tolist()
    assert every == [keys.of(text) for text in texts]
    assert len(set(every)) == len(set(texts))


def test_keys_are_others_in_another_table() -> None:
    assert Keys().of(b"hello") != Keys().of(b"hello")


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_cut_at_the_first_sign(seed: int) -> None:
    texts = _random_texts(seed)
    left, right, both = (_bytes_of(part) for part in Texts.joined(texts).split(b" "))
    cut = [text.partition(b" ") for text in texts]
    assert left == [before for before, _, _ in cut]
    assert right == [behind for _, _, behind in cut]
    assert both == [before + behind for before, _, behind in cut]


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_replaced_chosen_and_packed(seed: int) -> None:
    texts = _random_texts(seed)
    draw = random.Random(seed)
    changed = {place: b"new" * place for place in range(len(texts)) if draw.random() < 0.2}
    which = np.array([draw.random() < 0.5 for _ in texts])
    expected = [changed.get(place, text) for place, text in enumerate(texts)]
    replaced = Texts.joined(texts).replaced(changed)
    assert _bytes_of(replaced) == expected
    kept = [text for text, keep in zip(expected, which, strict=True) if keep]
    packed = replaced.chosen(which).packed()
    assert _bytes_of(packed) == kept
    assert packed.blob.tobytes() == b"".join(kept)


@pytest.mark.parametrize("seed", range(20))
def test_a_vocabulary_finds_one_by_one_what_it_finds_at_once(seed: int) -> None:
    texts = [text.decode("utf-8", "surrogateescape") for text in _random_texts(seed)]
    vocabulary = Vocabulary(texts, hidden=range(0, len(texts), 5))
    asked = [text.encode("utf-8", "surrogateescape") for text in texts] + [b"missing"]
    found = vocabulary.find_all(Texts.joined(asked)).tolist()
    assert found == [-1 if (id_ := vocabulary.find(text)) is None else id_ for text in asked]
    last = {text: id_ for id_, text in enumerate(texts) if id_ % 5}
    assert found[:-1] == [last.get(text, -1) for text in texts]
