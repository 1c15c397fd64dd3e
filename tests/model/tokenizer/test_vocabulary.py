"""A vocabulary finds every text, given as strings or as spans of a file."""

from __future__ import annotations

import random

import numpy as np
import pytest

from twostroke.model.tokenizer.vocabulary import Vocabulary


def _random_texts(seed: int) -> list[bytes]:
    draw = random.Random(seed)
    lengths = [0, 1, 2, 3, 7, 8, 9, 130, 255, 256, 257, 500]
    return [
        bytes(draw.choice(b"ab \xc3\xa9\xff\x00") for _ in range(draw.choice(lengths)))
        for _ in range(draw.randrange(1, 200))
    ]


class _InFile(list[str]):
    """Strings that offer their bytes as a GGUF array does, each followed by eight other bytes."""

    def spans(self) -> tuple[bytes, np.ndarray, np.ndarray]:
        encoded = [text.encode("utf-8", "surrogateescape") for text in self]
        starts = np.cumsum([0, *(len(text) + 8 for text in encoded)])[:-1]
        ends = starts + np.array([len(text) for text in encoded], np.int64)
        return b"".join(text + b"12345678" for text in encoded), starts, ends


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_found_by_the_last_id_that_is_not_hidden(seed: int) -> None:
    raw = _random_texts(seed)
    texts = [text.decode("utf-8", "surrogateescape") for text in raw]
    changed = dict.fromkeys(range(2, len(texts), 7), "bébé " * 90)
    expected = [*raw]
    for id_, text in changed.items():
        expected[id_] = text.encode()
    last = {text: id_ for id_, text in enumerate(expected) if id_ % 5}
    for source in (texts, _InFile(texts)):
        vocabulary = Vocabulary(source, hidden=range(0, len(texts), 5), changed=changed)
        assert [vocabulary.spelling(id_) for id_ in range(len(texts))] == expected
        for text in [*raw, *expected, b"missing"]:
            assert vocabulary.find(text) == last.get(text)
        for chars in ("", "ab ", "ab é", "ab é\x00\udcff"):
            used = {*chars.encode("utf-8", "surrogateescape")}
            fitting = [text for text in expected if used.issuperset(text)]
            longest = max(
                (sum(byte & 0xC0 != 0x80 for byte in text) for text in fitting), default=0
            )
            assert vocabulary.max_length(chars) == longest
