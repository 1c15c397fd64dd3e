"""Answers that are kept for later requests."""

from __future__ import annotations

import random
import threading

import pytest

from twostroke.serve import store as store_module
from twostroke.serve.store import Kept, Store, Tenant


def kept(name: str, previous: Kept | None = None, size: int = 10) -> Kept:
    return Kept(name, b"[]", b"x" * size, (f"item-{name}",), previous)


def test_an_answer_is_found_with_its_items_until_it_is_removed() -> None:
    mine = Tenant("me", Store(10, 10**6))
    assert mine.put(one := kept("a"))
    assert mine.find("a") is one
    assert mine.find_item("item-a") is one
    assert mine.remove("a")
    assert not mine.remove("a")
    assert mine.find("a") is None
    assert mine.find_item("item-a") is None
    assert (len(mine.store), mine.store.num_bytes) == (0, 0)


def test_tenants_see_nothing_of_each_other() -> None:
    store = Store(10, 10**6)
    mine, other = Tenant("me", store), Tenant("other", store)
    mine.put(kept("a"))
    assert other.find("a") is None
    assert other.find_item("item-a") is None
    assert not other.remove("a")
    other.put(theirs := kept("a"))
    assert mine.remove("a")
    assert other.find("a") is theirs


def test_the_oldest_leave_when_there_are_too_many() -> None:
    store = Store(3, 10**6)
    for name in "abcde":
        store.put("", kept(name))
    assert [name for name in "abcde" if store.find("", name)] == ["c", "d", "e"]
    assert store.find_item("", "item-b") is None


def test_the_oldest_leave_when_they_take_too_much() -> None:
    store = Store(100, 10_000)
    for name in "abcde":
        store.put("", kept(name, size=2000))
    assert [name for name in "abcde" if store.find("", name)] == ["c", "d", "e"]
    assert store.num_bytes <= 10_000


def test_nothing_leaves_for_what_is_too_large() -> None:
    store = Store(100, 10_000)
    assert store.put("", kept("a", size=2000))
    assert store.put("", second := kept("b", kept("0", size=2000), size=2000))
    before = store.num_bytes
    assert not store.put("", kept("c", size=9000))
    assert not store.put("", kept("d", second, size=3000))  # with the conversation before it
    assert [name for name in "abcd" if store.find("", name)] == ["a", "b"]
    assert store.num_bytes == before


def test_a_conversation_is_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    one = kept("a")
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_ITEMS", 2)
    monkeypatch.setattr(store_module, "MAX_CONVERSATION_BYTES", 3 * one.num_bytes)
    store = Store(100, 10**6)
    assert store.put("", one)
    assert store.put("", second := kept("b", one))
    assert not store.put("", kept("c", second))
    assert store.put("", kept("d", one, size=one.num_bytes))
    assert not store.put("", kept("e", one, size=2 * one.num_bytes))


@pytest.mark.parametrize(("max_answers", "max_bytes"), [(10, 10**6), (1000, 30_000)])
def test_the_tenant_that_has_most_gives_way(max_answers: int, max_bytes: int) -> None:
    store = Store(max_answers, max_bytes)
    for name in "abc":
        store.put("small", kept(name, size=2000))
    for number in range(40):
        assert store.put("greedy", kept(str(number), size=2000))
    assert all(store.find("small", name) for name in "abc")
    assert store.find("greedy", "39")
    assert store.find("greedy", "0") is None
    assert store.put("new", kept("a", size=2000))
    assert store.find("new", "a")
    assert all(store.find("small", name) for name in "abc")
    assert len(store) <= max_answers
    assert store.num_bytes <= max_bytes


def test_the_newest_stays_though_its_tenant_has_most() -> None:
    store = Store(100, 10_000)
    for name in "abcde":
        store.put(name, kept("x", size=500))
    assert store.put("greedy", first := kept("1", size=2500))
    assert store.put("greedy", kept("2", first, size=2500))  # which "1" does not make room for
    assert store.find("greedy", "1") is None
    assert store.find("greedy", "2")
    assert 0 < sum(store.find(name, "x") is not None for name in "abcde") < 5
    assert store.num_bytes <= 10_000


def test_a_store_of_none_keeps_none() -> None:
    nobody = Tenant("", Store(0, 10**6))
    assert not nobody.fits(kept("a"))
    assert not nobody.put(kept("a"))
    assert nobody.find("a") is None


def test_what_others_follow_keeps_its_memory_until_they_are_gone() -> None:
    store = Store(10, 10**6)
    store.put("", first := kept("a"))
    store.put("", second := kept("b", first))
    both = store.num_bytes
    assert store.remove("", "a")
    assert store.num_bytes == both
    assert [step.id for step in second.conversation()] == ["a", "b"]
    assert store.remove("", "b")
    assert store.num_bytes == 0


def test_what_was_forgotten_while_it_was_answered_counts_again() -> None:
    store = Store(10, 10**6)
    store.put("", first := kept("a"))
    store.remove("", "a")
    assert store.num_bytes == 0
    store.put("", second := kept("b", first))
    assert store.num_bytes == first.num_bytes + second.num_bytes


def test_a_newer_answer_s_items_stay_when_an_older_one_leaves() -> None:
    store = Store(10, 10**6)
    store.put("", kept("a"))
    again = Kept("b", b"[]", b"", ("item-a",))
    store.put("", again)
    store.remove("", "a")
    assert store.find_item("", "item-a") is again


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_what_the_kept_and_those_before_them_take(seed: int) -> None:
    store, chance = Store(5, 12_000), random.Random(seed)
    all_: list[Kept] = []
    for number in range(60):
        if chance.random() < 0.2:
            store.remove("", str(chance.randrange(60)))
            continue
        previous = chance.choice(all_) if all_ and chance.random() < 0.7 else None
        all_.append(kept(str(number), previous, chance.randrange(500)))
        store.put("", all_[-1])
        alive = {step for one in all_ if store.find("", one.id) for step in one.conversation()}
        assert store.num_bytes == sum(step.num_bytes for step in alive) <= 12_000
        assert len(store) <= 5


def test_threads_do_not_break_the_count() -> None:
    store = Store(20, 10**6)

    def work(name: int) -> None:
        for number in range(300):
            store.put(str(name), kept(str(number)))
            store.find(str(name), str(number))
            store.remove(str(name), str(number - 3))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [store.find(str(name), str(n)) for name in range(4) for n in range(300)]
    assert sum(one.num_bytes for one in left if one) == store.num_bytes
    assert sum(one is not None for one in left) == len(store)
