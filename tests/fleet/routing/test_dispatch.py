"""Requests go where their first token comes soonest, by what a router can know."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest

from twostroke.fleet.routing.dispatch import Dispatcher, RoutingKey
from twostroke.fleet.routing.hash_ring import HashRing
from twostroke.fleet.routing.policy import POLICIES, RoutingState, mix
from twostroke.fleet.routing.prefix_tree import PrefixTree
from twostroke.fleet.routing.prompt import block_keys, bytes_of_blocks, read_prompt

_SIZE = 10  # units of a block


def _extent(num_blocks: int) -> int:
    return _SIZE * num_blocks


class Fleet:
    """A dispatcher of four replicas whose time a test sets; a unit takes a second."""

    def __init__(self, policy: str = "prefix", count: int = 4, most_blocks: int = 1000) -> None:
        self.now_s = 100.0
        self.dispatcher = Dispatcher(
            policy, lambda: self.now_s, lambda count: _SIZE * count, most_blocks
        )
        for index in range(count):
            self.dispatcher.set_open(self.dispatcher.add_replica(f"r{index}"), is_open=True)
        self.dispatcher.unit_s = [1.0] * count

    def route(self, *keys: int, tried=()):
        routing_key = RoutingKey(keys, _SIZE * len(keys), keys[0] if keys else 0)
        return self.dispatcher.decide(routing_key, None, tried)

    def finish(self, routed_request) -> None:
        self.dispatcher.record_first_token(routed_request)
        self.dispatcher.end(routed_request)
        self.dispatcher.unit_s = [1.0] * len(self.dispatcher)


def test_a_conversation_comes_back_to_its_pages() -> None:
    fleet = Fleet()
    first = fleet.route(1, 2, 3)
    fleet.finish(first)
    for number in range(20, 26):
        fleet.finish(fleet.route(number))
    second = fleet.route(1, 2, 3, 4)
    assert (second.index, second.hit_units, second.missing_units) == (first.index, 30, 10)


def test_prompts_of_an_idle_fleet_fill_the_caches_of_all() -> None:
    fleet, counts = Fleet(), Counter[int]()
    for number in range(100):
        routed_request = fleet.route(mix(number))
        fleet.finish(routed_request)
        counts[routed_request.index] += 1
    assert len(counts) == 4
    assert max(counts.values()) < 50


def test_a_holder_that_is_too_busy_is_passed_over() -> None:
    fleet = Fleet()
    first = fleet.route(1)
    fleet.finish(first)
    fleet.dispatcher.report(first.index, 1000.0, None)
    other = fleet.route(1, 2)
    assert other.index != first.index
    assert (other.hit_units, other.best_hit_units) == (0, 10)


def test_what_is_older_than_the_horizon_is_evicted_and_what_runs_is_not() -> None:
    fleet = Fleet(count=1)
    old, running = fleet.route(1), fleet.route(2)
    fleet.finish(old)
    fleet.now_s += 50
    fleet.dispatcher.report(0, 0.0, 49.0)
    assert fleet.route(1).hit_units == 0
    assert fleet.route(2).hit_units == 10
    fleet.finish(running)


def test_a_replica_that_starts_again_holds_nothing() -> None:
    fleet = Fleet(count=1)
    fleet.finish(fleet.route(1))
    assert fleet.route(1).hit_units == 10
    fleet.dispatcher.reset(0)
    assert fleet.route(1).hit_units == 0


def test_a_pace_is_that_of_first_tokens_once_there_was_one() -> None:
    fleet, starts = Fleet(count=1), iter(range(0, 10_000, 1000))

    def answer(took_s: float, *, is_whole_answer: bool) -> list[float]:
        start = next(starts)
        routed_request = fleet.route(*range(start, start + 1000))
        fleet.now_s += took_s
        fleet.dispatcher.record_first_token(routed_request, is_whole_answer=is_whole_answer)
        fleet.dispatcher.end(routed_request)
        return fleet.dispatcher.unit_s

    num_units = 1000 * _SIZE + 2000
    assert answer(60.0, is_whole_answer=True)[0] == pytest.approx(
        60 / num_units
    )  # better than nothing
    first = list(answer(6.0, is_whole_answer=False))
    assert first[0] == pytest.approx(6 / num_units)
    assert answer(60.0, is_whole_answer=True) == first


def test_without_streams_a_pace_is_that_of_the_fastest_answers() -> None:
    fleet = Fleet("round-robin", count=2)
    paces = [list(fleet.dispatcher.unit_s)]
    for number in range(40):
        start = 1000 * number
        routed_request = fleet.route(*range(start, start + 1000))
        fleet.now_s += 6.0 if number in {4, 5} else 60.0  # most answers have many tokens
        fleet.dispatcher.record_first_token(routed_request, is_whole_answer=True)
        fleet.dispatcher.end(routed_request)
        paces.append(list(fleet.dispatcher.unit_s))
    num_units = 1000 * _SIZE + 2000
    assert paces[5] == pytest.approx([6 / num_units, 60 / num_units])
    assert paces[6] == pytest.approx([6 / num_units] * 2)
    assert 6 / num_units < paces[-1][0] < 10 / num_units, "it may rise again, slowly"


def test_the_first_token_of_one_replica_leaves_no_other_with_the_pace_of_whole_answers() -> None:
    fleet = Fleet("round-robin", count=2)
    for start, took_s in ((0, 60.0), (1000, 60.0), (2000, 6.0)):
        routed_request = fleet.route(*range(start, start + 1000))
        fleet.now_s += took_s
        fleet.dispatcher.record_first_token(routed_request, is_whole_answer=start < 2000)
        fleet.dispatcher.end(routed_request)
    first_pace, other = fleet.dispatcher.unit_s
    assert first_pace == pytest.approx(other)


def test_a_replica_that_was_slow_once_gets_its_part_of_short_prompts() -> None:
    fleet = Fleet(count=2)
    for number in range(16):
        fleet.dispatcher.unit_s = [1.0, 1.3]  # which nothing corrects that is not sent there
        routed_request = fleet.route(*range(100 * number, 100 * number + 11))
        fleet.dispatcher.record_first_token(routed_request)
    assert min(map(fleet.dispatcher.num_open, (0, 1))) >= 6


def test_what_is_sent_is_charged_at_once() -> None:
    fleet = Fleet("least-work")
    assert sorted(fleet.route(*range(10 * n, 10 * n + 9)).index for n in range(4)) == [0, 1, 2, 3]
    assert fleet.dispatcher.wait_s(0) == pytest.approx(90)


def test_shut_and_tried_replicas_get_nothing() -> None:
    for policy in POLICIES:
        fleet = Fleet(policy)
        fleet.dispatcher.set_open(1, is_open=False)
        among = np.array([True, True, True, False])
        counts = {
            fleet.dispatcher.decide(RoutingKey((n,), 10, n), among, {0}).index for n in range(20)
        }
        assert counts == {2}
        assert fleet.route(1, tried={0, 2, 3}) is None


def test_policies_see_open_requests_and_the_queues_that_replicas_report(monkeypatch) -> None:
    states: list[tuple[list[float], list[float]]] = []

    def fewest_waiting(state: RoutingState) -> int:
        states.append((state.num_open.tolist(), state.num_waiting.tolist()))
        return int(state.num_waiting.argmin())

    monkeypatch.setitem(POLICIES, "fewest-waiting", fewest_waiting)
    fleet = Fleet("fewest-waiting")
    assert fleet.route(1).index == 0
    for index, num_waiting in enumerate((3, 2, 0, 4)):
        fleet.dispatcher.report(index, 0.0, None, num_waiting=num_waiting)
    assert fleet.route(2).index == 2
    fleet.dispatcher.report(2, 0.0, None, num_waiting=5)
    fleet.dispatcher.reset(3)  # it was restarted
    assert fleet.route(3).index == 3
    assert states == [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 0, 0, 0], [3, 2, 0, 4]),
        ([1, 0, 1, 0], [3, 2, 5, 0]),
    ]


def test_only_the_last_blocks_are_known() -> None:
    fleet = Fleet(count=1, most_blocks=100)
    for number in range(1000):
        fleet.finish(fleet.route(number))
        assert len(fleet.dispatcher.prefix_tree) <= 100
    assert fleet.route(999).hit_units == 10
    assert fleet.route(1).hit_units == 0


def test_two_choices_and_turns_use_all_replicas_and_avoid_the_busiest() -> None:
    wait_s, zeros = np.array([1.0, 2.0, 3.0, 0.5]), np.zeros(4)
    views = [RoutingState(n, wait_s, zeros, zeros) for n in range(4000)]
    turns = Counter(POLICIES["round-robin"](view) for view in views)
    assert turns == dict.fromkeys(range(4), 1000)
    choices = Counter(POLICIES["two-choices"](view) for view in views)
    assert choices[3] == pytest.approx(4000 * 7 / 16, rel=0.1)
    assert choices[2] == pytest.approx(4000 * 1 / 16, rel=0.2)


def test_homes_move_only_where_a_replica_leaves() -> None:
    ring, wait_s = HashRing(), np.zeros(50)
    for index in range(50):
        ring.add(index, mix(index))
    before = [ring.preferred(mix(n), wait_s) for n in range(5000)]
    wait_s[before[0][0]] = np.inf
    for number, pair in enumerate(before):
        after = ring.preferred(mix(number), wait_s)
        if before[0][0] in pair:
            assert len(set(after)) == 2
        else:
            assert after == pair
    shares = Counter(first for first, _ in before)
    assert len(shares) == 50
    assert max(shares.values()) < 2 * 5000 / 50


def test_prompts_share_what_their_keys_share() -> None:
    rng, tree, texts, plain = random.Random(5), PrefixTree(10**6), [()], list[tuple[tuple, int]]()
    tree.reset(0)
    tree.reset(1)
    for _ in range(800):
        base = rng.choice(texts)
        keys = base[: rng.randint(0, len(base))]
        keys += tuple(rng.getrandbits(60) for _ in range(rng.randint(0, 5)))
        texts.append(keys)
        path = tree.find(keys)
        for index in (0, 1):
            replica_prompts = [prompt_keys for prompt_keys, at in plain if at == index]
            assert tree.num_cached(path, index) == max(
                [_shared(prompt_keys, keys) for prompt_keys in replica_prompts] or [0]
            )
        longest, counts = tree.longest_prefix(path)
        assert longest == max(tree.num_cached(path, index) for index in (0, 1))
        assert set(counts) == {p for p in (0, 1) if longest and tree.num_cached(path, p) == longest}
        index = rng.randint(0, 1)
        tree.add(keys, path, index)
        plain.append((keys, index))
    assert len(tree) == len({key for keys in texts for key in keys})


def _shared(keys: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(a == b for a, b in zip(keys, other, strict=False))


def test_keys_follow_the_text_and_the_salt() -> None:
    text = bytes(range(256)) * 33
    keys = block_keys(text, b"a")
    assert [bytes_of_blocks(count) for count in range(8)] == [
        0,
        512,
        1024,
        1536,
        2048,
        4096,
        6144,
        8192,
    ]
    assert len(keys) == 7
    assert block_keys(text + b"more", b"a") == keys == block_keys(text[:8192], b"a")
    changed = b"x" + text[1:]
    assert not set(block_keys(changed, b"a")) & set(keys)
    assert not set(block_keys(text, b"b")) & set(keys)


def test_a_turn_of_a_conversation_begins_as_the_one_before() -> None:
    output = '{"role":"user","content":"' + "x" * 3000 + '"}'
    first_body = f'{{"model":"m","messages":[{output}],"stream":true}}'.encode()
    two = f'{{"temperature":0,"messages":[{output},{output}],"model":"m"}}'.encode()
    first, second = read_prompt(first_body, b"").key, read_prompt(two, b"").key
    assert second.block_keys[: len(first.block_keys)] == first.block_keys
    other = read_prompt(first_body.replace(b'"model":"m"', b'"model":"n"'), b"").key
    assert not set(other.block_keys) & set(first.block_keys)


def test_lines_that_change_can_be_left_out_of_the_routing_key() -> None:
    keys = []
    for number in (1, 2):
        system = f"x-anthropic-billing-header: cc_version=2.1; cch=fa69{number};\nYou are an agent."
        text = {"type": "text", "text": system + "x" * 4000}
        body = json.dumps({"system": [text], "messages": []}).encode()
        keys.append((read_prompt(body, b"").key, read_prompt(body, b"", stable_prefix=True).key))
    assert keys[0][0].block_keys[0] != keys[1][0].block_keys[0]
    assert keys[0][1] == keys[1][1]
    assert keys[0][1].block_keys


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3, "model": [1]}', b"\xff"])
def test_a_body_that_is_wrong_is_the_replicas_to_refuse(body: bytes) -> None:
    assert read_prompt(body, b"salt").model == ""


def test_a_models_name_that_is_remembered_is_short() -> None:
    assert len(read_prompt(b'{"model":"%s"}' % (b"x" * 1_000_000), b"").model) == 1024


def test_requests_to_fill_in_go_where_their_files_are() -> None:
    files = [{"filename": "a.py", "text": "x = 1\n" * 2000}]

    def key_of(prefix: str, files: list[dict[str, str]]) -> RoutingKey:
        body = {"input_suffix": "\n", "input_prefix": prefix, "input_extra": files}
        return read_prompt(json.dumps(body).encode(), b"").key

    first, second = key_of("def f(", files), key_of("def f(a", files)
    assert len(first.block_keys) > 4
    assert first.block_keys == second.block_keys[: len(first.block_keys)]
    assert first.affinity == second.affinity
    assert key_of("def f(", []) != first
