"""Commands that run an event loop: signals cancel their work before the command exits."""

from __future__ import annotations

import asyncio
import signal

import pytest

from twostroke.cli.terminal import run_in_event_loop


def test_the_result_is_returned_and_handlers_stay():
    before = signal.getsignal(signal.SIGTERM)

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert run_in_event_loop(work()) == 7
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_work_and_exits(number):
    events: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # the event loop still runs
            events.append("cleaned up")

    before = signal.signal(number, lambda *_: events.append("handler of the command line"))
    try:
        with pytest.raises(SystemExit) as error:
            run_in_event_loop(work())
    finally:
        signal.signal(number, before)
    assert error.value.code == 128 + number
    assert events == ["cleaned up"]


def test_an_ignored_signal_stays_ignored():
    async def work() -> str:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_in_event_loop(work()) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)
