"""Open and closed loops in virtual time: when requests are sent, and what their times count."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import pytest

from support.bench_answers import make_answer
from support.virtual_time import run_virtually
from twostroke.lab.bench.prompts import PromptSizes, PromptWriter
from twostroke.lab.bench.request_form import RequestForm
from twostroke.lab.bench.requests_to_send import WorkloadSource
from twostroke.lab.bench.runner import LoadRunner, RunClock, RunLimits
from twostroke.lab.simulator.load import RequestArrival, Workload

if TYPE_CHECKING:
    from twostroke.lab.bench.request_form import PlannedRequest


def workload(times_s):
    return Workload("times", tuple(RequestArrival(at_s, 20, 5) for at_s in times_s))


def run(times_s, limits=None, answer_s=1.0, write_s=0.0, stop_at_s=None, failing=()):
    """Run requests that are due at `times_s`; each is answered after `answer_s`.

    Writing a request takes `write_s`. Returns the runner.
    """

    async def main():
        loop = asyncio.get_running_loop()
        clock = RunClock()
        source = WorkloadSource(workload(times_s), PromptWriter(PromptSizes(), 0), RequestForm())

        class Source:
            count, at_s = source.count, source.at_s

            def request(self, number):
                loop.spend(write_s)
                return source.request(number)

        async def send(planned: PlannedRequest, scheduled_s: float):
            sent_s = clock.now_s()
            await asyncio.sleep(answer_s)
            return make_answer(
                planned.number,
                scheduled_s,
                late_s=sent_s - scheduled_s,
                ended_s=clock.now_s(),
                failure="HTTP 429" if planned.number in failing else "",
            )

        runner = LoadRunner(send, Source(), clock, limits or RunLimits())
        if stop_at_s is not None:
            loop.call_later(stop_at_s, runner.stop)
        await runner.run()
        return runner

    return run_virtually(main())


def sent_times(runner):
    ordered = sorted(runner.answers, key=lambda answer: answer.number)
    start_s = ordered[0].log.timings.arrival_s
    return [answer.log.sent_s - start_s for answer in ordered]


def test_an_open_loop_sends_at_the_scheduled_times_whatever_the_answers_take():
    times_s = [0.0, 0.5, 0.5, 2.0]
    runner = run(times_s, answer_s=10.0)
    assert sent_times(runner) == pytest.approx(times_s)
    assert [a.log.sent_s - a.log.timings.arrival_s for a in runner.answers] == pytest.approx(
        [0] * 4
    )


def test_a_client_that_is_late_counts_from_the_scheduled_time():
    # Writing a request takes 0.3 s, and one is due each 0.1 s: the n-th is 0.2 s x n late.
    runner = run([0.0, 0.1, 0.2, 0.3], write_s=0.3)
    answers = sorted(runner.answers, key=lambda answer: answer.number)
    lateness_s = [a.log.sent_s - a.log.timings.arrival_s for a in answers]
    assert lateness_s == pytest.approx([0.0, 0.15, 0.35, 0.55], abs=0.051)
    scheduled_s = [a.log.timings.arrival_s - answers[0].log.timings.arrival_s for a in answers]
    assert scheduled_s == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_closed_loop_has_as_many_requests_in_progress_as_clients():
    runner = run([0.0] * 9, RunLimits(num_clients=3), answer_s=2.0)
    assert sorted(sent_times(runner)) == pytest.approx([0.0] * 3 + [2.0] * 3 + [4.0] * 3)
    assert sorted(answer.number for answer in runner.answers) == list(range(9))


def test_a_client_of_a_closed_loop_is_due_when_its_last_answer_ended():
    runner = run([0.0] * 3, RunLimits(num_clients=1), answer_s=2.0, write_s=0.5)
    lateness_s = [a.log.sent_s - a.log.timings.arrival_s for a in runner.answers]
    assert lateness_s == pytest.approx([0.0, 0.0, 0.0]), "requests are written during the wait"


def test_a_duration_ends_the_sending_and_waits_for_answers():
    for limits in (RunLimits(duration_s=3.0), RunLimits(num_clients=1, duration_s=3.0)):
        runner = run([float(second) for second in range(100)], limits, answer_s=1.0)
        assert len(runner.answers) == 4
        assert not runner.is_stopped


def test_a_stop_keeps_the_answers_so_far():
    for limits in (RunLimits(), RunLimits(num_clients=1)):
        runner = run([float(n) for n in range(100)], limits, answer_s=0.5, stop_at_s=10.3)
        assert runner.is_stopped
        assert 10 <= len(runner.answers) < 25
        assert all(answer.is_completed for answer in runner.answers)


def test_a_client_pauses_after_a_failure():
    runner = run([0.0] * 3, RunLimits(num_clients=1), answer_s=0.0, failing={0, 1, 2})
    times_s = sent_times(runner)
    assert times_s[1] > times_s[0]
    assert times_s[2] > times_s[1]


def test_an_error_of_the_sender_is_raised():
    async def main(limits):
        async def send(planned, scheduled_s):
            raise ZeroDivisionError

        source = WorkloadSource(workload([0.0, 1.0]), PromptWriter(PromptSizes(), 0), RequestForm())
        await LoadRunner(send, source, RunClock(), limits).run()

    for limits, error in ((RunLimits(), ZeroDivisionError), (RunLimits(1), BaseException)):
        with pytest.raises(error):
            run_virtually(main(limits))


def test_prompts_share_exactly_the_wanted_prefixes():
    arrivals = [
        RequestArrival(0.0, 60, 1, blocks=(1, 2), block_size=20),
        RequestArrival(0.0, 60, 1, blocks=(1, 3), block_size=20),
        RequestArrival(0.0, 60, 1, num_shared=30),
        RequestArrival(0.0, 50, 1, num_shared=30),
        RequestArrival(0.0, 50, 1),
        RequestArrival(0.0, 50, 1),
    ]
    write = functools.partial(map, PromptWriter(PromptSizes(), salt=1).write)
    texts = [text.split() for text in write(arrivals, range(6))]
    assert [len(words) for words in texts] == [60, 60, 60, 50, 50, 50]

    def shared(first, second):
        pairs = zip(texts[first], texts[second], strict=False)
        return next(index for index, (a, b) in enumerate(pairs) if a != b)

    assert 20 <= shared(0, 1) < 24
    assert 30 <= shared(2, 3) < 34
    assert shared(4, 5) < 4
    other = PromptWriter(PromptSizes(), salt=2)
    again = [other.write(arrival, number).split() for number, arrival in enumerate(arrivals)]
    for words, others in zip(texts, again, strict=True):
        assert words[:4] != others[:4], "another run shares nothing"


def test_a_prompt_has_the_tokens_that_the_endpoint_counts():
    sizes = PromptSizes(tokens_per_word=1.5, overhead=20)
    text = PromptWriter(sizes, salt=1).write(RequestArrival(0.0, 200, 1), 0)
    assert len(text.split()) * 1.5 + 20 == pytest.approx(200, abs=1.5)
    short = PromptWriter(sizes, salt=1).write(RequestArrival(0.0, 5, 1), 0)
    assert len(short.split()) == 1
