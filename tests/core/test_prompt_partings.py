"""Where prompts part, and the tokens after that which earlier prompts have, too."""

from __future__ import annotations

import random

import pytest

from twostroke.core.prompt_partings import PartingFinder


@pytest.fixture
def words() -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(50_000) for _ in range(2000)]


def test_a_date_in_the_system_prompt_spoils_what_follows(words: list[int]) -> None:
    finder = PartingFinder()
    system, question = words[:500], words[1000:]
    keys = set()
    for day in range(5):
        prompt = [*system[:37], 60_000 + day, *system[37:], *question[40 * day : 40 * day + 40]]
        parting = finder.add("", prompt)
        if day == 0:
            assert parting is None
            continue
        assert parting is not None
        assert parting.position == 37
        assert parting.num_after == 504
        assert parting.num_repeated == pytest.approx(463, rel=0.2)
        keys.add(parting.key)
    assert len(keys) == 1


def test_other_questions_after_the_same_beginning_repeat_nothing(words: list[int]) -> None:
    finder = PartingFinder()
    for number in range(4):
        prompt = [*words[:200], *words[200 + 300 * number : 500 + 300 * number]]
        parting = finder.add("", prompt)
    assert parting is not None
    assert (parting.position, parting.num_repeated) == (200, 0)


def test_a_conversation_that_grows_parts_nowhere_of_its_own(words: list[int]) -> None:
    finder = PartingFinder()
    finder.add("", words[:300])
    parting = finder.add("", words[:600])
    assert parting is None or (parting.position, parting.num_repeated) == (300, 0)
    assert finder.add("", words[:600]) is None


def test_tenants_are_not_compared(words: list[int]) -> None:
    finder = PartingFinder()
    finder.add("one", words)
    assert finder.add("two", words) is None
    other = finder.add("two", [7, *words])
    assert other is not None
    assert other.position == 0


def test_short_and_empty_prompts_have_no_parting(words: list[int]) -> None:
    finder = PartingFinder()
    for prompt in ([], words[:5], words[:5], [1, 2]):
        assert finder.add("", prompt) is None


@pytest.mark.parametrize("tenant", ["", "one"])
def test_prompts_may_part_at_their_first_token(words: list[int], tenant: str) -> None:
    finder = PartingFinder()
    assert finder.add(tenant, [60_000, *words]) is None
    parting = finder.add(tenant, [60_001, *words])
    assert parting is not None
    assert (parting.position, parting.num_after) == (0, 2001)


def test_texts_are_compared_by_their_bytes(words: list[int]) -> None:
    finder = PartingFinder(64, 32, 10_000)
    rest = " ".join(map(str, words[:500])).encode()
    assert finder.add("", b"It is Monday, and so " + rest) is None
    parting = finder.add("", b"It is Sunday, and so " + rest)
    assert parting is not None
    assert parting.position == len(b"It is ")
    assert parting.num_repeated == pytest.approx(len(rest), rel=0.2)
