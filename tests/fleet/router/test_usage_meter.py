"""The estimate of a request's usage over several attempts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from twostroke.fleet.router import usage_meter
from twostroke.fleet.router.response import Head
from twostroke.fleet.router.usage_meter import TokenRate, UsageMeter
from twostroke.server.auth.usage_header import USAGE_HEADER

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream")


class Clock(SimpleNamespace):
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(usage_meter, "time", clock)
    return clock


def meter() -> UsageMeter:
    rate = TokenRate()
    rate.per_s = 10.0
    return UsageMeter(9, 1000, rate)


def num_output(meter: UsageMeter) -> int:
    assert meter.used is not None
    return meter.used.completion_tokens


def test_the_estimate_of_a_silent_server_has_only_its_own_time(clock: Clock) -> None:
    silent = meter()
    clock.now_s += 60
    silent.restart()
    clock.now_s += 2
    assert num_output(silent) == 20


def test_a_silent_server_is_charged_output_after_a_replica_that_reported_its_usage(
    clock: Clock,
) -> None:
    lost = meter()
    lost.begin(Head(200, [JSON, (USAGE_HEADER, b"9 0 700")]))
    assert (num_output(lost), lost.is_estimated) == (700, False)
    lost.restart()
    clock.now_s += 2
    assert (num_output(lost), lost.is_estimated) == (20, True)


@pytest.mark.parametrize("is_continued", [False, True])
def test_events_of_an_earlier_attempt_count_only_if_their_stream_continues(
    clock: Clock, *, is_continued: bool
) -> None:
    stream = meter()
    stream.begin(Head(200, [EVENTS]))
    stream.take(b"data: a\n\ndata: b\n\n")
    stream.restart(is_continued=is_continued)
    stream.begin(Head(200, [EVENTS]))
    stream.take(b"data: c\n\n")
    clock.now_s += 2
    assert num_output(stream) == (3 if is_continued else 1)
