"""Responses that are stored for later requests."""

from __future__ import annotations

import random
import threading

import pytest

from twostroke.server.generation import response_store as store_module
from twostroke.server.generation.response_store import ResponseStore, StoredResponse, Tenant


def stored_response(
    name: str, previous: StoredResponse | None = None, size: int = 10
) -> StoredResponse:
    return StoredResponse(name, b"[]", b"x" * size, (f"item-{name}",), previous)


def test_an_answer_is_found_with_its_items_until_it_is_removed() -> None:
    mine = Tenant("me", ResponseStore(10, 10**6))
    assert mine.put(response := stored_response("a"))
    assert mine.find("a") is response
    assert mine.find_item("item-a") is response
    assert mine.remove("a")
    assert not mine.remove("a")
    assert mine.find("a") is None
    assert mine.find_item("item-a") is None
    assert (len(mine.store), mine.store.num_bytes) == (0, 0)


def test_tenants_are_isolated() -> None:
    store = ResponseStore(10, 10**6)
    mine, other = Tenant("me", store), Tenant("other", store)
    mine.put(stored_response("a"))
    assert other.find("a") is None
    assert other.find_item("item-a") is None
    assert not other.remove("a")
    other.put(theirs := stored_response("a"))
    assert mine.remove("a")
    assert other.find("a") is theirs


def test_an_answer_with_the_same_id_is_replaced() -> None:
    store = ResponseStore(10, 10_000)
    other, mine = Tenant("other", store), Tenant("me", store)
    other.put(theirs := stored_response("b", size=2000))
    for _ in range(10):
        mine.put(newest := stored_response("a", size=2000))
    assert mine.find("a") is mine.find_item("item-a") is newest
    assert other.find("b") is theirs
    assert store.num_bytes == newest.num_bytes + theirs.num_bytes


def test_oldest_is_evicted_over_the_count() -> None:
    store = ResponseStore(3, 10**6)
    for name in "abcde":
        Tenant("", store).put(stored_response(name))
    assert [name for name in "abcde" if Tenant("", store).find(name)] == ["c", "d", "e"]
    assert Tenant("", store).find_item("item-b") is None


def test_oldest_is_evicted_over_the_memory() -> None:
    store = ResponseStore(100, 10_000)
    for name in "abcde":
        Tenant("", store).put(stored_response(name, size=2000))
    assert [name for name in "abcde" if Tenant("", store).find(name)] == ["c", "d", "e"]
    assert store.num_bytes <= 10_000


def test_replaced_answer_evicts_others_also_if_it_is_the_oldest() -> None:
    mine = Tenant("", ResponseStore(100, 10_000))
    answers = [stored_response(name, size=2000) for name in "abc"]
    for answer in answers:
        mine.put(answer)
    mine.replace(answers[0], b"x" * 3500)
    assert [name for name in "abc" if mine.find(name)] == ["a", "c"]
    assert mine.store.num_bytes <= 10_000


def test_too_large_response_evicts_nothing() -> None:
    store = ResponseStore(100, 10_000)
    assert Tenant("", store).put(stored_response("a", size=2000))
    assert Tenant("", store).put(
        second := stored_response("b", stored_response("0", size=2000), size=2000)
    )
    before = store.num_bytes
    assert not Tenant("", store).put(stored_response("c", size=9000))
    assert not Tenant("", store).put(
        stored_response("d", second, size=3000)
    )  # with the conversation before it
    assert [name for name in "abcd" if Tenant("", store).find(name)] == ["a", "b"]
    assert store.num_bytes == before


def test_a_conversation_is_stored_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    response = stored_response("a")
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_ITEMS", 2)
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_BYTES", 3 * response.num_bytes)
    store = ResponseStore(100, 10**6)
    assert Tenant("", store).put(response)
    assert Tenant("", store).put(second := stored_response("b", response))
    assert not Tenant("", store).put(stored_response("c", second))
    assert Tenant("", store).put(stored_response("d", response, size=response.num_bytes))
    assert not Tenant("", store).put(stored_response("e", response, size=2 * response.num_bytes))


@pytest.mark.parametrize(("max_answers", "max_bytes"), [(10, 10**6), (1000, 30_000)])
def test_tenant_with_the_most_loses_its_oldest(max_answers: int, max_bytes: int) -> None:
    store = ResponseStore(max_answers, max_bytes)
    for name in "abc":
        Tenant("small", store).put(stored_response(name, size=2000))
    for number in range(40):
        assert Tenant("greedy", store).put(stored_response(str(number), size=2000))
    assert all(Tenant("small", store).find(name) for name in "abc")
    assert Tenant("greedy", store).find("39")
    assert Tenant("greedy", store).find("0") is None
    assert Tenant("new", store).put(stored_response("a", size=2000))
    assert Tenant("new", store).find("a")
    assert all(Tenant("small", store).find(name) for name in "abc")
    assert len(store) <= max_answers
    assert store.num_bytes <= max_bytes


def test_newest_is_never_evicted() -> None:
    store = ResponseStore(100, 10_000)
    for name in "abcde":
        Tenant(name, store).put(stored_response("x", size=500))
    assert Tenant("greedy", store).put(first := stored_response("1", size=2500))
    assert Tenant("greedy", store).put(
        stored_response("2", first, size=2500)
    )  # which "1" does not make room for
    assert Tenant("greedy", store).find("1") is None
    assert Tenant("greedy", store).find("2")
    assert 0 < sum(Tenant(name, store).find("x") is not None for name in "abcde") < 5
    assert store.num_bytes <= 10_000


def test_store_of_size_zero_stores_nothing() -> None:
    nobody = Tenant("", ResponseStore(0, 10**6))
    assert not nobody.fits(stored_response("a"))
    assert not nobody.put(stored_response("a"))
    assert nobody.find("a") is None


def test_continued_response_counts_until_its_followers_are_removed() -> None:
    store = ResponseStore(10, 10**6)
    Tenant("", store).put(first := stored_response("a"))
    Tenant("", store).put(second := stored_response("b", first))
    both = store.num_bytes
    assert Tenant("", store).remove("a")
    assert store.num_bytes == both
    assert [step.id for step in second.conversation()] == ["a", "b"]
    assert Tenant("", store).remove("b")
    assert store.num_bytes == 0


def test_response_removed_during_its_continuation_counts_again() -> None:
    store = ResponseStore(10, 10**6)
    Tenant("", store).put(first := stored_response("a"))
    Tenant("", store).remove("a")
    assert store.num_bytes == 0
    Tenant("", store).put(second := stored_response("b", first))
    assert store.num_bytes == first.num_bytes + second.num_bytes


def test_items_of_a_newer_response_survive_an_older_one() -> None:
    store = ResponseStore(10, 10**6)
    Tenant("", store).put(stored_response("a"))
    newer = StoredResponse("b", b"[]", b"", ("item-a",))
    Tenant("", store).put(newer)
    Tenant("", store).remove("a")
    assert Tenant("", store).find_item("item-a") is newer


@pytest.mark.parametrize("seed", range(20))
def test_memory_counts_stored_responses_and_their_ancestors(seed: int) -> None:
    store, rng = ResponseStore(5, 12_000), random.Random(seed)
    all_: list[StoredResponse] = []
    for number in range(60):
        if rng.random() < 0.2:
            Tenant("", store).remove(str(rng.randrange(60)))
            continue
        previous = rng.choice(all_) if all_ and rng.random() < 0.7 else None
        all_.append(stored_response(str(number), previous, rng.randrange(500)))
        Tenant("", store).put(all_[-1])
        alive = {
            step
            for response in all_
            if Tenant("", store).find(response.id)
            for step in response.conversation()
        }
        assert store.num_bytes == sum(step.num_bytes for step in alive) <= 12_000
        assert len(store) <= 5


def test_threads_do_not_break_the_count() -> None:
    store = ResponseStore(20, 10**6)

    def work(name: int) -> None:
        for number in range(300):
            Tenant(str(name), store).put(stored_response(str(number)))
            Tenant(str(name), store).find(str(number))
            Tenant(str(name), store).remove(str(number - 3))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [Tenant(str(name), store).find(str(n)) for name in range(4) for n in range(300)]
    assert sum(response.num_bytes for response in left if response) == store.num_bytes
    assert sum(response is not None for response in left) == len(store)
