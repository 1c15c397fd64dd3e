"""The placement rule `auto`: it compares the costs of prefilling here and in a prefill engine."""

from __future__ import annotations

import pytest

from twostroke.engine.disaggregation.placement import (
    TRANSFER_OVERHEAD_S,
    LocalPrefill,
    MissingPrefill,
    PrefillEngineState,
    TransferOverhead,
    choose_engine,
    local_prefill_s,
    remote_prefill_s,
)

GIGA = 1e9
WORK = MissingPrefill(100 * GIGA, 10_000_000)
LOCAL = LocalPrefill(0.0, 50 * GIGA, 10)
REMOTE = PrefillEngineState(0.0, 50 * GIGA, 1e9, 0.005)


@pytest.mark.parametrize(
    ("missing", "seconds"),
    [((), 2.0), ((1000,), 4.0), ((5,), 3.0), ((0, 10, 1000), 6.0)],
)
def test_a_stream_waits_no_longer_than_it_lasts(missing: tuple[int, ...], seconds: float) -> None:
    local_state = LocalPrefill(0.0, 50 * GIGA, 10, missing)
    assert local_prefill_s(WORK, local_state) == pytest.approx(seconds)


def test_pages_come_while_others_are_computed() -> None:
    assert remote_prefill_s(WORK, REMOTE) == pytest.approx(2.005)
    slow = PrefillEngineState(0.0, 50 * GIGA, 1e6, 0.005)
    assert remote_prefill_s(WORK, slow) == pytest.approx(10.005)


def test_a_prompt_goes_where_it_costs_least() -> None:
    busy = PrefillEngineState(500 * GIGA, 50 * GIGA, 1e9, 0.005)
    streams = LocalPrefill(0.0, 50 * GIGA, 10, (50,))
    assert choose_engine("auto", WORK, LOCAL, [REMOTE])[0] is None  # nobody to protect
    assert choose_engine("auto", WORK, streams, [busy, REMOTE])[0] == 1
    assert choose_engine("auto", WORK, streams, [busy])[0] is None
    assert choose_engine("always", WORK, LOCAL, [busy])[0] == 0
    assert choose_engine("never", WORK, streams, [REMOTE])[0] is None


def test_an_engine_without_a_known_pace_is_taken_to_be_like_the_others() -> None:
    streams = LocalPrefill(0.0, 500 * GIGA, 10, (50,))
    unknown = PrefillEngineState(0.0, 0.0, 1e9, 0.005)
    assert choose_engine("auto", WORK, streams, [unknown])[0] == 0
    waits = LocalPrefill(150 * GIGA, 0.0, 10)
    assert choose_engine("auto", WORK, waits, [REMOTE])[0] == 0


def test_a_cost_that_nobody_sees_is_learned_and_forgotten() -> None:
    overhead, streams, now_s = TransferOverhead(), LocalPrefill(0.0, 50 * GIGA, 10, (50,)), 100.0

    def chosen_engine() -> int | None:
        remote_state = PrefillEngineState(0.0, 50 * GIGA, 1e9, overhead.seconds(now_s))
        return choose_engine("auto", WORK, streams, [remote_state])[0]

    assert (overhead.seconds(now_s), chosen_engine()) == (TRANSFER_OVERHEAD_S, 0)
    while chosen_engine() is not None:  # each takes 3 s more than the queue, computing and moving
        expected_s = remote_prefill_s(
            WORK, PrefillEngineState(0.0, 50 * GIGA, 1e9, overhead.seconds(now_s))
        )
        overhead.learn(expected_s, 2.0 + 3.0, now_s)
        now_s += 1
        assert now_s < 110, "a cost of 3 s is more than the 2 s that are saved"
    now_s += 30
    assert chosen_engine() == 0, "it is tried again"
    overhead.learn(5.0, 0.0, now_s)
    assert overhead.seconds(now_s) == 0.0, "nothing takes less than no time"
