"""Failures of waits in tests say what was waited for."""

from __future__ import annotations

import asyncio

import pytest

from support.waiting import until, wait_for


class _Line:
    num_waiting = 1

    def running(self) -> list[str]:
        return ["first", "second"]


def test_a_wait_in_vain_tells_the_condition_and_its_values() -> None:
    line, expected = _Line(), 2
    with pytest.raises(AssertionError) as failure:
        wait_for(lambda: line.num_waiting == expected and len(line.running()) > 2, 0.01)
    assert str(failure.value).splitlines() == [
        "waited 0.01 s in vain for line.num_waiting == expected and len(line.running()) > 2",
        "  line.num_waiting = 1",
        "  expected = 2",
        "  len(line.running()) = 2",
        "  line.running() = ['first', 'second']",
    ]


def test_a_wait_of_a_task_tells_the_same() -> None:
    line = _Line()
    with pytest.raises(AssertionError, match=r"\n  line.num_waiting = 1$"):
        asyncio.run(until(lambda: line.num_waiting > 1, 0.01))


def test_a_value_that_cannot_be_read_again_is_an_error_in_the_text() -> None:
    values = iter([False])
    with pytest.raises(AssertionError, match=r"next\(values\) = StopIteration\(\)"):
        wait_for(lambda: next(values), 0.0)


def test_a_function_is_told_by_its_name() -> None:
    def never() -> bool:
        return False

    with pytest.raises(AssertionError, match=r"in vain for .*never"):
        wait_for(never, 0.01)
