"""The kept corpus, replayed without the engine: each input keeps the promise of targets.py."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import pytest

from fuzz import mutate
from fuzz.seeds import CORPUS, seeds, words
from fuzz.targets import MAX_LENGTH, TARGETS, keep_promise

if TYPE_CHECKING:
    from pathlib import Path

MAX_CORPUS_FILES = 48
MAX_CORPUS_FILE_BYTES = 4096


@pytest.mark.parametrize("target", TARGETS)
def test_every_kept_input_is_read_or_refused(tmp_path: Path, target: str) -> None:
    for data in seeds(target).values():
        keep_promise(target, data, tmp_path, measure_memory=True)


@pytest.mark.parametrize("target", TARGETS)
def test_fuzzing_starts_from_sound_files(tmp_path: Path, target: str) -> None:
    for name, data in seeds(target).items():
        assert len(data) <= MAX_LENGTH
        if name.startswith("seed-"):
            assert keep_promise(target, data, tmp_path, measure_memory=False), name


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_keep_the_promise_and_reach_both_ends(tmp_path: Path, target: str) -> None:
    rng, dictionary = random.Random(1), words()
    inputs = [data for name, data in seeds(target).items() if name.startswith("seed-")]
    read = refused = 0
    for _ in range(300):
        try:
            data = mutate.mutated(rng.choice(inputs), rng, dictionary)
        except (ValueError, struct.error):
            continue
        if keep_promise(target, data, tmp_path, measure_memory=False):
            read += 1
        else:
            refused += 1
    assert min(read, refused) > 20


def test_a_broken_promise_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large_objects: list[bytes] = []
    monkeypatch.setitem(
        TARGETS, "greedy", lambda data, folder: large_objects.append(bytes(1 << 23))
    )
    with pytest.raises(AssertionError, match="bytes of memory for 2 bytes"):
        keep_promise("greedy", b"ab", tmp_path, measure_memory=True)
    monkeypatch.setitem(TARGETS, "crashing", lambda data, folder: data.decode())
    with pytest.raises(UnicodeDecodeError):
        keep_promise("crashing", b"\xff", tmp_path, measure_memory=True)
    monkeypatch.setattr("fuzz.targets.MAX_SECONDS", 0.0)
    with pytest.raises(AssertionError, match="s for 0 bytes"):
        keep_promise("gguf", b"", tmp_path, measure_memory=False)


def test_the_kept_corpus_stays_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) <= MAX_CORPUS_FILES
    assert all(path.stat().st_size <= MAX_CORPUS_FILE_BYTES for path in files)
